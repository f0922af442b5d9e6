"""Cut points: tiles cover exactly, keep their bounds, and prefer the ends of sentences and paragraphs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvboost_rag.chunking import BreakFinder, cuts, prompt_cuts
from kvboost_rag.chunks import IntArray, as_ids
from kvboost_rag.config import ANCHOR_TOKENS, Chunking

WORDS = ["word", " word", ".", " end.", "\n", "\n\n", ".\n\n", "  ", "。", '."', "", "x.y"]


def pieces(*texts: str) -> tuple[IntArray, BreakFinder]:
    return as_ids(range(len(texts))), BreakFinder(list(texts).__getitem__)


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        ((), ()),
        (("One", " two", ".", " Three"), (0, 0, 1, 0)),
        (("One", ".", "5"), (0, 0, 0)),
        (("Done", "."), (0, 1)),
        (("He", " said", ' "No', '."', " Then"), (0, 0, 0, 1, 0)),
        (("(", "see", " there", ".", ")", " Then"), (0, 0, 0, 0, 1, 0)),
        (("Why", "?", "\n", "Because"), (0, 1, 2, 0)),
        (("a", "\n", "\n", "b"), (0, 2, 3, 0)),
        (("a", ".\n\n", "b"), (0, 3, 0)),
        (("a", "\r\n", "\r\n", "b"), (0, 2, 3, 0)),
        (("a", "\n \t\n", "b"), (0, 3, 0)),
        (("a", "\n\n   ", "b"), (0, 3, 0)),
        (("a", "\n\nb", "c"), (0, 0, 0)),
        (("a.", "", " b"), (1, 0, 0)),
        (("好", "。", "是"), (0, 1, 0)),
        (("好。」", "是"), (1, 0)),
        (("कैसे", "।", " हाँ"), (0, 1, 0)),
    ],
)
def test_strength(texts: tuple[str, ...], expected: tuple[int, ...]) -> None:
    ids, breaks = pieces(*texts)
    strength = breaks.strength(ids)
    assert strength.dtype == np.uint8
    assert tuple(strength.tolist()) == expected


def test_every_piece_is_asked_for_once() -> None:
    asked: list[int] = []

    def piece(token: int) -> str:
        asked.append(token)
        return "."

    breaks = BreakFinder(piece)
    breaks.strength(as_ids([3, 3, 4]))
    breaks.strength(as_ids([4, 3]))
    assert sorted(asked) == [3, 4]


def text(n: int, ends: dict[int, str]) -> tuple[IntArray, BreakFinder]:
    """Words; where ``ends`` names a position, the token just before that cut ends something."""
    return pieces(*(ends.get(i + 1, " w") for i in range(n)))


def call(n: int, ends: dict[int, str], strategy: Chunking = "semantic", **more: Any) -> list[tuple[int, int]]:
    ids, breaks = text(n, ends)
    return cuts(ids, strategy=strategy, breaks=breaks, **{"chunk_tokens": 100, "max_tokens": 10_000} | more)


def test_fixed() -> None:
    assert call(250, {90: ".\n\n"}, "fixed") == [(0, 100), (100, 200), (200, 250)]
    assert call(216, {}, "fixed") == [(0, 100), (100, 200), (200, 216)]
    assert call(215, {}, "fixed") == [(0, 100), (100, 215)]
    assert call(10, {}, "fixed") == [(0, 10)]
    assert call(0, {}, "fixed") == []


def test_semantic_takes_the_nearest_sentence_end() -> None:
    assert call(200, {80: "end.", 115: "end.", 190: "end."}) == [(0, 115), (115, 200)]


def test_semantic_prefers_a_paragraph_within_a_quarter() -> None:
    assert call(200, {98: "end.", 125: ".\n\n"}) == [(0, 125), (125, 200)]
    assert call(200, {98: "end.", 126: ".\n\n"}) == [(0, 98), (98, 200)]
    assert call(200, {126: ".\n\n"}) == [(0, 126), (126, 200)]


def test_semantic_never_goes_farther_than_half_a_chunk() -> None:
    assert call(200, {49: "end.", 151: ".\n\n"}) == [(0, 100), (100, 200)]
    assert call(200, {51: "end."}) == [(0, 51), (51, 200)]


def test_semantic_leaves_no_tile_that_cannot_be_found() -> None:
    tiles = call(400, {149: "end.", 152: "end."})
    assert min(end - start for start, end in tiles) >= ANCHOR_TOKENS


def test_document_is_one_tile() -> None:
    assert call(9999, {50: ".\n\n"}, "document") == [(0, 9999)]


def test_a_long_document_is_split_at_the_best_break() -> None:
    ends = {60: ".\n\n", 95: "end."}
    assert call(150, ends, "document", max_tokens=100) == [(0, 60), (60, 150)]
    assert call(150, {95: "end.", 70: "end."}, "document", max_tokens=100) == [(0, 95), (95, 150)]
    assert call(150, {}, "document", max_tokens=100) == [(0, 100), (100, 150)]
    # The rest would be too short to be found.
    assert call(105, {}, "document", max_tokens=100) == [(0, 55), (55, 105)]


def test_no_strategy_exceeds_max_tokens() -> None:
    for strategy in ("fixed", "semantic", "document"):
        tiles = call(1000, {k: "end." for k in range(0, 1000, 7)}, strategy, chunk_tokens=400, max_tokens=150)
        assert max(end - start for start, end in tiles) <= 150


def test_without_a_break_finder_cuts_are_by_count() -> None:
    ids = as_ids(range(300))
    by_count = cuts(ids, strategy="fixed", chunk_tokens=100, breaks=None, max_tokens=1000)
    assert cuts(ids, strategy="semantic", chunk_tokens=100, breaks=None, max_tokens=1000) == by_count


def test_prompt_text_is_cut_at_paragraphs() -> None:
    ids, breaks = text(900, {30: "\n\n", 70: "\n\n", 100: "end.", 300: ".\n\n", 880: "\n\n"})
    tiles = prompt_cuts(ids, strategy="document", chunk_tokens=128, breaks=breaks, max_tokens=10_000)
    assert tiles == [(0, 70), (70, 300), (300, 812), (812, 900)]


def test_prompt_text_keeps_the_other_strategies() -> None:
    ids, breaks = text(300, {})
    tiles = prompt_cuts(ids, strategy="fixed", chunk_tokens=100, breaks=breaks, max_tokens=1000)
    assert tiles == [(0, 100), (100, 200), (200, 300)]


def test_the_same_document_behind_another_gives_the_same_tiles() -> None:
    para = [" w"] * 99 + [".\n\n"]
    first, second = [" a"] * 79 + [".\n\n"], [" b"] * 149 + [".\n\n"]

    def tiles_of(head: list[str]) -> set[tuple[int, int]]:
        ids, breaks = pieces(*head, *para, *para)
        tiles = prompt_cuts(ids, strategy="document", chunk_tokens=128, breaks=breaks, max_tokens=10_000)
        return {(start - len(head), end - len(head)) for start, end in tiles if start >= len(head)}

    assert tiles_of(first) == tiles_of(second) == {(0, 100), (100, 200)}


@pytest.mark.parametrize("name", ["chunk_tokens", "max_tokens"])
def test_lengths_are_checked(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} is 0; it must be 1 or more"):
        call(10, {}, "document", **{name: 0})


STRATEGIES = st.sampled_from(["fixed", "semantic", "document"])
TEXTS = st.one_of(
    st.lists(st.integers(0, len(WORDS) - 1), max_size=300),
    st.tuples(st.lists(st.integers(0, len(WORDS) - 1), min_size=1, max_size=60), st.integers(1, 40)).map(
        lambda pair: pair[0] * pair[1]
    ),
)


def assert_tiles(tiles: list[tuple[int, int]], n: int) -> None:
    assert [start for start, _ in tiles] == [0, *(end for _, end in tiles)][: len(tiles)]
    assert all(start < end for start, end in tiles)
    assert (tiles[-1][1] if tiles else 0) == n


@given(TEXTS, STRATEGIES, st.integers(1, 400), st.integers(1, 600), st.booleans())
def test_tiles_cover_and_are_bounded(
    tokens: list[int], strategy: Chunking, chunk_tokens: int, max_tokens: int, with_breaks: bool
) -> None:
    ids, n = as_ids(tokens), len(tokens)
    breaks = BreakFinder(WORDS.__getitem__) if with_breaks else None
    more: Any = {"strategy": strategy, "chunk_tokens": chunk_tokens, "breaks": breaks, "max_tokens": max_tokens}

    tiles = cuts(ids, **more)
    assert_tiles(tiles, n)
    lengths = [end - start for start, end in tiles]
    limit = {"fixed": chunk_tokens, "semantic": 2 * chunk_tokens, "document": max_tokens}[strategy]
    assert max(lengths, default=0) <= min(max_tokens, limit + ANCHOR_TOKENS)
    assert min(lengths, default=n) >= min(n, ANCHOR_TOKENS, chunk_tokens // 2, max_tokens // 2)

    assert_tiles(prompt_cuts(ids, **more), n)


@given(TEXTS, st.integers(128, 2000))
def test_prompt_tiles_are_bounded(tokens: list[int], max_tokens: int) -> None:
    breaks = BreakFinder(WORDS.__getitem__)
    tiles = prompt_cuts(as_ids(tokens), strategy="document", chunk_tokens=128, breaks=breaks, max_tokens=max_tokens)
    lengths = [end - start for start, end in tiles]
    assert min(lengths, default=64) >= min(64, len(tokens))
    assert max(lengths, default=0) <= min(512, max_tokens)
