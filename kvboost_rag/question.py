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
from .repair import Asked, Positions, Recipe, Run, Scores, most_whole

QUESTION_TOKENS = 64  # the most that count as the question
QUESTION_WORDS = 3  # what says less, such as "Why?", is asked about what was said before it
LINE_TOKENS = 4  # a last line of fewer, such as "Answer:", belongs to the one before
WORD_LETTERS = 4
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
    if most_whole(recipe, runs):
        repeats, continued = words_of(ids, runs, passages, question, tokens)
    else:
        repeats, continued = np.zeros(len(runs), np.float32), np.zeros(len(runs), bool)
    return replace(plan, asked=Asked(rows, repeats, continued, passages, len(question)))


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


def words_of(
    ids: IntArray, runs: Sequence[Run], passages: npt.NDArray[np.bool_], question: Positions, tokens: Tokens
) -> tuple[Scores, npt.NDArray[np.bool_]]:
    """What the words of a question say of each run, see `Asked`: ``repeats`` and ``continued``.

    Two words in a row count like one more word: they are what names are made of.

    Args:
        ids: the prompt.
        runs: moved stretches of it.
        passages: which of them can be asked about, bool ``(runs,)``.
        question: its positions.
        tokens: what they are.
    """
    same = tokens.same(ids)
    told = [run for run, passage in zip(runs, passages, strict=True) if passage]
    words, first = np.unique(same[question], return_index=True)
    held = np.zeros((len(runs), len(words)), bool)
    held[passages] = _held(same, told, words, 0)
    pairs = same[:-1].astype(np.int64) << 32 | same[1:]
    asked = np.unique(pairs[np.intersect1d(question, question - 1)])
    in_a_row = np.zeros((len(runs), len(asked)), bool)
    in_a_row[passages] = _held(pairs, told, asked, 1)
    both = np.concatenate([held, in_a_row], 1).astype(np.float32)
    # What few runs hold counts more: a word that all of them hold names none.
    repeats = both @ (1 / np.maximum(both.sum(0), 1) ** 2)
    more = held[1:] & ~held[:-1]
    says = np.zeros(len(words), bool)
    said_more = np.flatnonzero(more.any(0))
    says[said_more] = [tokens.is_word(int(ids[question[first[i]]])) for i in said_more]
    return repeats, np.append((more & says).any(1), [False] * min(len(runs), 1))


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
