"""What a disk tier counts."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from dataclasses import dataclass

_log = logging.getLogger("kvboost_rag")
WARN_EVERY_S = 60.0  # a full disk fails every write; one line a minute says it


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskStats:
    """State of a folder of stored KV, and totals of this process.

    Attributes:
        chunks: chunks that can be loaded.
        newer_chunks: chunks of a newer version of kvboost-rag, which are neither used nor deleted.
        stored_bytes: bytes of all files and what the catalogue says of them, including what is being written.
        budget_bytes: their limit.
        read_only: nothing is written.
        written, written_bytes: chunks written, and the bytes of their files.
        loads, loaded_bytes, load_s: chunks mapped, their bytes, and the seconds until they were ready to be read.
        evictions: chunks pushed out to make room.
        rejections: chunks that do not fit the budget.
        bad: damaged entries that were dropped, to be computed again.
        vanished: chunks whose file was gone.
        newer: loads refused because a newer version wrote the file.
        unwritten: chunks that were not written because too much waited to be written.
        write_errors: chunks that could not be written: the disk was full, or the like.
        waiting_bytes: bytes that wait to be written.
        last_error: what went wrong last.
    """

    chunks: int = 0
    newer_chunks: int = 0
    stored_bytes: int = 0
    budget_bytes: int = 0
    read_only: bool = False
    written: int = 0
    written_bytes: int = 0
    loads: int = 0
    loaded_bytes: int = 0
    load_s: float = 0.0
    evictions: int = 0
    rejections: int = 0
    bad: int = 0
    vanished: int = 0
    newer: int = 0
    unwritten: int = 0
    write_errors: int = 0
    waiting_bytes: int = 0
    last_error: str | None = None


class Tally:
    """Counts of one process. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._load_s = 0.0
        self._last_error: str | None = None
        self._warned: dict[str, float] = {}

    def add(self, **counts: int) -> None:
        """Count."""
        with self._lock:
            self._counts.update(counts)

    def loaded(self, nbytes: int, seconds: float) -> None:
        """Count a load."""
        with self._lock:
            self._counts.update(loads=1, loaded_bytes=nbytes)
            self._load_s += seconds

    @property
    def load_s_per_byte(self) -> float:
        """What loading took so far; 0 before anything was loaded."""
        with self._lock:
            return self._load_s / max(self._counts["loaded_bytes"], 1)

    def bad(self, error: BaseException) -> None:
        """Count a damaged entry, and say so."""
        self.add(bad=1)
        self._say("a stored chunk is damaged and is computed again: %s", error)

    def failed(self, error: BaseException, *, chunks: int = 0) -> None:
        """Note an error, and say so at most once in a while."""
        self.add(write_errors=chunks)
        self._say("KV could not be written to disk, and is served from RAM: %s", error)

    def _say(self, message: str, error: BaseException) -> None:
        text, now = f"{type(error).__name__}: {error}", time.monotonic()
        with self._lock:
            self._last_error = text
            quiet = now - self._warned.get(message, -WARN_EVERY_S) < WARN_EVERY_S
            if not quiet:
                self._warned[message] = now
        if not quiet:
            _log.warning(message, text)

    def snapshot(
        self, *, chunks: int, newer_chunks: int, stored_bytes: int, budget_bytes: int, read_only: bool
    ) -> DiskStats:
        """The counts so far, together with the state of the folder."""
        with self._lock:
            return DiskStats(
                chunks=chunks,
                newer_chunks=newer_chunks,
                stored_bytes=stored_bytes,
                budget_bytes=budget_bytes,
                read_only=read_only,
                load_s=self._load_s,
                last_error=self._last_error,
                **self._counts,
            )
