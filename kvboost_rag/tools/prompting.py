"""Conversations with tools for chat templates that know none, and for templates that are strict about roles.

Each tool is one line of canonical JSON between newlines, so that its tokens, and with them its stored KV, are the same
whichever tools stand around it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from ..errors import ContextOverflowError, PromptError
from .calls import ToolCall, new_call_id
from .formats import ToolFormat
from .schemas import canonical_tool, canonical_tools

Message: TypeAlias = dict[str, Any]

_INTRODUCTION = "# Tools\n\nYou can call these tools. Each line describes one:\n"
_SYSTEM = ("system", "developer")
_RESULTS = ("tool", "function", "ipython")
_BORDER = re.compile(r"\s*(?:result of\b|```)", re.IGNORECASE)
_TICKS = re.compile("`+")
_MERGED = ("system", "developer", "user", "assistant")


def tool_text(tool: Mapping[str, Any]) -> str:
    """The run of text that a tool is in every prompt that `fallback` makes.

    Raises:
        PromptError: the tool cannot be described; see `schemas.canonical_tool`.
    """
    return json.dumps(canonical_tool(tool), ensure_ascii=False)


def write_calls(calls: Iterable[ToolCall], format: ToolFormat) -> str:
    """Calls as the model writes them; what `calls.ReplyReader` reads. Ids are not written.

    Raises:
        PromptError: arguments are not plain JSON.
    """
    written = []
    for call in calls:
        try:
            body = json.dumps(
                {format.name_key: call.name, format.arguments_key: call.arguments}, ensure_ascii=False, allow_nan=False
            )
        except (TypeError, ValueError, RecursionError) as error:
            raise PromptError(f"the arguments of a call of {call.name!r} are not plain JSON: {error}") from None
        written.append(format.call_begin + body + format.call_end)
    return format.begin + format.between.join(written) + format.end if written else ""


def fallback(
    messages: Sequence[Mapping[str, Any]], tools: Iterable[Mapping[str, Any]], format: ToolFormat
) -> list[Message]:
    """A conversation in which tools, calls and results are text, for a template that knows none of them.

    The system message, made if it is missing, gets the tools behind its own text. Calls of the assistant stand behind
    what it said; each result becomes a message of the user, as small models know no other role that brings news. Such a
    result is fenced where its text could pass for another message.

    Args:
        messages: the conversation; its calls in OpenAI's form, with arguments as a dict or as JSON.
        tools: function tools as OpenAI describes them; none if only the history needs rewriting.
        format: how the model is to write calls.

    Returns:
        New messages with nothing but role and content where something was rewritten; the others as they are.

    Raises:
        PromptError: a tool or a call cannot be written.
    """
    described = canonical_tools(tools)
    names: dict[str, str] = {}
    made = []
    for i, message in enumerate(messages):
        calls = _calls(message, f"messages[{i}]")
        names |= {call.id: call.name for call in calls}
        if calls:
            said = _text(message.get("content"))
            made.append(
                {"role": message["role"], "content": (f"{said}\n" if said else "") + write_calls(calls, format)}
            )
        elif message.get("role") in _RESULTS:
            made.append({"role": "user", "content": _result(message, names)})
        else:
            made.append({key: value for key, value in message.items() if key != "tool_calls"})
    if not described:
        return made
    offer = _INTRODUCTION + "".join(f"{tool_text(tool)}\n" for tool in described) + _instructions(format)
    if made and made[0].get("role") in _SYSTEM:
        said = _text(made[0].get("content"))
        made[0] = {**made[0], "content": f"{said}\n\n{offer}" if said else offer}
        return made
    return [{"role": "system", "content": offer}, *made]


def fit_roles(messages: Sequence[Mapping[str, Any]], render: Callable[[list[Message]], object]) -> list[Message]:
    r"""The conversation as a template accepts it, changed as little as possible.

    Tried in turn: as it is; neighbours of one role merged, two newlines between them; system messages folded into the
    user's; both. Messages with tool calls and results of tools are never merged. A system message in front of an
    assistant's becomes a message of the user, so that the user begins.

    Args:
        messages: the conversation.
        render: renders messages; raises `PromptError` if the template refuses them.

    Raises:
        PromptError: the template accepts none of these; what it said of the conversation as it is.
    """
    given = [dict(message) for message in messages]
    tried: list[list[Message]] = []
    first: PromptError | None = None
    for change in (_same, _merged, _folded, _folded_and_merged):
        fitted = change(given)
        if fitted in tried:
            continue
        tried.append(fitted)
        try:
            render(fitted)
        except ContextOverflowError:
            raise
        except PromptError as error:
            first = first or error
        else:
            return fitted
    raise first or PromptError("there are no messages; give at least one")


def _same(messages: list[Message]) -> list[Message]:
    return messages


def _folded_and_merged(messages: list[Message]) -> list[Message]:
    return _merged(_folded(messages))


def _merged(messages: list[Message]) -> list[Message]:
    merged: list[Message] = []
    for message in messages:
        if merged and _may_merge(merged[-1], message):
            merged[-1] = _joined(merged[-1], message)
        else:
            merged.append(message)
    return merged


def _may_merge(one: Message, other: Message) -> bool:
    """Whether nothing but the border between them is lost."""
    if one.get("role") not in _MERGED or one.get("tool_calls") or other.get("tool_calls"):
        return False
    return {key: one[key] for key in one if key != "content"} == {key: other[key] for key in other if key != "content"}


def _folded(messages: list[Message]) -> list[Message]:
    """The leading system messages in the user's message behind them; later ones as messages of the user."""
    lead = next((i for i, message in enumerate(messages) if message.get("role") not in _SYSTEM), len(messages))
    rest = [{**message, "role": "user"} if message.get("role") in _SYSTEM else message for message in messages[lead:]]
    if not lead:
        return rest
    head: Message = {"role": "user", "content": messages[0].get("content")}
    for message in messages[1:lead]:
        head = _joined(head, message)
    if rest and rest[0].get("role") == "user":
        return [{**rest[0], **_joined(head, rest[0])}, *rest[1:]]
    return [head, *rest]


def _joined(one: Message, other: Message) -> Message:
    texts = (_text(one.get("content")), _text(other.get("content")))
    return {**one, "content": "\n\n".join(text for text in texts if text)}


def _calls(message: Mapping[str, Any], at: str) -> list[ToolCall]:
    given = message.get("tool_calls") or ()
    if isinstance(given, (str, Mapping)) or not isinstance(given, Sequence):
        raise PromptError(f"{at}.tool_calls is a {type(given).__name__}; give a list of calls")
    return [_call(call, f"{at}.tool_calls[{i}]") for i, call in enumerate(given)]


def _call(call: Any, at: str) -> ToolCall:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise PromptError(
            f"{at} is {call!r}; give {{'type': 'function', 'id': …, 'function': {{'name': …, 'arguments': {{…}}}}}}"
        )
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError as error:
            raise PromptError(f"{at}.function.arguments is not valid JSON: {error}; give a dict") from None
    if not isinstance(arguments, Mapping):
        raise PromptError(f"{at}.function.arguments is a {type(arguments).__name__}; give a dict")
    return ToolCall(str(call.get("id") or new_call_id()), function["name"], dict(arguments))


def _result(message: Mapping[str, Any], names: Mapping[str, str]) -> str:
    """A tool's answer on lines of its own. It is named by the tool; the id only tells the model less."""
    call_id = message.get("tool_call_id")
    name = message.get("name") or names.get(str(call_id))
    what = f"the tool {name}" if name else f"the tool call {call_id}" if call_id else "a tool call"
    return f"Result of {' '.join(what.split())}:\n{_fenced(_text(message.get('content')))}"


def _fenced(text: str) -> str:
    """A result as it is; between fences if it holds what could pass for its end, and the next message behind it.

    Messages that are merged have an empty line between them. The text itself stays, and with it its stored KV.
    """
    lines = text.splitlines()
    plain = all(line.strip() and not _BORDER.match(line) for line in lines) and not text.endswith("\n")
    if plain:
        return text
    fence = "`" * max(3, 1 + max(map(len, _TICKS.findall(text)), default=0))
    return f"{fence}\n{text}\n{fence}"


def _text(content: Any) -> str:
    """Text of a message's content, be it a string or text blocks."""
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, Sequence) and all(
        isinstance(block, Mapping) and block.get("type") == "text" and isinstance(block.get("text"), str)
        for block in content
    ):
        return "".join(block["text"] for block in content)
    raise PromptError(f"a content is a {type(content).__name__} that is not all text; give a string, or text blocks")


def _instructions(format: ToolFormat) -> str:
    """How to call. Directly behind the last tool's newline: an empty line would change that tool's last token."""
    body = f'{{"{format.name_key}": <name of the tool>, "{format.arguments_key}": {{<argument>: <value>}}}}'
    one = format.begin + format.call_begin + body + format.call_end + format.end
    return (
        f"To call a tool, write nothing but the call, in this form:\n{one}\n"
        "The result follows in the next message. If you need no tool, answer in plain text."
    )
