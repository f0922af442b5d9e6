"""Messages of a log, in whatever form they were written, as OpenAI has them. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, TypeAlias

Message: TypeAlias = dict[str, Any]

_ROLES = {"human": "user", "ai": "assistant", "aimessagechunk": "assistant", "humanmessagechunk": "user"}
TEXTS = ("text", "input_text", "output_text")


def message_of(value: Any) -> tuple[Message | None, int]:
    """A message in OpenAI's form, and how many parts of it are no text.

    Understood are OpenAI's messages and response items; LangChain's as `dumpd` ({"lc": …, "kwargs": …}) and
    `messages_to_dict` ({"type": …, "data": …}) write them, its flat form ({"type": "human", "content": …}) and its
    pairs (["human", "text"]); and a string, which is the user's.

    Returns:
        None for an item that a model does not read as a message.

    Raises:
        ValueError: it is no message; says why.
    """
    if isinstance(value, str):
        return {"role": "user", "content": value}, 0
    if isinstance(value, list) and len(value) == 2 and all(isinstance(part, str) for part in value):
        return {"role": _role(value[0]), "content": value[1]}, 0
    if not isinstance(value, Mapping):
        raise ValueError(f"is a {type(value).__name__}; expected an object with 'role' and 'content'")
    if "lc" in value or isinstance(value.get("kwargs"), Mapping):
        return _of_langchain(value)
    if isinstance(value.get("data"), Mapping):
        return _made({"role": _role(value.get("type"), value["data"]), **_without_role(value["data"])})
    if "role" not in value:
        return _without_a_role(value)
    return _made(value)


def _of_langchain(value: Mapping[str, Any]) -> tuple[Message | None, int]:
    kwargs, names = value.get("kwargs"), value.get("id")
    if not isinstance(kwargs, Mapping) or not isinstance(names, list) or not names:
        raise ValueError("is a serialised object without 'id' and 'kwargs'")
    kind = str(names[-1]).removesuffix("Chunk").removesuffix("Message").lower()
    return _made({"role": _role(kind, kwargs), **_without_role(kwargs)})


def _without_a_role(value: Mapping[str, Any]) -> tuple[Message | None, int]:
    kind = value.get("type")
    if kind == "function_call":  # items of OpenAI's Responses
        call = {"id": value.get("call_id"), "name": value.get("name"), "arguments": value.get("arguments")}
        return _made({"role": "assistant", "content": None, "tool_calls": [call]})
    if kind == "function_call_output":
        return _made({"role": "tool", "content": value.get("output"), "tool_call_id": value.get("call_id")})
    if kind in ("reasoning", "item_reference"):
        return None, 0
    if "content" in value and isinstance(kind, str):
        return _made({"role": _role(kind, value), **_without_role(value)})
    raise ValueError("has no 'role'")


def _without_role(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: fields[name] for name in fields if name not in ("role", "type")}


def _role(kind: Any, fields: Mapping[str, Any] | None = None) -> str:
    if not isinstance(kind, str):
        raise ValueError("has no 'role'")
    if kind.lower() == "chat" and fields is not None:
        return str(fields.get("role", "user"))
    return _ROLES.get(kind.lower(), kind.lower())


def _made(fields: Mapping[str, Any]) -> tuple[Message, int]:
    role = _role(fields["role"])
    content, left_out = _content(fields.get("content"))
    message: Message = {"role": role, "content": content}
    more = fields.get("additional_kwargs")
    calls = fields.get("tool_calls") or (more.get("tool_calls") if isinstance(more, Mapping) else None)
    if isinstance(calls, list) and calls and role == "assistant":
        message["tool_calls"] = [_call(call) for call in calls]
    for name in ("tool_call_id", "name"):
        if isinstance(found := fields.get(name), str):
            message[name] = found
    return message, left_out


def _content(content: Any) -> tuple[str, int]:
    """Text of a content, and how many of its parts are none."""
    if content is None:
        return "", 0
    if isinstance(content, str):
        return content, 0
    if not isinstance(content, list):
        raise ValueError(f"has a content of type {type(content).__name__}")
    texts, left_out = [], 0
    for part in content:
        if isinstance(part, str):
            texts.append(part)
        elif isinstance(part, Mapping) and part.get("type") in TEXTS and isinstance(part.get("text"), str):
            texts.append(part["text"])
        elif not (isinstance(part, Mapping) and part.get("type") == "tool_use"):  # its call stands beside the content
            left_out += 1
    return "".join(texts), left_out


def _call(call: Any) -> dict[str, Any]:
    """A tool call in OpenAI's form, its arguments as an object."""
    if not isinstance(call, Mapping):
        raise ValueError("has a tool call that is no object")
    function = call.get("function")
    inner: Mapping[str, Any] = function if isinstance(function, Mapping) else call
    arguments = inner.get("arguments", inner.get("args", {}))
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            raise ValueError("calls a tool with arguments that are no JSON") from None
    made = {"type": "function", "function": {"name": str(inner.get("name")), "arguments": arguments}}
    return {"id": call["id"], **made} if isinstance(call.get("id"), str) else made
