"""Tools and structured output of ChatKVBoost on real tiny engines.

Where a test needs a model that decides to call a tool, it says which tokens the model prefers; everything else runs.
Numbers in names and comments are the issues of other local-model classes that must not happen here.
"""

from __future__ import annotations

import asyncio
import functools
import json
import re
from typing import Annotated, Literal, NotRequired

import jsonschema
import pytest
from langchain_core.exceptions import OutputParserException
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.runnables import RunnableLambda
from langchain_core.tools import InjectedToolArg, StructuredTool, tool
from pydantic import BaseModel, Field, field_validator
from typing_extensions import TypedDict

from kvboost_rag import ConfigError, Engine, EngineConfig, PromptError
from kvboost_rag.tools import canonical_tools
from langchain_kvboost import ChatKVBoost, PromptOverflowError
from langchain_kvboost.tools import describe
from tests.chat_tokenizers import LLAMA31_TOOLS, MISTRAL_TOOLS, llama, sentencepiece, special
from tests.recording import recording

TOKENIZERS = {
    "fallback": lambda: None,
    "hermes": lambda: "qwen2.5",
    "llama3": lambda: llama(LLAMA31_TOOLS),
    "mistral": lambda: sentencepiece(
        MISTRAL_TOOLS,
        legacy=False,
        added=special("[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
    ),
}


@functools.cache
def engine_for(family):
    return recording(TOKENIZERS[family](), window=8192)


def engine_of_family(family):
    engine = engine_for(family)
    engine.clear()
    engine.asked.clear()
    engine.says = None
    return engine


@pytest.fixture
def engine():
    """Whose template shows tools itself."""
    return engine_of_family("hermes")


@pytest.fixture
def plain():
    """Whose template knows no tools."""
    return engine_of_family("fallback")


class Weather(BaseModel):
    """Tell the weather."""

    city: Literal["Rome", "Oslo"]
    days: int = Field(ge=1, le=9)


class Sun(BaseModel):
    """Tell when the sun rises."""

    summer: bool


def weather(city: Literal["Rome", "Oslo"], days: int) -> str:
    """Tell the weather."""
    return f"{city} {days}"


def tool_dict(name, description="Do it.", **properties):
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


FLAG = {"type": "boolean"}
SWITCH = tool_dict("switch", "Switch the lamp.", on=FLAG)
LOCK = tool_dict("lock", "Lock the door.", shut=FLAG)
ROOMY = 400  # tokens of an answer with a call, by tiny tokenizers


def merged(pieces):
    pieces = list(pieces)
    return sum(pieces[1:], pieces[0])


async def collected(stream):
    return [piece async for piece in stream]


def named(calls):
    return [(call["name"], call["args"]) for call in calls]


def hermes(*calls):
    return "\n".join(f'<tool_call>\n{{"name": "{name}", "arguments": {args}}}\n</tool_call>' for name, args in calls)


class TestBinding:
    @pytest.mark.parametrize(
        "given",
        [
            Weather,
            weather,
            tool(weather),
            StructuredTool.from_function(weather),
            {"title": "Weather", "description": "Tell the weather.", "type": "object", "properties": {}},
            {
                "name": "Weather",
                "description": "Tell the weather.",
                "input_schema": {"type": "object", "properties": {}},
            },
            tool_dict("weather"),
            RunnableLambda(lambda x: x["city"]).with_types(input_type=Weather).with_config(run_name="weather"),
        ],
        ids=["pydantic", "function", "tool", "structured", "schema", "anthropic", "openai", "runnable"],
    )
    def test_29033_every_kind_of_tool_reaches_the_prompt(self, engine, plain, given):
        for one in (engine, plain):  # 30453
            ChatKVBoost(engine=one, max_tokens=1).bind_tools([given]).invoke("q")
            name = describe([given])[0]["function"]["name"]
            assert f'"name": "{name}"' in one.text

    def test_what_is_no_tool(self, engine):
        chat = ChatKVBoost(engine=engine)
        with pytest.raises(ConfigError, match="is no tool"):
            chat.bind_tools([3])
        with pytest.raises(ConfigError, match="provider"):
            chat.bind_tools([{"type": "web_search_preview"}])
        with pytest.raises(PromptError, match="name"):
            chat.bind_tools([tool_dict("no name!")]).invoke("q")

    def test_the_same_tool_twice_counts_once(self, engine):
        ChatKVBoost(engine=engine, max_tokens=1).bind_tools([tool(weather), weather]).invoke("q")
        assert len(engine.options["tools"]) == 1

    def test_injected_arguments_are_not_shown(self, engine):
        @tool
        def save(text: str, user: Annotated[str, InjectedToolArg]) -> str:
            """Save a text."""
            return text + user

        ChatKVBoost(engine=engine, max_tokens=1).bind_tools([save]).invoke("q")
        assert list(engine.options["tools"][0]["function"]["parameters"]["properties"]) == ["text"]

    def test_two_tools_of_one_name(self, engine):
        with pytest.raises(ConfigError, match="two different tools"):
            ChatKVBoost(engine=engine).bind_tools([SWITCH, tool_dict("switch", "Another.")])

    def test_no_tools(self, engine):
        assert ChatKVBoost(engine=engine, max_tokens=2).bind_tools([]).invoke("q").content is not None
        with pytest.raises(ConfigError, match="no tools"):
            ChatKVBoost(engine=engine).bind_tools([], tool_choice="any").invoke("q")

    @pytest.mark.parametrize("choice", ["shout", {"type": "function", "function": {"name": "shout"}}, 7])
    def test_unknown_choices_raise_at_once(self, engine, choice):
        with pytest.raises(ConfigError, match=r"shout|7"):
            ChatKVBoost(engine=engine).bind_tools([SWITCH], tool_choice=choice)

    def test_unknown_arguments_raise(self, engine):
        with pytest.raises(ConfigError, match="tool_kindness"):
            ChatKVBoost(engine=engine).bind_tools([SWITCH], tool_kindness=1).invoke("q")

    def test_33_key_order_of_a_tool_does_not_matter(self, engine):
        """Of qwen-code 6338: the order of tools or keys busts the cache."""
        chat = ChatKVBoost(engine=engine, max_tokens=1)
        turned = {"function": dict(reversed(SWITCH["function"].items())), "type": "function"}
        chat.bind_tools([SWITCH, LOCK]).invoke("q")
        ids = engine.ids
        answer = chat.bind_tools([turned, LOCK]).invoke("q")
        assert engine.ids == ids
        assert answer.response_metadata["exact_tokens"] >= len(ids) - 1

    @pytest.mark.parametrize("family", ["hermes", "fallback"])
    def test_token_counts_with_tools(self, family):
        chat = ChatKVBoost(engine=engine_of_family(family), max_tokens=1)
        messages = [SystemMessage("s"), HumanMessage("h")]
        usage = chat.bind_tools([SWITCH, LOCK]).invoke(messages).usage_metadata
        assert chat.get_num_tokens_from_messages(messages, tools=[SWITCH, LOCK]) == usage["input_tokens"]
        assert chat.get_num_tokens_from_messages(messages) < usage["input_tokens"]


FORMATS = [
    *((family, None) for family in TOKENIZERS),
    *(("fallback", format) for format in ("hermes", "llama3", "mistral")),
    ("hermes", "json"),
    *(
        pytest.param(family, format, marks=pytest.mark.slow)
        for family in ("hermes", "llama3", "mistral")
        for format in ("hermes", "llama3", "mistral", "json")
    ),
]


class TestForced:
    @pytest.mark.parametrize(("family", "format"), FORMATS)
    def test_24430_every_format_on_every_template(self, family, format):
        chat = ChatKVBoost(engine=engine_of_family(family), max_tokens=ROOMY, tool_format=format)
        answer = chat.bind_tools([SWITCH], tool_choice="any").invoke("q")
        ((name, args),) = named(answer.tool_calls)
        assert name == "switch"
        assert isinstance(args["on"], bool)
        assert (answer.content, answer.invalid_tool_calls) == ("", [])
        assert answer.response_metadata["finish_reason"] == "tool_calls"

    @pytest.mark.parametrize(
        "choice",
        [
            "any",
            "required",
            True,
            "lock",
            {"type": "function", "function": {"name": "lock"}},
            {"type": "any"},
            {"type": "tool", "name": "lock"},
        ],
    )
    def test_choices_that_force(self, plain, choice):
        bound = ChatKVBoost(engine=plain, max_tokens=ROOMY).bind_tools([SWITCH, LOCK], tool_choice=choice)
        ((name, _),) = named(bound.invoke("q").tool_calls)
        assert name in ({"lock"} if "lock" in str(choice) else {"switch", "lock"})

    @pytest.mark.parametrize("choice", [None, "auto", "none", False, {"type": "auto"}])
    def test_choices_that_do_not(self, engine, choice):
        engine.says = "Good day."
        answer = ChatKVBoost(engine=engine, max_tokens=40).bind_tools([SWITCH], tool_choice=choice).invoke("q")
        assert (answer.content, answer.tool_calls) == ("Good day.", [])
        assert ("switch" in engine.text) == (choice != "none")

    def test_arguments_fit_the_schema(self, plain):
        schema = tool_dict(
            "order",
            size={"enum": ["s", "m"]},
            count={"type": "integer", "minimum": 3, "maximum": 5},
            tags={"type": "array", "items": {"type": "string", "maxLength": 4}, "minItems": 1, "maxItems": 2},
            inner={"type": "object", "properties": {"x": FLAG}, "required": ["x"]},
        )
        bound = ChatKVBoost(engine=plain, max_tokens=ROOMY, temperature=2.0).bind_tools([schema], tool_choice="order")
        for seed in range(2):
            ((_, args),) = named(bound.invoke("q", seed=seed).tool_calls)
            jsonschema.validate(args, schema["function"]["parameters"])

    @pytest.mark.parametrize("form", ["stream", "ainvoke", "astream", "batch"])
    def test_34134_every_form_calls(self, plain, form):
        bound = ChatKVBoost(engine=plain, max_tokens=ROOMY).bind_tools([SWITCH], tool_choice="any")
        answer = {
            "stream": lambda: merged(bound.stream("q")),
            "ainvoke": lambda: asyncio.run(bound.ainvoke("q")),
            "astream": lambda: merged(asyncio.run(collected(bound.astream("q")))),
            "batch": lambda: bound.batch(["q"])[0],
        }[form]()
        expected = bound.invoke("q")
        assert named(answer.tool_calls) == named(expected.tool_calls)
        assert answer.content == ""
        assert answer.usage_metadata["output_tokens"] == expected.usage_metadata["output_tokens"]
        assert answer.response_metadata["finish_reason"] == "tool_calls"

    def test_llama_cpp_1995_threads_at_once(self):
        """On an engine whose tokenizer nobody has prepared for constrained decoding yet."""
        engine = recording(window=1024)
        bound = ChatKVBoost(engine=engine, max_tokens=ROOMY).bind_tools([SWITCH], tool_choice="any")
        answers = bound.batch(["q"] * 3)
        again = asyncio.run(bound.abatch(["q"] * 2))
        expected = named(bound.invoke("q").tool_calls)
        assert all(named(answer.tool_calls) == expected for answer in [*answers, *again])
        ids = [call["id"] for answer in [*answers, *again] for call in answer.tool_calls]
        assert len(set(ids)) == 5

    def test_stops_do_not_cut_a_forced_call(self, plain):
        chat = ChatKVBoost(engine=plain, max_tokens=ROOMY, stop=['"', ":"])
        answer = chat.bind_tools([SWITCH], tool_choice="any").invoke("q", stop=["}"])
        assert len(answer.tool_calls) == 1

    @pytest.mark.parametrize(("parallel", "calls"), [(None, 1), (False, 1), (True, 2)])
    @pytest.mark.parametrize("family", ["hermes", "fallback"])
    def test_parallel_tool_calls(self, family, parallel, calls):
        engine = engine_of_family(family)
        on, off = '{"on": true}', '{"on": false}'
        written = f'[{{"name": "switch", "arguments": {on}}}, {{"name": "switch", "arguments": {off}}}]'
        engine.says = written if family == "fallback" else hermes(("switch", on), ("switch", off))
        chat = ChatKVBoost(engine=engine, max_tokens=ROOMY)
        answer = chat.bind_tools([SWITCH], tool_choice="any", parallel_tool_calls=parallel).invoke("q")
        assert [args["on"] for _, args in named(answer.tool_calls)] == [True, False][:calls]
        assert len({call["id"] for call in answer.tool_calls}) == calls

    def test_a_schema_that_cannot_be_enforced(self, plain):
        odd = tool_dict("odd", x={"not": {"type": "string"}})
        with pytest.raises(ConfigError, match="not"):
            ChatKVBoost(engine=plain).bind_tools([odd], tool_choice="any").invoke("q")

    def test_recursive_classes(self, plain):
        bound = ChatKVBoost(engine=plain, max_tokens=1500).bind_tools([Folder], tool_choice="any")
        ((_, args),) = named(bound.invoke("q").tool_calls)
        Folder.model_validate(args)


class Folder(BaseModel):
    """A folder."""

    open: bool
    inner: list[Folder] = Field(max_length=1)


class TestVoluntary:
    def test_a_call_is_parsed(self, engine):
        engine.says = "I will look.\n" + hermes(("Weather", '{"city": "Oslo", "days": 2}'))
        answer = ChatKVBoost(engine=engine, max_tokens=ROOMY).bind_tools([Weather, Sun]).invoke("q")
        assert named(answer.tool_calls) == [("Weather", {"city": "Oslo", "days": 2})]
        assert answer.content == "I will look."
        assert answer.response_metadata["finish_reason"] == "tool_calls"

    @pytest.mark.parametrize(
        ("family", "says"),
        [
            ("fallback", '[{"name": "switch", "arguments": {"on": true}}]'),
            ("llama3", '{"name": "switch", "parameters": {"on": true}}'),
            ("llama3", '<|python_tag|>{"name": "switch", "parameters": {"on": true}}'),
            ("mistral", '[TOOL_CALLS] [{"name": "switch", "arguments": {"on": true}}]'),
        ],
    )
    def test_in_other_families(self, family, says):
        engine = engine_of_family(family)
        engine.says = says
        bound = ChatKVBoost(engine=engine, max_tokens=ROOMY).bind_tools([SWITCH])
        for answer in (bound.invoke("q"), merged(bound.stream("q"))):
            assert named(answer.tool_calls) == [("switch", {"on": True})]
            assert answer.content == ""

    def test_26971_text_streams_while_calls_wait(self, engine):
        """And 29129."""
        said = "I will look at the lamp first, since it is dark."
        engine.says = f"{said}\n" + hermes(("switch", '{"on": true}'), ("lock", '{"shut": false}'))
        bound = ChatKVBoost(engine=engine, max_tokens=ROOMY).bind_tools([SWITCH, LOCK])
        pieces = list(bound.stream("q"))
        texts = [piece.content for piece in pieces if piece.content]
        assert len(texts) > 10
        assert "".join(texts) == said
        assert [bool(piece.tool_call_chunks) for piece in pieces] == [False] * (len(pieces) - 1) + [True]
        whole, answer = merged(pieces), bound.invoke("q")
        assert (
            named(whole.tool_calls) == named(answer.tool_calls) == [("switch", {"on": True}), ("lock", {"shut": False})]
        )
        assert whole.content == answer.content
        assert whole.response_metadata["finish_reason"] == "tool_calls"
        assert whole.usage_metadata["output_tokens"] == answer.usage_metadata["output_tokens"]

    def test_strict_makes_voluntary_calls_valid(self, engine):
        engine.says = hermes(("nope", '{"on": 3}'))
        bound = ChatKVBoost(engine=engine, max_tokens=ROOMY).bind_tools([SWITCH], strict=True)
        for answer in (
            bound.invoke("q"),
            ChatKVBoost(engine=engine, max_tokens=ROOMY).bind_tools([SWITCH]).invoke("q"),
        ):
            ((name, args),) = named(answer.tool_calls)
            assert name == "switch"
            assert isinstance(args["on"], bool)

    def test_parallel_tool_calls_false(self, engine):
        engine.says = hermes(("switch", '{"on": true}'), ("switch", '{"on": false}'))
        chat = ChatKVBoost(engine=engine, max_tokens=ROOMY)
        assert len(chat.bind_tools([SWITCH]).invoke("q").tool_calls) == 2
        assert len(chat.bind_tools([SWITCH], parallel_tool_calls=True).invoke("q").tool_calls) == 2
        assert len(chat.bind_tools([SWITCH], parallel_tool_calls=False).invoke("q").tool_calls) == 1

    @pytest.mark.parametrize(
        "written",
        [
            '{"name": "nope", "arguments": {"on": true}}',
            '{"name": "switch", "arguments": {"on": tr',
            '{"name": "switch", "arguments": "loudly"}',
            '{"name": "switch", "arguments": {"on": oops}}',
        ],
        ids=["unknown", "unfinished", "no-object", "no-json"],
    )
    def test_invalid_calls(self, engine, written):
        engine.says = f"Well.\n<tool_call>\n{written}"
        bound = ChatKVBoost(engine=engine, max_tokens=ROOMY).bind_tools([SWITCH], strict=False)
        answer, whole = bound.invoke("q"), merged(bound.stream("q"))
        for one in (answer, whole):
            assert one.tool_calls == []
            assert len(one.invalid_tool_calls) == 1
            assert one.content == "Well."
            assert one.response_metadata["finish_reason"] == "stop"
        assert answer.invalid_tool_calls[0]["args"] == written
        error = answer.invalid_tool_calls[0]["error"]
        assert error
        *_, last = bound.stream("q")
        assert last.invalid_tool_calls[0]["error"] == error
        for one in (answer, whole):  # LangChain has no place for it in merged pieces
            assert one.response_metadata["invalid_tool_call_errors"] == [error]
        prompts = []
        for one in (answer, whole):  # what the model wrote is what it is shown again
            bound.invoke([HumanMessage("q"), one, HumanMessage("That was no call.")], max_tokens=1)
            prompts.append(engine.ids)
        assert prompts[0] == prompts[1]
        assert written in engine.text

    @pytest.mark.parametrize("flag", ["strict", "parallel_tool_calls"])
    @pytest.mark.parametrize("value", ["false", 0, 1])
    def test_flags_are_bools(self, engine, flag, value):
        chat = ChatKVBoost(engine=engine)
        with pytest.raises(ConfigError, match=f"{flag} is {value!r}"):
            chat.bind_tools([SWITCH], **{flag: value})
        with pytest.raises(ConfigError, match=f"{flag} is {value!r}"):
            chat.invoke("q", tools=[SWITCH], **{flag: value})

    def test_strict_where_no_marker_tells_calls_from_text(self, plain):
        plain.says = "Hello."
        chat = ChatKVBoost(engine=plain, max_tokens=ROOMY)
        with pytest.raises(ConfigError, match="'json' have no marker"):
            chat.bind_tools([SWITCH], strict=True).invoke("q")
        assert chat.bind_tools([SWITCH], parallel_tool_calls=False).invoke("q").content == "Hello."
        assert chat.bind_tools([SWITCH], strict=True, tool_choice="any").invoke("q").tool_calls
        assert chat.bind_tools([SWITCH], strict=True, tool_choice="none").invoke("q").content == "Hello."
        # As an agent with a provider's structured output asks.
        both = chat.bind_tools([SWITCH], strict=True, response_format=Sun).invoke("q")
        assert both.tool_calls or Sun.model_validate_json(both.content)

    def test_a_call_is_begun_only_where_it_fits(self, engine):
        call = hermes(("switch", '{"on": true}'))
        engine.says = f"Now.\n{call}"
        bound = ChatKVBoost(engine=engine).bind_tools([SWITCH])
        needed = bound.invoke("q").usage_metadata["output_tokens"] - 1  # the end-of-sequence token may be missing
        assert len(bound.invoke("q", max_tokens=needed).tool_calls) == 1
        for tokens in (needed - 1, needed - 4, needed - 9):
            answer = bound.invoke("q", max_tokens=tokens)
            assert "<tool_call>" not in answer.content
            # Denied its marker, the scripted model writes the bare call, which is a call as well where it is complete.
            assert named(answer.tool_calls) in ([], [("switch", {"on": True})])

    def test_output_version_v1(self, engine):
        engine.says = "Well.\n" + hermes(("switch", '{"on": true}'))
        bound = ChatKVBoost(engine=engine, max_tokens=ROOMY, output_version="v1").bind_tools([SWITCH])
        for answer in (bound.invoke("q"), merged(bound.stream("q"))):
            assert [block["type"] for block in answer.content] == ["text", "tool_call"]
            result = ToolMessage("ok", tool_call_id=answer.tool_calls[0]["id"])
            bound.invoke([HumanMessage("q"), answer, result], max_tokens=1)
            assert engine.prompt[1]["content"] == "Well."
            assert engine.prompt[1]["tool_calls"][0]["function"] == {"name": "switch", "arguments": {"on": True}}

    def test_calls_without_tools_are_text(self, engine):
        engine.says = hermes(("switch", '{"on": true}'))
        answer = ChatKVBoost(engine=engine, max_tokens=ROOMY).invoke("q")
        assert "switch" in answer.content
        assert answer.tool_calls == []

    def test_a_template_that_opens_thinking(self):
        tokenizer = TOKENIZERS["llama3"]()
        tokenizer.chat_template = LLAMA31_TOOLS.replace(
            "assistant<|end_header_id|>\\n\\n' }}\n{%- endif %}\n",
            "assistant<|end_header_id|>\\n\\n<think>\\n' }}\n{%- endif %}\n",
        )
        assert tokenizer.chat_template.count("<think>") == 1
        engine = recording(tokenizer)
        call = '{"name": "switch", "parameters": {"on": true}}'
        engine.says = f"Perhaps {call}\n{call} is it.</think>{call}"
        answer = ChatKVBoost(engine=engine, max_tokens=ROOMY).bind_tools([SWITCH]).invoke("q")
        assert len(answer.tool_calls) == 1

    def test_format_of_ones_own_choice(self, plain):
        plain.says = hermes(("switch", '{"on": true}'))
        bound = ChatKVBoost(engine=plain, max_tokens=ROOMY, tool_format="hermes").bind_tools([SWITCH])
        assert named(bound.invoke("q").tool_calls) == [("switch", {"on": True})]
        assert "<tool_call>" in plain.text  # the model is told so


HISTORY = [
    SystemMessage("s"),
    HumanMessage("Light!"),
    AIMessage("", tool_calls=[{"name": "switch", "args": {"on": True}, "id": "abcdefghi"}]),
    ToolMessage("it is on", tool_call_id="abcdefghi"),
    HumanMessage("And?"),
]


class TestHistory:
    @pytest.mark.parametrize("family", ["hermes", "llama3"])
    def test_native_ids_are_those_of_plain_hugging_face(self, family):
        engine = engine_of_family(family)
        ChatKVBoost(engine=engine, max_tokens=1).bind_tools([SWITCH, LOCK]).invoke(HISTORY)
        messages = [
            {"role": "system", "content": "s"},
            {"role": "user", "content": "Light!"},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [
                    {
                        "type": "function",
                        "id": "abcdefghi",
                        "function": {"name": "switch", "arguments": {"on": True}},
                    }
                ],
            },
            {"role": "tool", "content": "it is on", "tool_call_id": "abcdefghi"},
            {"role": "user", "content": "And?"},
        ]
        rendered = engine.tokenizer.apply_chat_template(
            messages, tools=canonical_tools([SWITCH, LOCK]), add_generation_prompt=True
        )
        assert engine.ids == rendered["input_ids"]

    def test_fallback_ids_are_those_of_plain_hugging_face(self, plain):
        ChatKVBoost(engine=plain, max_tokens=1).bind_tools([SWITCH]).invoke(HISTORY)
        rendered = plain.tokenizer.apply_chat_template(plain.prompt, add_generation_prompt=True)
        assert plain.ids == rendered["input_ids"]
        assert [message["role"] for message in plain.prompt] == ["system", "user", "assistant", "user", "user"]
        assert plain.prompt[2]["content"] == '[{"name": "switch", "arguments": {"on": true}}]'
        assert plain.prompt[3]["content"] == "Result of the tool switch:\nit is on"

    @pytest.mark.parametrize("family", list(TOKENIZERS))
    def test_a_call_and_its_result_go_round(self, family):
        """Of gendox-core 542: what is replayed is what was sent, so that the second turn reuses the first."""
        engine = engine_of_family(family)
        bound = ChatKVBoost(engine=engine, max_tokens=ROOMY).bind_tools([SWITCH])
        question = HumanMessage("Light!")
        call = bound.invoke([question], tool_choice="any")
        first = call.usage_metadata["input_tokens"]
        result = ToolMessage("it is on", tool_call_id=call.tool_calls[0]["id"])
        answer = bound.invoke([question, call, result], max_tokens=1)
        assert "it is on" in engine.text
        details = answer.response_metadata
        assert details["exact_tokens"] + details["approximate_tokens"] > 0.8 * first

    def test_mistrals_ids_of_calls(self):
        """The template refuses ids that are not nine letters and digits, as ours are; it is said clearly."""
        engine = engine_of_family("mistral")
        bound = ChatKVBoost(engine=engine, max_tokens=1).bind_tools([SWITCH])
        bound.invoke([message for message in HISTORY if message.type != "system"][:3])
        foreign = AIMessage("", tool_calls=[{"name": "switch", "args": {"on": True}, "id": "call_1"}])
        with pytest.raises(PromptError, match="length 9"):
            bound.invoke([HumanMessage("h"), foreign, ToolMessage("x", tool_call_id="call_1")])

    def test_parallel_calls_in_a_template_that_takes_one(self):
        engine = engine_of_family("llama3")
        calls = [{"name": "switch", "args": {"on": on}, "id": f"abcdefgh{i}"} for i, on in enumerate((True, False))]
        with pytest.raises(PromptError, match="single tool-calls"):
            ChatKVBoost(engine=engine, max_tokens=1).bind_tools([SWITCH]).invoke(
                [HumanMessage("h"), AIMessage("", tool_calls=calls)]
            )

    def test_results_in_blocks(self, engine):
        history = [*HISTORY[:3], ToolMessage([{"type": "text", "text": "it is on"}], tool_call_id="abcdefghi")]
        ChatKVBoost(engine=engine, max_tokens=1).bind_tools([SWITCH]).invoke(history)
        assert "it is on" in engine.text

    def test_calls_in_anthropics_blocks(self, engine):
        blocks = [
            {"type": "text", "text": "ok"},
            {"type": "tool_use", "id": "abcdefghi", "name": "switch", "input": {}},
        ]
        message = AIMessage(blocks, tool_calls=HISTORY[2].tool_calls)
        ChatKVBoost(engine=engine, max_tokens=1).bind_tools([SWITCH]).invoke([HISTORY[1], message, HISTORY[3]])
        assert engine.prompt[1]["content"] == "ok"
        assert '{"name": "switch", "arguments": {"on": true}}' in engine.text


class Lamp(BaseModel):
    """A lamp."""

    on: bool
    colour: Literal["red", "green"]


class LampDict(TypedDict):
    """A lamp."""

    on: Annotated[bool, ..., "whether it shines"]
    colour: Literal["red", "green"]


LAMP_SCHEMA = {
    "title": "Lamp",
    "description": "A lamp.",
    "type": "object",
    "properties": {"on": FLAG, "colour": {"enum": ["red", "green"]}},
    "required": ["on", "colour"],
}
SCHEMAS = {
    "pydantic": Lamp,
    "typeddict": LampDict,
    "schema": LAMP_SCHEMA,
    "untitled": {key: value for key, value in LAMP_SCHEMA.items() if key not in ("title", "description")},
    "openai": tool_dict("Lamp", "A lamp.", on=FLAG, colour={"enum": ["red", "green"]}),
}


class TestStructuredOutput:
    """32197, 29569, 17553."""

    @pytest.mark.parametrize(
        ("method", "kind"),
        [
            *(("json_schema", kind) for kind in SCHEMAS),
            *(("function_calling", kind) for kind in ("pydantic", "typeddict", "untitled")),
            *(("json_mode", kind) for kind in ("pydantic", "schema")),
            *(pytest.param("function_calling", kind, marks=pytest.mark.slow) for kind in ("schema", "openai")),
            *(pytest.param("json_mode", kind, marks=pytest.mark.slow) for kind in ("typeddict", "untitled", "openai")),
        ],
    )
    def test_methods_and_schemas(self, plain, method, kind):
        plain.says = '{"on": true, "colour": "green"}' if method == "json_mode" else None
        chain = ChatKVBoost(engine=plain, max_tokens=ROOMY).with_structured_output(SCHEMAS[kind], method=method)
        found = chain.invoke("q")
        assert isinstance(found, Lamp if kind == "pydantic" else dict)
        Lamp.model_validate(found)

    @pytest.mark.parametrize(
        ("family", "method"),
        [
            ("hermes", "json_schema"),
            ("mistral", "function_calling"),
            pytest.param("hermes", "function_calling", marks=pytest.mark.slow),
            pytest.param("llama3", "json_schema", marks=pytest.mark.slow),
            pytest.param("llama3", "function_calling", marks=pytest.mark.slow),
            pytest.param("mistral", "json_schema", marks=pytest.mark.slow),
        ],
    )
    def test_families(self, family, method):
        chat = ChatKVBoost(engine=engine_of_family(family), max_tokens=ROOMY)
        assert isinstance(chat.with_structured_output(Lamp, method=method).invoke("q"), Lamp)

    @pytest.mark.parametrize("method", ["json_schema", "function_calling"])
    def test_streams_and_async(self, plain, method):
        chain = ChatKVBoost(engine=plain, max_tokens=ROOMY).with_structured_output(Lamp, method=method)
        expected = chain.invoke("q")
        assert list(chain.stream("q"))[-1] == expected
        assert asyncio.run(chain.ainvoke("q")) == expected
        assert asyncio.run(collected(chain.astream("q")))[-1] == expected

    def test_json_streams(self, plain):
        chain = ChatKVBoost(engine=plain, max_tokens=ROOMY).with_structured_output(LAMP_SCHEMA)
        assert len(list(chain.stream("q"))) > 2

    @pytest.mark.parametrize("method", ["json_schema", "function_calling", "json_mode"])
    def test_include_raw(self, plain, method):
        plain.says = '{"on": true, "colour": "green"}' if method == "json_mode" else None
        chain = ChatKVBoost(engine=plain, max_tokens=ROOMY).with_structured_output(
            Lamp, method=method, include_raw=True
        )
        found = chain.invoke("q")
        assert isinstance(found["raw"], AIMessage)
        assert isinstance(found["parsed"], Lamp)
        assert found["parsing_error"] is None
        assert found["raw"].usage_metadata["output_tokens"] > 0

    @pytest.mark.parametrize("method", ["json_schema", "function_calling", "json_mode"])
    def test_parsing_errors(self, plain, method):
        class Red(BaseModel):
            """A red lamp."""

            colour: Literal["red", "green"]

            @field_validator("colour")
            @classmethod
            def red(cls, colour):
                raise ValueError("no colour is red enough")

        plain.says = '{"colour": "green"}' if method == "json_mode" else None
        chat = ChatKVBoost(engine=plain, max_tokens=ROOMY)
        found = chat.with_structured_output(Red, method=method, include_raw=True).invoke("q")
        assert found["parsed"] is None
        assert "red enough" in str(found["parsing_error"])
        with pytest.raises((OutputParserException, ValueError), match="red enough"):
            chat.with_structured_output(Red, method=method).invoke("q")

    def test_json_mode_gives_any_object(self, plain):
        chain = ChatKVBoost(engine=plain, max_tokens=60).with_structured_output(method="json_mode")
        assert isinstance(chain.invoke("q"), dict)

    @pytest.mark.parametrize(
        ("method", "strict"), [("json_schema", True), ("json_schema", False), ("function_calling", False)]
    )
    def test_strict(self, plain, method, strict):
        chat = ChatKVBoost(engine=plain, max_tokens=ROOMY)
        assert isinstance(chat.with_structured_output(Lamp, method=method, strict=strict).invoke("q"), Lamp)

    @pytest.mark.parametrize("method", ["json_schema", "function_calling", "json_mode"])
    def test_further_arguments_reach_the_call(self, plain, method):
        plain.says = '{"on": true, "colour": "green"}' if method == "json_mode" else None
        chat = ChatKVBoost(engine=plain, max_tokens=3)
        chat.with_structured_output(Lamp, method=method, max_tokens=ROOMY, namespace="x").invoke("q")
        assert plain.sampling.max_tokens == ROOMY
        assert plain.options["namespace"] == "x"

    def test_bad_arguments(self, plain):
        chat = ChatKVBoost(engine=plain)
        with pytest.raises(ConfigError, match="xml"):
            chat.with_structured_output(Lamp, method="xml")
        with pytest.raises(ConfigError, match="needs one"):
            chat.with_structured_output(None)
        with pytest.raises(ConfigError, match="kindness"):
            chat.with_structured_output(Lamp, kindness=1).invoke("q")

    def test_the_schema_is_shown_and_constrains(self, plain):
        ChatKVBoost(engine=plain, max_tokens=ROOMY).with_structured_output(Lamp).invoke(
            [("system", "s"), ("human", "h")]
        )
        assert '"colour"' in plain.prompt[0]["content"]
        assert plain.prompt[0]["content"].startswith("s\n\n")

    def test_stops_do_not_cut_json(self, plain):
        chat = ChatKVBoost(engine=plain, max_tokens=ROOMY, stop=[","])
        assert isinstance(chat.with_structured_output(Lamp).invoke("q"), Lamp)

    @pytest.mark.parametrize("method", ["json_schema", "function_calling"])
    def test_recursive_classes(self, plain, method):
        chat = ChatKVBoost(engine=plain, max_tokens=1500)
        assert isinstance(chat.with_structured_output(Folder, method=method).invoke("q"), Folder)

    @pytest.mark.parametrize("method", ["json_schema", "function_calling"])
    def test_aliases_defaults_and_nested_classes(self, plain, method):
        class Room(BaseModel):
            """A room."""

            lamp: Lamp
            size: Literal[1, 2] = Field(alias="room-size")
            dark: bool = False

        chat = ChatKVBoost(engine=plain, max_tokens=ROOMY)
        assert isinstance(chat.with_structured_output(Room, method=method).invoke("q").lamp, Lamp)

    @pytest.mark.parametrize("method", ["json_schema", "function_calling"])
    def test_typeddict_with_optional_keys(self, plain, method):
        class Door(TypedDict):
            """A door."""

            shut: bool
            locked: NotRequired[bool]

        found = ChatKVBoost(engine=plain, max_tokens=ROOMY).with_structured_output(Door, method=method).invoke("q")
        assert isinstance(found["shut"], bool)
        assert set(found) <= {"shut", "locked"}

    def test_response_format_beside_tools(self, engine):
        """As agents do: calls first, then the answer in JSON."""
        wanted = {"type": "json_schema", "json_schema": {"name": "Lamp", "schema": LAMP_SCHEMA, "strict": True}}
        bound = ChatKVBoost(engine=engine, max_tokens=ROOMY).bind_tools([SWITCH], response_format=wanted)
        engine.says = hermes(("switch", '{"on": true}'))
        assert named(bound.invoke("q").tool_calls) == [("switch", {"on": True})]
        engine.says = '{"on": true, "colour": "red"}'
        answer = bound.invoke("q")
        assert json.loads(answer.content) == {"on": True, "colour": "red"}
        assert answer.tool_calls == []
        engine.says = "I would rather talk."
        answer = bound.invoke("q")
        assert answer.tool_calls or Lamp.model_validate_json(answer.content)

    @pytest.mark.parametrize("family", list(TOKENIZERS))
    def test_an_answer_that_looks_like_a_call(self, family):
        engine = engine_of_family(family)
        schema = {
            "type": "object",
            "properties": {"name": {"enum": ["switch", "lock"]}, "on": FLAG},
            "required": ["name", "on"],
            "additionalProperties": False,
        }
        engine.says = '{"name": "switch", "on": true}'
        bound = ChatKVBoost(engine=engine, max_tokens=ROOMY).bind_tools([SWITCH], response_format=schema)
        for answer in (bound.invoke("q"), merged(bound.stream("q"))):
            assert json.loads(answer.content) == {"name": "switch", "on": True}
            assert answer.tool_calls == []

    def test_own_stop_strings_of_a_model_do_not_cut_json(self):
        engine = recording(window=1024)
        engine.model.generation_config.stop_strings = ['"']
        assert ChatKVBoost(engine=engine, max_tokens=ROOMY).with_structured_output(Lamp).invoke("q")

    @pytest.mark.parametrize("form", [Lamp, LampDict, LAMP_SCHEMA, {"type": "json_object"}, {"type": "text"}])
    def test_forms_of_response_format(self, plain, form):
        answer = ChatKVBoost(engine=plain, max_tokens=80).bind_tools([], response_format=form).invoke("q")
        if form != {"type": "text"}:
            assert isinstance(json.loads(answer.content), dict)

    def test_unknown_response_format(self, plain):
        with pytest.raises(ConfigError, match="grammar"):
            ChatKVBoost(engine=plain).invoke("q", response_format={"type": "grammar"})


class Note(BaseModel):
    """A note."""

    text: str
    tags: list[str]


@functools.cache
def small_engine():
    return recording(window=1024)


class TestWhyItEnded:
    """An answer that was brought to its end because the tokens ran out says so, and no other."""

    LONG = tool_dict("note", "Take a note.", text={"type": "string"})

    def ends(self, engine, runnable):
        """Of an answer and of a streamed one."""
        return {
            one.response_metadata["finish_reason"] for one in (runnable.invoke("q"), merged(list(runnable.stream("q"))))
        }

    @pytest.mark.parametrize(("tokens", "reason"), [(70, "length"), (ROOMY, "tool_calls")])
    def test_calls(self, engine, tokens, reason):
        engine.says = hermes(("note", json.dumps({"text": "word " * 25})))
        chat = ChatKVBoost(engine=engine, max_tokens=tokens)
        assert self.ends(engine, chat.bind_tools([self.LONG], tool_choice="any")) == {reason}

    @pytest.mark.parametrize(("tokens", "reason"), [(30, "length"), (ROOMY, "stop")])
    def test_structured_output(self, engine, tokens, reason):
        engine.says = json.dumps({"text": "word " * 25})
        chat = ChatKVBoost(engine=engine, max_tokens=tokens)
        schema = self.LONG["function"]["parameters"]
        wanted = {"type": "json_schema", "json_schema": {"schema": schema}}
        assert self.ends(engine, chat.bind(response_format=wanted)) == {reason}
        raw = chat.with_structured_output(schema, include_raw=True).invoke("q")
        assert raw["raw"].response_metadata["finish_reason"] == reason
        assert raw["parsed"]["text"].startswith("word")

    def test_a_call_of_its_own_will(self, engine):
        engine.says = hermes(("note", '{"text": "word"}'))
        chat = ChatKVBoost(engine=engine, max_tokens=ROOMY)
        assert self.ends(engine, chat.bind_tools([self.LONG])) == {"tool_calls"}


class TestAbsurdSchemas:
    def test_deep_and_cyclic_ones_are_refused(self, engine):
        deep = {"type": "string"}
        for _ in range(3000):
            deep = {"type": "array", "items": deep}
        cyclic = {"type": "object", "properties": {}}
        cyclic["properties"]["again"] = cyclic
        chat = ChatKVBoost(engine=engine)
        for schema in ({"type": "object", "properties": {"x": deep}}, cyclic):
            with pytest.raises(ConfigError, match="levels deep"):
                chat.invoke("q", response_format=schema)
            with pytest.raises(ConfigError, match="levels deep"):
                chat.bind_tools([{"type": "function", "function": {"name": "f", "parameters": schema}}])
            with pytest.raises(ConfigError, match="levels deep"):
                chat.with_structured_output({"title": "f", **schema})

    def test_a_name_is_no_schema(self, engine):
        with pytest.raises(ConfigError, match="'Order' is no schema"):
            ChatKVBoost(engine=engine).with_structured_output("Order")


class TestRoom:
    @pytest.fixture
    def plain(self):
        return small_engine()

    def least(self, chain):
        with pytest.raises(ConfigError, match="max_tokens is 2") as raised:
            chain.invoke("q")
        assert "raise max_tokens" in str(raised.value)
        return int(re.search(r"needs about (\d+)", str(raised.value))[1])

    @pytest.mark.parametrize("method", ["json_schema", pytest.param("function_calling", marks=pytest.mark.slow)])
    def test_forced_json_is_complete_near_the_least_max_tokens(self, plain, method):
        chat = ChatKVBoost(engine=plain, max_tokens=2, temperature=1.5)
        least = self.least(chat.with_structured_output(Note, method=method))
        for extra in (0, 1, 2, 5, 11, 23):
            chain = chat.with_structured_output(Note, method=method, max_tokens=least + extra, seed=extra)
            assert isinstance(chain.invoke("q"), Note)

    @pytest.mark.parametrize("form", ["invoke", "stream"])
    def test_forced_json_is_complete_in_a_window_almost_full(self, plain, form):
        chat = ChatKVBoost(engine=plain, max_tokens=2, temperature=1.5, seed=1)
        least = self.least(chat.with_structured_output(Note))
        chain = chat.with_structured_output(Note, max_tokens=120, reuse="exact", include_raw=True)
        used = chain.invoke("")["raw"].usage_metadata["input_tokens"]
        each = len(plain.tokenizer("é").input_ids)
        for room in (least, least + 1, least + 7):
            letters = (plain.window_tokens + 1 - used - room) // each
            plain.clear()
            found = chain.invoke("é" * letters) if form == "invoke" else merged(chain.stream("é" * letters))
            usage = found["raw"].usage_metadata
            assert 0 <= plain.window_tokens + 1 - usage["input_tokens"] - room < each
            assert found["parsing_error"] is None
            assert isinstance(found["parsed"], Note)

    def test_no_room_for_the_shortest_answer(self, plain):
        chat = ChatKVBoost(engine=plain, max_tokens=200)
        bound = chat.bind(response_format=LAMP_SCHEMA)
        used = bound.invoke("").usage_metadata["input_tokens"]
        long = "é" * ((plain.window_tokens - used - 5) // len(plain.tokenizer("é").input_ids))
        for run in (lambda: bound.invoke(long), lambda: list(bound.stream(long))):
            with pytest.raises(PromptOverflowError, match="shortest answer that fits the schema") as raised:
                run()
            assert used < raised.value.prompt_tokens <= raised.value.window_tokens == plain.window_tokens
        assert chat.invoke("q", max_tokens=1).content is not None  # the engine goes on


LONG_TOOLS = [
    tool_dict(name, f"This tool is for the {name}; use it whenever somebody asks for the {name}.", on=FLAG)
    for name in ("lantern", "meadow", "harbor")
]
OTHER = tool_dict("rocket", "Start the rocket, but only when everybody has left the meadow.", on=FLAG)


class TestWarmTools:
    def read(self, chat, tools, messages="q"):
        return chat.bind_tools(tools).invoke(messages).response_metadata

    @pytest.mark.parametrize("family", ["hermes", "fallback"])
    def test_any_order_and_company(self, family):
        engine = engine_of_family(family)
        chat = ChatKVBoost(engine=engine, max_tokens=1, namespace="any")
        engine.clear("any")
        report = chat.warm_tools(LONG_TOOLS)
        assert report.computed == 3
        sizes = {
            tool["function"]["name"]: len(engine.tokenizer(json.dumps(canonical_tools([tool])[0])).input_ids)
            for tool in LONG_TOOLS
        }
        for tools in (LONG_TOOLS[::-1], LONG_TOOLS[:2], LONG_TOOLS[2:], [OTHER, *LONG_TOOLS]):
            for messages in ("q", [("system", "A system prompt."), ("human", "h")]):
                details = self.read(chat, tools, messages)
                known = sum(sizes.get(tool["function"]["name"], 0) for tool in tools)
                assert details["exact_tokens"] + details["approximate_tokens"] > 0.85 * known
        assert chat.warm_tools(LONG_TOOLS).already_warm == 3

    @pytest.mark.parametrize("family", ["hermes", "fallback"])
    def test_with_the_system_prompt_hits_are_exact(self, family):
        engine = engine_of_family(family)
        engine.clear("exact")
        chat = ChatKVBoost(engine=engine, max_tokens=1, namespace="exact", reuse="exact")
        chat.warm_tools(LONG_TOOLS, system="Be kind.")
        details = self.read(chat, LONG_TOOLS, [("system", "Be kind."), ("human", "h")])
        assert details["exact_tokens"] > 0.6 * len(engine.ids)
        engine.clear("exact")
        assert self.read(chat, LONG_TOOLS, [("system", "Be kind."), ("human", "h")])["exact_tokens"] == 0

    def test_namespaces(self, engine):
        chat = ChatKVBoost(engine=engine, max_tokens=1, namespace="mine")
        chat.warm_tools(LONG_TOOLS, namespace="theirs")
        details = self.read(chat, LONG_TOOLS)
        assert details["exact_tokens"] + details["approximate_tokens"] == 0
        engine.clear("theirs")
        chat.warm_tools(LONG_TOOLS, namespace="theirs")
        details = self.read(chat.model_copy(update={"namespace": "theirs"}), LONG_TOOLS)
        assert details["exact_tokens"] + details["approximate_tokens"] > 100

    def test_what_would_have_no_effect_raises(self, engine):
        with pytest.raises(ConfigError, match="system="):
            ChatKVBoost(engine=engine, reuse="exact").warm_tools(LONG_TOOLS)
        with pytest.raises(ConfigError, match="reuse is 'off'"):
            ChatKVBoost(engine=recording(reuse="off")).warm_tools(LONG_TOOLS)
        with pytest.raises(PromptOverflowError):
            ChatKVBoost(engine=engine).warm_tools(LONG_TOOLS, system="s " * engine.window_tokens)

    def test_in_every_family(self):
        for family in ("llama3", "mistral"):
            chat = ChatKVBoost(engine=engine_of_family(family), max_tokens=1)
            chat.warm_tools(LONG_TOOLS)
            details = self.read(chat, LONG_TOOLS[::-1])
            assert details["exact_tokens"] + details["approximate_tokens"] > 0.5 * len(chat.engine.ids)
            chat.warm_tools(LONG_TOOLS, system="Be kind.", namespace="system")
            tenant = chat.model_copy(update={"namespace": "system", "reuse": "exact"})
            details = self.read(tenant, LONG_TOOLS, [("system", "Be kind."), ("human", "h")])
            assert details["exact_tokens"] > 0.5 * len(chat.engine.ids)


@pytest.fixture(scope="module")
def real(model_path):
    engine = Engine.from_pretrained(str(model_path), config=EngineConfig(fallback=False))
    yield engine
    engine.close()


@pytest.mark.model
class TestRealModel:
    @pytest.mark.slow
    def test_forced_call(self, real):
        chat = ChatKVBoost(engine=real, max_tokens=48)
        answer = chat.bind_tools([Weather, Sun], tool_choice="any").invoke("How is the weather in Oslo in two days?")
        assert len(answer.tool_calls) == 1
        assert answer.content == ""

    @pytest.mark.slow
    @pytest.mark.parametrize("method", ["json_schema", "function_calling", "json_mode"])
    def test_structured_output(self, real, method):
        chat = ChatKVBoost(engine=real, max_tokens=96)
        question = "Describe a red lamp that is on as a JSON object with the keys on and colour."
        found = chat.with_structured_output(None if method == "json_mode" else Lamp, method=method).invoke(question)
        assert isinstance(found, dict if method == "json_mode" else Lamp)

    @pytest.mark.slow
    def test_warm_tools_start_sooner(self, real):
        chat = ChatKVBoost(engine=real, max_tokens=1)
        tools = [
            tool_dict(
                name, f"Look up the {name} of a town, and of the villages around it, in the land register.", on=FLAG
            )
            for name in ("taxes", "schools", "bridges", "wells", "mills", "forests")
        ]
        cold = chat.bind_tools(tools).invoke("How many wells?", namespace="cold").response_metadata
        chat.warm_tools(tools)
        warm = chat.bind_tools(tools[::-1]).invoke("How many wells?").response_metadata
        assert warm["computed_tokens"] < 0.5 * cold["computed_tokens"]
