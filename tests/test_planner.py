"""Plans tile their prompt, compute its last token, and know where seams lie."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvboost_rag.chunks import ChunkHeader, Hit, Scope, as_ids
from kvboost_rag.planner import Plan, Segment, make_plan, without_approximate
from kvboost_rag.repair import Run

SCOPE = Scope("f" * 32, "tenant")
Headers = Mapping[str, ChunkHeader]


def _chunk(base: int, length: int, *, first: int = 0, exact: bool = True) -> ChunkHeader:
    """A chunk out of the sequence first, first + 1, …"""
    ids = np.arange(first, first + base + length)
    history = as_ids(ids[:base]) if exact else None
    return ChunkHeader.of(SCOPE, as_ids(ids[base:]), base=base, history=history, origin="warm")


def _by_key(*headers: ChunkHeader) -> dict[str, ChunkHeader]:
    return {header.key: header for header in headers}


@st.composite
def _found(draw: st.DrawFn) -> tuple[int, list[Hit], list[Hit], dict[str, ChunkHeader]]:
    """What an index may return: exact hits from 0, then approximate hits with or without gaps."""
    exact: list[Hit] = []
    approximate: list[Hit] = []
    headers: dict[str, ChunkHeader] = {}
    at = 0
    for i in range(draw(st.integers(0, 3))):
        length = draw(st.integers(1, 40))
        exact.append(Hit(at, length, f"exact{i}", 0))
        at += length
    for _ in range(draw(st.integers(0, 5))):
        at += draw(st.one_of(st.just(0), st.integers(1, 20)))
        length, offset, base = draw(st.integers(1, 40)), draw(st.integers(0, 9)), draw(st.integers(0, 30))
        header = _chunk(base, offset + length, first=1000 * len(headers), exact=draw(st.booleans()))
        headers[header.key] = header
        approximate.append(Hit(at, length, header.key, offset))
        at += length
    return max(at + draw(st.integers(0, 20)), 1), exact, approximate, headers


@settings(max_examples=200, deadline=None)
@given(_found())
def test_any_plan_tiles_its_prompt_and_computes_the_last_token(
    found: tuple[int, list[Hit], list[Hit], dict[str, ChunkHeader]],
) -> None:
    n, exact, approximate, headers = found
    plan = make_plan(n, exact, approximate, headers)
    covered = [p for s in plan.segments for p in range(s.start, s.end)]
    assert covered == list(range(n))
    assert plan.segments[-1].kind == "compute"
    assert sum(plan.tokens(kind) for kind in ("exact", "approximate", "compute")) == n
    hit = {p for h in (*exact, *approximate) for p in range(h.start, h.end)} - {n - 1}
    assert {p for s in plan.segments if s.kind != "compute" for p in range(s.start, s.end)} == hit


@settings(max_examples=200, deadline=None)
@given(_found())
def test_each_segment_names_the_tokens_it_takes(
    found: tuple[int, list[Hit], list[Hit], dict[str, ChunkHeader]],
) -> None:
    n, exact, approximate, headers = found
    plan = make_plan(n, exact, approximate, headers)
    hits = {(h.start, h.key): h for h in (*exact, *approximate)}
    for segment in plan.segments:
        if segment.key is None:
            assert segment.kind == "compute"
            continue
        hit = hits[segment.start, segment.key]
        assert segment.offset == hit.offset
        if segment.kind == "exact":
            assert segment.delta == 0
        else:
            old = headers[segment.key].base + segment.offset
            assert old + segment.delta == segment.start
    assert set(plan.keys) == {s.key for s in plan.segments if s.key is not None}
    assert len(set(plan.keys)) == len(plan.keys)


@settings(max_examples=200, deadline=None)
@given(_found())
def test_runs_cover_just_the_approximate_segments(
    found: tuple[int, list[Hit], list[Hit], dict[str, ChunkHeader]],
) -> None:
    plan = make_plan(*found)
    runs = [p for r in plan.runs for p in range(r.start, r.end)]
    moved = [p for s in plan.segments if s.kind == "approximate" for p in range(s.start, s.end)]
    assert runs == moved
    starts = {s.start for s in plan.segments if s.kind == "approximate"}
    assert {r.start for r in plan.runs} <= starts


@settings(max_examples=100, deadline=None)
@given(_found())
def test_a_plan_without_approximate_segments_is_exact(
    found: tuple[int, list[Hit], list[Hit], dict[str, ChunkHeader]],
) -> None:
    plan = make_plan(*found)
    exact = without_approximate(plan)
    assert exact.prompt_tokens == plan.prompt_tokens
    assert exact.runs == ()
    assert exact.tokens("approximate") == 0
    assert exact.tokens("exact") == plan.tokens("exact")
    assert exact.exact_end == exact.tokens("exact")
    assert exact.pure_until == exact.prompt_tokens


def test_everything_in_front_of_the_first_moved_token_is_pure() -> None:
    chunk = _chunk(0, 30)
    plan = make_plan(60, [Hit(0, 10, "e", 0)], [Hit(20, 30, chunk.key, 0)], _by_key(chunk))
    assert (plan.exact_end, plan.pure_until) == (10, 20)


def test_a_prompt_that_is_one_hit_still_computes_its_last_token() -> None:
    plan = make_plan(10, [Hit(0, 10, "e", 0)])
    assert plan.segments == (Segment("exact", 0, 9, "e"), Segment("compute", 9, 10))
    assert make_plan(1, [Hit(0, 1, "e", 0)]).segments == (Segment("compute", 0, 1),)


def test_a_hit_of_only_the_last_token_is_no_segment() -> None:
    chunk = _chunk(0, 16)
    plan = make_plan(11, [Hit(0, 10, "e", 0)], [Hit(10, 1, chunk.key, 0)], _by_key(chunk))
    assert [s.kind for s in plan.segments] == ["exact", "compute"]
    assert plan.runs == ()


def test_chunks_of_one_encoding_that_move_together_have_no_seam() -> None:
    first, second = _chunk(0, 20), _chunk(20, 20)
    plan = make_plan(60, [], [Hit(5, 20, first.key, 0), Hit(25, 20, second.key, 0)], _by_key(first, second))
    assert plan.runs == (Run(5, 45),)


@pytest.mark.parametrize(
    ("second", "at"),
    [
        (_chunk(20, 20, first=500), 25),  # another document
        (_chunk(0, 20), 25),  # encoded on its own
        (_chunk(20, 20), 26),  # a token apart
        (_chunk(20, 20, exact=False), 25),  # encoded behind nobody knows what
    ],
    ids=["other history", "alone", "gap", "unknown history"],
)
def test_a_seam_lies_where_two_encodings_meet(second: ChunkHeader, at: int) -> None:
    first = _chunk(0, 20)
    plan = make_plan(60, [], [Hit(5, 20, first.key, 0), Hit(at, 20, second.key, 0)], _by_key(first, second))
    assert plan.runs == (Run(5, 25), Run(at, at + 20))


def test_the_same_document_twice_has_a_seam_between() -> None:
    chunk = _chunk(0, 20)
    plan = make_plan(60, [], [Hit(5, 20, chunk.key, 0), Hit(25, 20, chunk.key, 0)], _by_key(chunk))
    assert plan.runs == (Run(5, 25), Run(25, 45))


def test_two_parts_of_one_chunk_that_move_together_have_no_seam() -> None:
    chunk = _chunk(0, 40, exact=False)
    plan = make_plan(60, [], [Hit(5, 20, chunk.key, 0), Hit(25, 20, chunk.key, 20)], _by_key(chunk))
    assert plan.runs == (Run(5, 45),)


@pytest.mark.parametrize(
    "segments",
    [
        (),
        (Segment("compute", 1, 10),),
        (Segment("compute", 0, 9),),
        (Segment("compute", 0, 11),),
        (Segment("exact", 0, 5, "k"), Segment("compute", 6, 10)),
        (Segment("exact", 0, 5, "k"), Segment("compute", 4, 10)),
        (Segment("exact", 0, 0, "k"), Segment("compute", 0, 10)),
    ],
    ids=["nothing", "late start", "short", "long", "gap", "overlap", "empty segment"],
)
def test_segments_that_do_not_tile_are_no_plan(segments: tuple[Segment, ...]) -> None:
    with pytest.raises(ValueError, match=r"segment"):
        Plan(10, segments)
