"""The exact chain: chunks whose history is what the prompt has in front of them, from position 0."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from .chunks import ChunkHeader, Hit, IntArray, Scope, ScopedHash, prefix_hash


@dataclass(frozen=True, slots=True)
class _Link:
    """The best chunk at one position, and how far it agrees with the prompt."""

    start: int
    end: int
    key: str


@dataclass(slots=True, eq=False)
class _Family:
    """Chunks behind one history, sorted by their tokens so that the nearest relative is a neighbour.

    Attributes:
        history: the ids in front of every child.
        children: sorted by `_order`.
        longest: no child is or was longer, tokens.
    """

    history: IntArray
    children: list[ChunkHeader] = field(default_factory=list)
    longest: int = 0

    def add(self, header: ChunkHeader) -> None:
        insort(self.children, header, key=_order)
        self.longest = max(self.longest, len(header))

    def discard(self, header: ChunkHeader) -> None:
        at = bisect_left(self.children, _order(header), key=_order)
        while self.children[at].key != header.key:
            at += 1
        del self.children[at]

    def best(self, ids: IntArray) -> tuple[int, ChunkHeader]:
        """The child with the longest common prefix with ``ids``, and its length in tokens."""
        # Among sorted byte strings, the longest common prefix with a probe is at a neighbour of its place. Tokens
        # have four bytes each, so the same holds for tokens, whatever the order of bytes.
        at = bisect_left(self.children, ids[: self.longest].tobytes(), key=_order)
        near = self.children[max(at - 1, 0) : at + 1]
        lengths = [_common(child.tokens, ids) for child in near]
        best = int(np.argmax(lengths))
        return lengths[best], near[best]


class ExactChain:
    """The chunks of one scope that may serve exact hits, by the hash of their history."""

    def __init__(self, scope: Scope) -> None:
        self._scope = scope
        # A list per hash, because histories that differ may share one.
        self._families: dict[str, list[_Family]] = {}
        self._sizes: Counter[int] = Counter()
        self._starts: list[int] = []

    def add(self, header: ChunkHeader) -> None:
        """Register a chunk; one without history is left out."""
        if header.history is None:
            return
        families = self._families.setdefault(prefix_hash(self._scope, header.history), [])
        family = next((f for f in families if np.array_equal(f.history, header.history)), None)
        if family is None:
            family = _Family(header.history)
            families.append(family)
        family.add(header)
        if not self._sizes[header.base]:
            insort(self._starts, header.base)
        self._sizes[header.base] += 1

    def discard(self, header: ChunkHeader) -> None:
        """Forget a chunk that was added."""
        if header.history is None:
            return
        value = prefix_hash(self._scope, header.history)
        families = self._families[value]
        family = next(f for f in families if np.array_equal(f.history, header.history))
        family.discard(header)
        if not family.children:
            families.remove(family)
        if not families:
            del self._families[value]
        self._sizes[header.base] -= 1
        if not self._sizes[header.base]:
            del self._sizes[header.base]
            del self._starts[bisect_left(self._starts, header.base)]

    def walk(self, ids: IntArray) -> tuple[Hit, ...]:
        """Cover the longest possible stretch from position 0, with as few chunks as possible.

        Every position that is reached can be continued, because any first part of a chunk is exact too. So each
        registered history that ends inside the stretch is tried, not only the ends of whole chunks, and no cut of
        the stored sequences can hide a longer stretch.
        """
        links: list[_Link] = []
        reach = 0
        hashes = _PrefixHashes(self._scope, ids)
        for start in self._starts:
            if start > reach or start >= len(ids):
                break
            for family in self._relatives(hashes.at(start), ids[:start]):
                length, header = family.best(ids[start:])
                if start + length > reach:
                    reach = start + length
                    links.append(_Link(start, reach, header.key))
        return _fewest(links)

    def _relatives(self, value: str, history: IntArray) -> Iterator[_Family]:
        for family in self._families.get(value, ()):
            if np.array_equal(family.history, history):
                yield family


class ServedPrompts:
    """Whole prompts of one scope as they were served, found by their beginning."""

    def __init__(self) -> None:
        self._family = _Family(np.empty(0, np.int32))

    def add(self, header: ChunkHeader) -> None:
        """Register one."""
        self._family.add(header)

    def discard(self, header: ChunkHeader) -> None:
        """Forget one that was added."""
        self._family.discard(header)

    def best(self, ids: IntArray) -> Hit | None:
        """The one with the longest beginning in common with ``ids``."""
        if not self._family.children:
            return None
        length, header = self._family.best(ids)
        return Hit(0, length, header.key, 0) if length else None


class _PrefixHashes:
    """`prefix_hash` of growing prefixes of one sequence, each token hashed once."""

    def __init__(self, scope: Scope, ids: IntArray) -> None:
        self._hash = ScopedHash(scope, b"prefix")
        self._raw = memoryview(ids.astype("<i4").tobytes())
        self._done = 0

    def at(self, tokens: int) -> str:
        """`prefix_hash` of the first ``tokens`` ids; never fewer than in the call before."""
        self._hash.update(self._raw[4 * self._done : 4 * tokens])
        self._done = tokens
        return self._hash.hexdigest()


def _fewest(links: list[_Link]) -> tuple[Hit, ...]:
    """Tile ``[0, last end)`` from the right, each time with the link that begins furthest left."""
    hits: list[Hit] = []
    end = links[-1].end if links else 0
    while end:
        link = links[bisect_left(links, end, key=lambda candidate: candidate.end)]
        hits.append(Hit(link.start, end - link.start, link.key, 0))
        end = link.start
    return tuple(reversed(hits))


def _common(a: IntArray, b: IntArray) -> int:
    """Length of the longest common prefix."""
    n = min(len(a), len(b))
    unequal = a[:n] != b[:n]
    first = int(unequal.argmax()) if n else 0
    return first if n and unequal[first] else n


def _order(header: ChunkHeader) -> bytes:
    return header.tokens.tobytes()
