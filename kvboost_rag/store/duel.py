"""Follows whichever of several policies would have saved more lately."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .eviction import Entry, EvictionQueue, Policy

MARGIN = 1.02  # another policy than the first must have saved so many times more before it is followed


class Shadow:
    """What a store of the same budget would hold under one policy: names and sizes only.

    Attributes:
        saved: what its hits were worth, fading.
    """

    def __init__(self, policy: Policy, budget_bytes: int) -> None:
        self.saved = 0.0
        self._policy, self._budget_bytes = policy, budget_bytes
        self._queue: EvictionQueue[Entry] = EvictionQueue(policy)
        self._held: dict[str, Entry] = {}
        self._bytes = 0
        self._now = 0

    def ask(self, real: Entry) -> float:
        """Note a use as a store would; the key that the policy gives the entry."""
        self._now += 1
        entry = self._held.get(real.name)
        if entry is not None:
            self.saved += real.saved_per_byte * real.nbytes
        else:
            entry = Entry(real.nbytes, self._now, name=real.name, worth=real.worth)
            while self._bytes + entry.nbytes > self._budget_bytes and (oldest := self._queue.pop()) is not None:
                self._forget(oldest, evicted=True)
            self._held[entry.name] = entry
            self._bytes += entry.nbytes
        entry.uses += 1
        entry.last_used = self._now
        for fell in self._policy.touch(entry, self._now):
            self._queue.lower(fell)
        self._queue.push(entry)
        return self._policy.key(entry)

    def delete(self, name: str) -> None:
        """Note that a chunk was deleted."""
        if (entry := self._held.get(name)) is not None:
            self._queue.drop(entry)
            self._forget(entry, evicted=False)

    def _forget(self, entry: Entry, *, evicted: bool) -> None:
        del self._held[entry.name]
        self._bytes -= entry.nbytes
        self._policy.left(entry, evicted=evicted)


class Duel(Policy):
    """Keeps a shadow of the store under each policy and gives entries the keys of the one that leads.

    No single rule ages right for all traffic: counting uses wins where popularity lasts, recency where it does not, as
    in conversations that end. Each time as many bytes were asked for as the store holds, the shadows are compared; what
    they saved before counts half as much from then on. It costs some microseconds a use, and no KV.

    Source: the idea of following the expert with the least regret is LeCaR's (Vietri et al., HotStorage 2018); whole
    shadows instead of its samples are affordable here, since chunks are few and dear.

    Args:
        budget_bytes: of the store.
        policies: whose keys depend on an entry's own uses and on the policy's clock alone, and never fall. The first
            leads until another is clearly better, and again as soon as it is better.
    """

    def __init__(self, budget_bytes: int, policies: Sequence[Policy]) -> None:
        self.leader = 0
        self._budget_bytes = budget_bytes
        self._shadows = [Shadow(policy, budget_bytes) for policy in policies]
        self._entries: dict[str, tuple[Entry, list[float]]] = {}
        self._asked_bytes = 0

    def touch(self, entry: Entry, now: int) -> Iterable[Entry]:
        """Note a use in each shadow. Now and then another policy takes the lead, and every key changes."""
        keys = [shadow.ask(entry) for shadow in self._shadows]
        self._entries[entry.name] = entry, keys
        entry.rank = keys[self.leader]
        self._asked_bytes += entry.nbytes
        if self._asked_bytes < self._budget_bytes:
            return ()
        self._asked_bytes = 0
        before, self.leader = self.leader, self._best()
        for shadow in self._shadows:
            shadow.saved /= 2
        if self.leader == before:
            return ()
        for held, held_keys in self._entries.values():
            held.rank = held_keys[self.leader]
        return [held for held, _ in self._entries.values()]

    def key(self, entry: Entry) -> float:
        """What the leading policy says."""
        return entry.rank

    def left(self, entry: Entry, *, evicted: bool) -> None:
        """A shadow decides for itself what it evicts, but holds nothing that was deleted."""
        del self._entries[entry.name]
        if not evicted:
            for shadow in self._shadows:
                shadow.delete(entry.name)

    def _best(self) -> int:
        saved = [shadow.saved for shadow in self._shadows]
        best = max(range(len(saved)), key=saved.__getitem__)
        enough = saved[self.leader] * (MARGIN if best else 1.0)
        return best if saved[best] > enough else self.leader
