"""Which stored runs a prompt holds: the exact chain from position 0, and runs anywhere else.

Pure: ids in, hits out. Every hit is verified id by id; a hash match whose ids differ is a miss.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from .anchors import WINDOW, AnchorTable
from .chain import ExactChain, ServedPrompts
from .chunks import ChunkHeader, Hit, IntArray, Scope, content_hash
from .runs import diagonals, disjoint, equal_runs

_WARM = 1 << 48  # above any count of added chunks


class ChunkIndex:
    """Index of the chunks of one store; scopes never see each other.

    Not thread safe: the caller holds a lock around every call.
    """

    def __init__(self) -> None:
        self._headers: dict[str, ChunkHeader] = {}
        self._scopes: dict[Scope, _ScopeIndex] = {}
        self._added = 0

    def __len__(self) -> int:
        return len(self._headers)

    @property
    def nbytes(self) -> int:
        """Bytes of the tables of anchors and slots, which are most of what the index holds beside the headers."""
        return sum(part.nbytes for part in self._scopes.values())

    def add(self, header: ChunkHeader) -> None:
        """Register a chunk. A key that is there already changes nothing."""
        if header.key in self._headers:
            return
        self._added += 1
        self._headers[header.key] = header
        part = self._scopes.get(header.scope)
        if part is None:
            part = self._scopes[header.scope] = _ScopeIndex(header.scope)
        part.add(header, self._added)

    def add_many(self, headers: Iterable[ChunkHeader]) -> None:
        """`add` for each, several times faster where most of their text is new."""
        parts: dict[Scope, list[tuple[ChunkHeader, int]]] = {}
        for header in headers:
            if header.key not in self._headers:
                self._added += 1
                self._headers[header.key] = header
                parts.setdefault(header.scope, []).append((header, self._added))
        for scope, added in parts.items():
            part = self._scopes.get(scope)
            if part is None:
                part = self._scopes[scope] = _ScopeIndex(scope)
            part.add_many(added)

    def discard(self, key: str) -> None:
        """Forget a chunk. A key that is not there changes nothing."""
        header = self._headers.pop(key, None)
        if header is None:
            return
        part = self._scopes[header.scope]
        part.discard(header)
        if not part.headers:
            del self._scopes[header.scope]

    def get(self, key: str) -> ChunkHeader | None:
        """The header of a registered chunk, or None."""
        return self._headers.get(key)

    def keys(self, scope: Scope) -> list[str]:
        """Keys of the scope's chunks, oldest first."""
        part = self._scopes.get(scope)
        return list(part.headers) if part else []

    def find_content(self, scope: Scope, tokens: IntArray) -> list[ChunkHeader]:
        """All chunks that hold exactly these tokens, behind any history, oldest first."""
        part = self._scopes.get(scope)
        return part.find_content(tokens) if part else []

    def match_exact(self, scope: Scope, ids: IntArray) -> tuple[Hit, ...]:
        """The longest exact stretch from position 0, tiled by as few chunks as possible.

        Only chunks with their true history take part. Each hit begins at its chunk's first token; a chunk that
        agrees for its first m tokens gives m, and chunks stored behind exactly the ids so far go on from there.
        No longer stretch can be tiled by first parts of stored chunks, whatever the cuts they were stored with.
        """
        part = self._scopes.get(scope)
        return part.chain.walk(_int32(ids)) if part else ()

    def match_served(self, scope: Scope, ids: IntArray) -> Hit | None:
        """The longest beginning in common with a prompt as it was served, or None."""
        part = self._scopes.get(scope)
        return part.served.best(_int32(ids)) if part else None

    def match_runs(self, scope: Scope, ids: IntArray, start: int = 0) -> tuple[Hit, ...]:
        """Stored runs anywhere in ``ids[start:]``: at least 16 tokens, maximal, long runs first, disjoint, in order.

        Every run of 24 tokens or more that equals a run of a stored chunk is found, wherever it stands in the chunk
        and in the prompt, and so are first and last parts of chunks from 16 tokens. Overlaps go to the longer run;
        what is left of the other counts from 16 tokens. Equally long runs: warmed before seen in a prompt, then the
        chunk that was added last.

        Limits that keep hostile or repetitive text cheap: a window stored more than `anchors.PER_WINDOW` times
        leads to the latest of its chunks only, so a long run is missed only if all of its windows are that common;
        and at most ``ROUND * ROUNDS`` alignments are compared, those with the rarest windows first.

        Raises:
            ValueError: ``start`` is outside of the prompt.
        """
        if not 0 <= start <= len(ids):
            raise ValueError(f"start is {start}; it must be from 0 to the {len(ids)} ids")
        part = self._scopes.get(scope)
        return part.match_runs(_int32(ids)[start:], start) if part else ()


class _ScopeIndex:
    """The chunks of one scope."""

    def __init__(self, scope: Scope) -> None:
        self.headers: dict[str, ChunkHeader] = {}
        self.chain = ExactChain(scope)
        self.served = ServedPrompts()
        self._scope = scope
        self._contents: dict[str, list[ChunkHeader]] = {}
        self._anchors = AnchorTable()
        self._slots: dict[str, int] = {}
        self._by_slot: list[ChunkHeader | None] = []
        self._free_slots: list[int] = []
        self._lengths = np.zeros(16, dtype=np.int64)
        self._preference = np.zeros(16, dtype=np.int64)

    @property
    def nbytes(self) -> int:
        return self._anchors.nbytes + self._lengths.nbytes + self._preference.nbytes

    def add(self, header: ChunkHeader, order: int) -> None:
        slot = self._enter(header, order)
        if slot is not None:
            self._anchors.add(slot, header.tokens)

    def add_many(self, added: Sequence[tuple[ChunkHeader, int]]) -> None:
        slots = [(self._enter(header, order), header.tokens) for header, order in added]
        self._anchors.add_many([(slot, tokens) for slot, tokens in slots if slot is not None])

    def _enter(self, header: ChunkHeader, order: int) -> int | None:
        """Register all but the anchors; the slot for those, if the chunk has any."""
        self.headers[header.key] = header
        if header.origin == "served":
            self.served.add(header)
            return None
        self.chain.add(header)
        self._contents.setdefault(content_hash(self._scope, header.tokens), []).append(header)
        if len(header) < WINDOW:
            return None
        slot = self._slots[header.key] = self._new_slot(header)
        self._lengths[slot] = len(header)
        self._preference[slot] = order + (_WARM if header.origin == "warm" else 0)
        return slot

    def discard(self, header: ChunkHeader) -> None:
        del self.headers[header.key]
        if header.origin == "served":
            self.served.discard(header)
            return
        self.chain.discard(header)
        content = content_hash(self._scope, header.tokens)
        kept = [other for other in self._contents[content] if other.key != header.key]
        if kept:
            self._contents[content] = kept
        else:
            del self._contents[content]
        slot = self._slots.pop(header.key, None)
        if slot is not None:
            self._anchors.remove(slot)
            self._by_slot[slot] = None
            self._free_slots.append(slot)

    def find_content(self, tokens: IntArray) -> list[ChunkHeader]:
        same = self._contents.get(content_hash(self._scope, tokens), [])
        return [header for header in same if np.array_equal(header.tokens, tokens)]

    def match_runs(self, ids: IntArray, base: int) -> tuple[Hit, ...]:
        candidates = self._anchors.lookup(ids)
        if not len(candidates.position):
            return ()
        found = diagonals(candidates, len(ids), self._lengths, self._preference)
        runs = disjoint(equal_runs(found, ids, self._tokens, self._preference))
        return tuple(
            Hit(base + run.start, run.end - run.start, self._header(run.slot).key, run.start - run.shift)
            for run in runs
        )

    def _new_slot(self, header: ChunkHeader) -> int:
        if self._free_slots:
            slot = self._free_slots.pop()
            self._by_slot[slot] = header
            return slot
        slot = len(self._by_slot)
        self._by_slot.append(header)
        if slot == len(self._lengths):
            self._lengths = np.concatenate((self._lengths, np.zeros_like(self._lengths)))
            self._preference = np.concatenate((self._preference, np.zeros_like(self._preference)))
        return slot

    def _header(self, slot: int) -> ChunkHeader:
        header = self._by_slot[slot]
        assert header is not None
        return header

    def _tokens(self, slot: int) -> IntArray:
        return self._header(slot).tokens


def _int32(ids: IntArray) -> IntArray:
    return np.ascontiguousarray(ids, dtype=np.int32)
