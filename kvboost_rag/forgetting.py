"""Which stored chunks hold a document. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from .anchors import window_hashes
from .chunks import ChunkHeader, IntArray
from .config import ANCHOR_TOKENS


def chunks_holding(headers: Iterable[ChunkHeader], documents: Sequence[IntArray]) -> list[str]:
    """Keys of chunks that hold one of ``documents``.

    A chunk seen inside a prompt goes if it, or what it is known to have been computed behind, shares any run of 16
    tokens with a document: its KV and its history have seen the document, and it is cheap to make again. A warmed
    chunk goes if the document covers at least half of it, so that documents with a common heading do not take each
    other down. Documents shorter than 16 tokens are matched as a whole.
    """
    wanted = _Wanted(documents)
    return [header.key for header in headers if wanted.held_by(header)]


class _Wanted:
    """The documents, cut into windows for a fast search."""

    def __init__(self, documents: Sequence[IntArray]) -> None:
        self._windows = {window.tobytes() for document in documents for window in _windows(document)}
        hashes = [window_hashes(document) for document in documents]
        self._hashes = np.unique(np.concatenate(hashes)) if hashes else np.empty(0, np.int32)
        self._short = [document for document in documents if 0 < len(document) < ANCHOR_TOKENS]

    def held_by(self, header: ChunkHeader) -> bool:
        ids = header.tokens
        if header.origin == "prompt":
            if header.history is not None:
                ids = np.concatenate([header.history, ids])
            return len(self._found(ids)) > 0 or self._holds_short(ids)
        covered = np.zeros(len(ids), bool)
        for at in self._found(ids):
            covered[at : at + ANCHOR_TOKENS] = True
        return 2 * int(covered.sum()) >= len(ids) or self._holds_short(ids)

    def _found(self, ids: IntArray) -> list[int]:
        """Where a window of a document begins."""
        likely = np.flatnonzero(np.isin(window_hashes(ids), self._hashes)).tolist()
        return [at for at in likely if ids[at : at + ANCHOR_TOKENS].tobytes() in self._windows]

    def _holds_short(self, ids: IntArray) -> bool:
        return any((_windows(ids, len(part)) == part).all(axis=1).any() for part in self._short)


def _windows(ids: IntArray, width: int = ANCHOR_TOKENS) -> IntArray:
    """Every run of ``width`` ids, ``(max(0, n - width + 1), width)``."""
    if len(ids) < width:
        return np.empty((0, width), np.int32)
    return sliding_window_view(np.ascontiguousarray(ids, dtype=np.int32), width)
