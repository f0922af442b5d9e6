"""Chunks in RAM: a hard byte budget, pins, eviction by policy."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Generic, cast

import numpy as np

from ..chunks import ChunkHeader, IntArray, Scope
from .eviction import LRU, Entry, EvictionQueue, Policy, Worth
from .tier import KV, Chunk, StoreStats


@dataclass(slots=True, eq=False)
class _Slot(Entry, Generic[KV]):
    chunk: Chunk[KV] | None = None
    pins: int = 0


class Reservation:
    """Bytes set aside for chunks that are being computed. Leaving the `with` block gives back what is left."""

    def __init__(self, nbytes: int, give_back: Callable[[Reservation], None]) -> None:
        self._left_bytes = nbytes
        self._give_back = give_back

    @property
    def left_bytes(self) -> int:
        """Bytes not yet used by a `put`."""
        return self._left_bytes

    def release(self) -> None:
        """Give back what is left; more calls do nothing."""
        self._give_back(self)

    def __enter__(self) -> Reservation:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.release()


class MemoryStore(Generic[KV]):
    """Tier in RAM that never holds more than its budget, reservations included.

    Lock order: the store's lock comes first. `on_evict` runs under it, once for every chunk that leaves (evicted,
    deleted, cleared), in the order in which they leave, and may take a lock of its own. So never call the store while
    holding a lock that `on_evict` takes. `on_evict` must not raise and must not put, pin or delete.

    Args:
        budget_bytes: limit; 0 stores nothing.
        policy: which entry leaves first; a policy serves one store.
        on_evict: told of every chunk that leaves.
        worth: what a chunk that is put is worth to the policy; asked once for each, without the store's lock.
    """

    def __init__(
        self,
        budget_bytes: int,
        policy: Policy | None = None,
        on_evict: Callable[[ChunkHeader], None] | None = None,
        worth: Callable[[Chunk[KV]], Worth] | None = None,
    ) -> None:
        if budget_bytes < 0:
            raise ValueError(f"budget_bytes is {budget_bytes}; it must be 0 or more")
        self._budget_bytes = budget_bytes
        self._policy = LRU() if policy is None else policy
        self._on_evict = on_evict
        self._worth = worth
        self._lock = threading.RLock()
        self._slots: dict[str, _Slot[KV]] = {}
        self._queue: EvictionQueue[_Slot[KV]] = EvictionQueue(self._policy)
        self._now = 0
        self._stored_bytes = 0
        self._reserved_bytes = 0
        self._pinned_bytes = 0
        self._evictions = 0
        self._rejections = 0

    @property
    def nbytes(self) -> int:
        """Bytes of stored chunks, also of deleted ones that are still pinned."""
        return self._stored_bytes

    def stats(self) -> StoreStats:
        """State and totals, all of one moment."""
        with self._lock:
            return StoreStats(
                chunks=len(self._slots),
                stored_bytes=self._stored_bytes,
                reserved_bytes=self._reserved_bytes,
                pinned_bytes=self._pinned_bytes,
                budget_bytes=self._budget_bytes,
                evictions=self._evictions,
                rejections=self._rejections,
            )

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, key: object) -> bool:
        return key in self._slots

    def get(self, key: str) -> Chunk[KV] | None:
        """The chunk, or None. The chunk stays valid in the caller's hands, but only a pin keeps it stored."""
        with self._lock:
            slot = self._slots.get(key)
            return None if slot is None else self._use(slot).chunk

    def scan(self, scope: Scope | None = None) -> Iterator[ChunkHeader]:
        """Headers of all chunks, or of one scope, as they were when `scan` was called."""
        with self._lock:
            headers = [slot.chunk.header for slot in self._slots.values() if slot.chunk is not None]
        return iter(headers if scope is None else [header for header in headers if header.scope == scope])

    def reserve(self, nbytes: int) -> Reservation | None:
        """Set bytes aside before computing what will fill them.

        Evicts as much as it takes. When even that cannot make room, nothing is evicted and None comes back.
        """
        if nbytes < 0:
            raise ValueError(f"nbytes is {nbytes}; it must be 0 or more")
        with self._lock:
            if not self._make_room(nbytes):
                self._rejections += 1
                return None
            self._reserved_bytes += nbytes
            return Reservation(nbytes, self._release)

    def put(self, chunk: Chunk[KV], reservation: Reservation | None = None) -> bool:
        """Keep a chunk, in reserved bytes as far as they reach.

        Returns:
            True if the store holds the chunk now; a chunk it already held counts as used. False if there is no room,
            or if the key belongs to other tokens.
        """
        header, nbytes = chunk.header, chunk.nbytes
        worth = Worth() if self._worth is None else self._worth(chunk)
        with self._lock:
            present = self._slots.get(header.key)
            if present is not None:
                # Keys are not collision-proof against an attacker: KV must never answer for other tokens.
                if present.chunk is None or not _same(present.chunk.header, header):
                    self._rejections += 1
                    return False
                self._use(present)
                return True
            reserved = 0 if reservation is None else min(nbytes, reservation._left_bytes)
            if not self._make_room(nbytes - reserved):
                self._rejections += 1
                return False
            if reservation is not None:
                reservation._left_bytes -= reserved
                self._reserved_bytes -= reserved
            slot = _Slot(nbytes=nbytes, created=self._now, name=header.key, worth=worth, chunk=chunk)
            self._slots[header.key] = slot
            self._stored_bytes += nbytes
            self._queue.push(self._use(slot))
            return True

    @contextmanager
    def pin(self, keys: Sequence[str]) -> Iterator[list[Chunk[KV] | None]]:
        """Hold chunks, all looked up in one moment; None stands for what is not stored.

        Until the block is left they are neither evicted nor freed. Pins nest.
        """
        with self._lock:
            slots = [self._slots.get(key) for key in keys]
            held = [self._hold(slot) for slot in slots if slot is not None]
            chunks = [None if slot is None else slot.chunk for slot in slots]
        try:
            yield chunks
        finally:
            with self._lock:
                for slot in held:
                    self._let_go(slot)

    def delete(self, key: str) -> bool:
        """Hide a chunk at once; its bytes are freed when nobody pins it any more."""
        with self._lock:
            slot = self._slots.get(key)
            if slot is not None:
                self._remove(slot, evicted=False)
            return slot is not None

    def clear(self, scope: Scope | None = None) -> int:
        """Delete all chunks, or those of one scope; returns how many."""
        with self._lock:
            headers = list(self.scan(scope))
            return sum(self.delete(header.key) for header in headers)

    # Below here the caller holds the lock.

    def _make_room(self, nbytes: int) -> bool:
        if nbytes > self._budget_bytes - self._reserved_bytes - self._pinned_bytes:
            return False
        while self._stored_bytes + self._reserved_bytes + nbytes > self._budget_bytes:
            slot = self._queue.pop()
            if slot is None:  # cannot happen: what is neither pinned nor queued is not counted
                return False
            if slot.pins == 0 and slot.chunk is not None:
                self._evictions += 1
                self._remove(slot, evicted=True)
        return True

    def _use(self, slot: _Slot[KV]) -> _Slot[KV]:
        self._now += 1
        slot.last_used = self._now
        slot.uses += 1
        for fell in self._policy.touch(slot, self._now):
            self._queue.lower(cast("_Slot[KV]", fell))
        return slot

    def _hold(self, slot: _Slot[KV]) -> _Slot[KV]:
        if slot.pins == 0:
            self._pinned_bytes += slot.nbytes
        slot.pins += 1
        return self._use(slot)

    def _let_go(self, slot: _Slot[KV]) -> None:
        slot.pins -= 1
        if slot.pins:
            return
        self._pinned_bytes -= slot.nbytes
        if slot.chunk is None:
            self._stored_bytes -= slot.nbytes
        else:
            self._queue.push(slot)

    def _remove(self, slot: _Slot[KV], *, evicted: bool) -> None:
        del self._slots[slot.name]
        self._queue.drop(slot)
        self._policy.left(slot, evicted=evicted)
        chunk, slot.chunk = slot.chunk, None
        if slot.pins == 0:
            self._stored_bytes -= slot.nbytes
        if self._on_evict is not None and chunk is not None:
            self._on_evict(chunk.header)

    def _release(self, reservation: Reservation) -> None:
        with self._lock:
            self._reserved_bytes -= reservation._left_bytes
            reservation._left_bytes = 0


def _same(a: ChunkHeader, b: ChunkHeader) -> bool:
    return a.scope == b.scope and a.base == b.base and _same_ids(a.tokens, b.tokens) and _same_ids(a.history, b.history)


def _same_ids(a: IntArray | None, b: IntArray | None) -> bool:
    if a is None or b is None:
        return a is b
    return np.array_equal(a, b)
