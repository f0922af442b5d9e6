"""Eviction policies beyond LRU: GDSF, LFU, S3-FIFO, and the importance of the KVBoost paper; and which runs by name."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping

from ..config import Eviction
from .duel import Duel
from .eviction import LRU, Entry, Policy

HALF_LIFE = 32  # rise of the clock, in units of one use, by which GDSF counts a use half
GHOSTS = 4  # budgets' worth of evicted chunks that GDSF remembers
RECENT = 8  # chunks that the importance policy does not evict while there are others
SMALL_SHARE = 0.1  # of the budget, for chunks that S3-FIFO has yet to see used again
MAX_CREDIT = 3  # laps that S3-FIFO spares an entry for its uses
_FAR = 1 << 60  # ints, so that ticks beside it keep their last digit


class LFU(Policy):
    """Fewest uses since it was put first. Never forgets, so what was once popular stays."""

    def key(self, entry: Entry) -> float:
        """Uses."""
        return entry.uses


class GDSF(Policy):
    """Greedy dual size frequency: the least seconds saved per byte, times uses, over a clock that rises.

    The clock is the highest key that was evicted. A use lifts an entry to the clock plus what it is worth, so an entry
    that is not used any more is caught up with, however popular it was. Two things are not in the source. Uses fade
    while the clock rises. And what was evicted is remembered by name for a while, so that a chunk that comes back
    continues where it was, which one that is only ever seen once cannot.

    Source: L. Cherkasova, Improving WWW Proxies Performance with Greedy-Dual-Size-Frequency Caching Policy, 1998.

    Args:
        ghost_bytes: size of the evicted chunks that are remembered.
    """

    def __init__(self, ghost_bytes: int = 0) -> None:
        self.clock = 0.0
        self._ghosts: OrderedDict[str, tuple[float, float, int]] = OrderedDict()  # heat, clock and bytes by name
        self._ghost_bytes, self._ghost_bytes_limit = 0, ghost_bytes

    def touch(self, entry: Entry, now: int) -> Iterable[Entry]:
        """Lift the entry to the clock."""
        worth = entry.saved_per_byte
        if entry.uses > 1:
            heat, at = entry.heat, entry.rank - entry.heat * worth
        else:
            heat, at, nbytes = self._ghosts.pop(entry.name, (0.0, self.clock, 0))
            self._ghost_bytes -= nbytes
        if worth > 0:
            heat *= 0.5 ** (max(self.clock - at, 0.0) / (worth * HALF_LIFE))
        entry.heat = min(1 + heat, HALF_LIFE)  # a hotter one would fade faster than the clock rises: its key would fall
        entry.rank = max(self.clock + entry.heat * worth, entry.rank)
        return ()

    def key(self, entry: Entry) -> float:
        """Clock at the last use + uses x seconds saved / bytes."""
        return entry.rank

    def left(self, entry: Entry, *, evicted: bool) -> None:
        """The clock rises to what was evicted."""
        if not evicted:
            return
        at = entry.rank - entry.heat * entry.saved_per_byte
        self.clock = max(self.clock, entry.rank)
        self._ghosts[entry.name] = (entry.heat, at, entry.nbytes)
        self._ghost_bytes += entry.nbytes
        while self._ghost_bytes > self._ghost_bytes_limit:
            self._ghost_bytes -= self._ghosts.popitem(last=False)[1][2]


class S3FIFO(Policy):
    """New entries pass through a small queue, and only those used again in it reach the main one.

    What leaves the small queue unused is remembered by name; if it comes back, it enters the main queue at once. The
    main queue spares an entry one lap for each use, three at most.

    Source: Yang et al., FIFO queues are all you need for cache eviction, SOSP 2023. Sizes are bytes here, not entries.

    Args:
        budget_bytes: of the store.
    """

    def __init__(self, budget_bytes: int) -> None:
        self._small_bytes_limit = int(SMALL_SHARE * budget_bytes)
        self._ghost_bytes_limit = budget_bytes - self._small_bytes_limit
        self._small: OrderedDict[str, Entry] = OrderedDict()
        self._small_bytes = 0
        self._ghosts: OrderedDict[str, int] = OrderedDict()  # bytes by name
        self._ghost_bytes = 0
        self._ticks = 0

    def touch(self, entry: Entry, now: int) -> Iterable[Entry]:
        """Count a use, or let a new entry in; the oldest of a small queue that is too full are due."""
        if entry.uses > 1:
            entry.heat = min(entry.heat + 1, MAX_CREDIT)
            return ()
        self._ticks += 1
        if (nbytes := self._ghosts.pop(entry.name, None)) is not None:
            self._ghost_bytes -= nbytes
            entry.rank = self._ticks
            return ()
        entry.rank = _FAR + self._ticks
        self._small[entry.name] = entry
        self._small_bytes += entry.nbytes
        return self._due()

    def key(self, entry: Entry) -> float:
        """Place in the queue: what is due in the small one, then the main one, then the rest of the small one."""
        return entry.rank

    def spare(self, entry: Entry) -> bool:
        """Whether the entry was used since it came, or since its last lap."""
        if not entry.heat:
            return False
        if entry.rank < 0 or entry.rank > _FAR:
            self._leave_small(entry)
            entry.heat = 0
        else:
            entry.heat -= 1
        self._ticks += 1
        entry.rank = self._ticks
        return True

    def left(self, entry: Entry, *, evicted: bool) -> None:
        """Remember what was evicted unused."""
        main = 0 < entry.rank < _FAR
        self._leave_small(entry)
        if main or not evicted:
            return
        self._ghosts[entry.name] = entry.nbytes
        self._ghost_bytes += entry.nbytes
        while self._ghost_bytes > self._ghost_bytes_limit:
            self._ghost_bytes -= self._ghosts.popitem(last=False)[1]

    def _due(self) -> list[Entry]:
        due = []
        while self._small_bytes > self._small_bytes_limit:
            _, entry = self._small.popitem(last=False)
            self._small_bytes -= entry.nbytes
            entry.rank -= 2 * _FAR
            due.append(entry)
        return due

    def _leave_small(self, entry: Entry) -> None:
        if self._small.pop(entry.name, None) is not None:
            self._small_bytes -= entry.nbytes


class Importance(Policy):
    """Least mean L2 norm of the keys first, the most recently used last, LRU on ties; as the KVBoost paper has it.

    The paper never evicts the recent ones. Here they go when nothing else is left, for the budget is hard. It takes a
    large norm for much attention; others measured the opposite, see docs/store.md.

    Source: S. Unnikrishnan, KVBoost, section 4.4.1; against it: Devoto et al., A simple and effective L2 norm-based
    strategy for KV cache compression, 2024.

    Args:
        recent: how many recently used entries go last.
    """

    def __init__(self, recent: int = RECENT) -> None:
        self._recent: OrderedDict[int, Entry] = OrderedDict()
        self._limit = recent

    def touch(self, entry: Entry, now: int) -> Iterable[Entry]:
        """The entry is recent now, and perhaps another no longer."""
        self._recent[id(entry)] = entry
        self._recent.move_to_end(id(entry))
        entry.rank = _FAR + now
        if len(self._recent) <= self._limit:
            return ()
        _, oldest = self._recent.popitem(last=False)
        oldest.rank = oldest.worth.importance
        return (oldest,)

    def key(self, entry: Entry) -> float:
        """The importance; that of recent entries is beyond all others."""
        return entry.rank

    def left(self, entry: Entry, *, evicted: bool) -> None:
        """It is not recent any more."""
        self._recent.pop(id(entry), None)


POLICIES: Mapping[Eviction, Callable[[int], Policy]] = {
    "gdsf": lambda budget_bytes: Duel(budget_bytes, [LRU(), GDSF(GHOSTS * budget_bytes)]),
    "lru": lambda budget_bytes: LRU(),
    "s3fifo": S3FIFO,
    "importance": lambda budget_bytes: Importance(),
}


def policy_of(eviction: Eviction, budget_bytes: int) -> Policy:
    """A new policy for one store of so many bytes."""
    return POLICIES[eviction](budget_bytes)
