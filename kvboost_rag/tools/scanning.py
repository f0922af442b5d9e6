"""What reading an answer piece by piece needs: the ends of JSON, beginnings of calls, and the text around calls."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

_OUTSIDE = re.compile(r'["{}\[\]<`]')
_INSIDE = re.compile(r'["\\]')
_NEWLINE = re.compile(r"[\r\n]")


class JsonScanner:
    """Finds the end of one JSON object or list that comes in pieces, looking at each character once."""

    def __init__(self) -> None:
        self._depth, self._quoted, self._escaped = 0, False, False

    def advance(self, text: str, at: int, stops: Callable[[int], bool | None]) -> tuple[int, bool]:
        """Read on.

        Args:
            text: more of the value.
            at: where it goes on in there.
            stops: whether a text that cannot be JSON begins at a place; None if more must come to tell.

        Returns:
            How far it has read, and whether the value ends there.
        """
        while at < len(text):
            if self._escaped:
                self._escaped = False
                at += 1
                continue
            found = (_INSIDE if self._quoted else _OUTSIDE).search(text, at)
            if found is None:
                return len(text), False
            at = found.start()
            stop = False if self._quoted else stops(at)
            if stop is not False:
                return at, bool(stop)
            at += 1
            if self._closes(found.group()):
                return at, True
        return at, False

    def _closes(self, character: str) -> bool:
        if character == '"':
            self._quoted = not self._quoted
        elif character == "\\":
            self._escaped = True
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1
            return self._depth <= 0
        return False


class Openings:
    """Beginnings of calls, and quickly whether a text may become one."""

    def __init__(self, texts: tuple[str, ...]) -> None:
        self.texts = texts
        self.prefixes = frozenset(text[:n] for text in texts for n in range(1, len(text)))

    def find(self, text: str) -> str | None:
        """That with which the text begins."""
        return next((one for one in self.texts if text.startswith(one)), None) if text.startswith(self.texts) else None


class ShownText:
    """The text of an answer: what a reader has given out, and whitespace that depends on what comes next.

    Attributes:
        first: whether there is no text yet, or none since calls or thinking.
        blank: whether there is none on this line.
        last: last character.
    """

    def __init__(self) -> None:
        self.first, self.blank, self.last = True, True, ""
        self._given: list[str] = []
        self._returned = 0  # pieces of _given that were returned
        self._before: list[str] = []  # whitespace that belongs to the text if text follows
        self._after: list[str] = []  # whitespace behind a call
        self._joint = False  # whether a call was read since the last text

    def add(self, text: str) -> None:
        """Give out a text as it is."""
        self._given.append(text)

    def write(self, text: str) -> None:
        """Give out a text, but hold newlines at its end back: they go if a call follows."""
        if not text:
            return
        core = text.strip()
        line = text.rpartition("\n")[2]
        self.blank = not line.strip() and (self.blank or len(line) < len(text))
        self.last = text[-1]
        if self._joint:
            if not core:
                self._after.append(text)
                return
            text = self._join(text)
        self.first = self.first and not core
        newline = _NEWLINE.search(text, len(text.rstrip()))
        held = newline.start() if newline else len(text)
        if not core and (self._before or not self._given):
            held = 0
        if held:
            self._given += [*self._before, text[:held]]
            self._before = []
        if held < len(text):
            self._before.append(text[held:])

    def cut(self) -> None:
        """A call stands here."""
        self._joint = True
        self.last = ""
        self.restart()

    def restart(self) -> None:
        """What comes may be a call by itself, as at the beginning."""
        self.first = self.blank = True

    def end(self) -> None:
        """Nothing follows."""
        if not self._joint:
            self._given += self._before

    def fresh(self) -> str:
        """What was not returned before."""
        fresh = "".join(self._given[self._returned :])
        self._returned = len(self._given)
        return fresh

    def whole(self) -> str:
        """All that was given out."""
        return "".join(self._given)

    def _join(self, text: str) -> str:
        """Text behind a call, with what stood in front of the call between it and earlier text."""
        core = text.lstrip()
        space = self._before or [*self._after, text[: len(text) - len(core)]]
        self._before, self._after, self._joint = [], [], False
        return ("".join(space) if self._given else "") + core


def either(texts: Iterable[str]) -> re.Pattern[str]:
    """A pattern of any of the texts."""
    return re.compile("|".join(map(re.escape, texts)) or "(?!)")


def begun(text: str, beginnings: Iterable[str]) -> str | None:
    """That of the beginnings which the text has."""
    return next((one for one in beginnings if text.startswith(one)), None)


def skip(pattern: re.Pattern[str], text: str, at: int, limit: int) -> int:
    """Where what fits the pattern ends."""
    match = pattern.match(text, at, limit)
    return at if match is None else match.end()
