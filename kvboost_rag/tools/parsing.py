"""The JSON of tool calls, read whatever small models make of it. Nothing here raises on what a model wrote."""

from __future__ import annotations

import json
import re
import string
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from secrets import choice
from typing import Any

from .formats import ToolFormat

_ID_CHARACTERS = string.ascii_letters + string.digits
_NAME = re.compile(r'"name"\s*:\s*"([^"\\]*)("?)')
_GIVES = re.compile(r'"(?:arguments|parameters)"\s*:')
_COMMAS = re.compile(r"[\s,]*")
_CLOSED = re.compile(r"[\s\]]*\Z")


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool that exists.

    Attributes:
        id: what the tool's answer will refer to.
        name: of the tool.
        arguments: as the model wrote them; whether they fit the tool's schema is not checked.
    """

    id: str
    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class InvalidCall:
    """Something that was meant as a call and cannot be used as one.

    Attributes:
        text: what the model wrote.
        name: of the tool, if that much can be read.
        error: what is wrong, in words for the model.
    """

    text: str
    name: str | None
    error: str


def new_call_id() -> str:
    """A fresh id: nine letters and digits, as Mistral's templates demand."""
    return "".join(choice(_ID_CHARACTERS) for _ in range(9))


@dataclass(frozen=True, slots=True)
class _Entry:
    """One value that a model wrote, or why there is none."""

    text: str
    value: Any = None
    error: str | None = None


class CallParser:
    """Reads calls from JSON.

    Args:
        format: whose keys count first; the customary ones are read too.
        names: of the tools there are.
    """

    def __init__(self, format: ToolFormat, names: Collection[str]) -> None:
        self._name_keys = dict.fromkeys((format.name_key, "name"))
        self._argument_keys = dict.fromkeys((format.arguments_key, "arguments", "parameters"))
        self._names = frozenset(names)

    def marked(self, text: str) -> list[ToolCall | InvalidCall]:
        """Calls in a text that stands where calls stand: an object, a list, or a list that lacks its end."""
        return [self._call(entry) for entry in _entries(text)]

    def named(self, text: str, name: str) -> list[ToolCall | InvalidCall]:
        """The call of a tool whose arguments are the text."""
        try:
            return [self._call(_Entry(text, {"name": name, "arguments": _loads(text)}))]
        except (ValueError, RecursionError) as error:
            return [InvalidCall(text, name, _why(error))]

    def bare(self, text: str, *, first: bool) -> list[ToolCall | InvalidCall] | None:
        """Calls in a text that may be anything.

        Args:
            text: JSON, complete or not.
            first: whether it is where only a call or an answer in JSON can be; then a call may lack arguments, or name
                a tool that does not exist.

        Returns:
            None if this is no call.
        """
        entries = _entries(text)
        if any(self._meant(entry, first) for entry in entries):
            return [self._call(entry) for entry in entries]
        return None

    def _meant(self, entry: _Entry, first: bool) -> bool:
        if entry.error is not None:
            found = _NAME.search(entry.text)
            if found is None:
                return False
            cut = not found[2] and any(name.startswith(found[1]) for name in self._names)
            gives = bool(_GIVES.search(entry.text))
            return (first or gives) if found[1] in self._names else first and (gives or cut)
        name, arguments = self._parts(entry.value)
        if not isinstance(name, str):
            return False
        known, gives = name in self._names, isinstance(arguments, (Mapping, str))
        return (known or gives) if first else (known and gives)

    def _parts(self, value: Any) -> tuple[Any, Any]:
        """Name and arguments; an argument None if there are none."""
        if not isinstance(value, Mapping):
            return None, None
        function = value.get("function")
        if isinstance(function, Mapping):
            value = {**value, **function}
        elif isinstance(function, str):
            value = {"name": function, **value}
        name = next((value[key] for key in self._name_keys if key in value), None)
        return name, next((value[key] for key in self._argument_keys if key in value), None)

    def _call(self, entry: _Entry) -> ToolCall | InvalidCall:
        if entry.error is not None:
            found = _NAME.search(entry.text)
            return InvalidCall(entry.text, found[1] if found and found[1] in self._names else None, entry.error)
        name, arguments = self._parts(entry.value)
        if not isinstance(name, str):
            return InvalidCall(entry.text, None, "the call has no name; write a JSON object with name and arguments")
        if name not in self._names:
            known = ", ".join(sorted(self._names))
            return InvalidCall(entry.text, name, f"there is no tool named {name!r}; the tools are: {known}")
        try:
            arguments = _loads(arguments or "{}") if isinstance(arguments, str) else arguments
            json.dumps(arguments, ensure_ascii=False).encode()
        except (ValueError, RecursionError) as error:
            return InvalidCall(entry.text, name, f"the arguments of {name} are {_why(error)}")
        if arguments is None:
            arguments = {}
        if not isinstance(arguments, dict):
            return InvalidCall(
                entry.text, name, f"the arguments of {name} are a {type(arguments).__name__}; write a JSON object"
            )
        if _repeats_description(entry.value, arguments):
            return InvalidCall(entry.text, name, f"this repeats the description of {name}; write values as arguments")
        return ToolCall(new_call_id(), name, arguments)


def _repeats_description(value: Mapping[str, Any], arguments: Mapping[str, Any]) -> bool:
    function = value.get("function")
    described = "description" in (function if isinstance(function, Mapping) else value)
    return described and isinstance(arguments.get("properties"), dict)


def _entries(text: str) -> list[_Entry]:
    text = text.strip()
    try:
        return _flat(text, _loads(text))
    except (ValueError, RecursionError) as error:
        return _salvaged(text) if text.startswith("[") else [_Entry(text, error=_why(error))]


def _flat(text: str, value: Any) -> list[_Entry]:
    if isinstance(value, dict) and isinstance(value.get("tool_calls"), list):
        value = value["tool_calls"]
    if not isinstance(value, list):
        return [_checked(text, value)]
    return [_checked(json.dumps(one, ensure_ascii=False), one) for one in value]


def _checked(text: str, value: Any) -> _Entry:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeError as error:
        return _Entry(text.encode("utf-8", "replace").decode(), error=_why(error))
    return _Entry(text, value)


def _salvaged(text: str) -> list[_Entry]:
    """What is complete in a list that is not."""
    entries: list[_Entry] = []
    at = _end(_COMMAS, text, 1)
    while not _CLOSED.match(text, at):
        try:
            value, end = _DECODER.raw_decode(text, at)
        except (ValueError, RecursionError) as error:
            return [*entries, _Entry(text[at:], error=_why(error))]
        entries.append(_checked(text[at:end], value))
        at = _end(_COMMAS, text, end)
    return entries


def _end(pattern: re.Pattern[str], text: str, at: int) -> int:
    match = pattern.match(text, at)
    return at if match is None else match.end()


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


# Models write newlines and tabs inside strings.
_DECODER = json.JSONDecoder(strict=False, parse_constant=_refuse)


def _loads(text: str) -> Any:
    return _DECODER.decode(text)


def _why(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"not valid JSON: {error.msg} at character {error.pos}"
    if isinstance(error, UnicodeError):
        return "not valid JSON: half of a surrogate pair"
    return "not valid JSON: nested too deeply" if isinstance(error, RecursionError) else f"not valid JSON: {error}"
