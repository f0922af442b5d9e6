"""What a log holds → prompts: plain ones, chat messages and OpenAI requests, LangSmith runs. Pure.

Of a record that holds its answer too, the answer is taken: it says how much of the time is decoding.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Literal

from .answers import answer_in, answer_tokens_in, text_in
from .turns import Message, message_of

Format = Literal["auto", "prompts", "messages", "langsmith"]
_TIMES = ("timestamp", "start_time", "created_at", "created", "time", "date")


class Unusable(Exception):
    """A record holds no prompt that could be run; says why."""


class NoModelCall(Exception):
    """A record is a step around model calls, whose prompts stand in records of their own; says what it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Logged:
    """A request to a model.

    Attributes:
        prompt: text, chat messages in OpenAI's form, or token ids.
        tools: descriptions in OpenAI's form.
        answer: text of the answer; None if the log does not hold it.
        answer_tokens: its length where the log says so.
        namespace: the tenant.
        time: seconds since the epoch; None if the log does not say.
        left_out: parts of messages that are no text, such as images.
    """

    prompt: str | list[Message] | list[int]
    tools: tuple[Mapping[str, Any], ...] = ()
    answer: str | None = None
    answer_tokens: int | None = None
    namespace: str = ""
    time: float | None = None
    left_out: int = 0


def records_in(where: str, value: Any) -> Iterator[tuple[str, Any]]:
    """A value of a log, or the runs in it if it is a page of LangSmith's API; each with its place."""
    runs = value.get("runs") if isinstance(value, Mapping) else None
    if not isinstance(runs, list):
        yield where, value
        return
    for number, run in enumerate(runs, 1):
        yield f"{where}, run {number}", run


def read_requests(
    value: Any, *, format: Format = "auto", namespace_field: str | None = None, time_field: str | None = None
) -> Iterator[Logged]:
    """The requests that one value of a log holds, usually one.

    Args:
        value: parsed JSON.
        format: "auto" looks at the value.
        namespace_field: where the tenant stands, such as "user" or "metadata.tenant"; None is one tenant for all.
        time_field: where the time stands; None looks at the usual names.

    Raises:
        Unusable: there is no prompt in it; says why.
        NoModelCall: it is a LangSmith run of something else than a model.
    """
    record = value if isinstance(value, Mapping) else {}
    known = Logged(prompt="", namespace=_namespace(record, namespace_field), time=_time(record, time_field))
    for logged in _READERS[format](value):
        yield replace(logged, namespace=known.namespace, time=known.time)


def _auto(value: Any) -> Iterator[Logged]:
    if isinstance(value, str) or _is_ids(value):
        return _prompts(value)
    if isinstance(value, list):
        return _messages(value)
    if not isinstance(value, Mapping):
        raise Unusable(f"it is a {type(value).__name__}, not a prompt, messages or an object that holds them")
    if isinstance(value.get("inputs"), Mapping):
        return _langsmith(value)
    request = _request(value)
    if "messages" in request or ("input" in request and "prompt" not in request):
        return _messages(value)
    if "prompt" in request:
        return _prompts(value)
    held = ", ".join(map(repr, list(value)[:6])) or "nothing"
    raise Unusable(f"it holds {held}, and none of 'prompt', 'messages', 'input' or 'inputs'")


def _prompts(value: Any) -> Iterator[Logged]:
    """A string, token ids, or an object with "prompt", which may be several."""
    if isinstance(value, str) or _is_ids(value):
        yield Logged(prompt=value)
        return
    request = _request(value) if isinstance(value, Mapping) else {}
    prompt = request.get("prompt")
    if isinstance(prompt, list) and not _is_ids(prompt) and prompt:
        if isinstance(prompt[0], (str, list)) and all(isinstance(one, str) or _is_ids(one) for one in prompt):
            yield from (Logged(prompt=one) for one in prompt)
            return
        yield from _conversations(prompt, request, value)
        return
    if not (isinstance(prompt, str) or (isinstance(prompt, list) and _is_ids(prompt))):
        raise Unusable(f"'prompt' is a {type(prompt).__name__}; expected text or token ids")
    yield Logged(prompt=prompt, answer=answer_in(value), answer_tokens=answer_tokens_in(value))


def _messages(value: Any) -> Iterator[Logged]:
    """A list of messages, or an object with "messages", or with "input" as OpenAI's Responses have it."""
    if isinstance(value, list):
        return _conversations(value, {}, {})
    request = _request(value) if isinstance(value, Mapping) else {}
    messages = request.get("messages", request.get("input"))
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    if not isinstance(messages, list):
        raise Unusable(f"its messages are a {type(messages).__name__}; expected a list")
    if isinstance(instructions := request.get("instructions"), str):
        messages = [{"role": "system", "content": instructions}, *messages]
    return _conversations(messages, request, value)


def _langsmith(value: Any) -> Iterator[Logged]:
    """A run of a model as LangSmith exports it."""
    inputs = value.get("inputs") if isinstance(value, Mapping) else None
    if not isinstance(inputs, Mapping):
        raise Unusable("it is no LangSmith run: it holds no 'inputs'")
    kind = value.get("run_type", "llm")
    if kind not in ("llm", "chat_model"):
        raise NoModelCall(f"it is a run of type {kind!r}")
    extra = value.get("extra")
    settings = extra.get("invocation_params") if isinstance(extra, Mapping) else None
    request = {**(settings if isinstance(settings, Mapping) else {}), **inputs}
    if isinstance(prompts := inputs.get("prompts"), list) and prompts:
        alone = len(prompts) == 1
        for prompt in prompts:
            if not isinstance(prompt, str):
                raise Unusable(f"'inputs.prompts' holds a {type(prompt).__name__}; expected text")
            yield Logged(prompt=prompt, answer=answer_in(value) if alone else None)
        return
    for name in ("messages", "input", "prompt"):
        found = inputs.get(name)
        if isinstance(found, str):
            yield Logged(prompt=found, answer=answer_in(value), answer_tokens=answer_tokens_in(value))
            return
        if isinstance(found, list) and found:
            yield from _conversations(found, request, value)
            return
    held = ", ".join(map(repr, list(inputs)[:6])) or "nothing"
    raise Unusable(f"its inputs hold {held}, and neither 'messages' nor 'prompts'")


_READERS = {"auto": _auto, "prompts": _prompts, "messages": _messages, "langsmith": _langsmith}


def _conversations(messages: Sequence[Any], request: Mapping[str, Any], value: Any) -> Iterator[Logged]:
    """One conversation, or several in a list of lists."""
    if not messages:
        raise Unusable("it holds no messages")
    if all(isinstance(one, list) and not (one and isinstance(one[0], str)) for one in messages):
        alone = len(messages) == 1
        for one in messages:
            yield from _conversations(one, request, value if alone else {})
        return
    told, left_out = [], 0
    for i, one in enumerate(messages):
        try:
            message, missing = message_of(one)
        except ValueError as error:
            raise Unusable(f"messages[{i}] {error}") from None
        if message is not None:
            told.append(message)
        left_out += missing
    answer, tokens = answer_in(value), answer_tokens_in(value)
    if answer is None and len(told) > 1 and told[-1]["role"] == "assistant":
        answer = text_in(told.pop())  # a training example, or a log of whole conversations
    if not told:
        raise Unusable("it holds no messages that a model would read")
    yield Logged(prompt=told, tools=_tools(request), answer=answer, answer_tokens=tokens, left_out=left_out)


def _tools(request: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    tools = request.get("tools")
    if isinstance(tools, list):
        return tuple(_tool(tool) for tool in tools if isinstance(tool, Mapping))
    functions = request.get("functions")
    if isinstance(functions, list):  # the older form
        return tuple({"type": "function", "function": one} for one in functions if isinstance(one, Mapping))
    return ()


def _tool(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """A tool in OpenAI's form; Responses have it without the inner object."""
    if tool.get("type") == "function" and "function" not in tool and "name" in tool:
        return {"type": "function", "function": {key: tool[key] for key in tool if key != "type"}}
    return tool


def _request(record: Mapping[str, Any]) -> Mapping[str, Any]:
    """What was sent to the model, out of what a batch file or a proxy wrapped around it."""
    for name in ("body", "request", "kwargs"):
        inner = record.get(name)
        if isinstance(inner, Mapping) and "messages" not in record and "prompt" not in record:
            return _request(inner)
    return record


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(one) is int for one in value)


def at_field(record: Any, path: str) -> Any:
    """What stands at a dotted path; None if nothing does."""
    if not isinstance(record, Mapping):
        return None
    if path in record:
        return record[path]
    first, dot, rest = path.partition(".")
    return at_field(record.get(first), rest) if dot else None


def _namespace(record: Mapping[str, Any], path: str | None) -> str:
    if path is None:
        return "all"
    found = at_field(record, path)
    if isinstance(found, bool) or not isinstance(found, (str, int)) or found == "":
        raise Unusable(f"there is no tenant at {path!r}, so it might be mixed up with another one's")
    return str(found)


def _time(record: Mapping[str, Any], path: str | None) -> float | None:
    paths = _TIMES if path is None else (path,)
    return next((time for name in paths if (time := _seconds(at_field(record, name))) is not None), None)


def _seconds(value: Any) -> float | None:
    if isinstance(value, str):
        try:
            return datetime.fromisoformat(value).timestamp()
        except (ValueError, OverflowError, OSError):
            return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return float(value) / 1000 if value > 1e11 else float(value)  # milliseconds
