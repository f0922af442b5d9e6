"""Write-behind: a thread that brings chunks to disk while requests go on."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass

from ..kv import StoredRun
from .tier import Chunk

IDLE_S = 1.0  # a thread that has nothing to do ends; the next chunk starts another
_log = logging.getLogger("kvboost_rag")


@dataclass(slots=True, eq=False)
class _Waiting:
    chunk: Chunk[StoredRun]
    expires: float | None
    cancelled: bool = False

    def is_wanted(self) -> bool:
        return not self.cancelled


Write = Callable[[Chunk[StoredRun], float | None, Callable[[], bool]], None]


class Writer:
    """Chunks that wait to be written, and the thread that writes them. Thread-safe; empty in a child after a fork.

    Args:
        write: writes a chunk, asking last of all whether it is still wanted; handles its own errors.
        limit_bytes: most bytes that may wait.
    """

    def __init__(self, write: Write, limit_bytes: int) -> None:
        self._write, self._limit_bytes = write, limit_bytes
        self._begin()

    def _begin(self) -> None:
        self._pid = os.getpid()
        self._changed = threading.Condition()
        self._waiting: OrderedDict[str, _Waiting] = OrderedDict()
        self._jobs: deque[Callable[[], None]] = deque()
        self._bytes = 0
        self._busy = 0
        self._thread: threading.Thread | None = None
        self._closed = False

    @property
    def waiting_bytes(self) -> int:
        """Bytes of chunks that are not written yet."""
        return self._bytes

    def submit(self, chunk: Chunk[StoredRun], expires: float | None, *, wait: bool) -> bool:
        """Have a chunk written; one that waits already is not taken twice.

        Args:
            chunk: what to write.
            expires: end of its time.
            wait: wait for room, if there is none; otherwise the chunk is refused then.
        """
        self._own()
        key, nbytes = chunk.header.key, chunk.nbytes
        with self._changed:
            if key in self._waiting:
                return True
            # A chunk above the limit gets its turn when nothing else waits.
            while not self._closed and self._bytes and self._bytes + nbytes > self._limit_bytes:
                if not wait:
                    return False
                self._changed.wait(1.0)
            if self._closed or (nbytes > self._limit_bytes and not wait):
                return False
            self._waiting[key] = _Waiting(chunk, expires)
            self._bytes += nbytes
            self._start()
            return True

    def has_room(self, nbytes: int) -> bool:
        """Whether `submit` would take a chunk of a size now."""
        return not self._closed and self._bytes + nbytes <= self._limit_bytes

    def run_soon(self, job: Callable[[], None]) -> None:
        """Have something done by the thread after what waits now."""
        self._own()
        with self._changed:
            if not self._closed:
                self._jobs.append(job)
                self._start()

    def get(self, key: str) -> Chunk[StoredRun] | None:
        """A chunk that waits."""
        self._own()
        waiting = self._waiting.get(key)
        return None if waiting is None or waiting.cancelled else waiting.chunk

    def chunks(self) -> list[Chunk[StoredRun]]:
        """All chunks that wait."""
        self._own()
        with self._changed:
            return [waiting.chunk for waiting in self._waiting.values() if not waiting.cancelled]

    def __contains__(self, key: object) -> bool:
        waiting = self._waiting.get(key)  # type: ignore[call-overload]
        return waiting is not None and not waiting.cancelled

    def cancel(self, key: str) -> bool:
        """Do not write a chunk, or do not make it visible if it is being written; True if it was waiting."""
        self._own()
        with self._changed:
            waiting = self._waiting.get(key)
            if waiting is None or waiting.cancelled:
                return False
            waiting.cancelled = True
            return True

    def flush(self) -> None:
        """Wait until everything that waits now is written or has failed."""
        self._own()
        with self._changed:
            while self._waiting or self._jobs or self._busy:
                self._start()
                self._changed.wait(1.0)

    def close(self, then: Callable[[], None]) -> None:
        """Write what waits, take nothing more, and do a last thing; in the thread itself, if that is who calls."""
        self._own()
        if self._thread is threading.current_thread():  # which came upon the last reference to its store
            self._jobs.append(then)
            self._closed = True
            return
        self.flush()
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join()
        then()

    def _own(self) -> None:
        if self._pid != os.getpid():  # the parent writes what waited in it
            self._begin()

    def _start(self) -> None:
        if self._thread is None or not self._thread.is_alive():
            thread = threading.Thread(target=self._work, name="kvboost-rag writer", daemon=True)
            try:
                thread.start()
                self._thread = thread
            except RuntimeError:  # the interpreter shuts down, or there are too many threads
                self._work(wait=False)
        self._changed.notify_all()

    def _work(self, wait: bool = True) -> None:
        while (task := self._next(wait)) is not None:
            try:
                task()
            except Exception:  # a task handles what it expects; the thread must live on
                _log.exception("an unexpected error in the thread that writes KV to disk")
            finally:
                with self._changed:
                    self._busy -= 1
                    self._changed.notify_all()

    def _next(self, wait: bool) -> Callable[[], None] | None:
        with self._changed:
            end = time.monotonic() + (IDLE_S if wait else 0.0)
            while True:
                if self._waiting:
                    key = next(iter(self._waiting))
                    self._busy += 1
                    return lambda: self._bring(key)
                if self._jobs:
                    self._busy += 1
                    return self._jobs.popleft()
                left = end - time.monotonic()
                if self._closed or left <= 0:
                    self._thread = None
                    return None
                self._changed.wait(left)

    def _bring(self, key: str) -> None:
        """Write the chunk that waits longest; it can be had from here until it is on disk."""
        waiting = self._waiting[key]
        try:
            if not waiting.cancelled:
                self._write(waiting.chunk, waiting.expires, waiting.is_wanted)
        finally:
            with self._changed:
                del self._waiting[key]
                self._bytes -= waiting.chunk.nbytes
