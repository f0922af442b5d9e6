"""Which stored chunks hold a document. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from .anchors import window_hashes
from .chunks import ChunkHeader, IntArray
from .config import ANCHOR_TOKENS, LEAD_TOKENS


def chunks_holding(headers: Iterable[ChunkHeader], documents: Sequence[IntArray]) -> list[str]:
    """Keys of chunks that hold one of ``documents``, or whose KV was computed behind one.

    KV has seen what stood in front of it, so a chunk goes with the documents in its history. A chunk seen inside a
    prompt goes if it or its history shares any run of 16 tokens with a document: it is cheap to make again. A warmed
    chunk goes if a document covers at least half of it, or if at least half of a document stands in it or its history,
    so that documents with a common heading do not take each other down; or if a document's end leads its pack. A
    document shorter than 16 tokens is matched as a whole.
    """
    wanted = _Wanted(documents)
    # In this order a sequence comes right behind those that go on from it, so that a pack is searched once.
    ordered = sorted(((header.seen.tobytes(), header) for header in headers), key=lambda pair: pair[0], reverse=True)
    return [header.key for raw, header in ordered if wanted.held_by(header, raw)]


class _Wanted:
    """The documents, cut into windows for a fast search."""

    def __init__(self, documents: Sequence[IntArray]) -> None:
        self._owners: dict[bytes, set[int]] = {}  # window -> documents that hold it
        for number, document in enumerate(documents):
            for window in _windows(document):
                self._owners.setdefault(window.tobytes(), set()).add(number)
        hashes = [window_hashes(document) for document in documents]
        self._hashes = np.unique(np.concatenate(hashes)) if hashes else np.empty(0, np.int32)
        self._sizes = [max(1, len(document) - ANCHOR_TOKENS + 1) for document in documents]
        self._short = [document for document in documents if 0 < len(document) < ANCHOR_TOKENS]
        self._searched: tuple[bytes, list[int]] = (b"", [])

    def held_by(self, header: ChunkHeader, raw: bytes) -> bool:
        ids = np.frombuffer(raw, dtype=np.int32)
        before = len(ids) - len(header)
        found = self._found(ids, raw)
        if header.origin != "warm":
            return len(found) > 0 or self._holds_short(ids)
        covered = np.zeros(len(ids), bool)
        for at in found:
            if at >= before:
                covered[at : at + ANCHOR_TOKENS] = True
        mostly = 2 * int(covered.sum()) >= len(header)
        return mostly or self._holds_short(ids) or self._holds_half(ids, found) or (before > 0 and _is_led(found))

    def _holds_half(self, ids: IntArray, found: Sequence[int]) -> bool:
        """Whether at least half of a document stands in the ids."""
        seen: dict[int, set[bytes]] = {}
        for at in found:
            window = ids[at : at + ANCHOR_TOKENS].tobytes()
            for number in self._owners[window]:
                seen.setdefault(number, set()).add(window)
        return any(2 * len(windows) >= self._sizes[number] for number, windows in seen.items())

    def _found(self, ids: IntArray, raw: bytes) -> list[int]:
        """Where a window of a document begins; what is known of a sequence answers for every beginning of it."""
        longer, found = self._searched
        if longer.startswith(raw):
            return [at for at in found if at + ANCHOR_TOKENS <= len(ids)]
        found = self._search(ids)
        self._searched = raw, found
        return found

    def _search(self, ids: IntArray) -> list[int]:
        hashes = window_hashes(ids)
        if not len(self._hashes) or not len(hashes):
            return []
        # Sorted once: `np.isin` would sort the documents' windows again for every sequence.
        nearest = self._hashes[np.minimum(np.searchsorted(self._hashes, hashes), len(self._hashes) - 1)]
        likely = np.flatnonzero(nearest == hashes).tolist()
        return [at for at in likely if ids[at : at + ANCHOR_TOKENS].tobytes() in self._owners]

    def _holds_short(self, ids: IntArray) -> bool:
        return any((_windows(ids, len(part)) == part).all(axis=1).any() for part in self._short)


def _is_led(found: Sequence[int]) -> bool:
    """Whether a pack begins with a document's end: at least half of the lead, behind no more than special tokens."""
    return sum(at < LEAD_TOKENS - ANCHOR_TOKENS + 8 for at in found) > (LEAD_TOKENS - ANCHOR_TOKENS) // 2


def _windows(ids: IntArray, width: int = ANCHOR_TOKENS) -> IntArray:
    """Every run of ``width`` ids, ``(max(0, n - width + 1), width)``."""
    if len(ids) < width:
        return np.empty((0, width), np.int32)
    return sliding_window_view(np.ascontiguousarray(ids, dtype=np.int32), width)
