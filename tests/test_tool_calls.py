"""Reading tool calls: what small models write, at any split into deltas, and in linear time."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvboost_rag.errors import ConfigError
from kvboost_rag.tools.calls import InvalidCall, Reply, ReplyReader, ToolCall, new_call_id
from kvboost_rag.tools.formats import FORMATS, HERMES, JSON, LLAMA3, MISTRAL, ToolFormat
from kvboost_rag.tools.prompting import write_calls

NAMES = ["get_weather", "search", "a.b-c"]
SEARCH = '{"name": "search", "arguments": {"q": 1}}'
WEATHER = '{"name": "get_weather", "arguments": {"city": "Oslo"}}'
Q = ("search", {"q": 1})
W = ("get_weather", {"city": "Oslo"})


def read(format: ToolFormat, text: str, *steps: int, names: list[str] = NAMES, **more: Any) -> Reply:
    """The reply, having seen that it is the same for several splits and that text is given out once."""
    replies = []
    for step in steps or (1, 2, 3, 7, max(1, len(text))):
        reader = ReplyReader(format, names, **more)
        shown = "".join(reader.push(text[i : i + step]) for i in range(0, len(text), step))
        reply = reader.finish()
        assert shown + reply.rest == reply.text
        replies.append(reply)
    assert len({repr(plain(reply)) for reply in replies}) == 1
    return replies[0]


def plain(reply: Reply) -> tuple[str, list[tuple[str, dict[str, Any]]], tuple[InvalidCall, ...]]:
    return reply.text, [(call.name, call.arguments) for call in reply.calls], reply.invalid


VALID = {
    "hermes": (HERMES, f"<tool_call>\n{SEARCH}\n</tool_call>", "", [Q]),
    "hermes, tight": (HERMES, f"<tool_call>{SEARCH}</tool_call>", "", [Q]),
    "hermes, wide": (HERMES, f" \n<tool_call> \n\n {SEARCH} \n </tool_call>\n\n", "", [Q]),
    "hermes, parallel": (
        HERMES,
        f"<tool_call>\n{SEARCH}\n</tool_call>\n<tool_call>\n{WEATHER}\n</tool_call>",
        "",
        [Q, W],
    ),
    "hermes, two in one": (HERMES, f"<tool_call>\n{SEARCH}\n{WEATHER}\n</tool_call>", "", [Q, W]),
    "hermes, a list": (HERMES, f"<tool_call>[{SEARCH}, {WEATHER}]</tool_call>", "", [Q, W]),
    "hermes, no end": (HERMES, f"<tool_call>\n{SEARCH}", "", [Q]),
    "hermes, part of the end": (HERMES, f"<tool_call>\n{SEARCH}\n</tool_", "", [Q]),
    "hermes, brace too many": (HERMES, f"<tool_call>\n{SEARCH}}}\n</tool_call>", "", [Q]),
    "hermes, begin as end": (HERMES, f"<tool_call>\n{SEARCH}\n<tool_call>", "", [Q]),
    "hermes, begun twice": (HERMES, f"<tool_call>\n<tool_call>\n{SEARCH}\n</tool_call>", "", [Q]),
    "hermes, words around": (HERMES, f"Let me see.\n<tool_call>{SEARCH}</tool_call>\nDone.", "Let me see.\nDone.", [Q]),
    "hermes, garbage behind": (HERMES, f"<tool_call>{SEARCH} so be it</tool_call>", "so be it", [Q]),
    "hermes, end in a string": (
        HERMES,
        '<tool_call>{"name": "search", "arguments": {"q": "</tool_call>\\""}}</tool_call>',
        "",
        [("search", {"q": '</tool_call>"'})],
    ),
    "hermes, raw newline": (
        HERMES,
        '<tool_call>{"name": "search", "arguments": {"q": "a\nb"}}</tool_call>',
        "",
        [("search", {"q": "a\nb"})],
    ),
    "hermes, fenced": (HERMES, f"```json\n{SEARCH}\n```\nDone.", "Done.", [Q]),
    "hermes, bare": (HERMES, SEARCH, "", [Q]),
    "hermes, tools tag": (HERMES, f"<tools>\n{SEARCH}\n</tools>", "", [Q]),
    "llama": (LLAMA3, '{"name": "search", "parameters": {"q": 1}}', "", [Q]),
    "llama, parallel": (LLAMA3, f"{SEARCH}; {WEATHER}", "", [Q, W]),
    "llama, lines": (LLAMA3, f"{SEARCH}\n{WEATHER}\n", "", [Q, W]),
    "llama, tag": (LLAMA3, f"<|python_tag|>{SEARCH}; {WEATHER}", "", [Q, W]),
    "llama, nested": (
        LLAMA3,
        '{"type": "function", "function": {"name": "search", "parameters": {"q": 1}}}',
        "",
        [Q],
    ),
    "llama, outside": (LLAMA3, '{"function": "search", "parameters": {"q": 1}}', "", [Q]),
    "llama, arguments first": (LLAMA3, '{"parameters": {"q": 1}, "name": "search"}', "", [Q]),
    "llama, function tag": (LLAMA3, 'So: <function=search>{"q": 1}</function>', "So: ", [Q]),
    "llama, words before": (LLAMA3, f"I will call:\n{SEARCH}", "I will call:", [Q]),
    "mistral": (MISTRAL, f"[TOOL_CALLS] [{SEARCH}, {WEATHER}]", "", [Q, W]),
    "mistral, tight": (MISTRAL, f"[TOOL_CALLS][{SEARCH}]", "", [Q]),
    "mistral, an object": (MISTRAL, f"[TOOL_CALLS] {SEARCH}", "", [Q]),
    "mistral, no end": (MISTRAL, f"[TOOL_CALLS] [{SEARCH}, {WEATHER}", "", [Q, W]),
    "mistral, token lost": (MISTRAL, f" [{SEARCH}]", "", [Q]),
    "mistral, v11": (MISTRAL, '[TOOL_CALLS]search[ARGS]{"q": 1}', "", [Q]),
    "mistral, v11 parallel": (
        MISTRAL,
        '[TOOL_CALLS]search[CALL_ID]abcdefghi[ARGS]{"q": 1}[TOOL_CALLS]get_weather[ARGS]{"city": "Oslo"}',
        "",
        [Q, W],
    ),
    "mistral, citations": (MISTRAL, f"See [1] [2].[TOOL_CALLS] [{SEARCH}]", "See [1] [2].", [Q]),
    "json": (JSON, f"[{SEARCH}, {WEATHER}]", "", [Q, W]),
    "json, an object": (JSON, f"\n{SEARCH}", "", [Q]),
    "json, indented": (JSON, '[\n  {\n    "name" : "search",\n    "arguments": {"q": 1}\n  }\n]\n', "", [Q]),
    "json, fenced": (JSON, f"Sure!\n```json\n[{SEARCH}]\n```", "Sure!", [Q]),
    "json, fenced plainly": (JSON, f"```\n{SEARCH}\n```", "", [Q]),
    "json, wrapped": (JSON, f'{{"tool_calls": [{SEARCH}, {WEATHER}]}}', "", [Q, W]),
    "json, no end": (JSON, f"[{SEARCH}", "", [Q]),
    "json, Phi's tag": (JSON, f"<|tool_call|>[{SEARCH}]<|/tool_call|>", "", [Q]),
    "json, thinking": (JSON, f"<think>\n{WEATHER}\n</think>\n\n{SEARCH}", f"<think>\n{WEATHER}\n</think>", [Q]),
    "arguments in a string": (JSON, '{"name": "search", "arguments": "{\\"q\\": 1}"}', "", [Q]),
    "no arguments": (JSON, '{"name": "search"}', "", [("search", {})]),
    "null arguments": (JSON, '{"name": "search", "arguments": null}', "", [("search", {})]),
    "empty arguments": (JSON, '{"name": "search", "arguments": ""}', "", [("search", {})]),
}


@pytest.mark.parametrize("case", VALID)
def test_calls_of_real_models(case: str) -> None:
    format, text, rest, calls = VALID[case]
    assert plain(read(format, text)) == (rest, calls, ())


INVALID = {
    "cut": (HERMES, '<tool_call>\n{"name": "search", "arguments": {"q": "x', "search", "not valid JSON"),
    "brace missing": (HERMES, '<tool_call>{"name": "search", "arguments": {}</tool_call>', "search", "not valid JSON"),
    "single quotes": (HERMES, "<tool_call>{'name': 'search', 'arguments': {}}</tool_call>", None, "not valid JSON"),
    "python": (HERMES, '<tool_call>search(q="a{b")</tool_call>', None, "not valid JSON"),
    "python tag": (LLAMA3, '<|python_tag|>search.call(query="x")', None, "not valid JSON"),
    "XML": (HERMES, "<tool_call>\n<function=search>\n<parameter=q>1</parameter></function></tool_call>", None, "JSON"),
    "no name": (HERMES, '<tool_call>{"arguments": {"q": 1}}</tool_call>', None, "no name"),
    "a number": (MISTRAL, "[TOOL_CALLS] [1]", None, "not valid JSON|no name"),
    "unknown": (
        HERMES,
        '<tool_call>{"name": "nope", "arguments": {}}</tool_call>',
        "nope",
        "a.b-c, get_weather, search",
    ),
    "unknown, bare": (LLAMA3, '{"name": "nope", "parameters": {}}', "nope", "no tool named 'nope'"),
    "unknown, v11": (MISTRAL, "[TOOL_CALLS]nope[ARGS]{}", "nope", "no tool named"),
    "bad v11": (MISTRAL, "[TOOL_CALLS]search[ARGS]{q}", "search", "not valid JSON"),
    "a list of arguments": (JSON, '{"name": "search", "arguments": [1]}', "search", "are a list"),
    "bad string": (JSON, '{"name": "search", "arguments": "{q"}', "search", "not valid JSON"),
    "a string": (JSON, '{"name": "search", "arguments": "\\"x\\""}', "search", "are a str"),
    "NaN": (HERMES, '<tool_call>{"name": "search", "arguments": {"q": NaN}}</tool_call>', "search", "NaN"),
    "surrogate": (
        HERMES,
        '<tool_call>{"name": "search", "arguments": {"q": "\\ud800"}}</tool_call>',
        "search",
        "surro",
    ),
    "surrogate in a string": (JSON, '{"name": "search", "arguments": "{\\"q\\": \\"\\\\ud800\\"}"}', "search", "surro"),
    "deep": (HERMES, f'<tool_call>{{"name": "search", "arguments": {"[" * 9999}', "search", "deep"),
    "bare, cut": (JSON, '[{"name": "search", "arguments": {"q"', "search", "not valid JSON"),
    "bare, name cut": (JSON, '{"name": "sear', None, "not valid JSON"),
    "description": (
        JSON,
        '{"name": "search", "description": "d", "parameters": {"type": "object", "properties": {"q": {}}}}',
        "search",
        "repeats the description",
    ),
}


@pytest.mark.parametrize("case", INVALID)
def test_what_cannot_be_used_is_told(case: str) -> None:
    format, text, name, error = INVALID[case]
    reply = read(format, text)
    assert not reply.calls
    assert not reply.text
    [invalid] = reply.invalid
    assert invalid.name == name
    assert re.search(error, invalid.error)
    assert invalid.text


TEXT = {
    "prose": (HERMES, "Twice 2 < 3 { is no [1] call.\n\n```python\n{}\n```\n"),
    "json": (JSON, '{"answer": 3}'),
    "a person": (LLAMA3, '{"name": "Ada", "born": 1815} was a person.\n'),
    "people": (JSON, '[{"name": "Ada"}, {"name": "Bob"}]'),
    "a person, cut": (JSON, '{"name": "Ada", "born": 18'),
    "a schema": (JSON, '{"type": "object", "properties": {}}'),
    "unknown on a line": (JSON, 'Try this:\n{"name": "nope", "arguments": {}}\nGood?'),
    "not on a line of its own": (JSON, f"In code: f({SEARCH})"),
    "marker in backticks": (HERMES, f"Write `<tool_call>` and `<tool_call>{SEARCH}</tool_call>`."),
    "marker in quotes": (HERMES, 'The word "<tool_call>" begins a call.'),
    "stranger's marker": (JSON, "Qwen writes <tool_call> and </tool_call>."),
    "marker begun": (HERMES, "a <tool"),
    "ends in spaces": (HERMES, "a \n "),
    "only spaces": (HERMES, " \n\t"),
    "nothing": (HERMES, ""),
    "thinking": (HERMES, f"<think>maybe <tool_call>{SEARCH}</tool_call>"),
    "Mistral's thinking": (MISTRAL, f"[THINK]maybe [TOOL_CALLS] [{SEARCH}][/THINK]no"),
}


@pytest.mark.parametrize("case", TEXT)
def test_what_is_no_call_is_text(case: str) -> None:
    format, text = TEXT[case]
    assert plain(read(format, text)) == (text, [], ())


def test_text_streams_at_once_and_calls_never_show() -> None:
    reader = ReplyReader(HERMES, NAMES)
    deltas = ["Let", " me ", "see", ".\n", "<", "b> ", "<tool", "_call>", SEARCH, "\n</tool_", "call>", "\n", "Now"]
    shown = [reader.push(delta) for delta in deltas]
    assert shown == ["Let", " me ", "see", ".", "", "\n<b> ", "", "", "", "", "", "", "\nNow"]
    assert reader.finish().text == "Let me see.\n<b> \nNow"


def test_one_bad_call_does_not_hide_the_next() -> None:
    bad = '<tool_call>{"name": "search", "arguments": {"q": "5\'10""}}\n</tool_call>'
    reply = read(HERMES, f"{bad}\n<tool_call>{SEARCH}</tool_call> bye")
    assert plain(reply)[:2] == ("bye", [Q])
    assert [invalid.name for invalid in reply.invalid] == ["search"]
    assert plain(read(JSON, f'[{SEARCH}, {{"name": "se'))[1] == [Q]
    assert len(read(JSON, f'[{SEARCH}, {{"name": "nope"}}]').invalid) == 1


def test_an_open_thought_of_the_prompt() -> None:
    text = f"I could {SEARCH}\n</think>\n"
    assert plain(read(HERMES, f"{text}<tool_call>{SEARCH}</tool_call>", thinking=True)) == (text.rstrip(), [Q], ())


def test_without_tools_all_is_text() -> None:
    text = f"\n<tool_call>{SEARCH}</tool_call>\n"
    assert plain(read(HERMES, text, names=[])) == (text, [], ())


def test_a_format_of_ones_own() -> None:
    own = ToolFormat("own", begin="<<", call_begin="CALL ", call_end=" END", between=" ", end=">>", name_key="tool")
    assert plain(read(own, write_calls([ToolCall("", "search", {"q": 1})], own), names=["search"]))[1] == [Q]


def test_the_answer_ends_once() -> None:
    reader = ReplyReader(HERMES, "search")
    reader.push("a")
    assert reader.finish() is reader.finish()
    with pytest.raises(ConfigError, match="new ReplyReader"):
        reader.push("b")


def test_ids_suit_mistral() -> None:
    ids = {new_call_id() for _ in range(100)}
    assert len(ids) == 100
    assert all(re.fullmatch("[A-Za-z0-9]{9}", one) for one in ids)
    assert len({call.id for call in read(JSON, f"[{SEARCH}, {SEARCH}]").calls}) == 2


plain_json: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"]))
    | st.sampled_from(["</tool_call>", "[TOOL_CALLS]", '"}]', "```", "<|python_tag|>", "\\", "; {"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("a{</\"\\'", max_size=4), inner, max_size=3),
    max_leaves=8,
)
some_calls = st.lists(
    st.builds(
        ToolCall,
        id=st.just(""),
        name=st.sampled_from(NAMES),
        arguments=st.dictionaries(st.sampled_from(["q", "name", "properties", 'x"y']), plain_json, max_size=3),
    ),
    max_size=4,
)


@settings(max_examples=300, deadline=None)
@given(format=st.sampled_from(list(FORMATS.values())), calls=some_calls, data=st.data())
def test_reads_what_is_written_at_any_split(format: ToolFormat, calls: list[ToolCall], data: st.DataObject) -> None:
    said = data.draw(st.sampled_from(["", "Well, let me see.", "A\n\nB <b> [1] {x}"]))
    text = said + ("\n" if said else "") + write_calls(calls, format) if calls else said
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    reader = ReplyReader(format, NAMES)
    shown = [reader.push(text[a:b]) for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    reply = reader.finish()
    assert plain(reply) == (said, [(call.name, call.arguments) for call in calls], ())
    assert "".join(shown) + reply.rest == said


PIECES = [
    "<tool_call>",
    "</tool_call>",
    "[TOOL_CALLS]",
    "[ARGS]",
    "<|python_tag|>",
    "```json\n",
    "```",
    SEARCH,
    "{",
    "}",
]
PIECES += [
    "[",
    "]",
    '"',
    "\\",
    "\n",
    " ",
    "search",
    '{"name": "',
    "<think>",
    "</think>",
    "word",
    ";",
    ",",
    "`",
    "<function=",
]


@settings(max_examples=500, deadline=None)
@given(format=st.sampled_from(list(FORMATS.values())), pieces=st.lists(st.sampled_from(PIECES), max_size=14))
def test_anything_is_read_the_same_at_any_split(format: ToolFormat, pieces: list[str]) -> None:
    read(format, "".join(pieces))


LONG = {
    "text": "a word ",
    "newlines": "\n",
    "angles": "<",
    "braces": "{",
    "brackets": "[",
    "ticks": "`",
    "lines": "{\n",
    "string": '<tool_call>{"name": "search", "arguments": {"q": "' + "x\\n" * 30_000,
    "list": '<tool_call>{"name": "search", "arguments": {"q": [' + "{}," * 30_000,
    "junk": "<tool_call>" + "x" * 100_000,
    "space": f"<tool_call>{SEARCH}" + " " * 100_000,
    "head": "<tool_call>" + "\n" * 100_000,
    "cut calls": '<tool_call>{"a',
    "hidden calls": '<tool_call>{"a</tool_call>',
    "calls": f"{SEARCH}; ",
    "open list": "[" + f"{SEARCH}, " * 2_000,
    "names": '[{"name":',
    "thought": "<think>" + "</think" * 15_000,
}


@pytest.mark.parametrize("case", LONG)
@pytest.mark.parametrize("format", [HERMES, JSON], ids=lambda format: format.name)
def test_time_is_linear(case: str, format: ToolFormat) -> None:
    text = (LONG[case] * (50_000 // len(LONG[case]) + 1))[:50_000]
    begun = time.process_time()
    read(format, text, 1)
    assert time.process_time() - begun < 4  # less than one; a quadratic reader takes minutes


@pytest.mark.parametrize(
    ("format", "whole"),
    [
        (JSON, f"[{SEARCH}, {WEATHER}, {SEARCH}]"),
        (HERMES, "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in (SEARCH, WEATHER, SEARCH))),
        (LLAMA3, "; ".join(call.replace("arguments", "parameters") for call in (SEARCH, WEATHER, SEARCH))),
        (MISTRAL, f"[TOOL_CALLS] [{SEARCH}, {WEATHER}, {SEARCH}]"),
    ],
    ids=lambda one: one.name if isinstance(one, ToolFormat) else "",
)
def test_a_third_call_that_is_cut_is_not_shown(format: ToolFormat, whole: str) -> None:
    third = whole.rindex('{"name"')
    for end in range(third, third + len('{"name": "search", "')):
        reply = read(format, whole[:end], 1, 1000)
        assert plain(reply)[1] == [Q, W]
        assert end <= third + 1 or not reply.text, f"{whole[third:end]!r} leaves {reply.text!r}"
