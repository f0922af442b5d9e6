"""From candidate windows to hits: equal runs along diagonals, long runs first."""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .chunks import IntArray
from .config import ANCHOR_TOKENS as WINDOW

ROUND = 256  # diagonals compared before what they cover is taken out of the rest
ROUNDS = 4
MAX_RUNS = 4096

_HALF = np.int64(1 << 31)
_SCATTER = np.int64(0x9E3779B1)

Column = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Candidates:
    """Places where a window of the prompt may equal a window of a stored chunk; equal hashes only, unverified.

    Attributes:
        position: window start in the prompt, ``(n,)``.
        slot: the chunk's number, ``(n,)``.
        offset: window start in the chunk, ``(n,)``.
        rarity: 1 for a window stored once and seen once in the prompt, less for common ones, ``(n,)``.
    """

    position: Column
    slot: Column
    offset: Column
    rarity: npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Diagonals:
    """Ways to lay a chunk beside the prompt, most telling first; token ``i`` of the prompt beside ``i - shift``.

    Attributes:
        slot: the chunk, ``(n,)``.
        shift: position in the prompt of the chunk's first token, may be negative, ``(n,)``.
        first: start of the first candidate window in the prompt, ``(n,)``.
        last: end of the last candidate window in the prompt, ``(n,)``.
    """

    slot: Column
    shift: Column
    first: Column
    last: Column

    def __len__(self) -> int:
        return len(self.slot)

    def pairs(self) -> list[tuple[int, int]]:
        """Slot and shift of each."""
        return list(zip(self.slot.tolist(), self.shift.tolist(), strict=True))

    def where(self, keep: npt.NDArray[np.bool_] | slice) -> Diagonals:
        """The diagonals that are kept, in the same order."""
        return Diagonals(self.slot[keep], self.shift[keep], self.first[keep], self.last[keep])


@dataclass(frozen=True, slots=True, order=True)
class Run:
    """An equal run. Sorts by what is taken first: long runs, then the preferred chunk, then the leftmost.

    Attributes:
        shortness: minus the length, tokens.
        rank: minus the preference of the chunk.
        start: position in the prompt.
        slot: the chunk.
        shift: position in the prompt of the chunk's first token.
    """

    shortness: int
    rank: int
    start: int
    slot: int
    shift: int

    @property
    def end(self) -> int:
        """Position after the run in the prompt."""
        return self.start - self.shortness


def diagonals(candidates: Candidates, size: int, lengths: Column, preference: Column) -> Diagonals:
    """Group candidates that lie on one diagonal, the most telling diagonal first.

    Rare windows count most, so that the normal text of a document speaks before boilerplate and repetitions do.

    Args:
        candidates: what the anchors found; at least one.
        size: tokens of the prompt.
        lengths: tokens per slot.
        preference: per slot, higher is better.
    """
    code = (candidates.slot << 32) | (candidates.position - candidates.offset + _HALF)
    order = np.argsort(code, kind="stable")
    code = code[order]
    starts = np.flatnonzero(np.append(True, code[1:] != code[:-1]))
    position = candidates.position[order]
    slot, shift = code[starts] >> 32, (code[starts] & np.int64(0xFFFFFFFF)) - _HALF
    overlap = np.minimum(shift + lengths[slot], size) - np.maximum(shift, 0)
    telling = np.add.reduceat(candidates.rarity[order], starts)
    # Scattered, so that where all are alike each round of `equal_runs` reaches every part of the prompt.
    scattered = shift * _SCATTER & np.int64(0xFFFFFFFF)
    best = np.lexsort((-preference[slot], scattered, -overlap, -telling))
    first = np.minimum.reduceat(position, starts)
    last = np.maximum.reduceat(position, starts) + WINDOW
    return Diagonals(slot[best], shift[best], first[best], last[best])


def equal_runs(found: Diagonals, ids: IntArray, tokens_of: Callable[[int], IntArray], preference: Column) -> list[Run]:
    """All equal runs of at least `WINDOW` tokens on the diagonals, best first, verified id by id.

    The first `ROUND` diagonals are always compared. Beyond them, those whose windows are covered already are left
    out, and the work ends after `ROUNDS` rounds and `MAX_RUNS` runs.
    """
    rows = np.empty((0, 4), dtype=np.int64)
    for _ in range(ROUNDS):
        now, found = found.where(slice(ROUND)), found.where(slice(ROUND, None))
        rows = np.concatenate([rows, *(_runs_on(slot, shift, ids, tokens_of(slot)) for slot, shift in now.pairs())])
        if not len(found) or len(rows) >= MAX_RUNS:
            break
        uncovered = _uncovered_before(rows, len(ids))
        found = found.where(uncovered[found.last] > uncovered[found.first])
    start, end, slot, shift = rows.T
    columns = np.stack((start - end, -preference[slot], start, slot, shift), axis=1)
    best = np.lexsort(columns[:, 2::-1].T)[:MAX_RUNS]
    return [Run(*row) for row in columns[best].tolist()]


def disjoint(runs: list[Run]) -> list[Run]:
    """Take long runs first, trim the others; what is left of a run counts from `WINDOW` tokens. In prompt order."""
    heap = list(runs)
    heapq.heapify(heap)
    starts: list[int] = []
    ends: list[int] = []
    taken: list[Run] = []
    while heap:
        run = heapq.heappop(heap)
        parts = _free_parts(run, starts, ends)
        if parts == [(run.start, run.end)]:
            at = bisect_left(starts, run.start)
            starts.insert(at, run.start)
            ends.insert(at, run.end)
            taken.insert(at, run)
            continue
        for start, end in parts:
            heapq.heappush(heap, Run(start - end, run.rank, start, run.slot, run.shift))
    return taken


def _runs_on(slot: int, shift: int, ids: IntArray, tokens: IntArray) -> Column:
    """Rows of start, end, slot, shift: the long runs of one diagonal, ``(n, 4)``."""
    low, high = max(shift, 0), min(shift + len(tokens), len(ids))
    unequal = np.ones(high - low + 2, dtype=bool)
    np.not_equal(ids[low:high], tokens[low - shift : high - shift], out=unequal[1:-1])
    breaks = np.flatnonzero(unequal) + low
    long = np.flatnonzero(breaks[1:] - breaks[:-1] > WINDOW)
    rows = np.empty((len(long), 4), dtype=np.int64)
    rows[:, 0], rows[:, 1], rows[:, 2], rows[:, 3] = breaks[long], breaks[long + 1] - 1, slot, shift
    return rows


def _uncovered_before(rows: Column, size: int) -> Column:
    """For each position, the count of positions before it that lie in no run, ``(size + 1,)``."""
    steps = np.bincount(rows[:, 0], minlength=size + 1) - np.bincount(rows[:, 1], minlength=size + 1)
    return np.append(0, np.cumsum(np.cumsum(steps[:-1]) == 0))


def _free_parts(run: Run, starts: list[int], ends: list[int]) -> list[tuple[int, int]]:
    parts = []
    start = run.start
    for at in range(bisect_right(ends, run.start), len(starts)):
        if starts[at] >= run.end:
            break
        parts.append((start, starts[at]))
        start = ends[at]
    parts.append((start, run.end))
    return [(s, e) for s, e in parts if e - s >= WINDOW]
