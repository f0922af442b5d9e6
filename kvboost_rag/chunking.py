"""Where stored runs are cut. Token ids in, tiles out; the text is only looked at to find good places."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from .chunks import IntArray
from .config import ANCHOR_TOKENS, Chunking

NONE, SENTENCE, LINE, PARAGRAPH = range(4)
PROMPT_TILE_TOKENS = (64, 512)  # least and most tokens of a tile of text whose document borders are unknown

Strengths = npt.NDArray[np.uint8]
Tiles = list[tuple[int, int]]

# Chinese and Japanese put no space after a full stop, so theirs ends a sentence wherever it stands.
_CLOSERS = r"""["'\u2019\u201d\u00bb)\]}*_`\u300d\u300f\uff09\u3011]*"""
_SPACED_STOPS, _CJK_STOPS = r"[.!?\u2026\u061f\u0964]", r"[\u3002\uff01\uff1f\uff61]"
_BREAKS = (
    (SENTENCE, re.compile(rf"{_SPACED_STOPS}{_CLOSERS}(?=\s|\Z)|{_CJK_STOPS}{_CLOSERS}")),
    (LINE, re.compile(r"[\n\u2028]")),
    (PARAGRAPH, re.compile(r"\n(?:[^\S\n]*\n)+|\u2029")),
)


class BreakFinder:
    """Finds sentence, line and paragraph ends between tokens.

    Args:
        piece: text of one token id, with the space in front of it if the token has one.
    """

    def __init__(self, piece: Callable[[int], str]) -> None:
        self._piece = piece
        self._pieces: dict[int, str] = {}

    def strength(self, ids: IntArray) -> Strengths:
        """How good a cut after each token is.

        Returns:
            uint8 ``(n,)``: 0 none, 1 sentence end, 2 line end, 3 paragraph end (a blank line).
        """
        strength = np.zeros(len(ids), dtype=np.uint8)
        pieces = [self._text(token) for token in ids.tolist()]
        text = "".join(pieces)
        ends = np.cumsum([len(piece) for piece in pieces])
        for level, pattern in _BREAKS:
            for match in pattern.finditer(text):
                token = int(np.searchsorted(ends, match.end()))
                # A token may hold the break and what follows it; only white space may stay on this side.
                if not text[match.end() : ends[token]].strip():
                    strength[token] = level
        return strength

    def _text(self, token: int) -> str:
        piece = self._pieces.get(token)
        if piece is None:
            piece = self._pieces[token] = self._piece(token)
        return piece


def cuts(ids: IntArray, *, strategy: Chunking, chunk_tokens: int, breaks: BreakFinder | None, max_tokens: int) -> Tiles:
    """Cut one document.

    Args:
        ids: tokens of the document, ``(n,)``.
        strategy: "fixed" cuts every `chunk_tokens`; "semantic" at the sentence, line or paragraph end nearest to each
            multiple of `chunk_tokens`, at most half a chunk away from it; "document" nowhere.
        chunk_tokens: target length.
        breaks: where sentences end; without it all cuts are made by count.
        max_tokens: a tile that would be longer is split, at the best break of its second half.

    Returns:
        ``(start, end)`` tiles in order that cover ``ids`` exactly, none empty. A last tile shorter than an anchor
        could not be found by the index, so it is part of the one before.
    """
    _check(chunk_tokens=chunk_tokens, max_tokens=max_tokens)
    n = len(ids)
    strength = _strength(ids, breaks)
    points: list[int] = []
    if strategy == "fixed":
        points = list(range(chunk_tokens, n, chunk_tokens))
    elif strategy == "semantic":
        points = list(_semantic(strength, chunk_tokens))
    if points and n - points[-1] < ANCHOR_TOKENS:
        points.pop()
    tiles: Tiles = []
    for start, end in _tiles(points, n):
        tiles += [(start + a, start + b) for a, b in _bounded(strength[start:end], max_tokens // 2, max_tokens)]
    return tiles


def prompt_cuts(
    ids: IntArray, *, strategy: Chunking, chunk_tokens: int, breaks: BreakFinder | None, max_tokens: int
) -> Tiles:
    """Cut text first seen inside a prompt, where nobody says which documents it holds.

    "document" cuts at paragraph ends into tiles of 64 to 512 tokens, so that a document met again among others shares
    most of its tiles; the other strategies do what they do in `cuts`. See there for arguments and result.
    """
    if strategy != "document":
        return cuts(ids, strategy=strategy, chunk_tokens=chunk_tokens, breaks=breaks, max_tokens=max_tokens)
    _check(chunk_tokens=chunk_tokens, max_tokens=max_tokens)
    low, high = PROMPT_TILE_TOKENS
    high = min(high, max_tokens)
    return _bounded(_strength(ids, breaks), min(low, high // 2), high, every_paragraph=True)


def _semantic(strength: Strengths, chunk_tokens: int) -> Iterator[int]:
    n = len(strength)
    reach = (chunk_tokens - 1) // 2  # two neighbours can then never cross
    previous = 0
    for target in range(chunk_tokens, n, chunk_tokens):
        best = _nearest(strength >= PARAGRAPH, target, chunk_tokens // 4, previous)
        if best is None:
            best = _nearest(strength > NONE, target, reach, previous)
        previous = target if best is None else best
        yield previous


def _nearest(good: npt.NDArray[np.bool_], target: int, reach: int, previous: int) -> int | None:
    low = max(target - reach, previous + ANCHOR_TOKENS)
    high = min(target + reach, len(good) - 1)
    points = np.flatnonzero(good[max(low - 1, 0) : high]) + max(low, 1)
    return int(points[np.argmin(np.abs(points - target))]) if len(points) else None


def _bounded(strength: Strengths, low: int, high: int, *, every_paragraph: bool = False) -> Tiles:
    """Tiles of at most `high` and, if there are that many tokens, at least `low` tokens; ``2 * low <= high``."""
    n, low = len(strength), max(low, 1)
    points: list[int] = []
    start = 0
    while n - start > high or (every_paragraph and n - start >= 2 * low):
        last = min(high, n - start - low)
        # strength[i] belongs to a cut after token i, which makes a tile of i + 1 tokens.
        window = strength[start + low - 1 : start + last]
        paragraphs = np.flatnonzero(window == PARAGRAPH)
        if every_paragraph and len(paragraphs):
            length = low + int(paragraphs[0])
        elif n - start <= high:
            break
        else:
            length = low + int(np.flatnonzero(window == window.max())[-1])
        start += length
        points.append(start)
    return _tiles(points, n)


def _strength(ids: IntArray, breaks: BreakFinder | None) -> Strengths:
    return np.zeros(len(ids), dtype=np.uint8) if breaks is None else breaks.strength(ids)


def _tiles(points: list[int], n: int) -> Tiles:
    return list(zip([0, *points], [*points, n], strict=True)) if n else []


def _check(**lengths: int) -> None:
    for name, value in lengths.items():
        if value < 1:
            raise ValueError(f"{name} is {value}; it must be 1 or more")
