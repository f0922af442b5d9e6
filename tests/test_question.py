"""What a prompt asks: the last turn of a chat, and which passages have words of it; what was said before is none."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvboost_rag.chunks import IntArray, as_ids
from kvboost_rag.planner import Plan, Segment
from kvboost_rag.question import (
    QUESTION_TOKENS,
    Alike,
    Repeated,
    Tokens,
    beginning_of,
    question_of,
    read,
    says_something,
)
from kvboost_rag.repair import (
    Asked,
    Positions,
    Recipe,
    Run,
    choose,
    expected,
    floor_positions,
    most_whole,
    named_runs,
    whole_runs,
)
from tests.test_repair import PROMPT, _runs

END, BEGIN, USER, MODEL = 1, 2, 3, 4  # of a chat template: a turn ends, a turn begins, and who speaks
CHAT = Tokens(
    markers=lambda: as_ids([END, BEGIN]),
    written=lambda: as_ids([END, BEGIN, USER, MODEL]),
    opening=lambda: as_ids([BEGIN, MODEL]),
)
WORDS = Tokens()


def _ids(*tokens: int) -> IntArray:
    return np.array(tokens, np.int32)


def asked_about(ids: IntArray, runs: list[Run], question: Positions, tokens: Tokens) -> Asked:
    passages = np.array([not np.isin(ids[run.start : run.end], tokens.markers()).any() for run in runs], bool)
    repeated = Repeated(ids, runs, passages, question, tokens)
    return Asked(question, *repeated.of_runs(), passages, spots=repeated.spots(16, floor_positions(Recipe(), runs)))


def test_the_question_of_a_chat_is_what_the_last_turn_says() -> None:
    ids = _ids(BEGIN, USER, 50, 51, 52, END, BEGIN, MODEL, 60, END, BEGIN, USER, 70, 71, 72, END, BEGIN, MODEL)
    assert question_of(ids, [], CHAT).tolist() == [12, 13, 14]
    assert question_of(ids, [], WORDS).tolist() == list(range(18))  # without markers all of it is one turn
    said_by_the_template = replace(CHAT, written=lambda: as_ids([END, BEGIN, USER, MODEL, 72]))
    assert question_of(ids, [], said_by_the_template).tolist() == [8, 12, 13]


def test_a_question_of_few_words_is_asked_about_what_was_said_before() -> None:
    ids = _ids(BEGIN, USER, 50, 51, 52, END, BEGIN, MODEL, 60, 61, END, BEGIN, USER, 70, END, BEGIN, MODEL)
    assert question_of(ids, [], CHAT).tolist() == [8, 9, 13]
    assert question_of(_ids(BEGIN, USER, 70, END, BEGIN, MODEL), [], CHAT).tolist() == [2]
    assert question_of(_ids(BEGIN, USER, END, BEGIN, MODEL), [], CHAT).tolist() == []


@pytest.mark.parametrize("begun", [[], [9], [9, 8, 7, 6, 5]])
def test_an_answer_that_the_caller_began_is_no_question(begun: list[int]) -> None:
    ids = _ids(BEGIN, USER, 50, 51, 52, END, BEGIN, MODEL, *begun)
    assert question_of(ids, [], CHAT).tolist() == [2, 3, 4]
    over = _ids(*ids, END, BEGIN, USER, 70, 71, 72)  # nobody is asked to answer yet
    assert question_of(over, [], CHAT).tolist()[-3:] == [len(over) - 3, len(over) - 2, len(over) - 1]


def test_what_stands_behind_the_passages_is_the_question_and_else_what_stands_around_them() -> None:
    end = [END, BEGIN, MODEL]
    behind = _ids(BEGIN, USER, 40, 41, 42, *range(100, 110), 70, 71, 72, *end)
    assert question_of(behind, [Run(5, 15)], CHAT).tolist() == [15, 16, 17]
    front = _ids(BEGIN, USER, 40, 41, 42, *range(100, 110), 70, *end)
    assert question_of(front, [Run(5, 15)], CHAT).tolist() == [2, 3, 4, 15]
    # The result of a search: what was searched for is in the call.
    call = [BEGIN, USER, 50, 51, 52, END, BEGIN, MODEL, 60, 61, 62, END]
    result = _ids(*call, BEGIN, USER, *range(100, 110), *end)
    assert question_of(result, [Run(14, 24)], CHAT).tolist() == [8, 9, 10]


def test_a_long_question_counts_from_its_end() -> None:
    ids = np.arange(100, 400, dtype=np.int32)
    assert question_of(ids, [], CHAT).tolist() == list(range(300 - QUESTION_TOKENS, 300))


def test_a_question_begins_with_its_line() -> None:
    lines = replace(CHAT, ends_line=lambda token: token == 9)
    document = [BEGIN, USER, *range(100, 120)]
    question, end = [70, 71, 72, 73, 74], [END, BEGIN, MODEL]
    assert beginning_of(_ids(*document, 9, *question, *end), lines) == 23
    assert beginning_of(_ids(*document, 9, *question, 9, 80, 81, *end), lines) == 23  # "Answer:" belongs to it
    assert beginning_of(_ids(*document, 9, *question, 9, 80, 81, 82, 83, *end), lines) == 29
    assert beginning_of(_ids(*document, *question, *end), lines) == 1  # the whole turn
    assert beginning_of(_ids(BEGIN, USER, 50, 9, 51, *end, USER, *question, *end), lines) == 7  # and no turn before
    long = np.arange(100, 400, dtype=np.int32)
    assert beginning_of(long, lines) == 300 - QUESTION_TOKENS
    assert beginning_of(long, WORDS) == 300  # lines are unknown
    assert beginning_of(_ids(BEGIN, MODEL), lines) <= 2


def test_what_was_said_before_is_no_passage_that_a_question_names() -> None:
    runs = [Run(10, 40), Run(42, 70), Run(72, 90)]
    ids = np.arange(1000, 1100, dtype=np.int32)
    ids[[75, 76, 77, 91, 92, 93]] = 7, 8, 9, 7, 8, 9  # the turn before repeats all of the question
    ids[[80, 50, 51]] = END, 8, 9
    asked = asked_about(ids, runs, np.array([91, 92, 93]), CHAT)
    assert asked.passages.tolist() == [True, True, False]
    assert asked.repeats.tolist() == [0.0, 3.0, 0.0]
    assert asked.continued.tolist() == [True, False, False]
    assert named_runs(Recipe(), runs, asked) == [runs[1]]
    assert named_runs(Recipe(), runs, asked, least=3.1) is None
    scores = np.zeros(100, np.float32)
    scores[75], scores[15] = 9.0, 1.0
    assert whole_runs(Recipe(), runs, scores, asked) == [runs[1]]
    assert whole_runs(Recipe(whole_asked=3), runs, scores, asked) == [runs[1], runs[0]]


def test_who_speaks_is_no_word_of_the_question() -> None:
    ids = _ids(50, USER, 51, 60, MODEL, 61, END, BEGIN, USER, 61, 62, 63, END, BEGIN, MODEL)
    runs = [Run(0, 3), Run(3, 6)]
    segments = (Segment("approximate", 0, 3, "a"), Segment("approximate", 3, 6, "b"), Segment("compute", 6, 15))
    asked = read(ids, Plan(15, segments, tuple(runs)), Recipe(), CHAT).asked
    assert asked is not None
    assert asked.repeats.tolist() == [0.0, 1.0]


def test_a_probe_asks_from_where_the_question_begins() -> None:
    ids = np.arange(100, 140, dtype=np.int32)
    ids[[5, 35]] = 7
    segments = (Segment("compute", 0, 4), Segment("approximate", 4, 20, "a"), Segment("compute", 20, 40))
    plan = Plan(40, segments, (Run(4, 20),))
    found = read(ids, plan, Recipe(), WORDS).asked
    assert found is not None
    assert (found.question.tolist(), found.repeats.tolist()) == (list(range(20, 40)), [1.0])
    unread = read(ids, plan, Recipe(whole_asked=0), WORDS).asked  # nothing depends on words
    assert unread is not None
    assert (unread.question.tolist(), unread.repeats.tolist()) == (list(range(20, 40)), [0.0])
    ids[28:30], ids[38:] = (END, BEGIN), (BEGIN, MODEL)
    last_turn = read(ids, plan, Recipe(), CHAT).asked
    assert last_turn is not None
    assert (last_turn.question.tolist(), last_turn.repeats.tolist()) == (list(range(30, 40)), [1.0])


def test_what_a_question_names_counts_as_much_as_what_it_attends_to() -> None:
    runs = [Run(10, 70), Run(72, 130), Run(132, 190), Run(192, 250)]
    ids = np.arange(1000, 1300, dtype=np.int32)
    ids[[20, 80, 140, 261]] = 7  # all but one hold it
    ids[[100, 260]] = 9  # asked about, and only the second run holds it
    ids[[10, 150, 200, 262]] = 11  # the others hold it, so the one behind the second says more than that
    asked = asked_about(ids, runs, np.array([260, 261, 262]), WORDS)
    assert asked.repeats.tolist() == pytest.approx([2 / 9, 1 + 1 / 9, 2 / 9, 1 / 9])
    assert asked.continued.tolist() == [True, True, False, False]
    scores = np.zeros(300, np.float32)
    scores[[15, 75, 135]] = 0.5, 0.2, 0.3
    assert whole_runs(Recipe(), runs, scores) == runs[:2]
    assert whole_runs(Recipe(), runs, scores, asked) == runs[1:3]
    assert set(range(132, 190)) <= set(choose(Recipe(ratio=0.0), runs, scores, asked).tolist())
    nothing = asked_about(ids, runs, np.array([270]), WORDS)  # no run holds it: attention decides
    assert nothing.repeats.tolist() == [0.0] * 4
    assert whole_runs(Recipe(), runs, scores, nothing) == runs[:1]
    none = asked_about(ids, [], np.array([260]), WORDS)
    assert (none.repeats.tolist(), none.continued.tolist()) == ([], [])
    unasked = asked_about(ids, runs, np.empty(0, np.int64), WORDS)
    assert (unasked.repeats.tolist(), unasked.continued.tolist()) == ([0.0] * 4, [False] * 4)


@settings(max_examples=100, deadline=None)
@given(_runs(), st.integers(0, 2**32 - 1), st.integers(1, 40))
def test_words_are_counted_as_sets_would(runs: list[Run], seed: int, vocabulary: int) -> None:
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, vocabulary, PROMPT).astype(np.int32)
    asking = np.arange(PROMPT - 20, PROMPT)
    asked = asked_about(ids, runs, asking, Tokens(lambda token: token % 2 == 0))
    words, pairs = set(ids[asking].tolist()), set(pairwise(ids[asking].tolist()))
    texts = [ids[run.start : run.end].tolist() for run in runs]
    held = [words & set(one) for one in texts]
    both: list[set[object]] = [{*own, *(pairs & set(pairwise(one)))} for own, one in zip(held, texts, strict=True)]
    for i, own in enumerate(held):
        behind = held[i + 1] if i + 1 < len(runs) else set[int]()
        assert asked.repeats[i] == pytest.approx(sum(1 / sum(w in other for other in both) ** 2 for w in both[i]))
        assert asked.continued[i] == any(word % 2 == 0 for word in behind - own)


def test_where_a_long_passage_repeats_the_question_is_recomputed() -> None:
    ids = np.arange(1000, 1800, dtype=np.int32)
    long, other, short = Run(10, 310), Run(312, 612), Run(614, 674)
    asking = np.arange(700, 720)
    ids[100:106] = ids[700:706]  # the line that is quoted
    ids[[20, 50, 200]] = ids[700]  # and a word of it elsewhere
    ids[400:403] = ids[710:713]  # what else is asked about
    ids[630:640] = ids[710:720]  # in a short passage, which is recomputed whole or not at all
    spots = asked_about(ids, [long, other, short], asking, WORDS).spots
    assert spots.tolist() == [*range(95, 111)]  # what is repeated, in the middle
    ids[630:640] = 5
    spots = asked_about(ids, [long, other, short], asking, WORDS).spots
    assert spots.tolist() == [*range(95, 111), *range(393, 409)]
    ids[500:503] = ids[706:709]  # there are no more than two, and the longer one comes first
    assert asked_about(ids, [long, other, short], asking, WORDS).spots.tolist() == spots.tolist()
    asked = asked_about(ids, [long, other], asking, WORDS)
    known = choose(Recipe(ratio=0.0), [long, other], None, asked)
    assert set(known.tolist()) == {*range(10, 14), *range(312, 316), *spots.tolist()}
    assert expected(Recipe(ratio=0.0), [long, other], asked) == len(known)
    for strategy in ("none", "selective"):
        less = choose(Recipe(strategy=strategy), [long, other], None, asked)
        assert not set(spots.tolist()) & set(less.tolist())


def test_a_spot_stays_inside_its_passage_and_holds_more_than_a_chance_word() -> None:
    ids = np.arange(1000, 1400, dtype=np.int32)
    run, asking = Run(10, 210), np.arange(300, 310)
    ids[207:210] = ids[300:303]
    assert asked_about(ids, [run], asking, WORDS).spots.tolist() == list(range(194, 210))
    ids[207:210] = 5
    ids[100] = ids[300]
    assert asked_about(ids, [run], asking, WORDS).spots.tolist() == []
    ids[10:14] = ids[300:304]  # the first four are recomputed anyway
    assert asked_about(ids, [run], asking, WORDS).spots.tolist() == []
    ids[12:18] = ids[300:306]
    assert asked_about(ids, [run], asking, WORDS).spots.tolist() == list(range(11, 27))
    segments = (Segment("compute", 0, 10), Segment("approximate", 10, 210, "a"), Segment("compute", 210, 310))
    plan = Plan(310, segments, (run,))
    for recipe, count in ((Recipe(), 16), (Recipe(spot_tokens=0), 0), (Recipe(strategy="none"), 0)):
        found = read(ids[:310], plan, recipe, WORDS).asked
        assert found is not None
        assert len(found.spots) == count


@settings(max_examples=150, deadline=None)
@given(_runs(longest=200), st.integers(0, 2**32 - 1), st.integers(2, 300), st.integers(1, 24))
def test_spots_hold_the_most_of_the_question(runs: list[Run], seed: int, vocabulary: int, size: int) -> None:
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, vocabulary, runs[-1].end + 20).astype(np.int32)
    asking = np.arange(len(ids) - 20, len(ids))
    every = np.full(len(runs), True)
    spots = Repeated(ids, runs, every, asking, WORDS).spots(size, np.empty(0, np.int64)).tolist()
    wanted = {*ids[asking].tolist(), *pairwise(ids[asking].tolist())}

    def held(start: int, end: int) -> set[object]:
        text = ids[start:end].tolist()
        return wanted & {*text, *pairwise(text)}

    holders = Counter(word for run in runs for word in held(run.start, run.end))

    def worth(start: int, taken: set[object]) -> float:
        return sum(1 / holders[word] ** 2 for word in held(start, start + size) - taken)

    long = [run for run in runs if len(run) >= 128]
    starts = [start for run in long for start in range(run.start, run.end - size + 1)]
    first = max((worth(start, set()) for start in starts), default=0.0)
    assert bool(spots) == (first >= 1.5 - 1e-6)
    assert len(spots) <= 2 * size
    windows = [start for start in starts if set(range(start, start + size)) <= set(spots)]
    if spots:
        assert max(worth(start, set()) for start in windows) == pytest.approx(first)


def test_what_stands_behind_is_recomputed_only_where_it_goes_on_about_what_is_asked() -> None:
    runs = [Run(10, 70), Run(72, 130), Run(132, 190)]
    ids = np.arange(1000, 1300, dtype=np.int32)
    ids[[20, 260]] = 9  # names the first run
    ids[[80, 150, 261]] = 7  # the second and the third have it, the first has not
    asking = np.array([260, 261])
    asked = asked_about(ids, runs, asking, Tokens(lambda token: token == 7))
    assert asked.continued.tolist() == [True, False, False]
    assert whole_runs(Recipe(), runs, None, asked) == runs[:2]
    particle = asked_about(ids, runs, asking, Tokens(lambda token: token != 7))
    assert particle.continued.tolist() == [False, False, False]
    assert whole_runs(Recipe(), runs, None, particle) == runs[:1]
    assert most_whole(Recipe(), runs) == 118  # before it is known what is asked


def test_a_word_is_the_same_at_the_beginning_of_a_text_and_in_a_sentence() -> None:
    pieces = {1: " git", 2: "git", 3: "Git", 4: " ", 5: "\n", 6: "-man", 7: " grit"}
    alike = Alike(pieces.__getitem__)
    numbers = alike(_ids(1, 2, 3, 4, 5, 6, 7)).tolist()
    assert numbers[0] == numbers[1] == numbers[2]
    assert len(set(numbers)) == 5
    runs = [Run(0, 2), Run(3, 5)]
    ids = _ids(2, 6, 4, 7, 6, 4, 4, 1, 6)  # "git-man" and "grit-man", and the question for " git-man"
    asked = asked_about(ids, runs, np.array([7, 8]), Tokens(same=alike))
    assert asked.repeats.tolist() == [2.25, 0.25]  # "git", both in a row, and "-man", which the other has, too


def test_parts_of_characters_are_not_alike() -> None:
    pieces = {1: "\ufffd", 2: "\ufffd", 3: " \ufffd", 4: "x\ufffd", 5: "哈", 6: " 哈"}
    assert Alike(pieces.__getitem__)(_ids(1, 2, 3, 4, 5, 6)).tolist() == [1, 2, 3, 4, 5, 5]


@pytest.mark.parametrize(
    ("piece", "says"),
    [(" version", True), ("size", True), (" not", False), (" the", False), ("'s", False), ("\n\n", False), ("", False),
     (" 2024", False), ("的版", True), (" да", True), ("<|im_end|>", True), ("()", False), (" a_b_c_d", True)],
)  # fmt: skip
def test_a_word_says_something_a_particle_does_not(piece: str, says: bool) -> None:
    assert says_something(piece) is says
