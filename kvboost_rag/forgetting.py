"""Which stored chunks hold a document. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from .chunks import ChunkHeader, IntArray
from .config import ANCHOR_TOKENS


def chunks_holding(headers: Iterable[ChunkHeader], documents: Sequence[IntArray]) -> list[str]:
    """Keys of chunks that hold one of ``documents``.

    A chunk seen inside a prompt goes if it shares any run of 16 tokens with a document: it is cheap to make again. A
    warmed chunk goes if the document covers at least half of it, so that documents with a common heading do not take
    each other down. Documents shorter than 16 tokens are matched as a whole.
    """
    wanted = {window for document in documents for window in _windows(document)}
    short = [document for document in documents if 0 < len(document) < ANCHOR_TOKENS]
    found = []
    for header in headers:
        hits = np.fromiter((w in wanted for w in _windows(header.tokens)), dtype=bool)
        covered = np.zeros(len(header), bool)
        for at in np.flatnonzero(hits):
            covered[at : at + ANCHOR_TOKENS] = True
        enough = 1 if header.origin == "prompt" else (len(header) + 1) // 2
        if covered.sum() >= enough or any(_contains(header.tokens, document) for document in short):
            found.append(header.key)
    return found


def _windows(ids: IntArray) -> list[bytes]:
    if len(ids) < ANCHOR_TOKENS:
        return []
    return [window.tobytes() for window in sliding_window_view(np.ascontiguousarray(ids), ANCHOR_TOKENS)]


def _contains(ids: IntArray, part: IntArray) -> bool:
    if len(part) > len(ids):
        return False
    return bool((sliding_window_view(ids, len(part)) == part).all(axis=1).any())
