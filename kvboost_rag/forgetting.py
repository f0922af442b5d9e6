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
    # The longest first: chunks of one pack stand in one sequence, which is searched once.
    longest = sorted(headers, key=lambda header: header.base + len(header), reverse=True)
    return [header.key for header in longest if wanted.held_by(header)]


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
        self._ends = {document[-LEAD_TOKENS:].tobytes() for document in documents if len(document) >= LEAD_TOKENS}
        self._searched: dict[bytes, list[tuple[IntArray, list[int]]]] = {}

    def held_by(self, header: ChunkHeader) -> bool:
        history = header.tokens[:0] if header.history is None else header.history
        ids = np.concatenate([history, header.tokens])
        found = self._found(ids)
        if header.origin != "warm":
            return len(found) > 0 or self._holds_short(ids)
        covered = np.zeros(len(ids), bool)
        for at in found:
            if at >= len(history):
                covered[at : at + ANCHOR_TOKENS] = True
        mostly = 2 * int(covered.sum()) >= len(header)
        return mostly or self._holds_short(ids) or self._holds_half(ids, found) or self._is_led(ids)

    def _is_led(self, ids: IntArray) -> bool:
        """Whether a document's end stands at the beginning, behind no more than special tokens."""
        return any(ids[at : at + LEAD_TOKENS].tobytes() in self._ends for at in range(8))

    def _holds_half(self, ids: IntArray, found: Sequence[int]) -> bool:
        """Whether at least half of a document stands in the ids."""
        seen: dict[int, set[bytes]] = {}
        for at in found:
            window = ids[at : at + ANCHOR_TOKENS].tobytes()
            for number in self._owners[window]:
                seen.setdefault(number, set()).add(window)
        return any(2 * len(windows) >= self._sizes[number] for number, windows in seen.items())

    def _found(self, ids: IntArray) -> list[int]:
        """Where a window of a document begins; what is known of a sequence answers for every beginning of it."""
        searched = self._searched.setdefault(ids[: 2 * ANCHOR_TOKENS].tobytes(), [])
        for longer, found in searched:
            if len(longer) >= len(ids) and np.array_equal(longer[: len(ids)], ids):
                return [at for at in found if at + ANCHOR_TOKENS <= len(ids)]
        found = self._search(ids)
        searched.append((ids, found))
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


def _windows(ids: IntArray, width: int = ANCHOR_TOKENS) -> IntArray:
    """Every run of ``width`` ids, ``(max(0, n - width + 1), width)``."""
    if len(ids) < width:
        return np.empty((0, width), np.int32)
    return sliding_window_view(np.ascontiguousarray(ids, dtype=np.int32), width)
