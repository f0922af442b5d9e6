"""Tools, structured output and agents of KVBoost on real tiny engines.

Where a test needs a model that decides to call a tool, it says which tokens the model prefers; everything else runs.
Numbers in names and comments are the issues of other local-model classes that must not happen here.
"""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Callable, Coroutine
from enum import Enum
from typing import Any, Generic, Literal, TypeVar

import pytest
from llama_index.core.agent.workflow import (
    AgentOutput,
    AgentStream,
    FunctionAgent,
    ReActAgent,
    ToolCall,
    ToolCallResult,
)
from llama_index.core.base.llms.types import ChatMessage, ToolCallBlock
from llama_index.core.base.response.schema import Response
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.instrumentation.events import BaseEvent
from llama_index.core.prompts import PromptTemplate
from llama_index.core.query_engine import CustomQueryEngine
from llama_index.core.tools import FunctionTool, QueryEngineTool
from llama_index.core.types import PydanticProgramMode
from pydantic import BaseModel, Field, field_validator

from kvboost_rag import ConfigError, ContextOverflowError, PromptError
from kvboost_rag.tools import canonical_tools
from llama_index.llms.kvboost import KVBoost
from llama_index.llms.kvboost.tools import describe
from tests.chat_tokenizers import LLAMA31_TOOLS, MISTRAL_TOOLS, llama, sentencepiece, special
from tests.recording import RecordingEngine, recording
from tests.scripted import call, scripted

TOKENIZERS: dict[str, Callable[[], Any]] = {
    "smollm2": lambda: "smollm2",  # whose template knows no tools
    "qwen2.5": lambda: "qwen2.5",
    "llama3.1": lambda: llama(LLAMA31_TOOLS),
    "mistral": lambda: sentencepiece(
        MISTRAL_TOOLS,
        legacy=False,
        added=special("[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
    ),
}
# LlamaIndex's own: its workflows look at every attribute of an agent, and its structured LLM streams `.json()`.
agents = pytest.mark.filterwarnings("ignore:.*attribute.* is deprecated:pydantic.PydanticDeprecationWarning")
structured_streams = pytest.mark.filterwarnings("ignore:The `json` method is deprecated")
ROOMY = 400  # tokens of an answer with a call, by tiny tokenizers
PATIENCE = 60  # seconds until a test that hangs is given up


@functools.cache
def engine_for(family: str) -> RecordingEngine:
    return recording(TOKENIZERS[family](), window=8192)


def engine_of_family(family: str) -> RecordingEngine:
    engine = engine_for(family)
    engine.clear()
    engine.asked.clear()
    engine.says = None
    return engine


@pytest.fixture
def engine() -> RecordingEngine:
    """Whose template shows tools itself."""
    return engine_of_family("qwen2.5")


@pytest.fixture
def plain() -> RecordingEngine:
    """Whose template knows no tools, and whose tokenizer is small."""
    return engine_of_family("smollm2")


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(work, PATIENCE))


async def collected(stream: Coroutine[Any, Any, Any]) -> list[Any]:
    return [piece async for piece in await stream]


def switch(on: bool) -> str:
    """Switch the lamp."""
    return f"on: {on}"


def lock(shut: bool) -> str:
    """Lock the door."""
    return f"shut: {shut}"


SWITCH, LOCK = FunctionTool.from_defaults(switch), FunctionTool.from_defaults(lock)
FLAG = {"type": "boolean"}


def tool_dict(name: str, description: str = "Do it.", **properties: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


class Echo(CustomQueryEngine):
    """Answers with the question."""

    def custom_query(self, query_str: str) -> Response:
        return Response(response=f"heard {query_str}")


ASK = QueryEngineTool.from_defaults(Echo(), name="ask", description="Ask the echo.")


def hermes(*calls: tuple[str, str]) -> str:
    return "\n".join(f'<tool_call>\n{{"name": "{name}", "arguments": {args}}}\n</tool_call>' for name, args in calls)


Form = Callable[..., Any]
FORMS: dict[str, Form] = {
    "chat": lambda llm, tools, **k: llm.chat_with_tools(tools, "q", **k),
    "achat": lambda llm, tools, **k: run(llm.achat_with_tools(tools, "q", **k)),
    "stream": lambda llm, tools, **k: list(llm.stream_chat_with_tools(tools, "q", **k))[-1],
    "astream": lambda llm, tools, **k: run(collected(llm.astream_chat_with_tools(tools, "q", **k)))[-1],
}
# Plain and streamed, blocking and on the loop: two forms show each once, the others take their time.
every_form = pytest.mark.parametrize(
    "form",
    [
        pytest.param(form, id=name, marks=() if name in ("chat", "astream") else pytest.mark.slow)
        for name, form in FORMS.items()
    ],
)
some_families = pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=() if name in ("smollm2", "qwen2.5") else pytest.mark.slow) for name in TOKENIZERS],
)


def named(llm: KVBoost, response: Any) -> list[tuple[str, Any]]:
    found = llm.get_tool_calls_from_response(response, error_on_no_tool_call=False)
    return [(one.tool_name, one.tool_kwargs) for one in found]


class TestDescribing:
    @some_families
    @pytest.mark.parametrize("tool", [SWITCH, ASK, tool_dict("switch", on=FLAG)], ids=["function", "engine", "dict"])
    def test_29033_every_kind_of_tool_reaches_the_prompt(self, family: str, tool: Any) -> None:
        engine = engine_of_family(family)  # 30453
        KVBoost(engine=engine, max_tokens=1).chat_with_tools([tool], "q")
        name = describe([tool])[0]["function"]["name"]
        assert f'"name": "{name}"' in engine.text

    def test_long_descriptions(self, engine: RecordingEngine) -> None:
        tool = FunctionTool.from_defaults(switch, description="Switch the lamp. " * 100)
        KVBoost(engine=engine, max_tokens=1).chat_with_tools([tool], "q")
        assert engine.text.count("Switch the lamp.") == 100

    def test_the_same_tool_twice_counts_once(self, engine: RecordingEngine) -> None:
        KVBoost(engine=engine, max_tokens=1).chat_with_tools([SWITCH, SWITCH], "q")
        assert len(engine.options["tools"]) == 1

    def test_what_is_no_tool(self, engine: RecordingEngine) -> None:
        llm = KVBoost(engine=engine)
        for bad in ([switch], [3], "switch", [{"name": "switch"}]):
            with pytest.raises(ConfigError, match="tool"):
                llm.chat_with_tools(bad, "q")
        with pytest.raises(ConfigError, match="two different tools"):
            llm.chat_with_tools([SWITCH, tool_dict("switch", "Another.")], "q")

    def test_6338_key_order_of_a_tool_does_not_matter(self, engine: RecordingEngine) -> None:
        llm = KVBoost(engine=engine, max_tokens=1)
        one = tool_dict("switch", on=FLAG)
        turned = {"function": dict(reversed(one["function"].items())), "type": "function"}
        llm.chat_with_tools([one], "q")
        ids = engine.ids
        answer = llm.chat_with_tools([turned], "q")
        assert engine.ids == ids
        assert answer.raw["exact_tokens"] >= len(ids) - 1

    @pytest.mark.parametrize("name", ["my tool", "größe", "Box[int]", "a" * 65])
    def test_names_no_call_could_hold_are_refused(self, engine: RecordingEngine, name: str) -> None:
        """LlamaIndex would show them another name, and not find the tool when the model calls it by that."""
        named = FunctionTool.from_defaults(switch, name=name)
        with pytest.raises(PromptError, match="rename it"):
            KVBoost(engine=engine).chat_with_tools([named], "q")

    def test_dots_in_names(self, plain: RecordingEngine) -> None:
        named = FunctionTool.from_defaults(switch, name="lamp.switch")
        answer = KVBoost(engine=plain, max_tokens=ROOMY).predict_and_call([named], "q", tool_required=True)
        assert [source.tool_name for source in answer.sources] == ["lamp.switch"]

    def test_no_tools(self, engine: RecordingEngine) -> None:
        llm = KVBoost(engine=engine, max_tokens=2)
        assert llm.chat_with_tools([], "q", tool_required=True).message.content is not None
        with pytest.raises(ConfigError, match="no tools"):
            llm.chat_with_tools([], "q", tool_choice="any")

    def test_messages(self, engine: RecordingEngine) -> None:
        llm, history = KVBoost(engine=engine, max_tokens=1), [ChatMessage(role="system", content="s")]
        for question in ("q", ChatMessage(role="user", content="q")):
            llm.chat_with_tools([SWITCH], question, chat_history=history)
            assert [(m["role"], m["content"]) for m in engine.prompt] == [("system", "s"), ("user", "q")]
        assert len(history) == 1
        llm.chat_with_tools([SWITCH], chat_history=[*history, ChatMessage(role="user", content="r")])
        assert engine.prompt[-1]["content"] == "r"


class TestForced:
    @some_families
    @every_form
    def test_24430_every_form_of_every_family(self, family: str, form: Form) -> None:
        llm = KVBoost(engine=engine_of_family(family), max_tokens=ROOMY)
        answer = form(llm, [SWITCH], tool_required=True)
        [(name, args)] = named(llm, answer)
        assert name == "switch"
        assert isinstance(args["on"], bool)
        assert not answer.message.content
        assert answer.raw["finish_reason"] == "tool_calls"
        [block] = answer.message.blocks
        assert isinstance(block, ToolCallBlock)
        [legacy] = answer.message.additional_kwargs["tool_calls"]
        assert json.loads(legacy["function"]["arguments"]) == args

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
        ids=str,
    )
    def test_choices_that_force(self, plain: RecordingEngine, choice: Any) -> None:
        llm = KVBoost(engine=plain, max_tokens=ROOMY)
        [(name, _)] = named(llm, llm.chat_with_tools([SWITCH, LOCK], "q", tool_choice=choice))
        assert name in ({"lock"} if "lock" in str(choice) else {"switch", "lock"})

    @pytest.mark.parametrize("choice", [None, "auto", "none", False, {"type": "auto"}], ids=str)
    def test_choices_that_do_not(self, engine: RecordingEngine, choice: Any) -> None:
        engine.says = "Good day."
        llm = KVBoost(engine=engine, max_tokens=40)
        answer = llm.chat_with_tools([SWITCH], "q", tool_choice=choice)
        assert (answer.message.content, named(llm, answer)) == ("Good day.", [])
        assert ("switch" in engine.text) == (choice != "none")
        with pytest.raises(ValueError, match="Good day"):
            llm.get_tool_calls_from_response(answer)

    @pytest.mark.parametrize("choice", ["auto", "none", "lock"])
    def test_a_choice_wins_over_tool_required(self, engine: RecordingEngine, choice: str) -> None:
        """As in LlamaIndex's other classes: what is said in particular counts."""
        engine.says = "Good day."
        llm = KVBoost(engine=engine, max_tokens=ROOMY)
        answer = llm.chat_with_tools([SWITCH, LOCK], "q", tool_required=True, tool_choice=choice)
        assert [name for name, _ in named(llm, answer)] == (["lock"] if choice == "lock" else [])

    @every_form
    @pytest.mark.parametrize("bad", [{"tool_choice": "shout"}, {"tool_choice": 7}, {"kindness": 1}], ids=str)
    def test_bad_arguments_raise(self, engine: RecordingEngine, form: Form, bad: dict[str, Any]) -> None:
        with pytest.raises(ConfigError, match=r"shout|7|kindness"):
            form(KVBoost(engine=engine), [SWITCH], **bad)
        assert not engine.asked

    def test_flags_are_bools(self, engine: RecordingEngine) -> None:
        with pytest.raises(ConfigError, match="parallel_tool_calls is 'false'"):
            KVBoost(engine=engine).chat([ChatMessage("q")], tools=[SWITCH], parallel_tool_calls="false")

    def test_stops_do_not_cut_a_forced_call(self, plain: RecordingEngine) -> None:
        llm = KVBoost(engine=plain, max_tokens=ROOMY, stop=['"', ":"])
        assert named(llm, llm.chat_with_tools([SWITCH], "q", tool_required=True, stop=["}"]))

    def test_tool_format(self, plain: RecordingEngine) -> None:
        plain.says = hermes(("switch", '{"on": true}'))
        llm = KVBoost(engine=plain, max_tokens=ROOMY, tool_format="hermes")
        assert named(llm, llm.chat_with_tools([SWITCH], "q")) == [("switch", {"on": True})]
        assert "<tool_call>" in plain.text  # the model is told so
        with pytest.raises(ConfigError, match="xml"):
            KVBoost(engine=plain, tool_format="xml").chat_with_tools([SWITCH], "q")


def many(family: str) -> str:
    """Two calls as a family writes them."""
    calls = [("switch", '{"on": true}'), ("switch", '{"on": false}')]
    if family == "qwen2.5":
        return hermes(*calls)
    array = "[" + ", ".join(f'{{"name": "{name}", "arguments": {args}}}' for name, args in calls) + "]"
    return f"[TOOL_CALLS] {array}" if family == "mistral" else array


class TestSeveral:
    @pytest.mark.parametrize("family", ["qwen2.5", "smollm2", pytest.param("mistral", marks=pytest.mark.slow)])
    @every_form
    @pytest.mark.parametrize("parallel", [False, True])
    def test_allow_parallel_tool_calls(self, family: str, form: Form, parallel: bool) -> None:
        engine = engine_of_family(family)
        engine.says = many(family)
        llm = KVBoost(engine=engine, max_tokens=ROOMY)
        answer = form(llm, [SWITCH], allow_parallel_tool_calls=parallel)
        assert [args["on"] for _, args in named(llm, answer)] == [True, False][: 1 + parallel]
        assert len(answer.message.additional_kwargs["tool_calls"]) == 1 + parallel
        ids = {one.tool_id for one in llm.get_tool_calls_from_response(answer)}
        assert len(ids) == 1 + parallel

    def test_forced_and_several(self, engine: RecordingEngine) -> None:
        engine.says = many("qwen2.5")
        llm = KVBoost(engine=engine, max_tokens=ROOMY)
        answer = llm.chat_with_tools([SWITCH], "q", tool_required=True, allow_parallel_tool_calls=True)
        assert [args["on"] for _, args in named(llm, answer)] == [True, False]


class TestVoluntary:
    @every_form
    def test_text_and_calls(self, engine: RecordingEngine, form: Form) -> None:
        engine.says = "I will look.\n" + hermes(("switch", '{"on": true}'), ("lock", '{"shut": false}'))
        llm = KVBoost(engine=engine, max_tokens=ROOMY)
        answer = form(llm, [SWITCH, LOCK], allow_parallel_tool_calls=True)
        assert named(llm, answer) == [("switch", {"on": True}), ("lock", {"shut": False})]
        assert answer.message.content == "I will look."
        assert answer.raw["finish_reason"] == "tool_calls"

    @pytest.mark.parametrize("form", ["stream", "astream"])
    def test_26971_text_streams_while_calls_wait(self, engine: RecordingEngine, form: str) -> None:
        """And 29129."""
        words = "I will look at the lamp first, since it is dark."
        engine.says = f"{words}\n" + hermes(("switch", '{"on": true}'))
        llm = KVBoost(engine=engine, max_tokens=ROOMY)
        if form == "stream":
            pieces = list(llm.stream_chat_with_tools([SWITCH], "q"))
        else:
            pieces = run(collected(llm.astream_chat_with_tools([SWITCH], "q")))
        assert len(pieces) > 10
        assert "".join(piece.delta for piece in pieces) == words
        assert pieces[-1].message.content == words
        assert [bool(named(llm, piece)) for piece in pieces] == [False] * (len(pieces) - 1) + [True]

    @every_form
    @pytest.mark.parametrize(
        "written",
        [
            '<|python_tag|>{"name": "nope", "parameters": {"on": true}}',
            '<|python_tag|>{"name": "switch", "parameters": "loudly"}',
            '<|python_tag|>{"name": "switch", "parameters": {"on": oops}}',
        ],
        ids=["unknown", "no-object", "no-json"],
    )
    def test_invalid_calls_are_kept(self, form: Form, written: str) -> None:
        """They are text for whoever reads text, and told apart for whoever looks."""
        engine = engine_of_family("llama3.1")
        engine.says = written
        llm = KVBoost(engine=engine, max_tokens=ROOMY)
        answer = form(llm, [SWITCH])
        assert named(llm, answer) == []
        assert "{" in answer.message.content
        [broken] = answer.message.additional_kwargs["invalid_tool_calls"]
        assert broken["error"]
        assert broken["arguments"] in answer.message.content
        assert answer.raw["finish_reason"] == "stop"

    def test_pieces_of_invalid_calls_add_up(self) -> None:
        engine = engine_of_family("llama3.1")
        engine.says = 'Well, then.\n<|python_tag|>{"name": "nope", "parameters": {"on": true}}'
        *_, last = pieces = list(KVBoost(engine=engine, max_tokens=ROOMY).stream_chat_with_tools([SWITCH], "q"))
        assert "".join(piece.delta for piece in pieces) == last.message.content
        assert last.message.content.startswith("Well, then.\n{")

    @every_form
    def test_unfinished_calls_are_kept(self, engine: RecordingEngine, form: Form) -> None:
        """Where nothing constrains them: a call of a format without markers that the limit cut."""
        plain = engine_of_family("smollm2")
        plain.says = '[{"name": "switch", "arguments": {"on": tr'
        llm = KVBoost(engine=plain, max_tokens=ROOMY)
        answer = form(llm, [SWITCH])
        assert named(llm, answer) == []
        assert '"switch"' in answer.message.content
        [broken] = answer.message.additional_kwargs["invalid_tool_calls"]
        assert "switch" in broken["arguments"]
        assert broken["error"]
        assert json.loads(json.dumps(answer.message.model_dump()))["additional_kwargs"]
        llm.chat([ChatMessage("q"), answer.message, ChatMessage("That was no call.")], max_tokens=1)
        assert answer.message.content in plain.text  # what the model wrote is what it is shown again

    def test_calls_without_tools_are_text(self, engine: RecordingEngine) -> None:
        engine.says = hermes(("switch", '{"on": true}'))
        llm = KVBoost(engine=engine, max_tokens=ROOMY)
        answer = llm.chat([ChatMessage("q")])
        assert "switch" in answer.message.content
        assert named(llm, answer) == []


HISTORY = [
    ChatMessage(role="system", content="s"),
    ChatMessage(role="user", content="Light!"),
    ChatMessage(
        role="assistant",
        blocks=[ToolCallBlock(tool_call_id="abcdefghi", tool_name="switch", tool_kwargs={"on": True})],
    ),
    ChatMessage(role="tool", content="it is on", additional_kwargs={"tool_call_id": "abcdefghi", "name": "switch"}),
    ChatMessage(role="user", content="And?"),
]
RENDERED = {
    "smollm2": [
        "<|im_start|>user\nLight!<|im_end|>\n",
        '<|im_start|>assistant\n[{"name": "switch", "arguments": {"on": true}}]<|im_end|>\n',
        "<|im_start|>user\nResult of the tool switch:\nit is on<|im_end|>\n",
    ],
    "qwen2.5": [
        "<|im_start|>user\nLight!<|im_end|>\n",
        '<|im_start|>assistant\n<tool_call>\n{"name": "switch", "arguments": {"on": true}}\n</tool_call><|im_end|>\n',
        "<|im_start|>user\n<tool_response>\nit is on\n</tool_response><|im_end|>\n",
    ],
    "llama3.1": [
        '<|start_header_id|>assistant<|end_header_id|>\n\n{"name": "switch", "parameters": {"on": true}}<|eot_id|>',
        "<|start_header_id|>ipython<|end_header_id|>\n\nit is on<|eot_id|>",
    ],
    "mistral": [
        '[TOOL_CALLS] [{"name": "switch", "arguments": {"on": true}, "id": "abcdefghi"}]</s>',
        '[TOOL_RESULTS] {"content": it is on, "call_id": "abcdefghi"}[/TOOL_RESULTS]',
    ],
}


class TestHistory:
    @pytest.mark.parametrize("family", RENDERED)
    def test_calls_and_results_in_each_family(self, family: str) -> None:
        engine = engine_of_family(family)
        messages = HISTORY if family != "mistral" else HISTORY[1:4]
        KVBoost(engine=engine, max_tokens=1).chat_with_tools([SWITCH, LOCK], chat_history=messages)
        # The tiny SentencePiece tokenizers show a space in front of a marker, and bytes for what they lack.
        rendered = engine.tokenizer.apply_chat_template(
            engine.prompt, tools=engine.options["tools"], add_generation_prompt=True, tokenize=False
        )
        for run_of_text in RENDERED[family]:
            assert run_of_text in rendered
        ids = engine.tokenizer(rendered, add_special_tokens=False)["input_ids"]
        assert engine.ids == ids

    @pytest.mark.parametrize("family", ["qwen2.5", "llama3.1"])
    def test_native_ids_are_those_of_plain_hugging_face(self, family: str) -> None:
        engine = engine_of_family(family)
        KVBoost(engine=engine, max_tokens=1).chat_with_tools([SWITCH, LOCK], chat_history=HISTORY)
        function = {"name": "switch", "arguments": {"on": True}}
        messages = [
            {"role": "system", "content": "s"},
            {"role": "user", "content": "Light!"},
            {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]},
            {"role": "tool", "content": "it is on", "tool_call_id": "abcdefghi"},
            {"role": "user", "content": "And?"},
        ]
        rendered = engine.tokenizer.apply_chat_template(
            messages, tools=canonical_tools(describe([SWITCH, LOCK])), add_generation_prompt=True
        )
        assert engine.ids == rendered["input_ids"]

    @pytest.mark.parametrize("family", TOKENIZERS)
    def test_542_a_call_and_its_result_go_round(self, family: str) -> None:
        engine = engine_of_family(family)
        llm, question = KVBoost(engine=engine, max_tokens=ROOMY), ChatMessage("Light!")
        call = llm.chat_with_tools([SWITCH], question, tool_required=True)
        first = call.raw["usage"]["prompt_tokens"]
        [made] = llm.get_tool_calls_from_response(call)
        result = ChatMessage(role="tool", content="it is on", additional_kwargs={"tool_call_id": made.tool_id})
        answer = llm.chat_with_tools([SWITCH], chat_history=[question, call.message, result], max_tokens=1)
        assert "it is on" in engine.text
        assert answer.raw["usage"]["prompt_tokens_details"]["cached_tokens"] > 0.8 * first

    def test_the_message_survives_a_chat_store(self, engine: RecordingEngine) -> None:
        llm = KVBoost(engine=engine, max_tokens=ROOMY)
        call = llm.chat_with_tools([SWITCH], "Light!", tool_required=True).message
        stored = ChatMessage.model_validate_json(call.model_dump_json())
        prompts = []
        for message in (call, stored):
            llm.chat([ChatMessage("Light!"), message, ChatMessage("And?")], max_tokens=1)
            prompts.append(engine.ids)
        assert prompts[0] == prompts[1]

    def test_mistrals_ids_of_calls(self) -> None:
        """The template refuses ids that are not nine letters and digits, as ours are; it is said clearly."""
        llm = KVBoost(engine=engine_of_family("mistral"), max_tokens=1)
        foreign = ToolCallBlock(tool_call_id="call_1", tool_name="switch", tool_kwargs={"on": True})
        with pytest.raises(PromptError, match="length 9"):
            llm.chat_with_tools(
                [SWITCH], chat_history=[ChatMessage("h"), ChatMessage(role="assistant", blocks=[foreign])]
            )


class TestPredictAndCall:
    @pytest.mark.parametrize("way", ["predict_and_call", "apredict_and_call"])
    def test_the_tool_is_called(self, engine: RecordingEngine, way: str) -> None:
        engine.says = hermes(("switch", '{"on": true}'))
        llm = KVBoost(engine=engine, max_tokens=ROOMY)
        found = getattr(llm, way)([SWITCH, LOCK], user_msg="Light!")
        answer = run(found) if way.startswith("a") else found
        assert str(answer) == "on: True"
        assert [source.tool_name for source in answer.sources] == ["switch"]

    def test_several(self, engine: RecordingEngine) -> None:
        engine.says = hermes(("switch", '{"on": true}'), ("ask", '{"input": "hm"}'))
        llm = KVBoost(engine=engine, max_tokens=ROOMY)
        answer = llm.predict_and_call([SWITCH, ASK], user_msg="q", allow_parallel_tool_calls=True)
        assert str(answer) == "on: True\n\nheard hm"

    def test_no_call(self, engine: RecordingEngine) -> None:
        engine.says = "No."
        llm = KVBoost(engine=engine, max_tokens=ROOMY)
        with pytest.raises(ValueError, match="calls no tool"):
            llm.predict_and_call([SWITCH], user_msg="q")
        answer = llm.predict_and_call([SWITCH], user_msg="q", error_on_no_tool_call=False)
        assert str(answer) == "No."


class Colour(Enum):
    """A colour."""

    RED = "red"
    GREEN = "green"


class Lamp(BaseModel):
    """A lamp."""

    on: bool
    colour: Colour


class Room(BaseModel):
    """A room."""

    lamp: Lamp
    sizes: list[int] = Field(max_length=2)
    kind: Literal["hall", "attic"]
    dark: bool = False
    note: str | None = None


ROOM = '{"lamp": {"on": true, "colour": "red"}, "sizes": [12, 13], "kind": "attic", "dark": true, "note": "cold"}'
PROMPT = PromptTemplate("Of the {thing}.")


Predict = Callable[..., Any]
STRUCTURED: dict[str, Predict] = {
    "structured_predict": lambda llm, made, **more: llm.structured_predict(made, PROMPT, thing="lamp", **more),
    "astructured_predict": lambda llm, made, **more: run(llm.astructured_predict(made, PROMPT, thing="lamp", **more)),
    "stream_structured_predict": lambda llm, made, **more: list(
        llm.stream_structured_predict(made, PROMPT, thing="lamp", **more)
    )[-1],
    "astream_structured_predict": lambda llm, made, **more: run(
        collected(llm.astream_structured_predict(made, PROMPT, thing="lamp", **more))
    )[-1],
}
every_structured_form = pytest.mark.parametrize("predict", STRUCTURED.values(), ids=STRUCTURED)


class Leaf(BaseModel):
    """Something that may hold another of its kind."""

    inside: Leaf | None = None
    size: int


T = TypeVar("T")


class Box(BaseModel, Generic[T]):
    """Holds something."""

    inside: T


def fixed(field: Any) -> Any:
    return field.value if isinstance(field, Enum) else field


class TestStructured:
    """32197, 29569, 17553."""

    @pytest.mark.parametrize("family", TOKENIZERS)
    def test_families(self, family: str) -> None:
        llm = KVBoost(engine=engine_of_family(family), max_tokens=ROOMY)
        assert isinstance(llm.structured_predict(Lamp, PROMPT, thing="lamp"), Lamp)
        assert "Of the lamp." in llm.engine.text or family == "mistral"

    def test_nested_optional_list_and_enum_fields(self, plain: RecordingEngine) -> None:
        llm = KVBoost(engine=plain, max_tokens=ROOMY)
        for found in (
            llm.structured_predict(Room, PROMPT, thing="room"),
            run(llm.astructured_predict(Room, PROMPT, thing="room")),
        ):
            assert isinstance(found, Room)
            assert isinstance(found.lamp.colour, Colour)

    @pytest.mark.parametrize("way", ["stream_structured_predict", "astream_structured_predict"])
    def test_objects_grow(self, plain: RecordingEngine, way: str) -> None:
        plain.says = ROOM
        llm = KVBoost(engine=plain, max_tokens=ROOMY)
        if way == "stream_structured_predict":
            found = list(llm.stream_structured_predict(Room, PROMPT, thing="room"))
        else:
            found = run(collected(llm.astream_structured_predict(Room, PROMPT, thing="room")))
        assert len(found) > 10
        assert found[-1] == Room.model_validate_json(ROOM)
        assert any(part.sizes == [12] for part in found)
        assert any(isinstance(part.lamp, dict) and part.lamp == {"on": True} for part in found)
        notes = [part.note for part in found if getattr(part, "note", None)]
        assert notes[-1] == "cold"
        assert notes[0] != "cold"  # strings grow, too
        sizes = [len(part.model_dump_json(exclude_none=True, exclude_defaults=True)) for part in found]
        assert sizes[0] < sizes[-1]

    def test_defaults_do_not_freeze_a_growing_object(self, plain: RecordingEngine) -> None:
        class Sized(BaseModel):
            """Something with a size."""

            size: int
            unit: str = "metres"
            exact: bool = True

        plain.says = '{"size": 1234}'
        llm = KVBoost(engine=plain, max_tokens=ROOMY)
        *_, last = llm.stream_structured_predict(Sized, PROMPT, thing="room")
        assert last.size == 1234

    @structured_streams
    @pytest.mark.parametrize("form", ["chat", "achat", "stream", "astream", "complete", "acomplete"])
    def test_as_structured_llm(self, plain: RecordingEngine, form: str) -> None:
        structured = KVBoost(engine=plain, max_tokens=ROOMY).as_structured_llm(Lamp)
        messages = [ChatMessage("Of the lamp.")]
        answer = {
            "chat": lambda: structured.chat(messages),
            "achat": lambda: run(structured.achat(messages)),
            "stream": lambda: list(structured.stream_chat(messages))[-1],
            "astream": lambda: run(collected(structured.astream_chat(messages)))[-1],
            "complete": lambda: structured.complete("Of the lamp."),
            "acomplete": lambda: run(structured.acomplete("Of the lamp.")),
        }[form]()
        assert isinstance(answer.raw, Lamp)

    def test_arguments_of_a_call(self, plain: RecordingEngine) -> None:
        llm = KVBoost(engine=plain, max_tokens=3)
        more = {"max_tokens": ROOMY, "namespace": "x"}
        assert isinstance(llm.structured_predict(Lamp, PROMPT, llm_kwargs=dict(more), thing="lamp"), Lamp)
        assert (plain.sampling.max_tokens, plain.options["namespace"]) == (ROOMY, "x")
        *_, last = llm.stream_structured_predict(Lamp, PROMPT, llm_kwargs=dict(more), thing="lamp")
        assert isinstance(last, Lamp)
        assert (plain.sampling.max_tokens, plain.options["namespace"]) == (ROOMY, "x")
        with pytest.raises(ConfigError, match="max_tokens is 3"):
            llm.structured_predict(Lamp, PROMPT, thing="lamp")

    def test_the_system_prompt_is_kept(self, plain: RecordingEngine) -> None:
        llm = KVBoost(engine=plain, max_tokens=ROOMY, system_prompt="Be kind.")
        llm.structured_predict(Lamp, PROMPT, thing="lamp")
        assert "Be kind." in plain.text
        list(llm.stream_structured_predict(Lamp, PROMPT, thing="lamp"))
        assert plain.text.count("Be kind.") == 1
        run(llm.astructured_predict(Lamp, PROMPT, thing="lamp"))
        assert plain.text.count("Be kind.") == 1

    @pytest.mark.parametrize("way", ["call", "stream", "astream"])
    def test_what_the_class_refuses_raises(self, plain: RecordingEngine, way: str) -> None:
        class Red(BaseModel):
            """A red lamp."""

            colour: Literal["red", "green"]

            @field_validator("colour")
            @classmethod
            def red(cls, colour: str) -> str:
                raise ValueError("no colour is red enough")

        llm = KVBoost(engine=plain, max_tokens=ROOMY)
        work = {
            "call": lambda: llm.structured_predict(Red, PROMPT, thing="lamp"),
            "stream": lambda: list(llm.stream_structured_predict(Red, PROMPT, thing="lamp")),
            "astream": lambda: run(collected(llm.astream_structured_predict(Red, PROMPT, thing="lamp"))),
        }[way]
        with pytest.raises(ValueError, match="red enough"):
            work()

    @pytest.mark.parametrize("made", [Leaf, Box[int]], ids=["refers to itself", "generic"])
    @every_structured_form
    def test_classes_that_are_no_tool(self, plain: RecordingEngine, predict: Predict, made: type[BaseModel]) -> None:
        """LlamaIndex's tools lose the fields of the one and the name of the other."""
        plain.says = '{"inside": {"inside": null, "size": 2}, "size": 1}' if made is Leaf else '{"inside": 3}'
        found = predict(KVBoost(engine=plain, max_tokens=ROOMY), made)
        assert isinstance(found, made)
        assert found == made.model_validate_json(plain.says)

    @every_structured_form
    def test_every_form_asks_the_same(self, plain: RecordingEngine, predict: Predict) -> None:
        llm = KVBoost(engine=plain, max_tokens=ROOMY, system_prompt="Be kind.")
        expected = llm.structured_predict(Lamp, PROMPT, thing="lamp")
        asked = plain.ids
        assert predict(llm, Lamp, llm_kwargs={"tool_choice": "any", "tool_required": True}) == expected
        assert plain.ids == asked
        assert plain.text.count("Be kind.") == 1

    @pytest.mark.parametrize("form", ["structured_predict", "astructured_predict"])
    def test_events_of_an_object(self, plain: RecordingEngine, form: str) -> None:
        seen: list[str] = []

        class Keeper(BaseEventHandler):
            """Names of what happened."""

            def handle(self, event: BaseEvent, **kwargs: Any) -> None:
                seen.append(event.class_name())

        dispatcher, keeper = get_dispatcher(), Keeper()
        dispatcher.add_event_handler(keeper)
        try:
            STRUCTURED[form](KVBoost(engine=plain, max_tokens=ROOMY), Lamp)
        finally:
            dispatcher.event_handlers.remove(keeper)
        told = [name for name in seen if name.startswith("LLM")]
        assert told == ["LLMStructuredPredictStartEvent", "LLMChatStartEvent", "LLMChatEndEvent", told[-1]]
        assert told[-1] == "LLMStructuredPredictEndEvent"

    def test_mode_llm_asks_in_words(self, plain: RecordingEngine) -> None:
        """LlamaIndex's text program: a schema in the prompt, and no constraint."""
        plain.says = '{"on": true, "colour": "green"}'
        llm = KVBoost(engine=plain, max_tokens=ROOMY, pydantic_program_mode=PydanticProgramMode.LLM)
        prompt = PromptTemplate("Of the {thing}, as JSON with the keys on and colour.")
        expected = Lamp(on=True, colour=Colour.GREEN)
        assert llm.structured_predict(Lamp, prompt, thing="lamp") == expected
        assert run(llm.astructured_predict(Lamp, prompt, thing="lamp")) == expected
        assert list(llm.stream_structured_predict(Lamp, prompt, thing="lamp"))[-1] == expected
        assert run(collected(llm.astream_structured_predict(Lamp, prompt, thing="lamp")))[-1] == expected
        assert not plain.sampling.logits_processors

    def test_mode_function(self, plain: RecordingEngine) -> None:
        llm = KVBoost(engine=plain, max_tokens=ROOMY, pydantic_program_mode=PydanticProgramMode.FUNCTION)
        assert isinstance(llm.structured_predict(Lamp, PROMPT, thing="lamp"), Lamp)
        assert isinstance(list(llm.stream_structured_predict(Lamp, PROMPT, thing="lamp"))[-1], Lamp)

    def test_response_format(self, plain: RecordingEngine) -> None:
        llm = KVBoost(engine=plain, max_tokens=ROOMY, stop=[","])
        forms: list[Any] = [
            Lamp,
            Lamp.model_json_schema(),
            {"type": "json_schema", "json_schema": {"schema": Lamp.model_json_schema()}},
        ]
        for form in forms:
            answer = llm.chat([ChatMessage("q")], response_format=form)
            Lamp.model_validate_json(answer.message.content)
        plain.says = '{"a": 1}'
        assert json.loads(llm.chat([ChatMessage("q")], response_format={"type": "json_object"}).message.content)
        for bad in ("Lamp", {"type": "grammar"}, 3):
            with pytest.raises(ConfigError, match="response_format"):
                llm.chat([ChatMessage("q")], response_format=bad)

    def test_leaving_a_growing_object_stops_the_model(self, plain: RecordingEngine) -> None:
        from tests.tiny import Forwards

        plain.says = '{"text": "' + "word " * 300
        llm = KVBoost(engine=plain, max_tokens=3000)

        class Note(BaseModel):
            """A note."""

            text: str

        with Forwards(plain.model) as forwards:
            objects = llm.stream_structured_predict(Note, PROMPT, thing="note")
            next(objects)
            objects.close()
            ran = len(forwards.rows)
            assert ran < 300
            asyncio.run(asyncio.sleep(0.1))
            assert len(forwards.rows) == ran


LONG_TOOLS = [
    tool_dict(name, f"This tool is for the {name}; use it whenever somebody asks for the {name}.", on=FLAG)
    for name in ("lantern", "meadow", "harbor")
]
OTHER = tool_dict("rocket", "Start the rocket, but only when everybody has left the meadow.", on=FLAG)


class TestWarmTools:
    def cached(self, llm: KVBoost, tools: Any, system: str | None = None) -> int:
        history = [ChatMessage(role="system", content=system)] if system else []
        answer = llm.chat_with_tools(tools, "q", chat_history=history)
        found: int = answer.raw["usage"]["prompt_tokens_details"]["cached_tokens"]
        return found

    @pytest.mark.parametrize("family", ["qwen2.5", "smollm2"])
    def test_6338_any_order_and_company(self, family: str) -> None:
        engine = engine_of_family(family)
        llm = KVBoost(engine=engine, max_tokens=1, namespace="any")
        engine.clear("any")
        assert llm.warm_tools(LONG_TOOLS).computed == 3
        sizes = {
            tool["function"]["name"]: len(engine.tokenizer(json.dumps(canonical_tools([tool])[0])).input_ids)
            for tool in LONG_TOOLS
        }
        for tools in (LONG_TOOLS[::-1], LONG_TOOLS[2:], [OTHER, *LONG_TOOLS]):
            for system in (None, "A system prompt."):
                known = sum(sizes.get(tool["function"]["name"], 0) for tool in tools)
                assert self.cached(llm, tools, system) > 0.85 * known
        assert llm.warm_tools(LONG_TOOLS).already_warm == 3

    def test_with_the_system_prompt_hits_are_exact(self, engine: RecordingEngine) -> None:
        llm = KVBoost(engine=engine, max_tokens=1, namespace="exact", reuse="exact")
        engine.clear("exact")
        llm.warm_tools(LONG_TOOLS, system="Be kind.")
        assert self.cached(llm, LONG_TOOLS, "Be kind.") > 0.6 * len(engine.ids)
        with pytest.raises(ConfigError, match="system="):
            llm.warm_tools(LONG_TOOLS)

    def test_namespaces(self, engine: RecordingEngine) -> None:
        llm = KVBoost(engine=engine, max_tokens=1, namespace="mine")
        engine.clear("mine")
        llm.warm_tools(LONG_TOOLS, namespace="theirs")
        assert self.cached(llm, LONG_TOOLS) == 0

    def test_tools_of_llama_index(self, engine: RecordingEngine) -> None:
        llm = KVBoost(engine=engine, max_tokens=1)
        llm.warm_tools([SWITCH, LOCK, ASK])
        assert self.cached(llm, [ASK, SWITCH, LOCK]) > 0.4 * len(engine.ids)


MORE = [("qwen2.5", False), ("smollm2", True)]


@agents
class TestAgents:
    @pytest.mark.parametrize(
        ("family", "streaming"),
        [("qwen2.5", True), ("smollm2", False), *(pytest.param(*more, marks=pytest.mark.slow) for more in MORE)],
    )
    def test_function_agent(self, family: str, streaming: bool) -> None:
        engine = scripted(family, call("switch", on=True), "The lamp is on now.")
        llm = KVBoost(engine=engine, max_tokens=160)
        agent = FunctionAgent(tools=[SWITCH, LOCK], llm=llm, system_prompt="You light.", streaming=streaming)

        async def work() -> tuple[str, list[Any]]:
            handler = agent.run(user_msg="Light!")
            events = [event async for event in handler.stream_events()]
            return str(await handler), events

        answer, events = run(work())
        assert answer == "The lamp is on now."
        [result] = [event for event in events if isinstance(event, ToolCallResult)]
        assert (result.tool_name, result.tool_kwargs, str(result.tool_output)) == ("switch", {"on": True}, "on: True")
        assert "You light." in engine.prompts[0]
        assert "on: True" in engine.prompts[1]
        streams = [event for event in events if isinstance(event, AgentStream)]
        assert "".join(event.delta for event in streams) == ("The lamp is on now." if streaming else "")
        outputs = [event for event in events if isinstance(event, AgentOutput)]
        usage = outputs[-1].raw["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] > 0.8 * outputs[0].raw["usage"]["prompt_tokens"]

    def test_several_calls_at_once(self) -> None:
        engine = scripted("qwen2.5", [*call("switch", on=True), *call("lock", shut=True)], "Done.")
        agent = FunctionAgent(tools=[SWITCH, LOCK], llm=KVBoost(engine=engine, max_tokens=160))

        async def work() -> tuple[str, list[str]]:
            handler = agent.run(user_msg="Light and lock!")
            calls = [event.tool_name async for event in handler.stream_events() if type(event) is ToolCall]
            return str(await handler), calls

        answer, calls = run(work())
        assert answer == "Done."
        assert sorted(calls) == ["lock", "switch"]
        assert "on: True" in engine.prompts[1]
        assert "shut: True" in engine.prompts[1]

    def test_a_first_call_is_forced(self) -> None:
        engine = scripted("qwen2.5", "I would rather talk.", "Done.")
        agent = FunctionAgent(
            tools=[SWITCH, LOCK], llm=KVBoost(engine=engine, max_tokens=160), initial_tool_choice="lock"
        )

        async def work() -> tuple[str, list[str]]:
            handler = agent.run(user_msg="Light!")
            calls = [event.tool_name async for event in handler.stream_events() if type(event) is ToolCall]
            return str(await handler), calls

        assert run(work()) == ("Done.", ["lock"])

    @pytest.mark.filterwarnings("ignore:is_running called from within a step:DeprecationWarning")  # LlamaIndex's agent
    def test_react_agent(self) -> None:
        engine = scripted(
            "smollm2",
            'Thought: I need a tool.\nAction: switch\nAction Input: {"on": true}',
            "Thought: I can answer.\nAnswer: The lamp is on now.",
        )
        agent = ReActAgent(tools=[SWITCH, LOCK], llm=KVBoost(engine=engine, max_tokens=200))

        async def work() -> tuple[str, list[Any]]:
            handler = agent.run(user_msg="Light!")
            events = [event async for event in handler.stream_events()]
            return str(await handler), events

        answer, events = run(work())
        assert answer == "The lamp is on now."
        [result] = [event for event in events if isinstance(event, ToolCallResult)]
        assert (result.tool_name, str(result.tool_output)) == ("switch", "on: True")
        assert "Observation: on: True" in engine.prompts[1]
        assert len([event for event in events if isinstance(event, AgentStream)]) > 10

    def test_errors_end_the_run(self) -> None:
        engine = scripted("qwen2.5", window=512)
        agent = FunctionAgent(tools=[SWITCH], llm=KVBoost(engine=engine, max_tokens=16))
        with pytest.raises(ContextOverflowError):
            run(_asked(agent, "word " * 600))


async def _asked(agent: Any, question: str) -> str:
    return str(await agent.run(user_msg=question))
