"""Logs of prompts: every form they are written in, and everything that can be wrong with them."""

from __future__ import annotations

import gzip
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from langchain_core.load import dumpd
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage, messages_to_dict

from kvboost_rag.analyze import lines
from kvboost_rag.analyze.encoding import EstimatedEncoding
from kvboost_rag.analyze.formats import Logged, NoModelCall, Unusable, read_requests, records_in
from kvboost_rag.analyze.lines import Bad, Found, read_values
from kvboost_rag.errors import PromptError, TraceError

SYSTEM, USER = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Which river?"}
CHAT = [SYSTEM, USER]
QUESTION = {"content": "Which river?"}
BROKEN = {"role": "assistant", "content": "", "tool_calls": [{"function": {"arguments": "{"}}]}
TOOL = {"type": "function", "function": {"name": "find", "description": "Finds.", "parameters": {"type": "object"}}}
CALLED = [
    SystemMessage("Be brief."),
    HumanMessage([{"type": "text", "text": "Which "}, {"type": "text", "text": "river?"}]),
    AIMessage("", tool_calls=[{"name": "find", "args": {"what": "river"}, "id": "1"}]),
    ToolMessage("the Oder", tool_call_id="1"),
]


def one(value: Any, **options: Any) -> Logged:
    (found,) = read_requests(value, **options)
    return found


@pytest.mark.parametrize("value", ["Which river?", {"prompt": "Which river?"}, {"body": {"prompt": "Which river?"}}])
def test_plain_prompts(value: Any) -> None:
    assert one(value).prompt == "Which river?"


def test_a_record_may_hold_several_prompts() -> None:
    assert [each.prompt for each in read_requests({"prompt": ["one", "two"]})] == ["one", "two"]
    assert one({"prompt": [5, 6, 7]}).prompt == [5, 6, 7]


@pytest.mark.parametrize(
    "value",
    [
        {"messages": CHAT},
        CHAT,
        {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {"model": "m", "messages": CHAT}},
        {"request": {"body": {"messages": CHAT}}},
        {"instructions": "Be brief.", "input": "Which river?"},
        {"input": [SYSTEM, {"role": "user", "content": [{"type": "input_text", "text": "Which river?"}]}]},
        {"messages": [["system", "Be brief."], ["human", "Which river?"]]},
        {"inputs": {"messages": [dumpd(SystemMessage("Be brief.")), dumpd(HumanMessage("Which river?"))]}},
        {"inputs": {"messages": [[dumpd(SystemMessage("Be brief.")), dumpd(HumanMessage("Which river?"))]]}},
        {"inputs": {"messages": messages_to_dict([SystemMessage("Be brief."), HumanMessage("Which river?")])}},
        {"inputs": {"messages": [{"type": "system", "content": "Be brief."}, {"type": "human", **QUESTION}]}},
        {"run_type": "llm", "inputs": {"messages": CHAT}},
    ],
)  # fmt: skip
def test_chat_messages(value: Any) -> None:
    assert one(value).prompt == CHAT


def test_calls_and_results_keep_their_form() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "find", "arguments": {"what": "river"}}}
    told = [*CHAT, {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": "the Oder", "tool_call_id": "1"}]  # fmt: skip
    assert one({"inputs": {"messages": [[dumpd(message) for message in CALLED]]}}).prompt == told
    assert one({"inputs": {"messages": messages_to_dict(CALLED)}}).prompt == told
    written = {**call, "function": {"name": "find", "arguments": '{"what": "river"}'}}
    assert (
        one({"messages": [*CHAT, {"role": "assistant", "content": None, "tool_calls": [written]}, told[-1]]}).prompt
        == told
    )
    items = [{"type": "function_call", "call_id": "1", "name": "find", "arguments": '{"what": "river"}'},
             {"type": "reasoning", "summary": []},
             {"type": "function_call_output", "call_id": "1", "output": "the Oder"}]  # fmt: skip
    assert one({"input": [*CHAT, *items]}).prompt == told


@pytest.mark.parametrize(
    "value",
    [
        {"messages": CHAT, "tools": [TOOL]},
        {"messages": CHAT, "functions": [TOOL["function"]]},
        {"input": CHAT, "tools": [{"type": "function", **TOOL["function"]}]},  # type: ignore[dict-item]
        {"inputs": {"messages": CHAT}, "extra": {"invocation_params": {"tools": [TOOL]}}},
    ],
)
def test_tools(value: Any) -> None:
    assert one(value).tools == (TOOL,)


@pytest.mark.parametrize(
    "more",
    [
        {"response": "the Oder"},
        {"completion": "the Oder"},
        {"response": {"choices": [{"message": {"role": "assistant", "content": "the Oder"}}]}},
        {"response": {"status_code": 200, "body": {"choices": [{"message": {"content": "the Oder"}}]}}},
        {"choices": [{"text": "the Oder"}]},
        {"output": [{"type": "message", "content": [{"type": "output_text", "text": "the Oder"}]}]},
        {"outputs": {"generations": [[{"text": "the Oder", "type": "ChatGeneration"}]]}},
        {"outputs": {"messages": [dumpd(HumanMessage("x")), dumpd(AIMessage("the Oder"))]}},
        {"outputs": {"generations": [[{"text": "", "message": dumpd(AIMessage("the Oder"))}]]}},
    ],
)
def test_answers(more: dict[str, Any]) -> None:
    assert one({"messages": CHAT, **more}).answer == "the Oder"
    if "outputs" in more:
        assert one({"inputs": {"messages": CHAT}, **more}).answer == "the Oder"


def test_an_answer_at_the_end_of_a_conversation_is_no_part_of_its_prompt() -> None:
    found = one({"messages": [*CHAT, {"role": "assistant", "content": "the Oder"}]})
    assert (found.prompt, found.answer) == (CHAT, "the Oder")
    assert one({"messages": CHAT}).answer is None


@pytest.mark.parametrize(
    "more",
    [
        {"response": {"usage": {"completion_tokens": 7}}},
        {"usage": {"output_tokens": 7}},
        {"completion_tokens": 7},
        {"outputs": {"llm_output": {"token_usage": {"completion_tokens": 7}}}},
    ],
)
def test_lengths_of_answers(more: dict[str, Any]) -> None:
    assert one({"messages": CHAT, **more}).answer_tokens == 7


def test_parts_that_are_no_text_are_counted() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:…"}}
    found = one({"messages": [{"role": "user", "content": [{"type": "text", "text": "Look:"}, image]}]})
    assert (found.prompt, found.left_out) == ([{"role": "user", "content": "Look:"}], 1)


def test_tenants_and_times() -> None:
    record = {"prompt": "x", "metadata": {"tenant": "a"}, "user": 7, "created": 1_700_000_000}
    assert one(record, namespace_field="metadata.tenant").namespace == "a"
    assert one(record, namespace_field="user").namespace == "7"
    assert one(record).namespace == one({"prompt": "y"}).namespace
    assert one(record).time == 1_700_000_000
    assert one({**record, "created": 1_700_000_000_000}).time == 1_700_000_000
    assert one({"prompt": "x", "start_time": "2026-01-02T03:04:05Z"}).time == 1767323045
    assert one({"prompt": "x", "sent": {"at": 5}}, time_field="sent.at").time == 5
    for missing in ("nobody", "metadata.nobody", "prompt.x"):
        with pytest.raises(Unusable, match=missing):
            one(record, namespace_field=missing)


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (7, "int"),
        (None, "NoneType"),
        ({}, "nothing"),
        ({"question": "x"}, "'question'"),
        ({"prompt": None}, "NoneType"),
        ({"prompt": []}, "list"),
        ({"messages": []}, "no messages"),
        ({"messages": "x"}, "user"),
        ({"messages": [5]}, r"messages\[0\] is a int"),
        ({"messages": [{"content": "x"}]}, r"messages\[0\] has no 'role'"),
        ({"messages": [{"role": 5, "content": "x"}]}, r"messages\[0\] has no 'role'"),
        ({"messages": [{"role": "user", "content": 5}]}, "content of type int"),
        ({"messages": [{"lc": 1}]}, "serialised"),
        ({"inputs": {}}, "nothing"),
        ({"inputs": {"prompts": [5]}}, "int"),
        ({"id": "1", "response": {"status_code": 200, "body": {"choices": []}}}, "'response'"),
        ({"messages": [BROKEN]}, "JSON"),
    ],
)  # fmt: skip
def test_what_holds_no_prompt_says_why(value: Any, why: str) -> None:
    if why == "user":  # a string is the user's message
        assert one(value).prompt == [{"role": "user", "content": "x"}]
        return
    with pytest.raises(Unusable, match=why):
        list(read_requests(value))


def test_runs_around_a_model_do_not_count_their_prompts_twice() -> None:
    with pytest.raises(NoModelCall, match="chain"):
        one({"run_type": "chain", "inputs": {"messages": CHAT}})


def test_a_named_format_is_taken() -> None:
    both = {"prompt": "rendered", "messages": CHAT}
    assert one(both).prompt == CHAT
    assert one(both, format="prompts").prompt == "rendered"
    with pytest.raises(Unusable, match="inputs"):
        one(both, format="langsmith")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4)
    | st.dictionaries(
        st.sampled_from("prompt messages input inputs prompts role content type data kwargs lc id body request text "
                        "tool_calls function arguments response outputs generations choices usage runs".split()),
        inner, max_size=5,
    ),
    max_leaves=30,
)  # fmt: skip


@given(JSON)
def test_whatever_stands_there_is_a_request_or_says_why_not(value: Any) -> None:
    encoding = EstimatedEncoding()
    for _, record in records_in("line 1", value):
        with suppress(Unusable, NoModelCall, PromptError):
            for logged in read_requests(record):
                assert len(encoding.prompt(logged))


# Files


def values(path: Path) -> list[Any]:
    return [each.value if isinstance(each, Found) else (each.where, each.reason) for each in read_values(path)]


RECORDS = [{"prompt": "äöü 漢字 \U0001f600"}, "plain", {"messages": CHAT}, {"prompt": 'a "quoted", [list] {x}\n'}]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    "text",
    [
        "\n".join(map(json.dumps, RECORDS)),
        "\r\n\r\n".join(json.dumps(record, ensure_ascii=False) for record in RECORDS) + "\r\n",
        json.dumps(RECORDS),
        json.dumps(RECORDS, indent=2, ensure_ascii=False),
        "\ufeff" + json.dumps(RECORDS),
        "\ufeff" + "\n".join(map(json.dumps, RECORDS)),
    ],
)
def test_files(tmp_path: Path, text: str, packed: bool) -> None:
    path = tmp_path / "log"
    path.write_bytes(gzip.compress(text.encode()) if packed else text.encode())
    assert values(path) == RECORDS


def test_indented_objects_and_lines_of_arrays(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("\n".join(json.dumps(record, indent=1) for record in RECORDS[2:]))
    assert values(path) == RECORDS[2:]
    path.write_text(f"{json.dumps(CHAT)}\n{json.dumps(CHAT)}\n")
    assert values(path) == [CHAT, CHAT]


@given(st.lists(JSON.filter(lambda value: value != ""), max_size=8), st.booleans())
def test_elements_of_an_array_are_those_that_were_written(
    tmp_path_factory: Any, written: list[Any], indent: bool
) -> None:
    path = tmp_path_factory.mktemp("log") / "log"
    path.write_text(json.dumps(written, indent=2 if indent else None))
    found = values(path)
    # On one line, and only there, an array may be a value by itself.
    assert found == written or found == [written]


def test_elements_longer_than_a_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "_BLOCK", 16)
    path = tmp_path / "log"
    path.write_text(json.dumps(RECORDS, indent=2, ensure_ascii=False))
    assert values(path) == RECORDS


def test_bad_lines_are_named_and_the_others_read(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b'"one"\n{"a":\n"\xff"\n\n' + b"[" * 100_000 + b'\n"two"')
    bad = [each for each in read_values(path) if isinstance(each, Bad)]
    assert [each.where for each in bad] == ["line 2", "line 3", "line 5"]
    assert "UTF-8" in bad[1].reason
    assert [each.value for each in read_values(path) if isinstance(each, Found)] == ["one", "two"]


def test_a_line_beyond_the_limit_is_left_out_and_the_next_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "MOST_BYTES", 1 << 20)
    path = tmp_path / "log"
    path.write_text(f'"one"\n"{"x" * (3 << 20)}"\n"two"\n')
    assert values(path) == ["one", ("line 2", "it is longer than 1 MiB"), "two"]
    path.write_text(f'[\n"one",\n"{"x" * (3 << 20)}",\n"two"]\n')
    assert values(path)[0] == "one"
    assert "1 MiB" in values(path)[1][1]


def test_damage_in_an_array_or_an_archive_ends_it(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text('[\n"one", {"a" "b"}, "two"]')
    assert values(path)[0] == "one"
    assert values(path)[1][0] == "element 2"
    path.write_bytes(b'[\n"one",' + b" " * 200_000 + b"\xff]")
    assert values(path)[0] == "one"
    assert "UTF-8" in values(path)[1][1]
    packed = gzip.compress("\n".join(f'"{i}{"x" * 50}"' for i in range(10_000)).encode())
    path.write_bytes(packed[: len(packed) // 2])
    found = list(read_values(path))
    assert isinstance(found[-1], Bad)
    assert "damaged" in found[-1].reason


def test_nothing_to_read(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("")
    assert values(tmp_path / "empty") == []
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(TraceError, match="name a file"):
            values(path)


# Estimated tokens


@given(st.text(min_size=1))
def test_estimated_pieces_joined_are_the_text(text: str) -> None:
    encoding = EstimatedEncoding()
    ids = encoding.text(text)
    assert "".join(map(encoding.piece, ids.tolist())) == text


def test_estimated_ids_of_a_passage_do_not_depend_on_what_is_in_front(monkeypatch: pytest.MonkeyPatch) -> None:
    passage = "The Oder is a river of 854 km in Central Europe. Its sources lie in the Czech Republic." * 3
    encoding = EstimatedEncoding()
    alone = encoding.text(passage).tolist()
    behind = encoding.text(f"Some words, then:\n\n{passage}").tolist()
    assert behind[-len(alone) :] == alone
    assert len(alone) == pytest.approx(len(passage) / 4.2, rel=0.3)


def test_a_full_table_spells_words_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvboost_rag.analyze.encoding._MOST_PIECES", 3)
    encoding = EstimatedEncoding()
    for text in ("one two three", " four\U0001f600 one", "five"):
        assert "".join(map(encoding.piece, encoding.text(text).tolist())) == text
    assert max(encoding.text("five").tolist()) < 1 << 31
