"""Tool calls in a model's answer: told from its text while it streams.

What counts as a call:

- what stands behind the format's own marker, wherever that is (unless in backticks or quotes: prose about the marker);
- JSON with the shape of a call behind another family's marker; or bare or in a fenced block, as the first thing of an
  answer, or at the start of a line if it gives arguments to a tool that exists. Other JSON is text.

What cannot be used becomes an `InvalidCall`, so that an agent can tell the model. Nothing in ``<think>…</think>`` at
the start of an answer is a call: there a model weighs what it might call. Newlines between text and calls belong to
neither, as templates write their own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ..errors import ConfigError
from .formats import ToolFormat
from .parsing import CallParser, InvalidCall, ToolCall, new_call_id
from .scanning import JsonScanner, Openings, ShownText, begun, either, skip

__all__ = ["InvalidCall", "Reply", "ReplyReader", "ToolCall", "new_call_id"]

# Beginning and end of calls in families that write JSON in between; Phi-4, Nemotron and Qwen Coder among them.
_MARKERS = {
    "<tool_call>": "</tool_call>",
    "[TOOL_CALLS]": "",
    "<|python_tag|>": "",
    "<|tool_call|>": "<|/tool_call|>",
    "<TOOLCALL>": "</TOOLCALL>",
    "<tools>": "</tools>",
    "<function_call>": "</function_call>",
}
_THINKING = {"<think>": "</think>", "[THINK]": "[/THINK]"}
_KEYS = ('{"name"', '{"function"', '{"arguments"', '{"parameters"', '{"tool_calls"', '{"type":"function"')
_VALUES = tuple(front + key for key in _KEYS for front in ("", "["))
# Beginnings of calls without the whitespace in them.
_ANYWHERE = tuple(marker + value for marker in _MARKERS for value in _VALUES)
_ON_A_LINE = (*_VALUES, *(fence + value for fence in ("```json", "```tool_call", "```") for value in _VALUES))
_WINDOW = 256  # characters within which the beginning of a call must show what it is
_RECOVERIES = 8  # unfinished calls of one answer behind which others are looked for, as each costs a pass

# Mistral v11 writes [TOOL_CALLS]name[CALL_ID]id[ARGS]{…}; Llama 3.1, asked so, <function=name>{…}</function>.
_HEAD = re.compile(r"(?:<function=([\w.-]+)>|([\w.-]+)\s*(?:\[CALL_ID\][\w-]*)?\s*(?:\[ARGS\])?)\s*")
_NAMING = re.compile(r'\[?\{"(?:name|function)":?(?:"[^"]*"?)?')  # up to the name that the text ends in
_SPACE = re.compile(r"\s*")
_BETWEEN = re.compile(r"[\s,;]*")
_REMAINS = re.compile(r"[\s,;}\]]*")


@dataclass(frozen=True, slots=True)
class Reply:
    """A whole answer.

    Attributes:
        text: everything that is no call.
        calls: in the order written.
        invalid: likewise.
        rest: end of the text, which no `ReplyReader.push` has returned.
    """

    text: str
    calls: tuple[ToolCall, ...] = ()
    invalid: tuple[InvalidCall, ...] = ()
    rest: str = ""


@dataclass(frozen=True, slots=True)
class _Region:
    """Where calls stand.

    Attributes:
        skip: characters in front of the JSON.
        ends: texts that close it.
        name: of the tool, where only the arguments are JSON.
        sure: whether it holds calls whatever it looks like.
        first: see `CallParser.bare`.
    """

    skip: int
    ends: tuple[str, ...] = ()
    name: str | None = None
    sure: bool = False
    first: bool = False


_LINE = Openings(_ON_A_LINE)


class ReplyReader:
    """Reads one answer. Text goes through at once, except for what may be the beginning of a call.

    Args:
        format: how the model writes calls.
        tool_names: tools that may be called. Without any, all is text.
        thinking: whether the prompt has opened ``<think>`` already, as some templates do.
    """

    def __init__(self, format: ToolFormat, tool_names: Iterable[str], *, thinking: bool = False) -> None:
        names = (tool_names,) if isinstance(tool_names, str) else tuple(tool_names)
        self._names = bool(names)
        self._parser = CallParser(format, names)
        ends = {text.strip(" ]\n") for text in (format.call_end, format.end)} - {""}
        begins = {text.rstrip(" [\n").lstrip() for text in (format.begin, format.call_begin)} | set(format.special)
        self._own = tuple(begins - ends - {""})
        self._ends = tuple(ends)
        self._stop = either(self._own + self._ends)
        self._head_stop = either((*self._own, *self._ends, "{"))
        self._may_begin = re.compile(
            "[" + re.escape("".join({*"<[{`", *(text[0] for text in self._own + self._ends)})) + "]"
        )
        self._anywhere = Openings((*_ANYWHERE, *(f"<function={name}>{{" for name in names)))

        self._tail, self._at = "", 0  # what no step has consumed begins at _at
        self._step: Callable[[], bool] = self._think if thinking else self._begin
        self._thought = _THINKING["<think>"]  # what ends the thinking
        self._region = _Region(0)
        self._prefix = ""  # held-back text in front of a JSON value that may be no call
        self._parts: list[str] = []  # of the value that is being read
        self._scanner = JsonScanner()

        self._shown = ShownText()
        self._calls: list[ToolCall] = []
        self._invalid: list[InvalidCall] = []
        self._reply: Reply | None = None

    def push(self, delta: str) -> str:
        """Take the next piece of the answer.

        Returns:
            The text that may be shown now.

        Raises:
            ConfigError: the answer is finished.
        """
        if self._reply is not None:
            raise ConfigError("the answer was finished; make a new ReplyReader for the next one")
        if not self._names:
            self._shown.add(delta)
        else:
            self._run(delta)
        return self._shown.fresh()

    def finish(self) -> Reply:
        """The whole answer; whatever is still open ends here."""
        if self._reply is None:
            if self._names:
                self._end()
            rest = self._shown.fresh()
            self._reply = Reply(self._shown.whole(), tuple(self._calls), tuple(self._invalid), rest)
        return self._reply

    def _run(self, delta: str) -> None:
        self._tail, self._at = self._tail[self._at :] + delta, 0
        while self._step():
            pass

    # Steps read on from _at. Each returns whether the next may run: False if more of the answer must come first.

    def _begin(self) -> bool:
        rest = self._tail[self._at :]
        if not (core := rest.lstrip()):
            self._give(len(self._tail))
            return False
        for opening, end in _THINKING.items():
            if core.startswith(opening):
                self._give(len(self._tail) - len(core) + len(opening))
                self._thought, self._step = end, self._think
                return True
            if opening.startswith(core):
                return False
        self._step = self._text
        return True

    def _think(self) -> bool:
        found = self._tail.find(self._thought, self._at)
        if found < 0:
            held = next(n for n in range(len(self._thought) - 1, -1, -1) if self._tail.endswith(self._thought[:n]))
            self._give(max(self._at, len(self._tail) - held))
            return False
        self._give(found + len(self._thought))
        self._shown.restart()
        self._step = self._text
        return True

    def _text(self) -> bool:
        for match in self._may_begin.finditer(self._tail, self._at):
            self._give(match.start())
            verdict = self._candidate(match.start())
            if verdict is not False:
                return bool(verdict)
        self._give(len(self._tail))
        return False

    def _candidate(self, at: int) -> bool | None:
        """Go on to what begins there if it is a call; None if more must come to tell."""
        rest = self._tail[at : at + _WINDOW]
        if self._shown.last == "`":
            return False
        if self._shown.last not in ('"', "'") and (own := begun(rest, self._own)):
            return self._enter(at, _Region(len(own), self._ends, sure=True), self._head)
        if end := begun(rest, self._region.ends) if self._region.sure else None:
            self._region, self._at = _Region(0), at + len(end)  # of a call that was complete without it
            return True
        compact = "".join(rest.split())
        openings = (self._anywhere, _LINE) if self._shown.blank else (self._anywhere,)
        for one in openings:
            if opening := one.find(compact):
                return self._enter(at, self._opened(opening, rest), self._value)
        if len(rest) < _WINDOW and (
            any(compact in one.prefixes for one in openings)
            or any(one.startswith(rest) for one in self._own + self._region.ends)
        ):
            return None
        return False

    def _opened(self, opening: str, rest: str) -> _Region:
        if opening.startswith("<function="):
            name = opening[len("<function=") : -2]
            return _Region(rest.index(">") + 1, ("</function>",), name=name, sure=True)
        marker = next((marker for marker in _MARKERS if opening.startswith(marker)), "")
        fenced = "```" if opening.startswith("```") else ""
        ends = tuple(end for end in (_MARKERS.get(marker, fenced),) if end)
        return _Region(len(marker or fenced), ends, first=self._shown.first or bool(marker))

    def _enter(self, at: int, region: _Region, step: Callable[[], bool]) -> bool:
        value = at + region.skip
        if step == self._value:
            value = next(i for i in range(value, len(self._tail)) if self._tail[i] in "[{")
        self._prefix = self._tail[at:value]
        self._region, self._step, self._at = region, step, value
        self._parts, self._scanner = [], JsonScanner()
        return True

    def _head(self) -> bool:
        """Between the own marker and its JSON."""
        self._at = skip(_SPACE, self._tail, self._at, len(self._tail))
        found = self._head_stop.search(self._tail, self._at, self._at + _WINDOW)
        if found is None:
            if len(self._tail) - self._at < _WINDOW:
                return False
            self._step = self._junk
            return True
        head = self._tail[self._at : found.start()]
        named = _HEAD.fullmatch(head)
        if found.group() in self._own and not head:
            self._at = found.end()  # twice, as small models do
        elif found.group() == "{" and (named or head.strip() in ("", "[")):
            region = _Region(0, self._region.ends, named and (named[1] or named[2]), sure=True)
            self._enter(found.start() if named else self._at, region, self._value)
        else:
            self._step = self._junk
        return True

    def _junk(self) -> bool:
        """What stands behind the own marker and is no JSON."""
        found = self._stop.search(self._tail, self._at)
        longest = max(map(len, (*self._own, *self._ends)))
        end = found.start() if found else max(self._at, len(self._tail) - longest + 1)
        self._parts.append(self._tail[self._at : end])
        self._at = end
        if found:
            self._take()
        return found is not None

    def _value(self) -> bool:
        """A JSON value up to its end, or up to a marker that cannot be in it."""
        end, done = self._scanner.advance(self._tail, self._at, self._stops)
        self._parts.append(self._tail[self._at : end])
        self._at = end
        if done:
            self._take()
        return done

    def _stops(self, at: int) -> bool | None:
        rest = self._tail[at : at + _WINDOW]
        stops = self._own + self._region.ends
        if begun(rest, stops):
            return True
        return None if any(stop.startswith(rest) for stop in stops) else False

    def _take(self) -> None:
        """Read the calls in what was collected."""
        text, region = "".join(self._parts), self._region
        self._parts = []
        if not region.sure:
            found = self._parser.bare(text, first=region.first)
            if found is None and self._calls and self._begins_a_call(text):
                found = [InvalidCall(text, None, "the answer ended inside a call")]
        elif region.name:
            found = self._parser.named(text, region.name)
        else:
            found = self._parser.marked(text) if text.strip() else []
        if found is None:
            self._region, self._step = _Region(0), self._text
            self._shown.write(self._prefix + text)
            return
        self._calls += [one for one in found if isinstance(one, ToolCall)]
        self._invalid += [one for one in found if isinstance(one, InvalidCall)]
        self._shown.cut()
        self._step = self._gap

    def _gap(self) -> bool:
        """Behind a call: its end, another call, or text."""
        tail, limit = self._tail, self._at + _WINDOW
        rest = skip(_REMAINS, tail, self._at, limit)
        if end := begun(tail[rest : rest + _WINDOW], self._region.ends):
            self._region, self._at = _Region(0), rest + len(end)
            return True
        if rest == len(tail) < limit:
            return False
        begin = skip(_BETWEEN, tail, self._at, limit)
        another = tail[begin : begin + 1] if self._region.sure and not self._region.name else ""
        verdict = False if another == "{" else self._candidate(begin)
        if verdict is not False:
            return bool(verdict)
        if another in ("{", "["):
            return self._enter(begin, _Region(0, self._region.ends, sure=True), self._value)
        if any(end.startswith(tail[rest : rest + _WINDOW]) for end in self._region.ends):
            return False
        self._step = self._text
        return True

    def _end(self) -> None:
        for left in range(_RECOVERIES, -1, -1):
            if self._step not in (self._head, self._junk, self._value):
                break
            written = "".join(self._parts) + self._tail[self._at :]
            # An odd number of quotes hides the end of a call, and all that follows, in a string.
            ends = [at for end in self._region.ends if left and (at := written.find(end)) >= 0]
            self._parts = [written[: min(ends)] if ends else written]
            self._tail, self._at = written[min(ends) :] if ends else "", 0
            self._take()
            self._run("")
        left_over = self._tail[skip(_REMAINS, self._tail, self._at, len(self._tail)) :]
        if self._calls and self._begins_a_call(left_over):
            self._invalid.append(InvalidCall(left_over.strip(), None, "the answer ended inside a call"))
            self._at = len(self._tail)
        elif self._step != self._gap or not any(end.startswith(left_over) for end in ("", *self._region.ends)):
            self._give(len(self._tail))
        self._shown.end()

    def _begins_a_call(self, text: str) -> bool:
        """Whether the text can only have become a further call."""
        compact = "".join(text.split())
        if _NAMING.fullmatch(compact):
            return True
        return len(compact) > 1 and any(compact in one.prefixes for one in (self._anywhere, _LINE))

    def _give(self, end: int) -> None:
        """What is not consumed up to there is text."""
        text, self._at = self._tail[self._at : end], end
        self._shown.write(text)
