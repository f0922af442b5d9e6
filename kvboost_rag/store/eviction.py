"""Which entry leaves first: a policy gives each entry a sort key, a lazy heap finds the lowest."""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar


@dataclass(slots=True, eq=False)
class Entry:
    """What a policy may look at. Times are ticks of the store's own clock, which only counts uses.

    Attributes:
        nbytes: size.
        created: when it was put.
        last_used: when it was last put, got or pinned.
        uses: how often that happened.
        rank: free for the policy.
        queued: whether it waits for eviction; only `EvictionQueue` writes it.
    """

    nbytes: int
    created: int
    last_used: int = 0
    uses: int = 0
    rank: float = 0.0
    queued: bool = False


class Policy(Protocol):
    """Order of eviction. Called under the store's lock.

    A key changes only in `touch`, and only upwards; that is what lets the queue refresh keys late.
    """

    def touch(self, entry: Entry, now: int) -> None:
        """Note a use; the entry's `last_used` and `uses` are already up to date."""
        ...

    def key(self, entry: Entry) -> float:
        """Sort key; the lowest is evicted first."""
        ...

    def evicted(self, entry: Entry) -> None:
        """Note that the entry was evicted, for policies that age."""
        ...


class LRU:
    """Least recently used first."""

    def touch(self, entry: Entry, now: int) -> None:
        """Nothing to note beyond `last_used`."""

    def key(self, entry: Entry) -> float:
        """Tick of the last use."""
        return entry.last_used

    def evicted(self, entry: Entry) -> None:
        """LRU does not age."""


E = TypeVar("E", bound=Entry)


class EvictionQueue(Generic[E]):
    """Entries by policy key; a push costs O(log n), as does a pop, averaged over the uses before it.

    A use does not touch the heap. `pop` compares the key a node was pushed with against the entry's present key
    and sinks the node if that has grown.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._heap: list[tuple[float, int, E]] = []
        self._ticket = 0
        self._dead = 0

    def __len__(self) -> int:
        return len(self._heap) - self._dead

    def push(self, entry: E) -> None:
        """Let the entry wait for eviction; nothing happens if it already does."""
        if not entry.queued:
            entry.queued = True
            heapq.heappush(self._heap, self._node(entry))

    def drop(self, entry: E) -> None:
        """Take the entry out for good; it must not be pushed again."""
        if not entry.queued:
            return
        entry.queued = False
        self._dead += 1
        # Dead nodes keep their entry alive, so they may never outnumber the living by much.
        if self._dead > len(self._heap) // 2 + 16:
            self._heap = [node for node in self._heap if node[2].queued]
            heapq.heapify(self._heap)
            self._dead = 0

    def pop(self) -> E | None:
        """Take out the entry with the lowest key."""
        while self._heap:
            key, _, entry = self._heap[0]
            if not entry.queued:
                heapq.heappop(self._heap)
                self._dead -= 1
            elif self._policy.key(entry) > key:
                heapq.heapreplace(self._heap, self._node(entry))
            else:
                heapq.heappop(self._heap)
                entry.queued = False
                return entry
        return None

    def _node(self, entry: E) -> tuple[float, int, E]:
        self._ticket += 1
        return self._policy.key(entry), self._ticket, entry
