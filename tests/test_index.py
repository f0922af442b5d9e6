"""The index against brute force: what it finds, what it must never find, and what hostile text costs."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, multiple, rule

from kvboost_rag import anchors, chain, index, runs
from kvboost_rag.chunks import ChunkHeader, Hit, IntArray, Origin, Scope, as_ids, prefix_hash
from kvboost_rag.index import ChunkIndex

ALICE = Scope("f1", "alice")
BOB = Scope("f1", "bob")
OTHER_MODEL = Scope("f2", "alice")
SCOPES = (ALICE, BOB, OTHER_MODEL)
NOTHING = as_ids([])


def ids_of(*parts: Sequence[int] | IntArray) -> IntArray:
    return as_ids(np.concatenate([np.asarray(part, dtype=np.int32) for part in parts]))


def chunk(
    tokens: Sequence[int] | IntArray,
    history: Sequence[int] | IntArray | None = (),
    *,
    scope: Scope = ALICE,
    origin: Origin = "warm",
    base: int = 0,
) -> ChunkHeader:
    """A header; ``history=None`` makes one that may never serve an exact hit."""
    known = None if history is None else as_ids(history)
    return ChunkHeader.of(
        scope, as_ids(tokens), base=base if known is None else len(known), history=known, origin=origin
    )


def index_of(*headers: ChunkHeader) -> ChunkIndex:
    made = ChunkIndex()
    for header in headers:
        made.add(header)
    return made


def text(seed: int, tokens: int, vocabulary: int = 50_000) -> IntArray:
    return as_ids(np.random.default_rng(seed).integers(0, vocabulary, size=tokens))


def spans(hits: Sequence[Hit]) -> list[tuple[int, int]]:
    return [(hit.start, hit.end) for hit in hits]


@contextmanager
def without_caps() -> Iterator[None]:
    """Look at every posting and every diagonal, so that the result has an exact reference."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runs, "ROUND", 1 << 20)
        patch.setattr(runs, "MAX_RUNS", 1 << 20)
        patch.setattr(anchors, "PER_WINDOW", 1 << 20)
        patch.setattr(anchors, "PER_CHUNK", 1 << 20)
        yield


@contextmanager
def colliding() -> Iterator[None]:
    """Make every hash of the index the same."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(anchors, "window_hashes", lambda ids: np.full(max(0, len(ids) - 15), 7, dtype=np.int32))
        patch.setattr(chain, "prefix_hash", lambda scope, sequence: "7")
        patch.setattr(chain._PrefixHashes, "at", lambda self, tokens: "7")
        patch.setattr(index, "content_hash", lambda scope, tokens: "7")
        yield


# --- brute force --------------------------------------------------------------------------------------------------


def brute_reach(headers: Sequence[ChunkHeader], ids: IntArray) -> int:
    """How far first parts of chunks behind their own history can tile from 0."""
    reach, before = 0, -1
    while reach != before:
        before = reach
        for header in headers:
            if header.history is None or header.base > reach:
                continue
            if header.history.tolist() == ids[: header.base].tolist():
                same = 0
                for mine, theirs in zip(header.tokens.tolist(), ids[header.base :].tolist(), strict=False):
                    if mine != theirs:
                        break
                    same += 1
                reach = max(reach, header.base + same)
    return reach


def brute_runs(headers: Sequence[ChunkHeader], ids: IntArray, start: int, collide: bool = False) -> list[Hit]:
    """Greedy choice among all runs of all diagonals where a registered window is equal, or seems so if all collide.

    ``headers`` oldest first.
    """
    found = []
    for age, header in enumerate(headers):
        rank = (header.origin != "warm", -age)
        for shift in range(start - len(header), len(ids)):
            equal = list(runs_on(header, ids, start, shift))
            seem_equal = [(max(shift, start), min(shift + len(header), len(ids)))] if collide else equal
            if any(holds_anchor(header, begin - shift, end - shift) for begin, end in seem_equal):
                found += [(begin - end, rank, begin, shift, header.key) for begin, end in equal]
    hits: list[Hit] = []
    while found:
        found.sort()
        minus, _, begin, shift, key = found[0]
        hits.append(Hit(begin, -minus, key, begin - shift))
        found = [part for run in found for part in outside(run, begin, begin - minus)]
    return sorted(hits, key=lambda hit: hit.start)


def runs_on(header: ChunkHeader, ids: IntArray, start: int, shift: int) -> Iterator[tuple[int, int]]:
    low, high = max(shift, start), min(shift + len(header), len(ids))
    begin = low
    for at in range(low, high + 1):
        if at == high or ids[at] != header.tokens[at - shift]:
            if at - begin >= 16:
                yield begin, at
            begin = at + 1


def holds_anchor(header: ChunkHeader, begin: int, end: int) -> bool:
    last = len(header) - 16
    return last >= 0 and any(begin <= offset and offset + 16 <= end for offset in (*range(0, last + 1, 8), last))


def outside(run: tuple, begin: int, end: int) -> list[tuple]:
    minus, rank, start, shift, key = run
    stop = start - minus
    parts = [(start, min(stop, begin)), (max(start, end), stop)]
    return [(s - e, rank, s, shift, key) for s, e in parts if e - s >= 16]


def check_exact(found: Sequence[Hit], known: ChunkIndex, ids: IntArray) -> int:
    """Hits tile from 0, each behind its chunk's history. Returns the covered length."""
    at = 0
    for hit in found:
        header = known.get(hit.key)
        assert header is not None
        assert header.history is not None
        assert (hit.start, hit.offset) == (at, 0)
        assert hit.length >= 1
        assert header.history.tolist() == ids[:at].tolist()
        assert header.tokens[: hit.length].tolist() == ids[at : hit.end].tolist()
        at = hit.end
    return at


def check_runs(found: Sequence[Hit], known: ChunkIndex, scope: Scope, ids: IntArray, start: int = 0) -> None:
    at, last = start, None
    for hit in found:
        header = known.get(hit.key)
        assert header is not None
        assert header.scope == scope
        assert hit.start >= at
        assert hit.length >= 16
        assert 0 <= hit.offset
        assert hit.offset + hit.length <= len(header)
        assert header.tokens[hit.offset : hit.offset + hit.length].tolist() == ids[hit.start : hit.end].tolist()
        if last is not None and last.end == hit.start and last.key == hit.key:
            assert last.offset + last.length != hit.offset, "one run given as two hits"
        at, last = hit.end, hit
    assert at <= len(ids)


# --- the registry -------------------------------------------------------------------------------------------------


def test_add_get_discard() -> None:
    one, two = chunk(text(1, 40)), chunk(text(2, 40))
    known = index_of(one, two, one)
    assert len(known) == 2
    assert known.keys(ALICE) == [one.key, two.key]
    assert known.get(one.key) is one
    known.discard(one.key)
    known.discard(one.key)
    known.discard("no such key")
    assert known.get(one.key) is None
    assert known.keys(ALICE) == [two.key]
    assert known.match_runs(ALICE, one.tokens) == ()
    assert known.match_exact(ALICE, one.tokens) == ()
    assert known.find_content(ALICE, one.tokens) == []
    known.add(one)
    assert known.match_exact(ALICE, one.tokens) == known.match_runs(ALICE, one.tokens) == (Hit(0, 40, one.key, 0),)


def test_finds_content_behind_any_history() -> None:
    tokens = text(1, 40)
    same = [chunk(tokens), chunk(tokens, [1, 2, 3]), chunk(tokens, None, base=9)]
    known = index_of(*same, chunk(tokens[:-1]), chunk(tokens, scope=BOB))
    assert known.find_content(ALICE, tokens) == same
    known.discard(same[1].key)
    assert known.find_content(ALICE, tokens) == [same[0], same[2]]
    assert known.find_content(OTHER_MODEL, tokens) == []


def test_same_content_hash_is_not_same_content() -> None:
    with colliding():
        one, two = chunk(text(1, 40)), chunk(text(2, 40))
        known = index_of(one, two)
        assert known.find_content(ALICE, one.tokens) == [one]
        known.discard(one.key)
        assert known.find_content(ALICE, one.tokens) == []
        assert known.find_content(ALICE, two.tokens) == [two]


def test_nothing_known_nothing_found() -> None:
    known = ChunkIndex()
    assert known.match_exact(ALICE, text(1, 40)) == known.match_runs(ALICE, text(1, 40)) == ()
    known.add(chunk([]))
    known.add(chunk(text(1, 40)))
    for ids in (NOTHING, as_ids([1]), text(2, 40)):
        assert known.match_exact(ALICE, ids) == known.match_runs(ALICE, ids, len(ids)) == ()


@pytest.mark.parametrize("start", [-1, 41])
def test_start_outside_of_the_prompt(start: int) -> None:
    with pytest.raises(ValueError, match=f"start is {start}; it must be from 0 to the 40 ids"):
        ChunkIndex().match_runs(ALICE, text(1, 40), start)


def test_scopes_never_see_each_other() -> None:
    tokens = text(1, 60)
    known = index_of(*(chunk(tokens, scope=scope) for scope in SCOPES))
    for scope in SCOPES:
        (key,) = known.keys(scope)
        assert [hit.key for hit in known.match_exact(scope, tokens)] == [key]
        assert [hit.key for hit in known.match_runs(scope, tokens)] == [key]
        known.discard(key)
        assert known.match_exact(scope, tokens) == known.match_runs(scope, tokens) == ()


# --- the exact chain ----------------------------------------------------------------------------------------------


def test_chain_goes_on_from_a_partial_match() -> None:
    ids = text(1, 100)
    long = chunk(ids_of(ids[:30], text(2, 50)))
    behind_part = chunk(ids[30:70], ids[:30])
    tail = chunk(ids_of(ids[70:90], text(3, 9)), ids[:70])
    known = index_of(tail, behind_part, long)
    assert known.match_exact(ALICE, ids) == (
        Hit(0, 30, long.key, 0),
        Hit(30, 40, behind_part.key, 0),
        Hit(70, 20, tail.key, 0),
    )


def test_a_longer_first_match_does_not_hide_a_longer_chain() -> None:
    ids = text(1, 300)
    greedy = chunk(ids_of(ids[:110], text(2, 40)))
    first, second = chunk(ids[:100]), chunk(ids[100:300], ids[:100])
    known = index_of(greedy, first, second)
    found = known.match_exact(ALICE, ids)
    assert check_exact(found, known, ids) == 300
    assert len(found) == 2


def test_chain_prefers_few_chunks() -> None:
    ids = text(1, 120)
    small = [chunk(ids[at : at + 10], ids[:at]) for at in range(0, 120, 10)]
    whole = chunk(ids[:100])
    known = index_of(*small, whole)
    assert spans(known.match_exact(ALICE, ids)) == [(0, 100), (100, 110), (110, 120)]


def test_chain_uses_only_true_history() -> None:
    ids = text(1, 80)
    known = index_of(chunk(ids, None), chunk(ids[40:], None, base=40), chunk(ids[40:], text(2, 40)))
    assert known.match_exact(ALICE, ids) == ()
    assert spans(known.match_runs(ALICE, ids)) == [(0, 80)]


def test_chunk_shorter_than_an_anchor_serves_the_chain_only() -> None:
    ids = text(1, 15)
    known = index_of(chunk(ids))
    assert spans(known.match_exact(ALICE, ids_of(ids, text(2, 20)))) == [(0, 15)]
    assert known.match_runs(ALICE, ids_of(ids, text(2, 20))) == ()


def test_best_of_many_siblings() -> None:
    common = text(0, 20)
    siblings = [chunk(ids_of(common, text(seed, 30))) for seed in range(1, 400)]
    known = index_of(*siblings)
    for wanted in siblings[::40]:
        ids = ids_of(wanted.tokens[:44], text(1000, 10))
        assert known.match_exact(ALICE, ids) == (Hit(0, 44, wanted.key, 0),)


def test_best_sibling_whatever_the_bytes_of_its_ids() -> None:
    known = index_of(chunk([1, 256, 3]), chunk([1, 255, 9]), chunk([1, 65536, 2]), chunk([0, 256, 3]))
    assert spans(known.match_exact(ALICE, as_ids([1, 65536, 2, 7]))) == [(0, 3)]
    assert spans(known.match_exact(ALICE, as_ids([1, 255, 3]))) == [(0, 2)]


@settings(deadline=None)
@given(st.lists(st.integers(0, 70_000), max_size=40), st.data())
def test_streamed_prefix_hashes(tokens: list[int], data: st.DataObject) -> None:
    ids = as_ids(tokens)
    hashes = chain._PrefixHashes(ALICE, ids)
    for end in sorted(data.draw(st.lists(st.integers(0, len(ids))))):
        assert hashes.at(end) == prefix_hash(ALICE, ids[:end])


def cut_sequences(vocabulary: int) -> st.SearchStrategy[list[ChunkHeader]]:
    """Chunks of a few related sequences, each cut elsewhere."""
    token = st.integers(0, vocabulary - 1)
    cut = st.tuples(
        st.lists(token, min_size=1, max_size=12), st.integers(0, 11), st.sampled_from((True, True, True, False))
    )

    def header(drawn: tuple[list[int], int, bool]) -> ChunkHeader:
        sequence, at, exact = drawn
        at = min(at, len(sequence) - 1)
        return chunk(sequence[at:], sequence[:at] if exact else None, base=at)

    return st.lists(cut.map(header), max_size=14)


@settings(max_examples=300, deadline=None)
@given(cut_sequences(2), st.lists(st.integers(0, 1), max_size=20), st.booleans())
def test_chain_reaches_as_far_as_brute_force(headers: list[ChunkHeader], prompt: list[int], collide: bool) -> None:
    ids = as_ids(prompt)
    with colliding() if collide else nullcontext():
        known = index_of(*headers)
        assert check_exact(known.match_exact(ALICE, ids), known, ids) == brute_reach(headers, ids)
        for header in headers[::2]:
            known.discard(header.key)
        left = [header for header in headers if known.get(header.key)]
        assert check_exact(known.match_exact(ALICE, ids), known, ids) == brute_reach(left, ids)


# --- runs anywhere ------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(
    st.permutations(range(120)),
    st.integers(24, 90),
    st.data(),
    st.lists(st.integers(1000, 1003), max_size=60),
    st.lists(st.integers(1000, 1003), max_size=60),
)
def test_every_stored_run_is_found(
    tokens: list[int], length: int, data: st.DataObject, before: list[int], after: list[int]
) -> None:
    """Whatever the place in the chunk and in the prompt: the hit is exactly the run."""
    header = chunk(tokens[:90])
    offset = data.draw(st.integers(0, 90 - length))
    start = data.draw(st.integers(0, len(before)))
    ids = ids_of(before, tokens[offset : offset + length], after)
    found = index_of(header, chunk(text(1, 50))).match_runs(ALICE, ids, start)
    assert found == (Hit(len(before), length, header.key, offset),)


def test_runs_of_24_tokens_from_every_offset() -> None:
    header = chunk(text(1, 77))
    known = index_of(header)
    for offset in range(77 - 24 + 1):
        ids = ids_of(text(2, 5), header.tokens[offset : offset + 24], text(3, 5))
        assert known.match_runs(ALICE, ids) == (Hit(5, 24, header.key, offset),)


def test_each_of_many_chunks_is_found() -> None:
    headers = [chunk(text(seed, 100)) for seed in range(2000)]
    known = index_of(*headers)
    for some in (headers[at : at + 50] for at in range(0, 2000, 50)):
        found = known.match_runs(ALICE, ids_of(*(header.tokens for header in some)))
        assert found == tuple(Hit(100 * i, 100, header.key, 0) for i, header in enumerate(some))


@settings(deadline=None)
@given(st.data(), st.integers(1, 3), st.booleans())
def test_every_stored_run_is_found_among_repetitions(data: st.DataObject, vocabulary: int, capped: bool) -> None:
    """With few different tokens, runs overlap and repeat; still none of 24 tokens is left out."""
    tokens = st.lists(st.integers(0, vocabulary - 1), min_size=24, max_size=70)
    stored = data.draw(st.lists(tokens, min_size=1, max_size=4))
    prompt = [data.draw(tokens)]
    for _ in range(data.draw(st.integers(1, 3))):
        source = data.draw(st.sampled_from(stored))
        begin = data.draw(st.integers(0, len(source) - 24))
        prompt += [source[begin : data.draw(st.integers(begin + 24, len(source)))], data.draw(tokens)]
    ids = ids_of(*prompt)
    with nullcontext() if capped else without_caps():
        known = index_of(*map(chunk, stored))
        found = known.match_runs(ALICE, ids)
    check_runs(found, known, ALICE, ids)
    covered = np.zeros(len(ids), dtype=bool)
    for hit in found:
        covered[hit.start : hit.end] = True
    windows = {tuple(source[at : at + 24]) for source in stored for at in range(len(source) - 23)}
    for at in range(len(ids) - 23):
        if tuple(ids[at : at + 24].tolist()) in windows:
            # A longer hit may have trimmed the run; then less than 16 tokens in a row are left.
            part = covered[at : at + 24]
            assert part.any()
            assert capped or not any(not part[i : i + 16].any() for i in range(9))


@pytest.mark.parametrize("length", range(16, 24))
def test_whole_short_chunk_is_found(length: int) -> None:
    header = chunk(text(1, length))
    found = index_of(header).match_runs(ALICE, ids_of(text(2, 13), header.tokens, text(3, 5)))
    assert found == (Hit(13, length, header.key, 0),)


def test_same_document_twice() -> None:
    header = chunk(text(1, 100))
    ids = ids_of(text(2, 7), header.tokens, text(3, 3), header.tokens)
    found = index_of(header).match_runs(ALICE, ids)
    assert found == (Hit(7, 100, header.key, 0), Hit(110, 100, header.key, 0))


def test_edited_document_gives_its_equal_parts() -> None:
    header = chunk(text(1, 100))
    ids = ids_of(header.tokens[:40], [60_000], header.tokens[41:], [60_001], header.tokens[10:20])
    assert index_of(header).match_runs(ALICE, ids) == (Hit(0, 40, header.key, 0), Hit(41, 59, header.key, 41))


def test_starts_inside_a_document() -> None:
    header = chunk(text(1, 100))
    assert index_of(header).match_runs(ALICE, ids_of(header.tokens, [1]), 37) == (Hit(37, 63, header.key, 37),)


def test_long_runs_first_and_leftovers() -> None:
    ids = text(1, 200)
    left, long, right = chunk(ids[:70]), chunk(ids[50:150]), chunk(ids[135:170])
    found = index_of(left, right, long).match_runs(ALICE, ids)
    assert found == (Hit(0, 50, left.key, 0), Hit(50, 100, long.key, 0), Hit(150, 20, right.key, 15))


def test_equally_long_runs_prefer_warmed_then_latest() -> None:
    tokens = text(1, 60)
    older, newer = chunk(tokens, [1]), chunk(tokens, [2])
    seen = chunk(tokens, [3], origin="prompt")
    known = index_of(older, newer, seen)
    assert [hit.key for hit in known.match_runs(ALICE, tokens)] == [newer.key]
    known.discard(newer.key)
    assert [hit.key for hit in known.match_runs(ALICE, tokens)] == [older.key]
    known.add(newer)
    known.discard(older.key)
    known.discard(newer.key)
    assert [hit.key for hit in known.match_runs(ALICE, tokens)] == [seen.key]


@st.composite
def related_texts(draw: st.DrawFn) -> tuple[list[ChunkHeader], IntArray, int]:
    """Chunks and a prompt that are cut from one text with repetitions, so that they share much."""
    half = draw(st.lists(st.integers(0, 3), min_size=60, max_size=90))
    pool = [*half, *([9] * draw(st.integers(0, 30))), *half[::-1], *half[20:60]]
    piece = st.tuples(st.integers(0, len(pool) - 20), st.integers(8, 60)).map(lambda p: pool[p[0] : p[0] + p[1]])
    joined = st.lists(piece, min_size=1, max_size=2).map(lambda parts: [token for part in parts for token in part])
    origins: st.SearchStrategy[Origin] = st.sampled_from(("warm", "prompt"))
    headers = draw(st.lists(st.builds(lambda t, o: chunk(t, None, origin=o), joined, origins), max_size=6))
    ids = ids_of(*draw(st.lists(piece, min_size=1, max_size=5)))
    return headers, ids, draw(st.integers(0, len(ids)))


@settings(max_examples=150, deadline=None)
@given(related_texts(), st.booleans())
def test_runs_equal_brute_force(case: tuple[list[ChunkHeader], IntArray, int], collide: bool) -> None:
    headers, ids, start = case
    with without_caps(), colliding() if collide else nullcontext():
        known = index_of(*headers)
        found = known.match_runs(ALICE, ids, start)
        check_runs(found, known, ALICE, ids, start)
        first = {header.key: header for header in reversed(headers)}
        assert list(found) == brute_runs([first[key] for key in known.keys(ALICE)], ids, start, collide)


def test_flood_of_collisions_stays_sound() -> None:
    """Beyond `MAX_CHAIN` colliding windows the rest is not registered: hits may be lost, never wrong."""
    with colliding():
        headers = [chunk(text(seed, 400)) for seed in range(12)]
        known = index_of(*headers)
        for header in headers:
            check_runs(known.match_runs(ALICE, header.tokens), known, ALICE, header.tokens)
        assert spans(known.match_runs(ALICE, headers[0].tokens)) == [(0, 400)]
        for header in headers:
            known.discard(header.key)
        assert len(known) == 0


# --- hostile and repetitive text ----------------------------------------------------------------------------------


def timed_runs(known: ChunkIndex, ids: IntArray) -> tuple[Hit, ...]:
    """Hits, found in far less than a prefill would take. The limit leaves room for slow machines."""
    begin = time.process_time()
    found = known.match_runs(ALICE, ids)
    assert time.process_time() - begin < 0.5
    check_runs(found, known, ALICE, ids)
    return found


def covered_tokens(found: Sequence[Hit]) -> int:
    return sum(hit.length for hit in found)


@pytest.mark.parametrize("stored", [(200,), tuple(range(200, 400)), (8000,)])
def test_one_token_repeated(stored: tuple[int, ...]) -> None:
    known = index_of(*(chunk([5] * tokens) for tokens in stored))
    found = timed_runs(known, as_ids([5] * 8192))
    assert covered_tokens(found) > 0.97 * min(8192, 8192 if len(stored) > 1 else stored[0] * 40)


def test_long_repetition_is_laid_beside_itself_in_full() -> None:
    header = chunk([5] * 8000)
    assert timed_runs(index_of(header), ids_of([1], header.tokens, [2])) == (Hit(1, 8000, header.key, 0),)
    (part,) = timed_runs(index_of(header), ids_of([1], header.tokens[:4000], [2]))
    assert (part.start, part.length) == (1, 4000)


def test_chunk_that_repeats_a_window_is_posted_at_its_first_and_last_place() -> None:
    table = anchors.AnchorTable()
    table.add(0, as_ids([7] * 100))
    assert sorted(table.lookup(as_ids([7] * 16)).offset.tolist()) == [0, 84]


def test_rarity_counts_what_is_stored_now_and_seen_in_the_prompt() -> None:
    window = text(1, 16)
    table = anchors.AnchorTable()
    for slot in range(4):
        table.add(slot, window)
    assert table.lookup(window).rarity.tolist() == [0.25] * 4
    table.remove(1)
    table.remove(3)
    found = table.lookup(ids_of(window, window))
    assert sorted(zip(found.position.tolist(), found.slot.tolist(), strict=True)) == [(0, 0), (0, 2), (16, 0), (16, 2)]
    assert found.rarity.tolist() == [0.25] * 4


def test_normal_text_next_to_repetitions() -> None:
    documents = [ids_of(text(seed, 5), [5] * 1500, text(100 + seed, 80)) for seed in range(40)]
    known = index_of(*map(chunk, documents))
    ids = ids_of(*(part for document in documents for part in ([5] * 120, document[1505:])))
    found = timed_runs(known, ids)
    assert covered_tokens(found) == len(ids)
    assert {hit.key for hit in found} == set(known.keys(ALICE))


def test_boilerplate_shared_by_thousands() -> None:
    """More chunks share the head than are looked at; each is found through its body, head included."""
    head = text(0, 60)
    headers = [chunk(ids_of(head, text(seed, 40))) for seed in range(1, 2001)]
    known = index_of(*headers)
    wanted = headers[3::50]
    found = timed_runs(known, ids_of(*(header.tokens for header in wanted)))
    assert found == tuple(Hit(100 * i, 100, header.key, 0) for i, header in enumerate(wanted))


def test_tables_and_periodic_text() -> None:
    row = text(0, 16)

    def table(seed: int) -> IntArray:
        cells = text(seed, 480, 10).tolist()
        return ids_of(*(ids_of(row, [cell]) for cell in cells))

    known = index_of(*(chunk(table(seed)) for seed in range(3)))
    assert spans(timed_runs(known, table(1))) == [(0, 8160)]
    timed_runs(known, table(9))


def test_every_window_from_another_chunk() -> None:
    ids = text(1, 4096)
    known = index_of(*(chunk(ids_of(ids[at : at + 16], text(at + 2, 20))) for at in range(4080)))
    assert covered_tokens(timed_runs(known, ids)) > 0.8 * len(ids)


def test_churn_leaves_nothing_behind() -> None:
    known = ChunkIndex()
    rng = np.random.default_rng(0)
    alive: list[str] = []

    def churn(rounds: int) -> None:
        for _ in range(rounds):
            history = rng.integers(0, 50, size=rng.integers(0, 1000))
            header = chunk(rng.integers(0, 50_000, size=50), history)
            known.add(header)
            alive.append(header.key)
            if len(alive) > 50:
                known.discard(alive.pop(int(rng.integers(0, 50))))

    churn(1000)
    columns = known.nbytes
    gc.collect()
    blocks = sys.getallocatedblocks()
    churn(9000)
    gc.collect()
    assert known.nbytes == columns
    assert sys.getallocatedblocks() - blocks < 1000
    assert len(known) == 50
    for key in alive:
        header = known.get(key)
        assert header is not None
        assert covered_tokens(known.match_runs(ALICE, header.tokens)) == 50
        known.discard(key)
    assert (len(known), known.nbytes, known.keys(ALICE)) == (0, 0, [])


# --- any sequence of calls ----------------------------------------------------------------------------------------

POOL = ids_of(text(7, 120, 40), [3] * 25, text(8, 100, 2), text(7, 120, 40)[30:80], [3] * 10)
PLACE = st.tuples(st.integers(0, len(POOL) - 1), st.integers(0, 70))


def cut_from_pool(place: tuple[int, int]) -> IntArray:
    return POOL[place[0] : place[0] + place[1]]


def test_many_chunks_at_once_are_found_as_one_by_one_and_leave_nothing_behind() -> None:
    heading = text(1, 40)
    headers = [chunk(ids_of(heading, text(seed, 100 + seed))) for seed in range(2, 80)]
    single, many = index_of(*headers), ChunkIndex()
    many.add_many(headers[:30])
    for header in headers[10:20]:
        many.discard(header.key)
    many.add_many(headers[30:])
    many.add_many(headers[10:20])
    for header in headers:
        prompt = ids_of(text(500, 20), header.tokens[45:], text(501, 20), heading)
        assert spans(many.match_runs(ALICE, prompt)) == spans(single.match_runs(ALICE, prompt))
    for header in headers:
        many.discard(header.key)
    assert len(many) == 0
    assert not many.match_runs(ALICE, headers[0].tokens)


def test_five_thousand_chunks_are_added_quickly() -> None:
    pack = text(0, 1500)
    headers = [chunk(text(seed, 250), pack[: 250 * (seed % 6)]) for seed in range(5000)]
    made = ChunkIndex()
    started = time.process_time()
    made.add_many(headers)
    assert time.process_time() - started < 2.0  # 0.5 on an idle machine; one by one it takes 4
    assert spans(made.match_runs(ALICE, headers[4321].tokens)) == [(0, 250)]


@st.composite
def drawn_header(draw: st.DrawFn) -> ChunkHeader:
    sequence = cut_from_pool(draw(PLACE))
    base = min(draw(st.one_of(st.just(0), st.integers(0, 40))), len(sequence))
    history = sequence[:base] if draw(st.booleans()) else None
    scope = draw(st.sampled_from((ALICE, ALICE, BOB)))
    return chunk(sequence[base:], history, scope=scope, origin=draw(st.sampled_from(("warm", "prompt"))), base=base)


HEADER = drawn_header()


class IndexMachine(RuleBasedStateMachine):
    """The index beside a plain list of headers."""

    headers = Bundle("headers")

    @initialize(target=headers, drawn=st.lists(HEADER, min_size=1, max_size=8))
    def begin(self, drawn: list[ChunkHeader]) -> object:
        self.patch = without_caps()
        self.patch.__enter__()
        self.index = ChunkIndex()
        self.model: dict[str, ChunkHeader] = {}
        for header in drawn:
            self.add(header)
        return multiple(*drawn)

    def teardown(self) -> None:
        if hasattr(self, "patch"):
            self.patch.__exit__(None, None, None)

    def of(self, scope: Scope) -> list[ChunkHeader]:
        return [header for header in self.model.values() if header.scope == scope]

    @rule(target=headers, header=HEADER)
    def add_new(self, header: ChunkHeader) -> ChunkHeader:
        self.add(header)
        return header

    @rule(header=headers)
    def add(self, header: ChunkHeader) -> None:
        self.index.add(header)
        self.model.setdefault(header.key, header)

    @rule(target=headers, drawn=st.lists(HEADER, max_size=8))
    def add_many(self, drawn: list[ChunkHeader]) -> object:
        self.index.add_many(drawn)
        for header in drawn:
            self.model.setdefault(header.key, header)
        return multiple(*drawn)

    @rule(header=headers)
    def discard(self, header: ChunkHeader) -> None:
        self.index.discard(header.key)
        self.model.pop(header.key, None)

    @rule(scope=st.sampled_from((ALICE, ALICE, BOB, OTHER_MODEL)), places=st.lists(PLACE, max_size=3), data=st.data())
    def look_up(self, scope: Scope, places: list[tuple[int, int]], data: st.DataObject) -> None:
        ids = ids_of(NOTHING, *map(cut_from_pool, places))
        exact = self.index.match_exact(scope, ids)
        assert check_exact(exact, self.index, ids) == brute_reach(self.of(scope), ids)
        assert all(self.model[hit.key].scope == scope for hit in exact)
        start = data.draw(st.integers(0, len(ids)))
        found = self.index.match_runs(scope, ids, start)
        check_runs(found, self.index, scope, ids, start)
        assert list(found) == brute_runs(self.of(scope), ids, start)

    @rule(header=headers)
    def find(self, header: ChunkHeader) -> None:
        same = [h for h in self.of(header.scope) if h.tokens.tolist() == header.tokens.tolist()]
        assert self.index.find_content(header.scope, header.tokens) == same
        assert self.index.get(header.key) is self.model.get(header.key)

    @invariant()
    def same_keys(self) -> None:
        if hasattr(self, "index"):
            assert len(self.index) == len(self.model)
            for scope in SCOPES:
                assert self.index.keys(scope) == [header.key for header in self.of(scope)]


IndexMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
TestIndexMachine = IndexMachine.TestCase
