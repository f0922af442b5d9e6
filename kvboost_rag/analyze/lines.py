"""A log file as a stream of JSON values: lines, arrays, pretty-printed objects, gzipped or not. Pure.

Nothing but the value at hand is kept, so a log may be of any size. What cannot be read is named and left out.
"""

from __future__ import annotations

import gzip
import json
import zlib
from codecs import getincrementaldecoder
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

from ..errors import TraceError

MOST_BYTES = 64 << 20  # of one line or element; a longer one is left out
_BLOCK = 1 << 16
_SPACE = " \t\r\n,"  # between values


@dataclass(frozen=True, slots=True)
class Found:
    """A JSON value of a log.

    Attributes:
        where: "line 3" or "element 3".
        value: what stands there.
    """

    where: str
    value: Any


@dataclass(frozen=True, slots=True)
class Bad:
    """A place of a log that was left out.

    Attributes:
        where: "line 3" or "element 3".
        reason: why.
    """

    where: str
    reason: str


def read_values(path: Path | str) -> Iterator[Found | Bad]:
    """All JSON values of a log, in order.

    Raises:
        TraceError: there is no such file, or it cannot be opened.
    """
    try:
        with _opened(Path(path)) as file:
            yield from _values(file)
    except OSError as error:
        raise TraceError(f"{path} cannot be read as a log: {error}; name a file of prompts") from error


def _opened(path: Path) -> IO[bytes]:
    with path.open("rb") as file:
        packed = file.read(2) == b"\x1f\x8b"
    return cast("IO[bytes]", gzip.open(path, "rb")) if packed else path.open("rb")


def _values(file: IO[bytes]) -> Iterator[Found | Bad]:
    try:
        head = file.read(_BLOCK).removeprefix(b"\xef\xbb\xbf").lstrip()
        file.seek(0)
        yield from _stream(file) if _is_one_document(head) else _lines(file)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        yield Bad("the end", f"the archive is damaged from here on: {error}")


def _is_one_document(head: bytes) -> bool:
    """Whether the file is an array or an indented object rather than a value in each line."""
    first, newline, _ = head.partition(b"\n")
    if head[:1] == b"{":
        return first.strip() == b"{"
    if head[:1] != b"[":
        return False
    if not newline:
        return True
    try:
        json.loads(first)
    except (ValueError, RecursionError):
        return True
    return False


def _lines(file: IO[bytes]) -> Iterator[Found | Bad]:
    number = 0
    while line := file.readline(MOST_BYTES + 1):
        number += 1
        where = f"line {number}"
        if len(line) > MOST_BYTES:
            while line and not line.endswith(b"\n"):
                line = file.readline(_BLOCK)
            yield Bad(where, f"it is longer than {MOST_BYTES >> 20} MiB")
            continue
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8")
            if text.strip():
                yield Found(where, json.loads(text))
        except UnicodeDecodeError as error:
            yield Bad(where, f"it is not UTF-8: {error.reason} at byte {error.start}")
        except ValueError as error:
            yield Bad(where, f"it is not JSON: {error}")
        except RecursionError:
            yield Bad(where, "it is nested too deeply")


def _stream(file: IO[bytes]) -> Iterator[Found | Bad]:
    """Values one behind another, inside of an array or not."""
    reader, number, inside = _Reader(file), 0, False
    try:
        if inside := reader.skip() == "[":
            reader.at += 1
        while (char := reader.skip()) and not (inside and char == "]"):
            number += 1
            yield Found(f"element {number}", reader.value())
    except UnicodeDecodeError as error:
        yield Bad(f"element {max(number, 1)}", f"it is not UTF-8: {error.reason}; what follows was not read")
    except (ValueError, RecursionError) as error:
        yield Bad(f"element {number}", f"it is not JSON: {error}; what follows was not read")


class _Reader:
    """Decodes values out of a growing piece of text.

    Attributes:
        at: where the next value begins.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self._text = file, ""
        self._characters, self._decoder = getincrementaldecoder("utf-8-sig")(), json.JSONDecoder()
        self.at = 0

    def skip(self) -> str:
        """The first character of the next value; nothing at the end."""
        while True:
            while self.at < len(self._text) and self._text[self.at] in _SPACE:
                self.at += 1
            if self.at < len(self._text):
                return self._text[self.at]
            if not self._more():
                return ""

    def value(self) -> Any:
        """The next value.

        Raises:
            ValueError: it is not JSON, or too long.
        """
        while True:
            try:
                found, self.at = self._decoder.raw_decode(self._text, self.at)
            except json.JSONDecodeError:
                if len(self._text) - self.at > MOST_BYTES:
                    raise ValueError(f"no value ends within {MOST_BYTES >> 20} MiB") from None
                if not self._more():
                    raise
            else:
                return found

    def _more(self) -> bool:
        # A value that is not complete is tried again from its start, so what is read doubles.
        left = self._text[self.at :]
        block = self._file.read(max(_BLOCK, len(left)))
        self._text, self.at = left + self._characters.decode(block, final=not block), 0
        return bool(block)
