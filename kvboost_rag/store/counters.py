"""What a disk tier counts."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from typing import Any

from ..stats import DiskStats

_log = logging.getLogger("kvboost_rag")
WARN_EVERY_S = 60.0  # a full disk fails every write; one line a minute says it


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

    def count(self, name: str) -> int:
        """One of the counts."""
        with self._lock:
            return self._counts[name]

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

    def unreadable(self, error: BaseException) -> None:
        """Count an entry that could not be read just now, and say so."""
        self.add(unreadable=1)
        self._say("a stored chunk cannot be read just now and is computed again: %s", error)

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

    def snapshot(self, **state: Any) -> DiskStats:
        """The counts so far, together with the state of the folder."""
        with self._lock:
            counts: dict[str, Any] = dict(self._counts)
            return DiskStats(**state, **counts, load_s=self._load_s, last_error=self._last_error)
