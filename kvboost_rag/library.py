"""The store and the index of stored chunks, kept in step. What enters and leaves does so here."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from .chunks import ChunkHeader, Hit, IntArray, Scope
from .config import ANCHOR_TOKENS
from .index import ChunkIndex
from .kv import StoredRun
from .planner import Plan
from .store import Chunk, MemoryStore, Policy, StoreStats
from .store.eviction import Worth
from .tracing import Recorder

Kept = Literal["kept", "present", "refused"]


@dataclass(frozen=True, slots=True)
class Match:
    """What is stored of a prompt.

    Attributes:
        exact: hits that tile the prompt from position 0.
        served: hit behind them that continues a prompt as it was served, which needs no repair.
        approximate: hits in the rest.
        headers: of every chunk that is hit, by key.
    """

    exact: tuple[Hit, ...]
    served: Hit | None
    approximate: tuple[Hit, ...]
    headers: dict[str, ChunkHeader]

    @property
    def hits(self) -> tuple[Hit, ...]:
        """All hits in the order of the prompt."""
        return (*self.exact, *((self.served,) if self.served else ()), *self.approximate)


class Library:
    """Chunks of all scopes of one engine. Thread-safe.

    Lock order: the store's lock, then ours (`MemoryStore` tells us of evictions under its lock). So nothing here calls
    the store while holding our lock.
    """

    def __init__(
        self,
        budget_bytes: int,
        served_bytes: int = 0,
        *,
        policy: Policy | None = None,
        worth: Callable[[Chunk[StoredRun]], Worth] | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        self.recorder = recorder
        self._worth = worth
        self._served_bytes = served_bytes  # limit of prompts as they were served, within the budget
        self._served: OrderedDict[str, int] = OrderedDict()  # bytes by key, the one used longest ago first
        self._lock = threading.Lock()
        self._index = ChunkIndex()
        self._store: MemoryStore[StoredRun] = MemoryStore(budget_bytes, policy, self._left, worth)

    def match(self, scope: Scope, ids: IntArray, *, approximate: bool) -> Match:
        """Find what is stored of ``ids``."""
        with self._lock:
            exact = self._index.match_exact(scope, ids)
            end = exact[-1].end if exact else 0
            served = self._continued(scope, ids, end) if approximate else None
            runs = self._index.match_runs(scope, ids, served.end if served else end) if approximate else ()
            match = Match(exact, served, runs, {})
            found = {hit.key: self._index.get(hit.key) for hit in match.hits}
        match.headers.update((key, header) for key, header in found.items() if header is not None)
        return match

    def _continued(self, scope: Scope, ids: IntArray, start: int) -> Hit | None:
        hit = self._index.match_served(scope, ids)
        if hit is None or hit.end < start + ANCHOR_TOKENS:
            return None
        if hit.key in self._served:
            self._served.move_to_end(hit.key)
        return Hit(start, hit.end - start, hit.key, start)

    def keep_served(
        self, header: ChunkHeader, kv_bytes: int, take: Callable[[], StoredRun], *, prompt_tokens: int
    ) -> None:
        """Store a prompt as it was served, in place of the same prompt with another answer and of what it continues."""
        if kv_bytes > self._served_bytes:
            return
        with self._lock:
            hit = self._index.match_served(header.scope, header.tokens)
            old = self._index.get(hit.key) if hit else None
            if hit and hit.length == len(header):
                return  # there is one that goes on from here
            leaving = [hit.key] if hit and old and hit.length >= min(len(old), prompt_tokens) else []
            room = self._served_bytes - kv_bytes - sum(s for key, s in self._served.items() if key not in leaving)
            for key, size in self._served.items():  # the one used longest ago first
                if room >= 0:
                    break
                if key not in leaving:
                    leaving.append(key)
                    room += size
        self.delete(leaving)  # before the new one needs room, lest documents make it
        if self.keep(header, kv_bytes, take) == "kept":
            with self._lock:
                if self._index.get(header.key) is not None:
                    self._served[header.key] = kv_bytes

    def clear_served(self) -> None:
        """Forget all prompts as they were served."""
        with self._lock:
            keys = list(self._served)
        self.delete(keys)

    @contextmanager
    def pin(self, keys: Sequence[str]) -> Iterator[dict[str, StoredRun] | None]:
        """KV of all ``keys``, held until the block is left; None if any of them is gone by now."""
        with self._store.pin(keys) as chunks:
            missing = [key for key, chunk in zip(keys, chunks, strict=True) if chunk is None]
            for key in missing:
                self._discard(key)
            yield None if missing else {c.header.key: c.kv for c in chunks if c is not None}

    def keep(self, header: ChunkHeader, kv_bytes: int, take: Callable[[], StoredRun]) -> Kept:
        """Store a chunk; room is made before ``take`` copies anything."""
        if header.key in self._store:
            return "present"
        reservation = self._store.reserve(kv_bytes + header.ids_bytes)
        if reservation is None:
            return "refused"
        with reservation:
            chunk = Chunk(header, take())
            if not self._store.put(chunk, reservation):
                return "refused"
        with self._lock:
            self._index.add(header)
        if self.recorder is not None:
            key_norm = 0.0 if self._worth is None else self._worth(chunk).importance
            self.recorder.kept(header, chunk.nbytes, key_norm=key_norm)
        if header.key not in self._store:  # evicted between the two locks
            self._discard(header.key)
        return "kept"

    def used(self, plan: Plan, chunks: Mapping[str, StoredRun]) -> None:
        """Note in the trace which chunks a plan takes; they are pinned now."""
        if self.recorder is None:
            return
        with self._lock:
            headers = {key: self._index.get(key) for key in plan.keys}
        for key, header in headers.items():
            if header is not None:
                tokens = sum(len(segment) for segment in plan.segments if segment.key == key)
                self.recorder.used(header, Chunk(header, chunks[key]).nbytes, tokens)

    def has(self, header: ChunkHeader) -> bool:
        """Whether the chunk is stored."""
        return header.key in self._store

    def with_content(self, scope: Scope, tokens: IntArray) -> list[ChunkHeader]:
        """Chunks that hold exactly these tokens."""
        with self._lock:
            return self._index.find_content(scope, tokens)

    def headers(self, scope: Scope) -> list[ChunkHeader]:
        """All chunks of a scope."""
        return list(self._store.scan(scope))

    def headers_in(self, namespace: str) -> list[ChunkHeader]:
        """All chunks of a tenant, under every fingerprint that the model has had."""
        return [header for header in self._store.scan() if header.scope.namespace == namespace]

    def delete(self, keys: Sequence[str]) -> int:
        """Forget chunks; returns how many there were."""
        if self.recorder is not None:
            self.recorder.dropped(keys)
        return sum(self._store.delete(key) for key in keys)

    def clear(self) -> int:
        """Forget all chunks; returns how many there were."""
        return self._store.clear()

    def stats(self) -> StoreStats:
        """State of the store."""
        return self._store.stats()

    def _left(self, header: ChunkHeader) -> None:
        self._discard(header.key)

    def _discard(self, key: str) -> None:
        with self._lock:
            self._index.discard(key)
            self._served.pop(key, None)
