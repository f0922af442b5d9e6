"""Traces of what a store was asked for: to try eviction policies and budgets on one's own traffic.

A trace is a file of JSON lines. It holds sizes, times and keyed hashes; no text, no token ids, and no key of the hash,
so it may be shared. It does tell how often and when the same chunk was asked for, and how long chunks and prompts are.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

from .chunks import ChunkHeader, Origin
from .errors import TraceError

VERSION = 1
Op = Literal["request", "warm"]
_log = logging.getLogger("kvboost_rag")


@dataclass(frozen=True, slots=True)
class Asked:
    """A chunk in a prompt, or one that was warmed.

    Attributes:
        name: keyed hash of its key.
        tokens, nbytes: of the whole chunk.
        wanted: tokens of it that the prompt holds; 0 if it was only stored.
        saved_s: seconds that one use of the whole chunk saves; 0 if nobody measured.
        hit: whether it was stored when the trace was recorded; a replay decides for itself.
        origin: see `ChunkHeader`.
        key_norm: mean L2 norm of its keys; 0 if unknown.
    """

    name: str
    tokens: int
    nbytes: int
    wanted: int
    saved_s: float
    hit: bool = False
    origin: Origin = "prompt"
    key_norm: float = 0.0


@dataclass(frozen=True, slots=True)
class Event:
    """One request, or one call of `warm`.

    Attributes:
        op: which.
        t: seconds since the trace began.
        namespace: keyed hash of the tenant.
        asked: chunks, in the order in which they were used or stored.
        dropped: names of chunks that were deleted before (not evicted).
        prompt_tokens, computed_tokens: of a request.
        seconds: of the prefill, or of warming.
    """

    op: Op
    t: float
    namespace: str
    asked: tuple[Asked, ...]
    dropped: tuple[str, ...] = ()
    prompt_tokens: int = 0
    computed_tokens: int = 0
    seconds: float = 0.0


class Recorder:
    """Appends events of one engine to a trace. Thread-safe.

    A trace that cannot be written is no reason to fail a request: recording ends with a warning in the log.

    Args:
        path: the file; a new session is appended if there is one.
        about: further entries of the session's first line, such as the budget.
        saved_s: seconds that one use of a chunk saves; None if nobody measured.

    Raises:
        TraceError: the file cannot be written.
    """

    def __init__(
        self, path: Path | str, about: Mapping[str, Any], saved_s: Callable[[ChunkHeader], float | None]
    ) -> None:
        self._path = Path(path).expanduser()
        self._saved_s = saved_s
        self._salt = secrets.token_bytes(32)
        self._began = time.perf_counter()
        self._lock = threading.Lock()
        self._pending: list[Asked] = []
        self._dropped: list[str] = []
        self._broken = False
        try:
            self._end_line()
            self._append({"kvboost_trace": VERSION, **about})
        except OSError as error:
            raise TraceError(f"trace_path {str(path)!r} cannot be written: {error}; name a file in a folder") from error

    def kept(self, header: ChunkHeader, nbytes: int, *, key_norm: float = 0.0) -> None:
        """Note a chunk that was stored; it belongs to the event that is written next."""
        wanted = len(header) if header.origin == "prompt" else 0
        asked = replace(self._asked(header, nbytes, wanted, hit=False), key_norm=key_norm)
        with self._lock:
            self._pending.append(asked)

    def dropped(self, keys: Iterable[str]) -> None:
        """Note chunks that were deleted; they belong to the event that is written next."""
        names = [self._hash(key) for key in keys]
        with self._lock:
            self._dropped.extend(names)

    def warmed(self, namespace: str, seconds: float) -> None:
        """Write what a call of `warm` stored."""
        self._write(Event("warm", self._now(), self._hash(namespace), (), seconds=seconds))

    def used(self, header: ChunkHeader, nbytes: int, tokens: int) -> None:
        """Note a chunk that served so many tokens of the request that is written next."""
        with self._lock:
            self._pending.append(self._asked(header, nbytes, tokens, hit=True))

    def served(self, namespace: str, *, prompt_tokens: int, computed_tokens: int, seconds: float) -> None:
        """Write a request, with all that was noted since the last event.

        Args:
            namespace: the tenant.
            prompt_tokens: length of the prompt.
            computed_tokens: tokens that ran.
            seconds: of the prefill.
        """
        event = Event("request", self._now(), self._hash(namespace), ())
        self._write(replace(event, prompt_tokens=prompt_tokens, computed_tokens=computed_tokens, seconds=seconds))

    def _asked(self, header: ChunkHeader, nbytes: int, wanted: int, *, hit: bool) -> Asked:
        saved_s = self._saved_s(header) or 0.0
        return Asked(self._hash(header.key), len(header), nbytes, wanted, saved_s, hit, header.origin)

    def _write(self, event: Event) -> None:
        with self._lock:
            event = replace(event, asked=tuple(self._pending), dropped=tuple(self._dropped))
            self._pending, self._dropped = [], []
            if self._broken:
                return
            try:
                self._append(to_json(event))
            except OSError as error:
                self._broken = True
                _log.warning("the trace %s ends here, it cannot be written: %s", self._path, error)

    def _end_line(self) -> None:
        """Put an end to a line that a process was killed in, lest it spoils ours."""
        if self._path.is_file() and self._path.stat().st_size:
            with self._path.open("r+b") as file:
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":
                    file.write(b"\n")

    def _append(self, line: Mapping[str, Any]) -> None:
        # Opened for each line: requests take far longer, and no engine has to be closed for its trace to be whole.
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, separators=(",", ":")) + "\n")

    def _now(self) -> float:
        return round(time.perf_counter() - self._began, 6)

    def _hash(self, name: str) -> str:
        return hashlib.blake2b(name.encode("utf-8", "surrogatepass"), key=self._salt, digest_size=10).hexdigest()


def to_json(event: Event) -> dict[str, Any]:
    """An event as a line of a trace; what is zero or empty is left out."""
    line: dict[str, Any] = {"op": event.op, "t": event.t, "namespace": event.namespace}
    for name in ("prompt_tokens", "computed_tokens", "seconds", "dropped"):
        if value := getattr(event, name):
            line[name] = list(value) if name == "dropped" else value
    line["chunks"] = [_chunk_json(asked) for asked in event.asked]
    return line


def write_trace(path: Path | str, events: Iterable[Event], about: Mapping[str, Any]) -> None:
    """Write a whole trace, in place of what the file held."""
    lines = [{"kvboost_trace": VERSION, **about}, *map(to_json, events)]
    Path(path).write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines), encoding="utf-8")


def read_trace(path: Path | str) -> list[Event]:
    """All events of a trace, in order. Names of different sessions never meet.

    Raises:
        TraceError: the file cannot be read, is no trace, or is of another version; says which line.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise TraceError(f"{path} cannot be read as a trace: {error}") from error
    return list(_events(path, lines))


def _events(path: Path | str, lines: Sequence[str]) -> Iterator[Event]:
    session, began, latest = 0, 0.0, 0.0
    for number, text in enumerate(lines, 1):
        try:
            line = json.loads(text)
            if (version := line.get("kvboost_trace")) is not None:
                if version != VERSION:
                    raise TraceError(f"{path} is a trace of version {version}; this release reads version {VERSION}")
                session, began = session + 1, latest
                continue
            event = _event(line, f"{session}:")
        except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
            if number == len(lines) > 1:
                return  # the last line of a process that was killed
            if session and lines[number].startswith('{"kvboost_trace":'):
                continue  # the same, and another session behind it
            raise TraceError(f"line {number} of {path} is no line of a trace: {error!r}") from error
        if not session:
            raise TraceError(f"{path} does not begin with a line that says kvboost_trace; it is no trace")
        latest = began + event.t
        yield replace(event, t=latest)


def _event(line: Mapping[str, Any], prefix: str) -> Event:
    if line["op"] not in get_args(Op):
        raise ValueError(f"op is {line['op']!r}")
    event = Event(
        op=line["op"],
        t=float(line["t"]),
        namespace=prefix + line["namespace"],
        asked=tuple(_asked(chunk, prefix) for chunk in line["chunks"]),
        dropped=tuple(prefix + name for name in line.get("dropped", ())),
        prompt_tokens=int(line.get("prompt_tokens", 0)),
        computed_tokens=int(line.get("computed_tokens", 0)),
        seconds=float(line.get("seconds", 0.0)),
    )
    numbers = (event.t, event.seconds, event.prompt_tokens, event.computed_tokens)
    if not all(map(math.isfinite, numbers)) or min(numbers) < 0:
        raise ValueError(f"times and counts are {numbers}")
    return event


def _chunk_json(asked: Asked) -> dict[str, Any]:
    found: dict[str, Any] = {
        "key": asked.name,
        "tokens": asked.tokens,
        "bytes": asked.nbytes,
        "wanted": asked.wanted,
        "saved_s": float(f"{asked.saved_s:.6g}"),
        "hit": asked.hit,
        "origin": asked.origin,
    }
    return {**found, "key_norm": float(f"{asked.key_norm:.6g}")} if asked.key_norm else found


def _asked(chunk: Mapping[str, Any], prefix: str) -> Asked:
    asked = Asked(
        name=prefix + chunk["key"],
        tokens=int(chunk["tokens"]),
        nbytes=int(chunk["bytes"]),
        wanted=int(chunk["wanted"]),
        saved_s=float(chunk["saved_s"]),
        hit=bool(chunk["hit"]),
        origin=chunk["origin"],
        key_norm=float(chunk.get("key_norm", 0.0)),
    )
    possible = min(asked.nbytes, asked.tokens - 1, asked.wanted) >= 0 and asked.origin in get_args(Origin)
    if not (possible and math.isfinite(asked.saved_s) and math.isfinite(asked.key_norm)):
        raise ValueError(f"a chunk has {asked}")
    return asked
