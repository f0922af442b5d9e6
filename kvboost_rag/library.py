"""The store and the index of stored chunks, kept in step. What enters and leaves does so here."""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from .chunks import ChunkHeader, Hit, IntArray, Scope
from .config import ANCHOR_TOKENS
from .index import ChunkIndex
from .kv import StoredRun
from .planner import Fresh, Plan
from .store import Chunk, DiskReader, DiskStats, Kept, Policy, StoreStats, TieredStore
from .store.eviction import Worth
from .tracing import Recorder


@dataclass(frozen=True, slots=True)
class Match:
    """What is stored of a prompt.

    Attributes:
        exact: hits that tile the prompt from position 0.
        served: hit behind them that continues a prompt as it was served, which needs no repair.
        approximate: hits in the rest.
        headers: of every chunk that is hit, by key.
        fresh: what of the KV of `served` is not as it was moved, see `planner.fresh_of`; None if that is not known.
    """

    exact: tuple[Hit, ...]
    served: Hit | None
    approximate: tuple[Hit, ...]
    headers: dict[str, ChunkHeader]
    fresh: Fresh | None = None

    @property
    def hits(self) -> tuple[Hit, ...]:
        """All hits in the order of the prompt."""
        return (*self.exact, *((self.served,) if self.served else ()), *self.approximate)

    def without(self, keys: Collection[str]) -> Match:
        """What is left if some chunks may not be used."""
        exact = tuple(itertools.takewhile(lambda hit: hit.key not in keys, self.exact))
        served = None if self.served is None or len(exact) < len(self.exact) else self.served
        approximate = tuple(hit for hit in self.approximate if hit.key not in keys)
        return Match(exact, served, approximate, self.headers, self.fresh)


@dataclass(frozen=True, slots=True, eq=False)
class _AsServed:
    """A prompt as it was served: bytes of its KV, and see `Match.fresh`."""

    nbytes: int
    fresh: Fresh


class Library:
    """Chunks of all scopes of one engine. Thread-safe.

    Lock order: the store's lock, then ours (`MemoryStore` tells us of evictions under its lock). So nothing here calls
    the store while holding our lock.

    Args:
        budget_bytes: limit of RAM.
        served_bytes: limit of prompts as they were served, within the budget.
        policy: which chunk leaves RAM first.
        worth: what a chunk is worth to the policy.
        recorder: writes a trace.
        disk: keeps what RAM evicts, and what was stored before this process began.
        write_behind_bytes: most bytes that may wait to be written to it.
        ttl_s: seconds that a chunk may be old; None is without limit.
    """

    def __init__(
        self,
        budget_bytes: int,
        served_bytes: int = 0,
        *,
        policy: Policy | None = None,
        worth: Callable[[Chunk[StoredRun]], Worth] | None = None,
        recorder: Recorder | None = None,
        disk: DiskReader | None = None,
        write_behind_bytes: int = 0,
        ttl_s: float | None = None,
    ) -> None:
        self.recorder = recorder
        self._worth = worth
        self._ttl_s = ttl_s
        self._end_of: dict[str, float] = {}  # when the time of a chunk is over
        self._ends: list[tuple[float, str]] = []  # the same as a heap, with some that are not true any more
        self._served_bytes = served_bytes
        self._served: OrderedDict[str, _AsServed] = OrderedDict()  # by key, the one used longest ago first
        self._lock = threading.Lock()
        self._index = ChunkIndex()
        self._store = TieredStore(
            budget_bytes, policy, worth, disk=disk, write_behind_bytes=write_behind_bytes, on_leave=self._discard
        )

    def match(
        self, scope: Scope, ids: IntArray, *, approximate: bool, served: bool = True, token_s: float | None = None
    ) -> Match:
        """Find what is stored of ``ids``.

        Args:
            scope: whose prompt it is.
            ids: the prompt.
            approximate: look for moved documents, too.
            served: and for the prompt that it continues, as it was served.
            token_s: seconds that computing a token takes; then what only the disk has is left out if loading it would
                take longer.
        """
        self._catch_up(scope)
        with self._lock:
            exact = self._index.match_exact(scope, ids)
            end = exact[-1].end if exact else 0
            known = self._continued(scope, ids, end) if approximate and served else None
            runs = self._index.match_runs(scope, ids, known.end if known else end) if approximate else ()
            of_known = self._served.get(known.key) if known else None
            match = Match(exact, known, runs, {}, of_known.fresh if of_known else None)
            found = {hit.key: self._index.get(hit.key) for hit in match.hits}
        match.headers.update((key, header) for key, header in found.items() if header is not None)
        return match if token_s is None else self._without_slow(match, token_s)

    def _without_slow(self, match: Match, token_s: float) -> Match:
        far = {key for key in match.headers if not self._store.in_ram(key)}
        tokens = sum(hit.length for hit in match.hits if hit.key in far)
        return match.without(far) if self.loading_s(far) > token_s * tokens else match

    def _continued(self, scope: Scope, ids: IntArray, start: int) -> Hit | None:
        hit = self._index.match_served(scope, ids)
        if hit is None or hit.end < start + ANCHOR_TOKENS:
            return None
        if hit.key in self._served:
            self._served.move_to_end(hit.key)
        return Hit(start, hit.end - start, hit.key, start)

    def keep_served(
        self, header: ChunkHeader, kv_bytes: int, take: Callable[[], StoredRun], *, prompt_tokens: int, fresh: Fresh
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
            room = (
                self._served_bytes
                - kv_bytes
                - sum(old.nbytes for key, old in self._served.items() if key not in leaving)
            )
            for key, other in self._served.items():  # the one used longest ago first
                if room >= 0:
                    break
                if key not in leaving:
                    leaving.append(key)
                    room += other.nbytes
        self.delete(leaving)  # before the new one needs room, lest documents make it
        if self.keep(header, kv_bytes, take) == "kept":
            with self._lock:
                if self._index.get(header.key) is not None:
                    self._served[header.key] = _AsServed(kv_bytes, fresh)

    def clear_served(self) -> None:
        """Forget all prompts as they were served."""
        with self._lock:
            keys = list(self._served)
        self.delete(keys)

    @contextmanager
    def pin(self, keys: Sequence[str]) -> Iterator[dict[str, StoredRun] | None]:
        """KV of all ``keys``, held until the block is left; None if any of them is gone by now."""
        with self._store.pin(keys) as chunks:
            with self._lock:
                headers = [self._index.get(key) for key in keys]
            missing = [
                key
                for key, chunk, header in zip(keys, chunks, headers, strict=True)
                if chunk is None or header is None or not chunk.header.is_same(header)
            ]
            for key in missing:
                self._discard(key)
            yield None if missing else {c.header.key: c.kv for c in chunks if c is not None}

    def keep(self, header: ChunkHeader, kv_bytes: int, take: Callable[[], StoredRun]) -> Kept:
        """Store a chunk; room is made before ``take`` copies anything."""
        expires = None if self._ttl_s is None else time.time() + self._ttl_s
        kept, chunk = self._store.keep(header, kv_bytes, take, expires)
        if chunk is None:
            return kept
        with self._lock:
            self._index.add(header)
            self._note_end(header.key, expires)
        if self.recorder is not None:
            key_norm = 0.0 if self._worth is None else self._worth(chunk).importance
            self.recorder.kept(header, chunk.nbytes, key_norm=key_norm)
        if header.key not in self._store:  # evicted between the two locks
            self._discard(header.key)
        return kept

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
        """Whether the chunk is stored. What the disk should have, and lacks, is sent there again."""
        self._catch_up(header.scope)
        self._store.ensure_on_disk(header)
        return header.key in self._store

    def with_content(self, scope: Scope, tokens: IntArray) -> list[ChunkHeader]:
        """Chunks that hold exactly these tokens."""
        self._catch_up(scope)
        with self._lock:
            return self._index.find_content(scope, tokens)

    def headers(self, scope: Scope) -> list[ChunkHeader]:
        """All chunks of a scope."""
        return self._store.headers(scope)

    def headers_in(self, namespace: str) -> list[ChunkHeader]:
        """All chunks of a tenant, under every fingerprint that the model has had."""
        return self._store.headers_in(namespace)

    def delete(self, keys: Sequence[str]) -> int:
        """Forget chunks in every tier; returns how many there were."""
        if self.recorder is not None:
            self.recorder.dropped(keys)
        deleted = self._store.delete(keys)
        for key in keys:
            self._discard(key)
        return deleted

    def clear(self) -> int:
        """Forget what is in RAM; what is on disk stays there. Returns how many chunks there were."""
        return self._store.clear_ram()

    def close(self) -> None:
        """Write what waits for the disk, close it, and free RAM. What comes later is kept in RAM only."""
        self._store.close()

    def on_disk(self, keys: Sequence[str]) -> int:
        """How many chunks are on disk now; waits until what was kept so far is written, or has failed."""
        return self._store.on_disk(keys)

    def loading_s(self, keys: Iterable[str]) -> float:
        """Seconds that it takes to bring chunks from disk that RAM lacks."""
        return self._store.loading_s(keys)

    def stats(self) -> StoreStats:
        """State of RAM."""
        return self._store.stats()

    def disk_stats(self) -> DiskStats | None:
        """State of the disk; None without one."""
        return self._store.disk_stats()

    @property
    def evictions(self) -> int:
        """Chunks that left the last tier to make room."""
        return self._store.evictions

    def _catch_up(self, scope: Scope) -> None:
        """Bring the index up to date with the clock and with what other processes did on disk."""
        self._expire()
        news = self._store.refresh(scope)
        if not (news.added or news.evicted or news.deleted):
            return
        with self._lock:
            self._index.add_many(header for header, _ in news.added)
            for header, expires in news.added:
                self._note_end(header.key, expires)
        for key in (*news.evicted, *news.deleted):
            if key not in self._store:
                self._discard(key)

    def _expire(self) -> None:
        if not self._ends or self._ends[0][0] > (now := time.time()):
            return
        over = []
        with self._lock:
            while self._ends and self._ends[0][0] <= now:
                end, key = heapq.heappop(self._ends)
                if self._end_of.get(key) == end:  # otherwise it left, and may have been stored again
                    over.append(key)
        self._store.delete(over, expired=True)
        for key in over:
            self._discard(key)

    def _note_end(self, key: str, expires: float | None) -> None:
        if expires is None:
            self._end_of.pop(key, None)
            return
        self._end_of[key] = expires
        heapq.heappush(self._ends, (expires, key))
        if len(self._ends) > 2 * len(self._end_of) + 64:
            self._ends = [(end, name) for name, end in self._end_of.items()]
            heapq.heapify(self._ends)

    def _discard(self, key: str) -> None:
        with self._lock:
            self._index.discard(key)
            self._served.pop(key, None)
            self._end_of.pop(key, None)
