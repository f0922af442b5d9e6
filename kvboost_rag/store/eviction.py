"""Which entry leaves first: a policy gives each entry a sort key, a lazy heap finds the lowest."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar


@dataclass(frozen=True, slots=True)
class Worth:
    """What a chunk is worth to a store.

    Attributes:
        saved_s: seconds that one use saves: computing it, less loading it, less the repair to expect. None if nobody
            measured; then every byte counts as equally dear. A store should know it of all its chunks or of none.
        importance: mean L2 norm of the keys per token, head and layer; only `policies.Importance` looks at it.
    """

    saved_s: float | None = None
    importance: float = 0.0


@dataclass(slots=True, eq=False)
class Entry:
    """What a policy may look at. Times are ticks of the store's own clock, which only counts uses.

    Attributes:
        nbytes: size.
        created: when it was put.
        last_used: when it was last put, got or pinned.
        uses: how often that happened.
        name: key of the chunk, for policies that remember what left.
        worth: see there.
        rank, heat: free for the policy.
        queued: whether it waits for eviction; only `EvictionQueue` writes it.
        ticket: which node of the heap is the entry's; only `EvictionQueue` writes it.
    """

    nbytes: int
    created: int
    last_used: int = 0
    uses: int = 0
    name: str = ""
    worth: Worth = Worth()
    rank: float = 0.0
    heat: float = 0.0
    queued: bool = False
    ticket: int = 0

    @property
    def saved_per_byte(self) -> float:
        """Seconds that one use saves, per byte held; 1 for all where nobody measured."""
        if self.worth.saved_s is None:
            return 1.0
        return max(self.worth.saved_s, 0.0) / max(self.nbytes, 1)


class Policy:
    """Order of eviction. Called under the store's lock; a policy serves one store.

    Subclasses give a `key` and override what else they need. A key may change only in `touch`, `spare` and `left`. It
    may grow at any of them without notice, which is what lets the queue refresh keys late; `touch` names the entries
    whose key fell.
    """

    def touch(self, entry: Entry, now: int) -> Iterable[Entry]:
        """Note a use; the entry's `last_used` and `uses` are already up to date. At the first, `uses` is 1.

        Returns:
            Entries, perhaps others than this one, that are to leave sooner than they were.
        """
        return ()

    def key(self, entry: Entry) -> float:
        """Sort key; the lowest is evicted first, and of equal ones the one that waits longest."""
        raise NotImplementedError

    def spare(self, entry: Entry) -> bool:
        """Whether an entry with the lowest key stays this once. Its key must have grown then."""
        return False

    def left(self, entry: Entry, *, evicted: bool) -> None:
        """Note that an entry is gone: evicted to make room, or deleted."""


class LRU(Policy):
    """Least recently used first."""

    def key(self, entry: Entry) -> float:
        """Tick of the last use."""
        return entry.last_used


E = TypeVar("E", bound=Entry)


class EvictionQueue(Generic[E]):
    """Entries by policy key; a push costs O(log n), as does a pop, averaged over the uses before it.

    A use does not touch the heap unless the key falls. `pop` compares the key a node was pushed with against the
    entry's present key and sinks the node if that has grown.
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
        """Take the entry out; it may be pushed again."""
        if entry.queued:
            entry.queued = False
            self._bury()

    def lower(self, entry: E) -> None:
        """Note that the key of an entry fell; nothing happens if it does not wait."""
        if entry.queued:
            heapq.heappush(self._heap, self._node(entry))  # under a new ticket: the old node is dead
            self._bury()

    def pop(self) -> E | None:
        """Take out the entry with the lowest key that the policy does not spare."""
        while self._heap:
            key, ticket, entry = self._heap[0]
            if not self._lives(ticket, entry):
                heapq.heappop(self._heap)
                self._dead -= 1
            elif self._policy.key(entry) > key or self._policy.spare(entry):
                heapq.heapreplace(self._heap, self._node(entry))
            else:
                heapq.heappop(self._heap)
                entry.queued = False
                return entry
        return None

    def _bury(self) -> None:
        self._dead += 1
        # Dead nodes keep their entry alive, so they may never outnumber the living by much.
        if self._dead > len(self._heap) // 2 + 16:
            self._heap = [node for node in self._heap if self._lives(node[1], node[2])]
            heapq.heapify(self._heap)
            self._dead = 0

    @staticmethod
    def _lives(ticket: int, entry: E) -> bool:
        return entry.queued and entry.ticket == ticket

    def _node(self, entry: E) -> tuple[float, int, E]:
        self._ticket += 1
        entry.ticket = self._ticket
        return self._policy.key(entry), self._ticket, entry
