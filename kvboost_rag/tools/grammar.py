"""What an answer may look like: JSON schemas and tool calls → grammars for constrained decoding. Text in, text out."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .closing import patterns_of, reach_bytes, samples_of, shortest_json
from .formats import ToolFormat
from .strict import strict_schema

MAX_CALLS = 8  # of one answer: a small model that has begun to repeat a call does not stop by itself
_MARKER = re.compile(r"(<[^<>\s]+>|\[[A-Z_]{3,}\])")
_PLAIN_ESCAPES = 'nrbtf\\"'
_HOLE = re.compile("\x00[^\x00]*\x00")
_CONTROL = re.compile("[\x00-\x07\x0b\x0e-\x1f]")


@dataclass(frozen=True, slots=True)
class Grammar:
    """What an answer may be, before it is known how a tokenizer writes markers such as ``<tool_call>``.

    Attributes:
        template: Lark rules with a hole for each marker.
        markers: texts that many tokenizers hold as one token.
        shortest: a short answer; only a hint, it is checked before use.
        reach_bytes: about how many bytes one further token can oblige an answer to; decides where the careful and
            slower walk to the end begins.
        samples: ends of texts whose formats are not easily met by trying.
        patterns: regular expressions of whole texts, likewise.
        free: text without an end is a fine answer too (free text that may turn into a call).
        trigger: the marker that turns free text into a call.
    """

    template: str
    markers: tuple[str, ...] = ()
    shortest: str = ""
    reach_bytes: int = 256
    samples: tuple[str, ...] = ()
    patterns: tuple[str, ...] = ()
    free: bool = False
    trigger: str | None = None

    @property
    def texts(self) -> str:
        """The rules without the holes: what they hold of a marker is text."""
        return _HOLE.sub("", self.template)

    def lark(self, token_of: Callable[[str], int | None], in_text: Iterable[int] = ()) -> str:
        """Lark rules for one tokenizer.

        Args:
            token_of: id of the marker if the tokenizer keeps it apart from ordinary text, else None.
            in_text: ids of other such tokens, which free text may hold.
        """
        rules = self.template
        for marker in self.markers:
            token = token_of(marker)
            rules = rules.replace(_hole(marker), _literal(marker) if token is None else f"<[{token}]>")
        if self.trigger is None:
            return rules
        token = token_of(self.trigger)
        apart = sorted(set(in_text) - {token})
        text = "TEXT" + (f" (<[{','.join(map(str, apart))}]> TEXT)*" if apart else "")
        if token is not None:
            head = f"head: text <[{token}]>"
        else:
            begun = f" <[{','.join(map(str, apart))}]>" if apart else ""
            head = f"head: {f'(TEXT{begun})* ' if apart else ''}opening\nopening[lazy]: TEXT {_literal(self.trigger)}"
        return f"{rules}\n{head}\ntext: {text}\nTEXT: /(.|\\n)*/"


def json_grammar(schema: Mapping[str, Any]) -> Grammar:
    """Grammar of one JSON value that fits the schema, written as ``json.dumps`` would.

    Raises:
        ConfigError: the schema asks for something that cannot be enforced.
    """
    return _json(strict_schema(schema))


def any_json_grammar() -> Grammar:
    """Grammar of any JSON object."""
    return _json(strict_schema({"type": "object"}))


def forced_calls_grammar(
    tools: Sequence[tuple[str, Mapping[str, Any]]], format: ToolFormat, parallel: bool = False
) -> Grammar:
    """Grammar of calls in the spelling of the format, and nothing else.

    Args:
        tools: names and JSON schemas of the arguments.
        format: how calls are written.
        parallel: one to `MAX_CALLS` calls instead of exactly one.

    Raises:
        ConfigError: a schema asks for something that cannot be enforced.
    """
    calls = _Calls(tools, format)
    return calls.grammar(f"start: {calls.sequence(parallel)}")


def calls_or_json_grammar(
    tools: Sequence[tuple[str, Mapping[str, Any]]],
    format: ToolFormat,
    schema: Mapping[str, Any],
    *,
    parallel: bool = True,
) -> Grammar:
    """Grammar of calls, or of the JSON answer that fits the schema.

    Raises:
        ConfigError: a schema asks for something that cannot be enforced.
    """
    calls, answer = _Calls(tools, format), _json(strict_schema(schema))
    either = answer.template.replace("start:", "answer:", 1)
    rules = f"start: calls | answer\ncalls: {calls.sequence(parallel)}\n{either}"
    return calls.grammar(rules, answer)


def text_or_calls_grammar(
    tools: Sequence[tuple[str, Mapping[str, Any]]], format: ToolFormat, *, parallel: bool = True
) -> Grammar | None:
    """Grammar of free text that goes on as valid calls once the format's marker is written.

    Returns:
        None for a format whose calls begin with no marker: there, text and calls cannot be told apart.

    Raises:
        ConfigError: a schema asks for something that cannot be enforced.
    """
    opening = _MARKER.match(format.begin + format.call_begin)
    if opening is None:
        return None
    calls = _Calls(tools, format)
    return calls.grammar(f"start: text | head {calls.sequence(parallel, skip=opening[0])}", trigger=opening[0])


class _Calls:
    """The rules that all grammars with calls share."""

    def __init__(self, tools: Sequence[tuple[str, Mapping[str, Any]]], format: ToolFormat) -> None:
        self.format = format
        self._markers: dict[str, None] = {}
        calls: list[dict[str, Any]] = []
        defs: dict[str, Any] = {}
        for at, (name, schema) in enumerate(tools):
            place = f"tool{at}"
            arguments = strict_schema(_arguments(schema), where=f"tool {name!r}: $")
            defs[place] = _moved(arguments, f"#/$defs/{place}")
            calls.append(
                {
                    "type": "object",
                    "properties": {
                        format.name_key: {"const": name},
                        format.arguments_key: {"$ref": f"#/$defs/{place}"},
                    },
                    "required": [format.name_key, format.arguments_key],
                    "additionalProperties": False,
                }
            )
        self.schema: dict[str, Any] = {"anyOf": calls, "$defs": defs}

    def sequence(self, parallel: bool, *, skip: str = "") -> str:
        """Right-hand side of a rule for one or more calls, without the text ``skip`` in front."""
        f = self.format
        opening = self._spelled((f.begin + f.call_begin)[len(skip) :])
        more = f"more{{0,{MAX_CALLS - 1}}}" if parallel else ""
        return " ".join(
            part for part in (opening, "body", self._spelled(f.call_end), more, self._spelled(f.end)) if part
        )

    def grammar(self, rules: str, answer: Grammar | None = None, *, trigger: str | None = None) -> Grammar:
        """The finished grammar: what is common to all, behind its own rules."""
        f = self.format
        if "more{" in rules:
            rules += f"\nmore: {self._spelled(f.between + f.call_begin)} body {self._spelled(f.call_end)}"
        body = _json(self.schema)
        shortest = f.begin + f.call_begin + body.shortest + f.call_end + f.end
        reach = max(body.reach_bytes, len(shortest) + 16)
        samples, patterns = body.samples, body.patterns
        if answer is not None:
            shortest, reach = min(shortest, answer.shortest, key=len), max(reach, answer.reach_bytes)
            samples, patterns = (*samples, *answer.samples), (*patterns, *answer.patterns)
        return Grammar(
            rules + body.template.replace("start:", "\nbody:", 1),
            tuple(self._markers),
            "" if trigger else shortest,
            reach,
            samples,
            patterns,
            free=trigger is not None,
            trigger=trigger,
        )

    def _spelled(self, text: str) -> str:
        parts = [part for part in _MARKER.split(text) if part]
        known = [part for part in parts if _MARKER.fullmatch(part)]
        self._markers.update(dict.fromkeys(known))
        return " ".join(_hole(part) if part in known else _literal(part) for part in parts)


def _json(strict: Mapping[str, Any]) -> Grammar:
    return Grammar(
        f"start: {_inline(strict)}",
        (),
        shortest_json(strict),
        reach_bytes(strict),
        samples_of(strict),
        patterns_of(strict),
    )


def text_grammar(pattern: str) -> Grammar:
    """Grammar of one JSON string that matches a regular expression."""
    return Grammar(f"start: {_inline({'type': 'string', 'pattern': pattern})}")


def _inline(schema: Mapping[str, Any]) -> str:
    """A schema as a Lark expression, written like ``json.dumps``, so that no loop of spaces exists."""
    options = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
    if not any(_CONTROL.search(text) for text in _texts(schema)):
        options["json_allowed_escapes"] = _PLAIN_ESCAPES  # a model that writes \u0000 means nothing by it
    return "%json " + json.dumps({"x-guidance": options, **schema})


def _texts(node: Any) -> Iterable[str]:
    if isinstance(node, str):
        yield node
    elif isinstance(node, Mapping):
        for key, value in node.items():
            yield key
            yield from _texts(value)
    elif isinstance(node, (list, tuple)):
        for value in node:
            yield from _texts(value)


def _arguments(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """A tool's schema; one that names no parameter takes none."""
    shaped = ("properties", "additionalProperties", "patternProperties", "$ref", "anyOf", "oneOf", "allOf")
    if any(key in schema for key in shaped):
        return schema
    return {**schema, "type": "object", "properties": {}}


def _moved(schema: Any, place: str) -> Any:
    """A schema whose references still point into itself once it stands at ``place`` of another one."""
    if isinstance(schema, list):
        return [_moved(item, place) for item in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {}
    for key, value in schema.items():
        if key == "$ref" and isinstance(value, str):
            moved[key] = place + value.removeprefix("#")
        else:
            moved[key] = value if key in ("const", "enum") and not isinstance(value, dict) else _moved(value, place)
    return moved


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _hole(marker: str) -> str:
    return f"\x00{marker}\x00"
