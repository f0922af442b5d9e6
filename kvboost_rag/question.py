"""What a prompt asks: where its question stands, and what the words of that say of the stretches that were moved. Pure.

Turns of a chat are told apart by the markers between them, which no document holds: special tokens in documents are
text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from .chunks import IntArray, as_ids
from .planner import Plan
from .repair import SHORT_TOKENS, Asked, Positions, Recipe, Run, Scores, floor_positions, most_whole

QUESTION_TOKENS = 64  # the most that count as the question
QUESTION_WORDS = 3  # what says less, such as "Why?", is asked about what was said before it
LINE_TOKENS = 4  # a last line of fewer, such as "Answer:", belongs to the one before
WORD_LETTERS = 4
MOST_SPOTS = 2
ROUNDING = 1e-6  # of sums of words
WORDS_OF_SPOT = 1.5  # words of the question that no other passage has, where a long one repeats it
NO_CHARACTER = "\ufffd"  # what a part of a character is decoded to


def _every_token(token: int) -> bool:
    return True


def _as_they_are(ids: IntArray) -> IntArray:
    return ids


def _no_tokens() -> IntArray:
    return as_ids([])


@dataclass(frozen=True, slots=True)
class Tokens:
    """What single tokens are; the defaults are those of a model without a tokenizer.

    Attributes:
        is_word: whether a token says something by itself, see `says_something`.
        ends_line: whether there is a line break in a token; None if that cannot be told.
        markers: the tokens that begin and end turns, and others that no document holds.
        written: the tokens that a chat template writes around what is said, these among them.
        opening: what it writes to begin an answer.
        same: numbers that are equal for tokens of the same word, see `Alike`.
    """

    is_word: Callable[[int], bool] = _every_token
    ends_line: Callable[[int], bool] | None = None
    markers: Callable[[], IntArray] = _no_tokens
    written: Callable[[], IntArray] = _no_tokens
    opening: Callable[[], IntArray] = _no_tokens
    same: Callable[[IntArray], IntArray] = _as_they_are


class Alike:
    """Numbers tokens so that those which differ only in case and in the space in front of them are equal.

    Args:
        piece: text of a token.
    """

    def __init__(self, piece: Callable[[int], str]) -> None:
        self._piece = piece
        self._number: dict[int, int] = {}
        self._first: dict[str, int] = {}  # token of each text

    def __call__(self, ids: IntArray) -> IntArray:
        """The number of each token, int32 ``(n,)``."""
        tokens, where = np.unique(ids, return_inverse=True)
        return np.array([self._of(token) for token in tokens.tolist()], np.int32)[where]

    def _of(self, token: int) -> int:
        number = self._number.get(token)
        if number is None:
            piece = self._piece(token)
            word = token if NO_CHARACTER in piece else self._first.setdefault(piece.strip().casefold() or piece, token)
            number = self._number[token] = word
        return number


def read(ids: IntArray, plan: Plan, recipe: Recipe, tokens: Tokens) -> Plan:
    """A plan with what its question says of the runs.

    Args:
        ids: the prompt.
        plan: of it.
        recipe: how it is repaired; words are looked up only if that depends on them.
        tokens: what they are.
    """
    runs, new = plan.runs, plan.computed
    if not runs:  # nothing is chosen, and most prompts of a chat end here
        nothing = np.empty(0, bool)
        return replace(plan, asked=Asked(new[:0], np.empty(0, np.float32), nothing, nothing))
    marked = np.isin(ids, tokens.markers())
    passages = np.array([not marked[run.start : run.end].any() for run in runs], bool)
    question = question_of(ids, [run for run, passage in zip(runs, passages, strict=True) if passage], tokens)
    rows = new[new >= max(plan.pure_until, question[0] if len(question) else 0)][-QUESTION_TOKENS:]
    asked = Asked(rows, np.zeros(len(runs), np.float32), np.zeros(len(runs), bool), passages, len(question))
    size = recipe.spot_tokens if recipe.strategy == "cacheblend" else 0
    if most_whole(recipe, runs) or (size and any(len(run) >= SHORT_TOKENS for run in runs)):
        repeated = Repeated(ids, runs, passages, question, tokens)
        repeats, continued = repeated.of_runs()
        asked = replace(
            asked, repeats=repeats, continued=continued, spots=repeated.spots(size, floor_positions(recipe, runs))
        )
    return replace(plan, asked=asked)


def beginning_of(ids: IntArray, tokens: Tokens) -> int:
    """Where the question begins, as far as it is one line of a turn; the end of the prompt if lines are unknown."""
    if tokens.ends_line is None:
        return len(ids)
    end = _answered_from(ids, tokens)
    said = np.flatnonzero(~np.isin(ids[:end], tokens.written()))
    last = int(said[-1]) if len(said) else len(ids) - 1
    turn = np.flatnonzero(np.isin(ids[:last], tokens.markers()))
    first = max(int(turn[-1]) + 1 if len(turn) else 0, last + 1 - QUESTION_TOKENS)
    for at in range(last - LINE_TOKENS, first - 1, -1):
        if tokens.ends_line(int(ids[at])):
            return at + 1
    return first


def question_of(ids: IntArray, passages: Sequence[Run], tokens: Tokens) -> Positions:
    """What is asked: the last turn that says enough without its passages, and what is said behind it.

    Of a turn with passages, what stands behind the last of them if that is enough, as in most prompts of retrieval;
    otherwise what stands around them. So a tool's result is read with the call that asked for it.

    Args:
        ids: the prompt.
        passages: stretches of it that are no part of a question, ascending.
        tokens: what they are.
    """
    end = _answered_from(ids, tokens)
    own = np.ones(end, bool)
    for run in passages:
        own[run.start : run.end] = False
    said = own & ~np.isin(ids[:end], tokens.written())
    found: Positions = np.empty(0, np.int64)
    words, stop = 0, end
    for start in [*(np.flatnonzero(np.isin(ids[:end], tokens.markers())) + 1)[::-1].tolist(), 0]:
        turn = start + np.flatnonzero(said[start:stop])
        behind = turn[turn >= max((run.end for run in passages if run.end <= stop), default=0)]
        turn = behind if len(behind) >= QUESTION_WORDS else turn
        if len(turn):  # with what a template might have written as well, but in between
            words += len(turn)
            found = np.concatenate([turn[0] + np.flatnonzero(own[turn[0] : turn[-1] + 1]), found])
        if words >= QUESTION_WORDS:
            break
        stop = max(start - 1, 0)
    return found[-QUESTION_TOKENS:]


@dataclass(frozen=True, slots=True, eq=False)
class _Kind:
    """Words of a question of one kind, and where they stand in passages.

    Attributes:
        tokens: that each of them has.
        at, which, before: positions at which they begin, which words they are, and where each began the last time
            before, or -1; ascending for each word.
        held: whether a run has a word, bool ``(runs, words)``; a run that is no passage has none.
        weights: of the words, float64; what few runs hold counts more, for a word that all of them hold names none.
    """

    tokens: int
    at: Positions
    which: Positions
    before: Positions
    held: npt.NDArray[np.bool_]
    weights: npt.NDArray[np.float64]


def _kind(
    words: npt.NDArray[np.integer],
    prompt: npt.NDArray[np.integer],
    tokens: int,
    runs: Sequence[Run],
    passages: npt.NDArray[np.bool_],
) -> _Kind:
    owner = np.full(len(prompt), -1)
    for number, (run, passage) in enumerate(zip(runs, passages, strict=True)):
        if passage:
            owner[run.start : run.end - tokens + 1] = number
    at = np.flatnonzero(owner >= 0) if len(words) else np.empty(0, np.int64)
    which = np.minimum(np.searchsorted(words, prompt[at]), len(words) - 1)
    known = words[which] == prompt[at]
    order = np.argsort(which[known], kind="stable")
    at, which = at[known][order], which[known][order]
    again = np.diff(which, prepend=-1) == 0
    held = np.zeros((len(runs), len(words)), bool)
    held[owner[at], which] = True
    weights = 1.0 / np.maximum(held.sum(0), 1) ** 2
    return _Kind(tokens, at, which, np.where(again, np.roll(at, 1), -1), held, weights)


class Repeated:
    """Where the words of a question stand in the stretches that were moved.

    Two words in a row count like one more word: they are what names are made of.

    Args:
        ids: the prompt.
        runs: moved stretches of it.
        passages: which of them can be asked about, bool ``(runs,)``.
        question: its positions.
        tokens: what they are.
    """

    def __init__(
        self, ids: IntArray, runs: Sequence[Run], passages: npt.NDArray[np.bool_], question: Positions, tokens: Tokens
    ) -> None:
        same = tokens.same(ids)
        pairs = same[:-1].astype(np.int64) << 32 | same[1:]
        words, first = np.unique(same[question], return_index=True)
        in_a_row = np.unique(pairs[np.intersect1d(question, question - 1)])
        self._kinds = (_kind(words, same, 1, runs, passages), _kind(in_a_row, pairs, 2, runs, passages))
        self._asked, self._is_word, self._prompt_tokens = ids[question[first]].tolist(), tokens.is_word, len(ids)
        self._long = [run for run, passage in zip(runs, passages, strict=True) if passage and len(run) >= SHORT_TOKENS]

    def of_runs(self) -> tuple[Scores, npt.NDArray[np.bool_]]:
        """What words say of each run, see `Asked`: ``repeats`` and ``continued``."""
        repeats = sum(kind.held @ kind.weights for kind in self._kinds)
        held = self._kinds[0].held
        more = held[1:] & ~held[:-1]
        says = np.zeros(held.shape[1], bool)
        said_more = np.flatnonzero(more.any(0))
        says[said_more] = [self._is_word(self._asked[i]) for i in said_more]
        return np.asarray(repeats, np.float32), np.append((more & says).any(1), [False] * min(len(held), 1))

    def spots(self, size: int, known: Positions) -> Positions:
        """Where long passages repeat most of the question: at most two windows of ``size`` tokens.

        The second one has other words than the first, and both have others than what is recomputed anyway. A word
        counts once in a window, however often it stands there.

        Args:
            size: of a window.
            known: what is recomputed anyway.
        """
        begins = np.zeros(self._prompt_tokens + 1, bool)
        for run in self._long if size else ():
            begins[run.start : max(run.end - size + 1, run.start)] = True
        weights = [kind.weights.copy() for kind in self._kinds]
        self._leave_out(weights, known)
        found: list[Positions] = []
        while len(found) < MOST_SPOTS and begins.any():
            sums = np.zeros(len(begins))
            for kind, weight in zip(self._kinds, weights, strict=True):
                # A word counts in the windows that hold it and not the place where it stood before.
                earliest = np.maximum(np.maximum(kind.before + 1, kind.at + kind.tokens - size), 0)
                np.add.at(sums, earliest, weight[kind.which])
                np.add.at(sums, kind.at + 1, -weight[kind.which])
            repeated = np.where(begins, np.cumsum(sums), 0.0)
            best = int(repeated.argmax())
            if repeated[best] < WORDS_OF_SPOT - ROUNDING:
                break
            behind = best + int((repeated[best:] < repeated[best] - ROUNDING).argmax())
            start = (best + max(behind - 1, best)) // 2  # of windows that hold the same, the middle one
            found.append(np.arange(start, start + size))
            self._leave_out(weights, found[-1])
        return np.unique(np.concatenate([np.empty(0, np.int64), *found]))

    def _leave_out(self, weights: Sequence[npt.NDArray[np.float64]], positions: Positions) -> None:
        """Count what stands at some positions no more."""
        there = np.zeros(self._prompt_tokens + 1, bool)
        there[positions] = True
        for kind, weight in zip(self._kinds, weights, strict=True):
            weight[kind.which[there[kind.at] & there[kind.at + kind.tokens - 1]]] = 0


def says_something(piece: str) -> bool:
    """Whether a token's text is more than a particle or a mark: four letters, or one that ASCII lacks."""
    letters = [c for c in piece if c.isalpha()]
    return len(letters) >= WORD_LETTERS or any(not c.isascii() for c in letters)


def _answered_from(ids: IntArray, tokens: Tokens) -> int:
    """Where the turn begins that the model is to write, which a caller may have begun; the end if that is not told."""
    opening = tokens.opening()
    if not 0 < len(opening) <= len(ids):
        return len(ids)
    there = (np.lib.stride_tricks.sliding_window_view(ids, len(opening)) == opening).all(1)
    at = np.flatnonzero(there)
    if not len(at) or np.isin(ids[at[-1] + len(opening) :], tokens.markers()).any():
        return len(ids)  # that answer is over
    return int(at[-1])
