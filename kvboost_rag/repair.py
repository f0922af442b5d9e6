"""Which reused tokens to recompute: small pure functions from probe results to token sets.

A selector gets what a probe saw of each prompt position and a budget, and returns positions. To add one, write a
function, name it in `SELECTORS`, and say which probe feeds it.

Sources: floor: EPIC (first tokens of each chunk). "deviation": CacheBlend (arXiv 2405.16444) §4.3, change of K and V in
the first layers. "query": attention of the question over the moved cache, as in ProphetKV (arXiv 2602.02579). Mean
offset: AgentKVShift (arXiv 2607.21604). All re-implemented from their descriptions; all approximate.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

SHORT_TOKENS = 128  # a run of fewer is a short passage, see `Recipe.whole_asked`
LEAD_TOKENS = 32  # beyond so many first tokens, being first makes no difference
CLEARLY = 1.5  # times as many words of the question as the next run, and
WORDS_OF_NAME = 2.5  # of them that no other run has: two that stand in a row are 3, and a chance word is 1
FIRST_RATIO = 0.03  # of a mean: its first tokens, for which no probe has to run
RERUN_FROM = 0.1  # so large a share chosen, new tokens that waited have seen too much unrepaired
SEPARATOR_TOKENS = 16  # passages with no more than this between them are neighbours
Positions: TypeAlias = npt.NDArray[np.int64]
Scores: TypeAlias = npt.NDArray[np.float32]
ProbeKind = Literal["deviation", "query"]
Compared = Literal["both", "keys", "values"]


@dataclass(frozen=True, slots=True)
class Run:
    """A stretch of the prompt that was moved as one piece: positions ``[start, end)``.

    Attributes:
        mean: whether its KV is the mean of several histories.
        mapped: whether its KV was mapped from that of another model.
    """

    start: int
    end: int
    mean: bool = False
    mapped: bool = False

    def __len__(self) -> int:
        return self.end - self.start


@dataclass(frozen=True, slots=True, eq=False)
class Asked:
    """What a prompt asks, and what the words of that say of each moved run of it, see `question`.

    Attributes:
        question: its positions.
        repeats: how much of the question a run repeats, float32 ``(runs,)``.
        continued: whether the run right behind it has words of the question that it lacks, bool ``(runs,)``.
        passages: whether it is text that can be asked about, and not what was said before, bool ``(runs,)``.
        said: how many tokens the question has, stored ones with them.
        spots: where long passages repeat most of the question, see `Recipe.spot_tokens`; ascending positions.
    """

    question: Positions
    repeats: Scores
    continued: npt.NDArray[np.bool_]
    passages: npt.NDArray[np.bool_]
    said: int = 0
    spots: Positions = field(default_factory=lambda: np.empty(0, np.int64))


@dataclass(frozen=True, slots=True)
class Recipe:
    """How approximate hits are repaired.

    Attributes:
        strategy: "none", "selective" or "cacheblend".
        selector: name in `SELECTORS`, for "cacheblend".
        ratio: share of the approximate tokens to recompute beyond the floor.
        mean_ratio: the share of runs whose KV is the mean of several histories, and so has less to repair; None is
            `ratio`.
        mapped_ratio: the share of runs whose KV was mapped from another model's, and so has more to repair; None is
            `ratio`.
        first_ratio: as much of that share as is taken from the beginning of such a run, without asking a probe: what is
            left to repair in a mean lies where a new neighbour is near. The rest is chosen.
        lead_share: how much of what is spent on the first tokens of means goes to those that stand behind no other run:
            behind the preamble, where none was encoded; at most 32 tokens each. All others stand behind a document, as
            they did.
        least_tokens: least tokens of each short run, of fewer than 128, to recompute beyond the floor, whatever the
            ratio.
        whole_asked: how many short runs are recomputed whole because the question is about them, each with the short
            run right behind it, where that has words of the question which the run itself lacks. Models tell like
            passages apart by where they stand, which moving changes; and one that leans on the passage before it ("its
            version is…") says of what it speaks only there.
        spot_tokens: size of the windows, at most two, that are recomputed where long passages repeat most of the
            question: the line that it quotes, the name that it asks about. New tokens find their answer by what stands
            there, and less surely where that was encoded among other documents.
        near_tokens: what "query" adds to a mean's token's distance from the beginning of its run before it divides
            attention by it: the nearer a new neighbour is, the more is left to repair. 0 leaves it to attention.
        floor_tokens: least first tokens of each run that are always recomputed.
        window_tokens: seam window of "selective".
        probe_from, probe_to: band of layers, as shares of the depth, whose attention counts for "query"; the probe
            runs only up to the scores of the last of them.
        rerun: whether the new tokens, which "query" ran up to the end of that band to see what they attend to, run
            again with the chosen tokens from the first layer on. Otherwise they wait there until the chosen tokens have
            caught up, and all go on together: cheaper by the probe, and a little less near.
        deviation_layer: layer whose keys and values the deviation probe compares; it runs no further.
        offset: weight of the mean (fresh − stale) of a run's recomputed tokens that is added to its other tokens.
    """

    strategy: Literal["none", "selective", "cacheblend"] = "cacheblend"
    selector: str = "query"
    ratio: float = 0.05
    mean_ratio: float | None = None
    mapped_ratio: float | None = None
    first_ratio: float = FIRST_RATIO
    lead_share: float = 0.5
    least_tokens: int = 0
    whole_asked: int = 1
    spot_tokens: int = 16
    near_tokens: int = 8
    floor_tokens: int = 4
    window_tokens: int = 16
    probe_from: float = 0.4
    probe_to: float = 0.6
    rerun: bool = False
    deviation_layer: int = 1
    offset: float = 0.5

    def with_ratio(self, ratio: float) -> Recipe:
        """The same with one share for all runs, however their KV came to be; a large one is spent on `rerun`, too."""
        return replace(self, ratio=ratio, mean_ratio=None, mapped_ratio=None, rerun=ratio >= RERUN_FROM)

    @property
    def everything(self) -> bool:
        """Whether the budget is all approximate tokens, which is a full prefill."""
        return self.strategy == "cacheblend" and self.ratio >= 1.0

    def probe(self, runs: Sequence[Run], asked: Asked | None = None) -> ProbeKind | None:
        """The probe that choosing tokens of these runs needs; None if none of them is to be chosen, or words choose."""
        if self.strategy != "cacheblend" or self.everything:
            return None
        probe = SELECTORS[self.selector].probe
        if probe == "query" and asked is not None and words_decide(self, runs, asked):
            return None
        return probe if any(budgets(self, runs)) or (probe == "query" and most_whole(self, runs)) else None


@dataclass(frozen=True, slots=True)
class Selector:
    """A choice rule and the probe that feeds it; ``compared`` says what a deviation probe looks at."""

    probe: ProbeKind
    choose: Callable[[Scores, Sequence[Run], Positions, Sequence[int]], Positions]
    compared: Compared = "both"


def floors(recipe: Recipe, runs: Sequence[Run]) -> list[int]:
    """How many of the first tokens of each run are recomputed, whatever a probe says."""
    if recipe.strategy == "none":
        return [0] * len(runs)
    shares = _first_shares(recipe, runs) if recipe.strategy == "cacheblend" else [0.0] * len(runs)
    return [min(len(run), max(recipe.floor_tokens, round(n))) for run, n in zip(runs, shares, strict=True)]


def _first_shares(recipe: Recipe, runs: Sequence[Run]) -> list[float]:
    """First tokens of each mean: a share of it, and more where it stands behind something else than a document."""
    leading = [run.mean and (not i or not _neighbours(runs[i - 1], run)) for i, run in enumerate(runs)]
    tokens = sum(len(run) for run in runs if run.mean)
    budget = min(_mean_ratio(recipe), recipe.first_ratio) * tokens
    extra = min(recipe.lead_share * budget / max(sum(leading), 1), LEAD_TOKENS)
    evenly = (budget - extra * sum(leading)) / max(tokens, 1)
    return [
        (evenly * len(run) if run.mean else 0.0) + (extra if leads else 0.0)
        for run, leads in zip(runs, leading, strict=True)
    ]


def floor_positions(recipe: Recipe, runs: Sequence[Run]) -> Positions:
    """The first tokens of each run: attention sinks where they stood first, and not where they stand now."""
    return _join([np.arange(r.start, r.start + n) for r, n in zip(runs, floors(recipe, runs), strict=True)])


def known_positions(recipe: Recipe, runs: Sequence[Run], asked: Asked | None) -> Positions:
    """What is recomputed whatever a probe says: first tokens, and where the question is repeated."""
    floor = floor_positions(recipe, runs)
    return floor if asked is None or recipe.strategy != "cacheblend" else _join([floor, asked.spots])


def seam_positions(runs: Sequence[Run], window_tokens: int) -> Positions:
    """Half a window on each side of every seam."""
    after = window_tokens // 2
    before = window_tokens - after
    parts = []
    for run in runs:
        parts.append(np.arange(run.start, min(run.end, run.start + after)))
        parts.append(np.arange(max(run.start, run.end - before), run.end))
    return _join(parts)


def budgets(recipe: Recipe, runs: Sequence[Run]) -> list[int]:
    """Tokens to recompute for the sake of each run, beyond the floor."""
    lengths = np.array([len(run) for run in runs], np.int64)
    exact = np.cumsum([0.0, *(len(run) * _ratio(recipe, run) for run in runs)])
    shares = np.diff(np.round(exact)).astype(int)  # rounded together: they sum to the whole budget
    least = np.where(lengths < SHORT_TOKENS, recipe.least_tokens, 0)
    return np.minimum(lengths, np.maximum(shares, least)).tolist()  # type: ignore[no-any-return]


def most_whole(recipe: Recipe, runs: Sequence[Run]) -> int:
    """The most tokens that runs which are recomputed whole can have."""
    sizes = (sum(map(len, group)) for group in _groups(recipe, runs))
    return sum(sorted(sizes, reverse=True)[: recipe.whole_asked])


def whole_runs(recipe: Recipe, runs: Sequence[Run], scores: Scores | None, asked: Asked | None = None) -> list[Run]:
    """The short runs that are recomputed whole: those that the question is about, and those that go on about it.

    Attention alone misses a third of them, and a question that uses other words than the passage repeats nothing of it;
    so both count, each as a share of what all runs have.

    Args:
        recipe: how many.
        runs: moved stretches.
        scores: attention to each position, float32 ``(prompt,)``; None, or another probe's, leaves it to words.
        asked: what words say; None leaves it to attention.
    """
    groups, about = _groups(recipe, runs, asked), np.zeros(len(runs))
    if scores is not None and SELECTORS[recipe.selector].probe == "query":
        about += _shares([float(scores[run.start : run.end].sum()) for run in runs])
    if asked is not None:
        about = (about + _shares(asked.repeats)) * asked.passages
    first = [i for i in np.argsort(-about, kind="stable")[: recipe.whole_asked] if about[i] > 0]
    return list(dict.fromkeys(run for i in first for run in groups[i]))


def words_decide(recipe: Recipe, runs: Sequence[Run], asked: Asked) -> bool:
    """Whether words choose, without a probe.

    They do if they clearly name what the question is about and a probe would choose nothing else, or, of mapped runs,
    no more than half of their budget.
    """
    spare = budgets(recipe, runs)
    if any(n for n, run in zip(spare, runs, strict=True) if not run.mapped):
        return False
    named = named_runs(recipe, runs, asked)
    return named is not None and 2 * sum(map(len, named)) >= sum(spare)


def named_runs(recipe: Recipe, runs: Sequence[Run], asked: Asked, *, least: float = WORDS_OF_NAME) -> list[Run] | None:
    """The short runs that are recomputed whole as far as words clearly tell; None if they do not.

    Args:
        recipe: how many.
        runs: moved stretches.
        asked: what words say.
        least: how many of them, as far as no other run has them, there must be.
    """
    ranked = [*np.sort(asked.repeats)[::-1], 0.0, 0.0]
    count = min(recipe.whole_asked, len(runs))
    clearly = count > 0 and ranked[count - 1] > CLEARLY * ranked[count] and ranked[count - 1] >= least
    return whole_runs(recipe, runs, None, asked) if clearly else None


def _groups(recipe: Recipe, runs: Sequence[Run], asked: Asked | None = None) -> list[list[Run]]:
    """What is recomputed if the question is about a run: itself and the one right behind it, as far as they are short.

    Where it is known what is asked, the one behind only if it goes on about it. Of mapped runs, in which everything is
    off, also one that the budget pays for.
    """
    paid = sum(n for n, run in zip(budgets(recipe, runs), runs, strict=True) if run.mapped)
    behind = [runs[i + 1 : i + 2] if asked is None or asked.continued[i] else () for i in range(len(runs))]
    return [
        [one for one in (run, *(other for other in after if _neighbours(run, other))) if len(one) < SHORT_TOKENS]
        or ([run] if run.mapped and len(run) <= paid else [])
        for run, after in zip(runs, behind, strict=True)
    ]


def _shares(parts: Sequence[float] | Scores) -> npt.NDArray[np.float64]:
    """Parts of their sum; nothing if there is none."""
    numbers = np.array(parts, np.float64)
    return numbers / max(numbers.sum(), 1e-12)  # type: ignore[no-any-return]


def _neighbours(one: Run, run: Run) -> bool:
    return run.start - one.end <= SEPARATOR_TOKENS


def _ratio(recipe: Recipe, run: Run) -> float:
    """The share of a run that a probe chooses."""
    if run.mean:
        return max(_mean_ratio(recipe) - recipe.first_ratio, 0.0)
    return recipe.mapped_ratio if run.mapped and recipe.mapped_ratio is not None else recipe.ratio


def _mean_ratio(recipe: Recipe) -> float:
    return recipe.ratio if recipe.mean_ratio is None else recipe.mean_ratio


def expected(recipe: Recipe, runs: Sequence[Run], asked: Asked | None = None) -> int:
    """About how many tokens of these runs are recomputed.

    Of runs that are recomputed whole, those that words tell count; where these do not, the most that there may be.
    """
    count = sum(floors(recipe, runs))
    if recipe.strategy == "selective":
        count += sum(min(recipe.window_tokens, len(run)) for run in runs)
    elif recipe.strategy == "cacheblend":
        known = asked is not None and recipe.probe(runs, asked) != "query"
        whole = sum(map(len, whole_runs(recipe, runs, None, asked))) if known else most_whole(recipe, runs)
        count += sum(budgets(recipe, runs)) + whole + (0 if asked is None else len(asked.spots))
    return min(count, sum(map(len, runs)))


def choose(recipe: Recipe, runs: Sequence[Run], scores: Scores | None, asked: Asked | None = None) -> Positions:
    """All positions of ``runs`` to recompute, ascending and unique.

    Args:
        recipe: the strategy.
        runs: moved stretches of the prompt.
        scores: what the recipe's probe saw, float32 ``(prompt,)``; None if it needs no probe.
        asked: what words say the question is about.
    """
    if recipe.strategy == "none" or not runs:
        return np.empty(0, np.int64)
    if recipe.everything:
        return _join([np.arange(r.start, r.end) for r in runs])
    known = known_positions(recipe, runs, asked)
    if recipe.strategy == "selective":
        return _join([known, seam_positions(runs, recipe.window_tokens)])
    whole = whole_runs(recipe, runs, scores, asked)
    sure = _join([known, *(np.arange(run.start, run.end) for run in whole)])
    if scores is None:
        return sure
    candidates = np.setdiff1d(_join([np.arange(r.start, r.end) for r in runs]), sure, assume_unique=True)
    left, spent = budgets(recipe, runs), sum(len(run) for run in whole if run.mapped and len(run) >= SHORT_TOKENS)
    for i, run in enumerate(runs):  # what a mapped run that is recomputed whole has cost, the mapped ones pay
        if run.mapped:
            left[i], spent = max(left[i] - spent, 0), max(spent - left[i], 0)
    selector = SELECTORS[recipe.selector]
    if selector.probe == "query" and recipe.near_tokens:
        scores = _by_distance(scores, runs, recipe.near_tokens)
    picked = selector.choose(scores, runs, candidates, left)
    return _join([sure, picked])


def top_positions(scores: Scores, runs: Sequence[Run], candidates: Positions, budgets: Sequence[int]) -> Positions:
    """The best-scored candidates, wherever they stand."""
    return _top(scores, candidates, sum(budgets))


def top_with_quota(scores: Scores, runs: Sequence[Run], candidates: Positions, budgets: Sequence[int]) -> Positions:
    """The best-scored candidates, half of each run's budget spent inside that run.

    Deviation grows along the prompt, so a global top share alone would starve the first documents.
    """
    picked = []
    for run, budget in zip(runs, budgets, strict=True):
        own = candidates[(candidates >= run.start) & (candidates < run.end)]
        picked.append(_top(scores, own, budget // 2))
    sure = _join(picked)
    rest = np.setdiff1d(candidates, sure, assume_unique=True)
    return _join([sure, _top(scores, rest, sum(budgets) - len(sure))])


def _by_distance(scores: Scores, runs: Sequence[Run], near: int) -> Scores:
    """Scores over ``near`` and, in means, the distance from the beginning; elsewhere all may have changed as much."""
    found = scores.copy()
    for run in runs:
        found[run.start : run.end] /= near + (np.arange(len(run), dtype=np.float32) if run.mean else np.float32(0))
    return found


def _top(scores: Scores, candidates: Positions, count: int) -> Positions:
    order = np.argsort(-scores[candidates], kind="stable")
    return candidates[order[: max(count, 0)]]


SELECTORS: Mapping[str, Selector] = {
    "deviation": Selector("deviation", top_with_quota),
    "query": Selector("query", top_positions),
    # For comparison, after their papers; no option of `EngineConfig` (benchmarks/frontier.py).
    "cacheblend-k": Selector("deviation", top_positions, "keys"),
    "cacheblend-v": Selector("deviation", top_positions, "values"),
}


def _join(parts: Sequence[npt.NDArray[np.integer]]) -> Positions:
    return np.unique(np.concatenate([np.empty(0, np.int64), *[p.astype(np.int64) for p in parts]]))
