"""Which tokens are recomputed: always inside moved runs, the floor first, then what the budget buys."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvboost_rag.config import Repair, SelectorName
from kvboost_rag.repair import (
    SELECTORS,
    Asked,
    Recipe,
    Run,
    Scores,
    budgets,
    choose,
    expected,
    floor_positions,
    floors,
    most_whole,
    seam_positions,
    top_positions,
    top_with_quota,
    whole_runs,
    words_decide,
)

PROMPT = 400
RATIOS = st.floats(0.0, 1.0)


@st.composite
def _runs(draw: st.DrawFn, *, longest: int = 50) -> list[Run]:
    at, runs = 0, []
    for _ in range(draw(st.integers(1, 6))):
        start = at + draw(st.integers(0, 12))
        at = start + draw(st.integers(1, longest))
        runs.append(Run(start, at))
    return runs


SCORES = st.integers(0, 2**32 - 1).map(lambda seed: np.random.default_rng(seed).random(PROMPT, dtype=np.float32))


def _named(*repeats: float, continued: bool = True) -> Asked:
    every = np.full(len(repeats), True)
    return Asked(np.empty(0, np.int64), np.array(repeats, np.float32), every & continued, every)


def _inside(runs: list[Run]) -> set[int]:
    return {p for r in runs for p in range(r.start, r.end)}


@settings(max_examples=150, deadline=None)
@given(_runs(), SCORES, RATIOS, st.sampled_from(get_args(Repair)), st.sampled_from(sorted(SELECTORS)))
def test_only_moved_tokens_are_chosen_each_once_in_order(
    runs: list[Run], scores: Scores, ratio: float, strategy: Repair, selector: str
) -> None:
    recipe = Recipe(strategy=strategy, selector=selector, ratio=ratio)
    chosen = choose(recipe, runs, scores)
    assert chosen.dtype == np.int64
    assert np.array_equal(chosen, np.unique(chosen))
    assert set(chosen.tolist()) <= _inside(runs)


@settings(max_examples=150, deadline=None)
@given(_runs(), SCORES, RATIOS, st.sampled_from(sorted(SELECTORS)))
def test_cacheblend_takes_the_floor_and_just_its_budget(
    runs: list[Run], scores: Scores, ratio: float, selector: str
) -> None:
    recipe = Recipe(selector=selector, ratio=ratio)
    chosen = choose(recipe, runs, scores)
    floor = set(floor_positions(Recipe(floor_tokens=4), runs).tolist())
    assert floor <= set(chosen.tolist())
    whole = _inside(whole_runs(recipe, runs, scores))
    assert whole <= set(chosen.tolist())
    assert len(chosen) == min(len(_inside(runs)), len(floor | whole) + sum(budgets(recipe, runs)))


@settings(max_examples=100, deadline=None)
@given(_runs(), SCORES, st.tuples(RATIOS, RATIOS), st.sampled_from(sorted(SELECTORS)))
def test_a_larger_budget_never_buys_fewer_tokens(
    runs: list[Run], scores: Scores, ratios: tuple[float, float], selector: str
) -> None:
    small, large = (len(choose(Recipe(selector=selector, ratio=r), runs, scores)) for r in sorted(ratios))
    assert small <= large


@settings(max_examples=100, deadline=None)
@given(_runs(), SCORES, st.integers(0, 200))
def test_top_positions_are_the_best_scored(runs: list[Run], scores: Scores, budget: int) -> None:
    candidates = np.array(sorted(_inside(runs)))
    picked = top_positions(scores, runs, candidates, [budget, *[0] * (len(runs) - 1)])
    left = np.setdiff1d(candidates, picked)
    assert len(picked) == min(budget, len(candidates))
    if len(picked) and len(left):
        assert scores[picked].min() >= scores[left].max()


@settings(max_examples=100, deadline=None)
@given(_runs(), SCORES, st.integers(0, 200))
def test_a_quota_leaves_no_run_without_its_share(runs: list[Run], scores: Scores, budget: int) -> None:
    candidates = np.array(sorted(_inside(runs)))
    shares = [min(budget, run.end - run.start) for run in runs]
    picked = top_with_quota(scores, runs, candidates, shares)
    assert len(picked) == sum(shares)
    for run, share in zip(runs, shares, strict=True):
        assert np.count_nonzero((picked >= run.start) & (picked < run.end)) >= share // 2


def test_a_quota_also_serves_a_run_that_scores_nothing() -> None:
    runs = [Run(0, 50), Run(50, 100)]
    scores = np.where(np.arange(100) < 50, 0.0, 1.0).astype(np.float32)
    picked = top_with_quota(scores, runs, np.arange(100), [10, 10])
    assert np.count_nonzero(picked < 50) == 5
    assert np.count_nonzero(top_positions(scores, runs, np.arange(100), [10, 10]) < 50) == 0


def test_nothing_is_repaired_only_when_that_was_asked_for() -> None:
    runs, scores = [Run(3, 40)], np.ones(PROMPT, np.float32)
    assert choose(Recipe(strategy="none"), runs, scores).tolist() == []
    assert choose(Recipe(ratio=0.0), runs, None).tolist() == [3, 4, 5, 6]
    assert choose(Recipe(), [], None).tolist() == []


def test_the_whole_budget_is_every_moved_token() -> None:
    runs = [Run(3, 40), Run(50, 61)]
    assert set(choose(Recipe(ratio=1.0), runs, None).tolist()) == _inside(runs)


def test_the_floor_is_the_first_tokens_of_each_run() -> None:
    assert floor_positions(Recipe(floor_tokens=4), [Run(3, 40), Run(50, 52)]).tolist() == [3, 4, 5, 6, 50, 51]
    assert floor_positions(Recipe(floor_tokens=0), [Run(3, 40)]).tolist() == []


def test_selective_repairs_a_window_of_both_sides_of_every_seam() -> None:
    runs = [Run(100, 140), Run(200, 203)]
    window = [*range(100, 108), *range(132, 140), 200, 201, 202]
    assert seam_positions(runs, 16).tolist() == window
    assert choose(Recipe(strategy="selective"), runs, None).tolist() == window
    assert len(seam_positions([Run(0, 40)], 5)) == 5


def test_the_window_of_selective_takes_effect() -> None:
    runs = [Run(0, 100)]
    assert len(choose(Recipe(strategy="selective", window_tokens=16), runs, None)) == 16
    assert len(choose(Recipe(strategy="selective", window_tokens=40), runs, None)) == 40


@pytest.mark.parametrize(
    ("recipe", "probe"),
    [
        (Recipe(strategy="none"), None),
        (Recipe(strategy="selective"), None),
        (Recipe(ratio=0.0), None),
        (Recipe(ratio=0.05, mean_ratio=0.0), "query"),
        (Recipe(ratio=1.0), None),
        (Recipe(selector="query"), "query"),
        (Recipe(selector="deviation"), "deviation"),
    ],
)
def test_a_probe_runs_only_where_something_is_chosen_by_it(recipe: Recipe, probe: str | None) -> None:
    assert recipe.probe([Run(0, 300, mean=True), Run(300, 600)]) == probe
    assert recipe.probe([]) is None


def test_no_probe_runs_where_all_are_means_that_need_none() -> None:
    recipe = Recipe(ratio=0.05, mean_ratio=0.0, least_tokens=6)
    assert recipe.probe([Run(0, 300, mean=True)]) is None
    assert recipe.probe([Run(0, 300, mean=True), Run(300, 330, mean=True)]) == "query"  # a short one does


def test_every_selector_can_be_configured() -> None:
    compared = {"cacheblend-k", "cacheblend-v"}  # benchmarks only
    assert set(SELECTORS) - compared == set(get_args(SelectorName)) - {"auto"}


def test_a_budget_is_a_share_of_each_run_and_never_too_little_for_a_short_one() -> None:
    runs = [Run(0, 300), Run(400, 430), Run(500, 506)]
    assert budgets(Recipe(ratio=0.1, least_tokens=12), runs) == [30, 12, 6]
    assert budgets(Recipe(ratio=0.1, least_tokens=0), runs) == [30, 3, 1]
    assert budgets(Recipe(ratio=0.0, least_tokens=6), runs) == [0, 6, 6]
    assert budgets(Recipe(ratio=0.01, least_tokens=6), [Run(0, 127), Run(200, 328)]) == [6, 2]


def test_the_mean_behind_the_preamble_gets_more_of_the_first_tokens() -> None:
    runs = [Run(20, 220, mean=True), Run(222, 422, mean=True), Run(424, 624, mean=True), Run(700, 900, mean=True)]

    def first(ratio: float, lead_share: float, runs: list[Run]) -> list[int]:
        return floors(Recipe(ratio=ratio, lead_share=lead_share, first_ratio=1.0), runs)

    assert first(0.1, 0.5, runs) == [30, 10, 10, 30]  # the last stands behind other text
    assert first(0.1, 0.5, runs[:3]) == [40, 10, 10]
    assert first(0.1, 0.0, runs) == [20, 20, 20, 20]
    assert first(0.05, 1.0, runs[:3]) == [30, 4, 4]
    assert first(0.5, 1.0, runs[:3]) == [121, 89, 89]  # no more than 32 for being first
    assert first(0.99, 1.0, runs[:3]) == [200, 187, 187]  # and no more than there is
    assert first(0.1, 0.5, [Run(20, 220), *runs[1:3]]) == [4, 20, 20]  # behind one that is no mean


def test_short_runs_that_are_asked_about_and_those_behind_them_are_recomputed_whole() -> None:
    runs = [Run(10, 70), Run(72, 130), Run(132, 190), Run(260, 320), Run(322, 500)]
    scores = np.zeros(600, np.float32)
    scores[75], scores[15], scores[300], scores[400] = 0.5, 0.4, 0.9, 0.1
    assert whole_runs(Recipe(), runs, scores) == [Run(260, 320)]  # what stands behind it is long
    assert whole_runs(Recipe(whole_asked=2), runs, scores) == [Run(260, 320), Run(72, 130), Run(132, 190)]
    assert whole_runs(Recipe(whole_asked=3), runs, scores)[3:] == [Run(10, 70)]
    assert most_whole(Recipe(), runs) == 118
    assert most_whole(Recipe(whole_asked=9), runs) >= 60 + 58 + 58 + 60
    scores[400] = 2.0  # a long one is asked about
    assert whole_runs(Recipe(), runs, scores) == []
    recipe = Recipe(ratio=0.0, least_tokens=0)
    assert recipe.probe(runs) == "query"
    scores[400] = 0.1
    assert set(range(260, 320)) <= set(choose(recipe, runs, scores).tolist())
    assert whole_runs(Recipe(whole_asked=0), runs, scores) == []
    assert most_whole(Recipe(whole_asked=0), runs) == 0


def test_without_a_query_probe_words_alone_say_what_a_question_is_about() -> None:
    runs, scores = [Run(10, 70), Run(72, 130), Run(132, 400)], np.ones(600, np.float32)
    recipe = Recipe(selector="deviation", ratio=0.0)
    assert recipe.probe(runs) is None
    assert whole_runs(recipe, runs, scores) == []  # how far tokens are off does not tell what is asked
    named = _named(0.0, 1.0, 0.5)
    assert whole_runs(recipe, runs, None, named) == [runs[1]]
    assert set(range(72, 130)) <= set(choose(recipe, runs, None, named).tolist())
    assert whole_runs(recipe, runs, None, _named(0.0, 0.0, 0.0)) == []


def test_where_words_name_a_passage_no_probe_runs() -> None:
    runs = [Run(10, 70, mean=True), Run(72, 130, mean=True), Run(132, 400, mean=True)]
    recipe = Recipe(mean_ratio=0.03)
    assert recipe.probe(runs) == "query"
    assert recipe.probe(runs, _named(0.2, 3.0, 0.1)) is None
    assert recipe.probe(runs, _named(0.1, 0.2, 3.0)) is None  # a long one is named: nothing is recomputed whole
    assert recipe.probe(runs, _named(2.9, 3.0, 0.1)) == "query"
    assert recipe.probe(runs, _named(0.0, 1.0, 0.0)) == "query"  # a word may be there by chance
    assert recipe.probe(runs, _named(0.0, 0.0, 0.0)) == "query"
    met = [*runs, Run(402, 700)]  # a probe is to choose in the last one anyway
    assert recipe.probe(met, _named(0.2, 3.0, 0.1, 0.1)) == "query"


def test_a_mapped_run_that_is_asked_about_is_recomputed_whole_if_the_budget_pays_for_it() -> None:
    runs = [Run(10, 210, mapped=True), Run(212, 412, mapped=True), Run(414, 614, mapped=True)]
    scores, named = np.zeros(700, np.float32), _named(0.1, 3.0, 0.2)
    scores[[20, 21, 300, 301]] = 0.2, 0.2, 0.15, 0.15
    recipe = Recipe(mapped_ratio=0.4, floor_tokens=0)
    chosen = choose(recipe, runs, scores, named)
    assert set(range(212, 412)) <= set(chosen.tolist())
    assert {20, 21} <= set(chosen.tolist())  # what is left of the budget goes by attention
    assert len(chosen) == round(0.4 * 600)
    assert words_decide(recipe, runs, named)
    assert choose(recipe, runs, None, named).tolist() == list(range(212, 412))
    assert not words_decide(recipe, runs, _named(2.9, 3.0, 0.2))  # words alone are not sure
    assert not words_decide(recipe, runs, _named(0.0, 0.0, 0.0))
    assert not words_decide(replace(recipe, mapped_ratio=0.9), runs, named)  # there is more to choose
    assert not words_decide(recipe, [*runs, Run(616, 650)], _named(0.1, 3.0, 0.2, 0.0))
    poor = replace(recipe, mapped_ratio=0.2)
    assert whole_runs(poor, runs, scores, named) == []
    assert len(choose(poor, runs, scores, named)) == round(0.2 * 600)


def test_a_run_that_stands_apart_is_bound_to_none() -> None:
    scores = np.ones(400, np.float32)
    assert whole_runs(Recipe(), [Run(0, 60), Run(90, 150)], scores) == [Run(0, 60)]
    assert whole_runs(Recipe(), [Run(0, 60)], scores) == [Run(0, 60)]
    assert whole_runs(Recipe(), [Run(0, 160)], scores) == []


def test_a_mean_of_several_histories_has_a_budget_of_its_own() -> None:
    runs = [Run(0, 300), Run(300, 600, mean=True), Run(600, 630, mean=True)]
    first = Recipe(ratio=0.1, lead_share=0.0, least_tokens=6, first_ratio=1.0)
    chosen, both = replace(first, first_ratio=0.0), replace(first, first_ratio=0.04)
    assert (floors(first, runs), budgets(first, runs)) == ([4, 30, 4], [30, 0, 6])
    assert (floors(chosen, runs), budgets(chosen, runs)) == ([4, 4, 4], [30, 30, 6])
    assert (floors(both, runs), budgets(both, runs)) == ([4, 12, 4], [30, 18, 6])
    assert (both.probe(runs[1:2]), first.probe(runs[1:2])) == ("query", None)
    default = Recipe(ratio=0.1, mean_ratio=0.0, least_tokens=6)
    assert (floors(default, runs), budgets(default, runs)) == ([4, 4, 4], [30, 0, 6])
    assert floors(Recipe(strategy="none"), runs) == [0, 0, 0]
    assert floors(Recipe(strategy="selective"), runs) == [4, 4, 4]
    assert choose(first, [runs[1]], None).tolist() == list(range(300, 330))


def test_of_what_is_attended_to_in_a_mean_what_stands_nearer_to_its_beginning_is_recomputed() -> None:
    recipe = Recipe(ratio=0.1, first_ratio=0.0, floor_tokens=4, near_tokens=8)
    scores = np.ones(700, np.float32)
    mean = [Run(100, 300, mean=True)]
    assert choose(recipe, mean, scores).tolist() == list(range(100, 124))
    scores[280] = 1.5 * (8 + 180) / (8 + 23)  # attended to so much more that it is worth it
    assert 280 in choose(recipe, mean, scores)
    scores[280] = 0.5 * (8 + 180) / (8 + 23)
    assert 280 not in choose(recipe, mean, scores)
    assert 280 in choose(replace(recipe, near_tokens=0), mean, scores)
    # Of what was met once, all may have changed as much.
    both = [Run(100, 300, mean=True), Run(400, 600)]
    assert set(choose(recipe, both, np.ones(700, np.float32)).tolist()) >= set(range(400, 440))
    scores = np.zeros(700, np.float32)
    scores[450:650:10] = 1.0
    assert set(range(450, 600, 10)) <= set(choose(recipe, both, scores).tolist())
    deviation = replace(recipe, selector="deviation")
    scores = np.arange(700, dtype=np.float32)  # a probe that saw what changed needs no guess
    assert choose(deviation, mean, scores).tolist() == [*range(100, 104), *range(280, 300)]


@pytest.mark.parametrize("ratio", [0.0, 0.02, 0.05, 0.1, 0.3])
def test_one_share_for_all_runs(ratio: float) -> None:
    recipe = Recipe(mean_ratio=0.03, mapped_ratio=0.2, floor_tokens=1, lead_share=0.0).with_ratio(ratio)
    runs = [Run(0, 300), Run(400, 700, mean=True), Run(800, 1100, mapped=True)]
    chosen = choose(recipe, runs, np.ones(1100, np.float32))
    for run in runs:
        mine = chosen[(chosen >= run.start) & (chosen < run.end)]
        assert len(mine) <= max(round(ratio * 300), 1) + 1 or not run.mean
    assert len(chosen) == pytest.approx(900 * ratio, abs=4)
    assert recipe.rerun == (ratio >= 0.1)


@settings(max_examples=100, deadline=None)
@given(_runs(), SCORES, RATIOS, st.sampled_from(get_args(Repair)))
def test_as_many_tokens_are_expected_as_may_be_chosen(
    runs: list[Run], scores: Scores, ratio: float, strategy: Repair
) -> None:
    recipe = Recipe(strategy=strategy, ratio=ratio)
    assert len(choose(recipe, runs, scores)) <= expected(recipe, runs) <= len(_inside(runs))


def test_what_words_name_is_expected_and_no_more() -> None:
    runs = [Run(10, 70, mean=True), Run(72, 130, mean=True), Run(132, 400, mean=True)]
    recipe = Recipe(ratio=0.0, mean_ratio=0.0)
    named = _named(0.2, 3.0, 0.1, continued=False)
    assert expected(recipe, runs) == 60 + 58 + 3 * 4
    assert expected(recipe, runs, named) == 58 + 3 * 4
    assert len(choose(recipe, runs, None, named)) == 58 + 2 * 4
    assert expected(recipe, runs, _named(3.0, 3.0, 0.1)) == 60 + 58 + 3 * 4  # words do not tell
    assert expected(Recipe(strategy="selective"), runs) == 3 * (4 + 16)
    assert expected(Recipe(strategy="none"), runs) == 0
