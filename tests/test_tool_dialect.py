"""Dialect: from tools, choices and schemas to what an engine is asked, and to a reader of the answer."""

from __future__ import annotations

import functools
import json
import re

import jsonschema
import pytest

from kvboost_rag import ConfigError, ContextOverflowError, PromptError, SamplingParams
from kvboost_rag.tools import FORMATS, Dialect, ToolFormat, canonical_tools
from tests.chat_tokenizers import (
    LLAMA31_TOOLS,
    MAKERS,
    MISTRAL_TOOLS,
    PHI4_TOOLS,
    SMOLLM2,
    byte_level,
    llama,
    sentencepiece,
    special,
)
from tests.recording import Says, recording

SWITCH = {
    "type": "function",
    "function": {
        "name": "switch",
        "description": "Switch the lamp.",
        "parameters": {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"]},
    },
}
LOCK = {
    "type": "function",
    "function": {
        "name": "lock",
        "description": "Lock the door.",
        "parameters": {"type": "object", "properties": {"shut": {"type": "boolean"}}, "required": ["shut"]},
    },
}
USER = [{"role": "user", "content": "q"}]
FAMILIES = {
    "fallback": lambda: MAKERS["smollm2"](),
    "hermes": lambda: MAKERS["qwen2.5"](),
    "llama3": lambda: llama(LLAMA31_TOOLS),
    "mistral": lambda: sentencepiece(
        MISTRAL_TOOLS, legacy=False, added=special("[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]")
    ),
    "gemma2": lambda: MAKERS["gemma2"](),
}


@functools.cache
def engine_for(family):
    return recording(FAMILIES[family]())


def dialect_of(family, format=None):
    engine = engine_for(family)
    return Dialect(engine.model, engine.tokenizer, format)


def rendered(engine, turn):
    return engine.tokenizer.apply_chat_template(
        turn.messages, tools=turn.tools, add_generation_prompt=True, tokenize=False
    )


def answer(family, turn, says=None, max_tokens=300):
    engine = engine_for(family)
    processors = turn.logits_processors
    if says is not None:
        ids = [*engine.tokenizer(says, add_special_tokens=False)["input_ids"], engine.tokenizer.eos_token_id]
        processors = (Says(ids), *processors)
    sampling = SamplingParams(
        max_tokens=max_tokens, logits_processors=processors, skip_special_tokens=turn.skip_special_tokens
    )
    return engine.generate(turn.messages, tools=turn.tools, sampling=sampling)


def read(turn, text):
    reader = turn.reader()
    reader.push(text)
    return reader.finish()


class TestFormat:
    def test_the_templates_own_way(self):
        assert [dialect_of(family).format.name for family in FAMILIES] == [
            "json",
            "hermes",
            "llama3",
            "mistral",
            "json",
        ]
        assert [dialect_of(family).native for family in FAMILIES] == [False, True, True, True, False]

    def test_chosen(self):
        assert dialect_of("hermes", "json").format is FORMATS["json"]
        own = ToolFormat("own", call_begin="CALL ", call_end=" END")
        assert dialect_of("fallback", own).format is own
        with pytest.raises(ConfigError, match="xml"):
            dialect_of("hermes", "xml")

    def test_an_own_format_is_told_written_and_read(self):
        dialect = dialect_of("fallback", ToolFormat("own", call_begin="<do>", call_end="</do>"))
        turn = dialect.turn(USER, tools=[SWITCH], choice="any", max_tokens=300)
        assert "<do>" in turn.messages[0]["content"]
        text = answer("fallback", turn).text
        assert text.startswith("<do>{")
        assert read(turn, text).calls[0].name == "switch"


class TestTurn:
    @pytest.mark.parametrize("family", list(FAMILIES))
    def test_without_tools_nothing_changes(self, family):
        turn = dialect_of(family).turn(USER, max_tokens=9)
        assert turn.messages == USER
        assert (turn.tools, turn.logits_processors, turn.reader, turn.constrained) == (None, (), None, False)
        assert turn.skip_special_tokens

    @pytest.mark.parametrize("family", list(FAMILIES))
    def test_tools_are_in_the_prompt_once(self, family):
        turn = dialect_of(family).turn(USER, tools=[SWITCH, LOCK], max_tokens=9)
        text = rendered(engine_for(family), turn)
        assert text.count('"switch"') == text.count('"lock"') == 1
        assert (turn.tools is not None) == dialect_of(family).native
        assert turn.reader is not None

    def test_native_tools_are_canonical(self):
        assert dialect_of("hermes").turn(USER, tools=[SWITCH], max_tokens=9).tools == canonical_tools([SWITCH])

    def test_none_shows_no_tools(self):
        for family in ("hermes", "fallback"):
            turn = dialect_of(family).turn(USER, tools=[SWITCH], choice="none", max_tokens=9)
            assert "switch" not in rendered(engine_for(family), turn)
            assert turn.reader is None

    def test_callers_messages_are_not_changed(self):
        messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]
        for family in FAMILIES:
            dialect_of(family).turn(messages, tools=[SWITCH], schema={"type": "object"}, max_tokens=99)
        assert messages == [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]

    def test_special_markers_are_kept_in_the_answer(self):
        assert not dialect_of("mistral").turn(USER, tools=[SWITCH], max_tokens=9).skip_special_tokens
        assert not dialect_of("llama3").turn(USER, tools=[SWITCH], max_tokens=9).skip_special_tokens
        assert dialect_of("hermes").turn(USER, tools=[SWITCH], max_tokens=9).skip_special_tokens
        assert dialect_of("mistral").turn(USER, max_tokens=9).skip_special_tokens

    def test_wrong_choices(self):
        with pytest.raises(ConfigError, match="no tools"):
            dialect_of("hermes").turn(USER, choice="any", max_tokens=9)
        with pytest.raises(ConfigError, match="no tool is named 'shout'"):
            dialect_of("hermes").turn(USER, tools=[SWITCH], choice=("shout",), max_tokens=9)

    def test_two_tools_of_one_name(self):
        with pytest.raises(PromptError, match="two tools"):
            dialect_of("hermes").turn(USER, tools=[SWITCH, SWITCH], max_tokens=9)

    def test_a_system_prompt_that_is_refused_goes_to_the_user(self):
        messages = [{"role": "system", "content": "Be kind."}, *USER]
        turn = dialect_of("gemma2").turn(messages, tools=[SWITCH], max_tokens=9)
        assert [message["role"] for message in turn.messages] == ["user"]
        assert turn.messages[0]["content"].startswith("Be kind.\n\n# Tools")

    def test_what_no_template_takes(self):
        with pytest.raises(PromptError, match=r"Only user and assistant|alternate"):
            Dialect(engine_for("fallback").model, MAKERS["mistral"]()).turn(
                [{"role": "critic", "content": "q"}], max_tokens=9
            )

    def test_the_schema_is_told_in_the_system_message(self):
        schema = {"type": "object", "properties": {"x": {"type": "boolean"}}}
        dialect = dialect_of("fallback")
        (told, _) = dialect.turn(USER, schema=schema, max_tokens=99).messages
        assert told["role"] == "system"
        assert json.dumps(schema) in told["content"]
        (told, _) = dialect.turn([{"role": "system", "content": "s"}, *USER], schema=schema, max_tokens=99).messages
        assert told["content"].startswith("s\n\n")
        assert dialect.turn(USER, schema="any", max_tokens=99).messages == USER


class TestAnswers:
    @pytest.mark.parametrize("family", ["fallback", "hermes", "llama3", "mistral"])
    def test_forced_calls(self, family):
        turn = dialect_of(family).turn(USER, tools=[SWITCH, LOCK], choice=("lock",), max_tokens=300)
        assert turn.constrained
        reply = read(turn, answer(family, turn).text)
        assert [call.name for call in reply.calls] == ["lock"]
        assert reply.text == ""
        assert isinstance(reply.calls[0].arguments["shut"], bool)

    def test_schema(self):
        schema = {
            "type": "object",
            "properties": {"n": {"type": "integer", "minimum": 1, "maximum": 3}, "e": {"enum": ["a", "b"]}},
            "required": ["n", "e"],
            "additionalProperties": False,
        }
        turn = dialect_of("fallback").turn(USER, schema=schema, max_tokens=99)
        jsonschema.validate(json.loads(answer("fallback", turn).text), schema)

    @pytest.mark.parametrize("family", ["fallback", "hermes", "llama3", "mistral"])
    def test_calls_or_a_schema(self, family):
        schema = {"type": "object", "properties": {"name": {"const": "switch"}}, "required": ["name"]}
        dialect = dialect_of(family)
        turn = dialect.turn(USER, tools=[SWITCH], schema=schema, max_tokens=300)
        assert turn.constrained
        text = answer(family, turn, '{"name": "switch"}').text
        for size in (1, 7, len(text)):
            reader = turn.reader()
            shown = "".join(reader.push(text[at : at + size]) for at in range(0, len(text), size))
            reply = reader.finish()
            assert (shown + reply.rest, reply.text, reply.calls) == (text, text, ())
        f = dialect.format
        body = f'{{"{f.name_key}": "switch", "{f.arguments_key}": {{"on": true}}}}'
        written = f.begin + f.call_begin + body + f.call_end + f.end
        turn = dialect.turn(USER, tools=[SWITCH], schema=schema, max_tokens=300)
        text = answer(family, turn, written).text
        for size in (1, 7, len(text)):
            reader = turn.reader()
            shown = "".join(reader.push(text[at : at + size]) for at in range(0, len(text), size))
            reply = reader.finish()
            assert (shown, reply.rest, reply.text) == ("", "", "")
            assert reply.calls[0].arguments == {"on": True}

    def test_calls_or_a_schema_cut_short(self):
        turn = dialect_of("hermes").turn(USER, tools=[SWITCH], schema={"type": "object"}, max_tokens=300)
        reader = turn.reader()
        assert reader.push("<tool_ca") == ""
        reply = reader.finish()
        assert (reply.text, reply.rest) == ("<tool_ca", "<tool_ca")
        assert turn.reader().finish().text == ""

    @pytest.mark.parametrize(("parallel", "calls"), [(None, 2), (True, 2), (False, 1)])
    def test_voluntary_calls(self, parallel, calls):
        turn = dialect_of("hermes").turn(USER, tools=[SWITCH], parallel=parallel, max_tokens=400)
        assert not turn.constrained
        call = '<tool_call>\n{"name": "switch", "arguments": {"on": true}}\n</tool_call>'
        text = answer("hermes", turn, f"Well. {call}\n{call}", 400).text
        assert len(read(turn, text).calls) == calls

    def test_not_strict(self):
        turn = dialect_of("hermes").turn(USER, tools=[SWITCH], strict=False, max_tokens=400)
        assert turn.logits_processors == ()
        text = answer("hermes", turn, '<tool_call>\n{"name": "switch", "arguments": {"odd": 1}}\n</tool_call>').text
        assert read(turn, text).calls[0].arguments == {"odd": 1}

    def test_thinking_that_the_template_opens(self):
        tokenizer = byte_level(
            PHI4_TOOLS.replace("'<|assistant|>'", "'<|assistant|><think>\n'"),
            ["<|endoftext|>"],
            ["<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<|tool|>"],
            eos_token="<|endoftext|>",
        )
        turn = Dialect(engine_for("fallback").model, tokenizer).turn(
            [{"role": "system", "content": "s"}, *USER], tools=[SWITCH], strict=False, max_tokens=9
        )
        call = '[{"name": "switch", "arguments": {"on": true}}]'
        reply = read(turn, f"Maybe\n{call}\n</think>{call}")
        assert len(reply.calls) == 1
        assert reply.text.endswith("</think>")


SCHEMA = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}


class TestRoom:
    def least(self):
        with pytest.raises(ConfigError, match="shortest answer") as raised:
            dialect_of("fallback").turn(USER, schema=SCHEMA, max_tokens=1)
        return int(re.search(r"about (\d+)", str(raised.value))[1])

    @pytest.mark.parametrize("extra", [0, 1, 4])
    @pytest.mark.parametrize("by", ["max_tokens", "window_tokens"])
    def test_complete_within_both_limits(self, by, extra):
        room = self.least() + extra
        dialect = dialect_of("fallback")
        messages = dialect.turn(USER, schema=SCHEMA, max_tokens=300).messages
        used = len(engine_for("fallback").tokenize(messages))
        limits = (
            {"max_tokens": 300, "window_tokens": used + room - 1} if by == "window_tokens" else {"max_tokens": room}
        )
        turn = dialect.turn(USER, schema=SCHEMA, **limits)
        generation = answer("fallback", turn)
        assert generation.usage.completion_tokens <= room
        assert set(json.loads(generation.text)) == {"text"}

    def test_no_room_in_the_window(self):
        room = self.least() - 1
        dialect = dialect_of("fallback")
        used = len(engine_for("fallback").tokenize(dialect.turn(USER, schema=SCHEMA, max_tokens=300).messages))
        turn = dialect.turn(USER, schema=SCHEMA, max_tokens=300, window_tokens=used + room - 1)
        with pytest.raises(ContextOverflowError, match=f"the {room} that are left") as raised:
            answer("fallback", turn)
        assert (raised.value.prompt_tokens, raised.value.window_tokens) == (used, used + room - 1)

    def test_a_window_with_room_changes_nothing(self):
        dialect = dialect_of("fallback")
        texts = [
            answer("fallback", dialect.turn(USER, schema=SCHEMA, max_tokens=40, window_tokens=window), None, 40).text
            for window in (None, 4096)
        ]
        assert texts[0] == texts[1]


class TestWarming:
    @pytest.mark.parametrize("family", list(FAMILIES))
    def test_each_tool_is_its_text_in_every_prompt(self, family):
        dialect = dialect_of(family)
        texts = dialect.tool_texts([SWITCH, LOCK])
        assert [("switch" in text, "lock" in text) for text in texts] == [(True, False), (False, True)]
        for tools in ([SWITCH, LOCK], [SWITCH]):
            whole = rendered(engine_for(family), dialect.turn(USER, tools=tools, max_tokens=9))
            for text in texts[: len(tools)]:
                assert text.strip().strip("[],\n ") in whole

    @pytest.mark.parametrize("family", ["fallback", "hermes", "llama3"])
    def test_a_prefix_is_the_start_of_the_prompt(self, family):
        dialect = dialect_of(family)
        before, text = dialect.tool_prefix([SWITCH, LOCK], "Be kind.")
        turn = dialect.turn([{"role": "system", "content": "Be kind."}, *USER], tools=[SWITCH, LOCK], max_tokens=9)
        assert rendered(engine_for(family), turn).startswith(before + text)
        assert "Be kind." in before

    def test_no_tools(self):
        assert dialect_of("hermes").tool_texts([]) == []
        assert dialect_of("fallback").tool_texts([]) == []

    def test_a_template_that_mixes_its_tools(self):
        tokenizer = byte_level(
            SMOLLM2.replace("{% for message", "{{ tools | length if tools else 0 }}{% for message", 1),
            ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
            eos_token="<|im_end|>",
        )
        with pytest.raises(PromptError, match="one behind the other"):
            Dialect(engine_for("fallback").model, tokenizer).tool_texts([SWITCH])
