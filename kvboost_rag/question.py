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
from .repair import Asked, Positions, Recipe, Run, most_whole

QUESTION_TOKENS = 64  # the most that count as the question
WORD_LETTERS = 4


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
        markers: the tokens that begin and end turns, and others that no document holds.
        written: the tokens that a chat template writes around what is said, these among them.
        same: numbers that are equal for tokens of the same word, see `Alike`.
    """

    is_word: Callable[[int], bool] = _every_token
    markers: Callable[[], IntArray] = _no_tokens
    written: Callable[[], IntArray] = _no_tokens
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
            number = self._number[token] = self._first.setdefault(piece.strip().casefold() or piece, token)
        return number


def read(ids: IntArray, plan: Plan, recipe: Recipe, tokens: Tokens, *, since: int = 0) -> Plan:
    """A plan with what its question says of the runs.

    Args:
        ids: the prompt.
        plan: of it.
        recipe: how it is repaired; words are looked up only if that depends on them.
        tokens: what they are.
        since: what stands in front of this position is not the question.
    """
    new = plan.computed
    question = question_of(ids, new[new >= max(since, plan.pure_until)], tokens)
    if most_whole(recipe, plan.runs):
        return replace(plan, asked=asked_about(ids, plan.runs, question, tokens))
    none = np.zeros(len(plan.runs), bool)
    return replace(plan, asked=Asked(question, none.astype(np.float32), none, ~none))


def beginning_of(ids: IntArray, tokens: Tokens) -> int:
    """Where the question of a prompt begins at the earliest: its last tokens, of a chat those of the last turn."""
    return max(_last_turn(ids, tokens), len(ids) - QUESTION_TOKENS)


def question_of(ids: IntArray, new: Positions, tokens: Tokens) -> Positions:
    """The last new tokens, of a chat only those of the turn that came last; with what the template writes behind it.

    Args:
        ids: the prompt.
        new: positions that are computed, ascending.
        tokens: what they are.
    """
    return new[new >= _last_turn(ids, tokens)][-QUESTION_TOKENS:]


def asked_about(ids: IntArray, runs: Sequence[Run], question: Positions, tokens: Tokens) -> Asked:
    """What the words of a question say of each run.

    Two words in a row count like one more word: they are what names are made of.

    Args:
        ids: the prompt.
        runs: moved stretches of it.
        question: its positions.
        tokens: what they are.
    """
    marked, same = np.isin(ids, tokens.markers()), tokens.same(ids)
    said = _said(ids, question, tokens)
    passages = np.array([not marked[run.start : run.end].any() for run in runs], bool)
    told = [run for run, passage in zip(runs, passages, strict=True) if passage]
    words, first = np.unique(same[said], return_index=True)
    held = np.zeros((len(runs), len(words)), bool)
    held[passages] = _held(same, told, words, 0)
    pairs = same[:-1].astype(np.int64) << 32 | same[1:]
    asked = np.unique(pairs[np.intersect1d(said, said - 1)])
    in_a_row = np.zeros((len(runs), len(asked)), bool)
    in_a_row[passages] = _held(pairs, told, asked, 1)
    both = np.concatenate([held, in_a_row], 1).astype(np.float32)
    # What few runs hold counts more: a word that all of them hold names none.
    repeats = both @ (1 / np.maximum(both.sum(0), 1) ** 2)
    more = held[1:] & ~held[:-1]
    says = np.zeros(len(words), bool)
    said_more = np.flatnonzero(more.any(0))
    says[said_more] = [tokens.is_word(int(ids[said[first[i]]])) for i in said_more]
    continued = np.append((more & says).any(1), [False] * min(len(runs), 1))
    return Asked(question, repeats, continued, passages)


def _said(ids: IntArray, question: Positions, tokens: Tokens) -> Positions:
    """The question without what a template writes in front of it and behind it."""
    inner = np.flatnonzero(~np.isin(ids[question], tokens.written()))
    return question[inner[0] : inner[-1] + 1] if len(inner) else question[:0]


def _held(
    prompt: npt.NDArray[np.integer], runs: Sequence[Run], words: npt.NDArray[np.integer], reach: int
) -> npt.NDArray[np.bool_]:
    """Which of some words, ascending, each run has, bool ``(runs, words)``; one is so many tokens longer than one."""
    held = np.zeros((len(runs), len(words)), bool)
    if len(words):
        which = np.minimum(np.searchsorted(words, prompt), len(words) - 1)
        known = words[which] == prompt
        for row, run in zip(held, runs, strict=True):
            span = slice(run.start, run.end - reach)
            row[which[span][known[span]]] = True
    return held


def says_something(piece: str) -> bool:
    """Whether a token's text is more than a particle or a mark: four letters, or one that ASCII lacks."""
    letters = [c for c in piece if c.isalpha()]
    return len(letters) >= WORD_LETTERS or any(not c.isascii() for c in letters)


def _last_turn(ids: IntArray, tokens: Tokens) -> int:
    """Where the last turn begins in which something is said that a template does not write by itself."""
    said = np.flatnonzero(~np.isin(ids, tokens.written()))
    before = np.flatnonzero(np.isin(ids[: said[-1] if len(said) else 0], tokens.markers()))
    return int(before[-1]) + 1 if len(before) else 0
