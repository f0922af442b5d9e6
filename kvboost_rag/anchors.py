"""Anchors: short windows of stored chunks, found again in a prompt by hash.

Like rsync: windows of `WINDOW` tokens are registered every `STRIDE` tokens of a chunk, and every window of a
prompt is looked up in one vectorised pass. A run of ``WINDOW + STRIDE`` equal tokens always holds a registered
window, wherever it stands in the chunk and in the prompt.

The table is made of flat integer columns, about 45 bytes per anchor: a bucket chain of *groups* (one group per
distinct window) and, per group, a doubly linked list of *postings* (chunk, offset), latest first. Rows that become
free are used again, so adding and removing leaves nothing behind.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from .chunks import IntArray
from .config import ANCHOR_TOKENS
from .runs import Candidates, Column

WINDOW = ANCHOR_TOKENS
STRIDE = 8
PER_WINDOW = 8  # chunks looked at per window, latest first: boilerplate shared by thousands must stay cheap
PER_CHUNK = 2  # postings of one chunk per window: its first and its last place, for text that repeats itself
MAX_CHAIN = 256  # groups per bucket; beyond it somebody makes hashes collide, and loses only these anchors

_HASH, _LINK, _FIRST, _COUNT = range(4)  # of a group: hash, next in bucket, latest posting, postings
_SLOT, _OFFSET, _NEXT, _PREVIOUS, _GROUP = range(5)  # of a posting
_NONE = -1
_BASE = 0x9E3779B97F4A7C15
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)

HashArray = npt.NDArray[np.uint64]
Rows = npt.NDArray[np.int32]


def window_hashes(ids: IntArray) -> Rows:
    """Hash of every window of `WINDOW` tokens, int32 ``(max(0, len(ids) - WINDOW + 1),)``.

    A polynomial over 64 bits, folded to 32: false matches are rare, and the ids decide anyway.
    """
    if len(ids) < WINDOW:
        return np.empty(0, dtype=np.int32)
    h = _mixed((ids.astype(np.uint64) + np.uint64(1)) * np.uint64(_BASE))
    width = 1
    while width < WINDOW:
        power = np.uint64(pow(_BASE, width, 1 << 64))
        h = h[:-width] * power + h[width:]
        width *= 2
    return _mixed(h).astype(np.uint32).view(np.int32)


def anchor_offsets(tokens: int) -> list[int]:
    """Where the registered windows of a chunk begin: every `STRIDE` tokens, and the last window."""
    last = tokens - WINDOW
    if last < 0:
        return []
    offsets = list(range(0, last + 1, STRIDE))
    return offsets if offsets[-1] == last else [*offsets, last]


class _Pool:
    """Rows of small integers; a freed row is handed out again before a new one."""

    def __init__(self, columns: int) -> None:
        self.rows: Rows = np.zeros((64, columns), dtype=np.int32)
        self.used = 0
        self._free = array("i")

    def take(self, *values: int) -> int:
        if self._free:
            row = self._free.pop()
        else:
            row = self.used
            self.used += 1
            if row == len(self.rows):
                # Not a concatenation: fresh zeros cost nothing until they are used.
                larger = np.zeros((2 * row, self.rows.shape[1]), dtype=np.int32)
                larger[:row] = self.rows
                self.rows = larger
        self.rows[row] = values
        return row

    def take_many(self, count: int) -> Rows:
        """Rows to be filled by the caller, freed ones first."""
        freed = min(count, len(self._free))
        rows = [self._free.pop() for _ in range(freed)]
        first, self.used = self.used, self.used + count - freed
        if self.used > len(self.rows):
            larger = np.zeros((max(2 * len(self.rows), self.used), self.rows.shape[1]), dtype=np.int32)
            larger[:first] = self.rows[:first]
            self.rows = larger
        return np.concatenate([np.array(rows, np.int32), np.arange(first, self.used, dtype=np.int32)])

    def free(self, row: int) -> None:
        self._free.append(row)


class AnchorTable:
    """Hash table from windows to the chunks that hold them. Slots are small numbers chosen by the caller."""

    def __init__(self) -> None:
        self._heads: Rows = np.full(64, _NONE, dtype=np.int32)
        self._groups = _Pool(4)
        self._postings = _Pool(5)
        self._chunks: dict[int, tuple[IntArray, array[int]]] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of the columns."""
        return self._heads.nbytes + self._groups.rows.nbytes + self._postings.rows.nbytes

    def add(self, slot: int, tokens: IntArray) -> None:
        """Register the windows of a chunk of at least `WINDOW` tokens."""
        offsets = anchor_offsets(len(tokens))
        hashes = window_hashes(tokens)[offsets].tolist()
        postings = array("i")
        self._chunks[slot] = (tokens, postings)
        for offset, value in zip(offsets, hashes, strict=True):
            group = self._group_of(value, tokens[offset : offset + WINDOW].tobytes())
            if group != _NONE:
                self._post(group, slot, offset, postings)

    def add_many(self, chunks: Sequence[tuple[int, IntArray]]) -> None:
        """`add` for many chunks, which finds the same. Windows that are there once only are registered all at once."""
        tokens = np.concatenate([ids for _, ids in chunks]) if chunks else np.empty(0, np.int32)
        lengths = np.array([len(ids) for _, ids in chunks], dtype=np.int64)
        last = lengths - WINDOW
        counts = np.where(last < 0, 0, last // STRIDE + 1 + (last % STRIDE > 0))
        at = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        offsets = np.minimum(at * STRIDE, np.repeat(last, counts))
        starts = np.repeat(np.cumsum(lengths) - lengths, counts)
        values = window_hashes(tokens)[starts + offsets]
        for slot, ids in chunks:
            self._chunks[slot] = (ids, array("i"))
        plain = self._are_new(values)
        slots = np.repeat(np.array([slot for slot, _ in chunks], dtype=np.int64), counts)
        self._insert(values[plain], slots[plain], offsets[plain])
        for value, slot, offset in zip(*(c[~plain].tolist() for c in (values, slots, offsets)), strict=True):
            ids, postings = self._chunks[slot]
            group = self._group_of(value, ids[offset : offset + WINDOW].tobytes())
            if group != _NONE:
                self._post(group, slot, offset, postings)

    def _are_new(self, values: Rows) -> npt.NDArray[np.bool_]:
        """Which hashes are not in the table, are there once here, and do not crowd a bucket."""
        _, inverse, times = np.unique(values, return_inverse=True, return_counts=True)
        new = times[inverse] == 1
        new[self._groups_in(values)[0]] = False
        buckets = max(64, 1 << (self._groups.used + len(values)).bit_length())
        _, inverse, times = np.unique(values & (buckets - 1), return_inverse=True, return_counts=True)
        fits: npt.NDArray[np.bool_] = new & (times[inverse] < MAX_CHAIN // 4)
        return fits

    def _insert(self, values: Rows, slots: Column, offsets: Column) -> None:
        """Register windows that `_are_new`; rows of one slot lie together."""
        if not len(values):
            return
        groups, postings = self._groups.take_many(len(values)), self._postings.take_many(len(values))
        none, one = np.full(len(values), _NONE), np.ones(len(values), dtype=np.int64)
        self._groups.rows[groups] = np.stack((values, none, postings, one), axis=1)
        self._postings.rows[postings] = np.stack((slots, offsets, none, none, groups), axis=1)
        begin = 0
        for end in (np.flatnonzero(np.append(slots[1:] != slots[:-1], True)) + 1).tolist():
            self._chunks[int(slots[begin])][1].frombytes(postings[begin:end].tobytes())
            begin = end
        if self._groups.used > len(self._heads):
            self._rehash()
            return
        bucket = values & (len(self._heads) - 1)
        order = np.argsort(bucket, kind="stable")
        bucket, groups = bucket[order], groups[order]
        changes = bucket[1:] != bucket[:-1]
        following = np.where(np.append(changes, True), self._heads[bucket], np.append(groups[1:], _NONE))
        self._groups.rows[groups, _LINK] = following
        begins = np.append(True, changes)
        self._heads[bucket[begins]] = groups[begins]

    def remove(self, slot: int) -> None:
        """Forget a chunk; the slot may be used again."""
        for posting in self._chunks.pop(slot)[1]:
            self._unpost(posting)

    def lookup(self, ids: IntArray) -> Candidates:
        """Look up every window of ``ids``; per distinct window, the `PER_WINDOW` latest postings."""
        position, group = self._groups_in(window_hashes(ids))
        _, inverse, seen = np.unique(group, return_inverse=True, return_counts=True)
        rarity = 1.0 / (seen[inverse] * self._groups.rows[group, _COUNT].astype(np.float64))
        rows = self._postings.rows
        posting, source = self._groups.rows[group, _FIRST], np.arange(len(group))
        postings, sources = [posting], [source]
        for _ in range(PER_WINDOW - 1):
            posting = rows[posting, _NEXT]
            more = posting != _NONE
            posting, source = posting[more], source[more]
            if not len(posting):
                break
            postings.append(posting)
            sources.append(source)
        found, s = rows[np.concatenate(postings)].astype(np.int64), np.concatenate(sources)
        return Candidates(position[s], found[:, _SLOT], found[:, _OFFSET], rarity[s])

    def _groups_in(self, hashes: Rows) -> tuple[Column, Rows]:
        """Window positions and the groups with their hash; more than one where hashes collide."""
        position = np.arange(len(hashes))
        group = self._heads[hashes & (len(self._heads) - 1)]
        positions, groups = [position[:0]], [group[:0]]
        while len(group):
            chained = group != _NONE
            position, group = position[chained], group[chained]
            rows = self._groups.rows[group]
            same = rows[:, _HASH] == hashes[position]
            positions.append(position[same])
            groups.append(group[same])
            group = rows[:, _LINK]
        return np.concatenate(positions), np.concatenate(groups)

    def _group_of(self, value: int, window: bytes) -> int:
        """The group of this window, made if there is none; `_NONE` if its bucket is full."""
        rows = self._groups.rows
        group = int(self._heads[value & (len(self._heads) - 1)])
        steps = 0
        while group != _NONE:
            stored, link, first, _ = rows[group].tolist()
            if stored == value and self._window_at(first) == window:
                return group
            group = link
            steps += 1
        return self._new_group(value) if steps < MAX_CHAIN else _NONE

    def _window_at(self, posting: int) -> bytes:
        slot, offset = self._postings.rows[posting, :2].tolist()
        return self._chunks[slot][0][offset : offset + WINDOW].tobytes()

    def _new_group(self, value: int) -> int:
        bucket = value & (len(self._heads) - 1)
        group = self._groups.take(value, self._heads[bucket], _NONE, 0)
        self._heads[bucket] = group
        if self._groups.used > len(self._heads):
            self._rehash()
        return group

    def _rehash(self) -> None:
        """Spread the groups over more buckets. A new row was just used, so no row is free."""
        rows = self._groups.rows[: self._groups.used]
        buckets = 2 * len(self._heads)
        while buckets < len(rows):
            buckets *= 2
        # One sort of plain numbers, bucket above row, is several times faster than an argsort.
        code = np.sort((rows[:, _HASH] & (buckets - 1)).astype(np.int64) << 32 | np.arange(len(rows)))
        bucket, order = code >> 32, (code & 0xFFFFFFFF).astype(np.int32)
        begins = np.append(True, bucket[1:] != bucket[:-1])
        rows[order, _LINK] = np.append(np.where(begins[1:], _NONE, order[1:]), _NONE)
        self._heads = np.full(buckets, _NONE, dtype=np.int32)
        self._heads[bucket[begins]] = order[begins]

    def _post(self, group: int, slot: int, offset: int, postings: array[int]) -> None:
        rows = self._groups.rows
        first = int(rows[group, _FIRST])
        if self._is_full_of(first, slot):
            self._postings.rows[first, _OFFSET] = offset
            return
        posting = self._postings.take(slot, offset, first, _NONE, group)
        if first != _NONE:
            self._postings.rows[first, _PREVIOUS] = posting
        rows[group, _FIRST] = posting
        rows[group, _COUNT] += 1
        postings.append(posting)

    def _is_full_of(self, posting: int, slot: int) -> bool:
        """Whether the list from this posting on begins with `PER_CHUNK` postings of the slot."""
        for _ in range(PER_CHUNK):
            if posting == _NONE or self._postings.rows[posting, _SLOT] != slot:
                return False
            posting = int(self._postings.rows[posting, _NEXT])
        return True

    def _unpost(self, posting: int) -> None:
        rows = self._postings.rows
        _, _, after, before, group = rows[posting].tolist()
        if before == _NONE:
            self._groups.rows[group, _FIRST] = after
        else:
            rows[before, _NEXT] = after
        if after != _NONE:
            rows[after, _PREVIOUS] = before
        self._groups.rows[group, _COUNT] -= 1
        if before == after == _NONE:
            self._unlink(group)
        self._postings.free(posting)

    def _unlink(self, group: int) -> None:
        rows = self._groups.rows
        bucket = int(rows[group, _HASH]) & (len(self._heads) - 1)
        at = int(self._heads[bucket])
        if at == group:
            self._heads[bucket] = rows[group, _LINK]
        else:
            while rows[at, _LINK] != group:
                at = int(rows[at, _LINK])
            rows[at, _LINK] = rows[group, _LINK]
        self._groups.free(group)


def _mixed(h: HashArray) -> HashArray:
    """The finaliser of splitmix64."""
    h = (h ^ (h >> np.uint64(30))) * _MIX_1
    h = (h ^ (h >> np.uint64(27))) * _MIX_2
    mixed: HashArray = h ^ (h >> np.uint64(31))
    return mixed
