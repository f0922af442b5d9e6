"""Answers that stand in a log beside their prompts. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from .turns import TEXTS, message_of

_PLACES = ("response", "completion", "outputs", "output", "answer", "generated_text", "result")
_INSIDE = ("body", "message", "content", "text", "output", "generations", "choices", "messages", "kwargs", "data")
_COUNTS = ("completion_tokens", "output_tokens")
_DEEP = 12


def answer_in(record: Any) -> str | None:
    """Text of the answer that a record holds; None if it holds none."""
    if not isinstance(record, Mapping):
        return None
    for name in _PLACES:
        part = record.get(name)
        if (found := _text(_last(part) if name == "output" else part, _DEEP)) is not None:
            return found
    if "choices" in record:
        return _text(record["choices"], _DEEP)
    return None


def answer_tokens_in(record: Any) -> int | None:
    """Tokens of the answer, where the log says how many."""
    return _tokens(record, _DEEP)


def text_in(message: Mapping[str, Any]) -> str:
    """What an assistant's message says, its calls as JSON."""
    calls = message.get("tool_calls")
    said = str(message.get("content") or "")
    return said + "".join(json.dumps(call["function"], ensure_ascii=False) for call in calls) if calls else said


def _text(value: Any, deep: int) -> str | None:
    if isinstance(value, str):
        return value
    if deep == 0 or not value:
        return None
    if isinstance(value, list):
        if all(isinstance(one, Mapping) and one.get("type") in TEXTS for one in value):
            return "".join(str(one.get("text")) for one in value)
        return _text(value[0], deep - 1)
    if not isinstance(value, Mapping):
        return None
    if value.get("tool_calls"):
        try:
            message, _ = message_of({"role": "assistant", **value})
        except ValueError:
            return None
        return None if message is None else text_in(message)
    # The first of several choices, but the last of several messages.
    inner = ((name, value[name]) for name in _INSIDE if name in value)
    found = (_text(_last(part) if name in ("messages", "output") else part, deep - 1) for name, part in inner)
    return next((text for text in found if text is not None), None)


def _last(value: Any) -> Any:
    return value[-1] if isinstance(value, list) and value else value


def _tokens(value: Any, deep: int) -> int | None:
    if deep == 0 or not isinstance(value, Mapping):
        return None
    for name in _COUNTS:
        count = value.get(name)
        if type(count) is int and count >= 0:
            return count
    inner = (
        value.get(name) for name in ("usage", "response", "body", "outputs", "output", "llm_output", "token_usage")
    )
    return next((count for one in inner if (count := _tokens(one, deep - 1)) is not None), None)
