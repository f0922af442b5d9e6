"""A question with a known answer, as one prompt; questions over the same documents make a set."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

BUCKETS = ("up to 500", "500–1k", "1k–2k", "over 2k")
_EDGES = (500, 1000, 2000)  # prompt tokens


@dataclass(frozen=True)
class Turn:
    """An earlier turn of a conversation: the documents it brought, what was asked, and the answer."""

    documents: tuple[str, ...]
    question: str
    answer: str


@dataclass(frozen=True)
class Question:
    """One prompt and its options.

    Attributes:
        preamble: system message.
        documents: new documents of this turn, in the order of the prompt.
        question: what is asked.
        prefix: fixed beginning of the answer behind which options are scored.
        options: distinct answers; none is the beginning of another.
        gold: index of the right one.
        closing: text that ends a scored option.
        history: earlier turns.
    """

    preamble: str
    documents: tuple[str, ...]
    question: str
    prefix: str
    options: tuple[str, ...]
    gold: int
    closing: str = ""
    history: tuple[Turn, ...] = ()

    @property
    def answer(self) -> str:
        """The right answer as a sentence."""
        return f"{self.prefix}{self.options[self.gold]}{self.closing}."

    @property
    def all_documents(self) -> tuple[str, ...]:
        """Documents of the whole prompt, in its order."""
        return (*(text for turn in self.history for text in turn.documents), *self.documents)

    def messages(self, *, documents: bool = True) -> list[dict[str, str]]:
        """Chat messages; without ``documents`` only what was said."""
        made = [{"role": "system", "content": self.preamble}]
        for turn in self.history:
            made.append({"role": "user", "content": _asked(turn.documents if documents else (), turn.question)})
            made.append({"role": "assistant", "content": turn.answer})
        made.append({"role": "user", "content": _asked(self.documents if documents else (), self.question)})
        return made


class Workload(Protocol):
    """Sets of questions by number: the same number gives the same set, however many are asked for."""

    source: str  # where the text comes from, with its version

    def questions(self, number: int) -> tuple[Question, ...]:
        """All questions of a set, in the order in which they are asked."""


def documents_of(sets: Sequence[Sequence[Question]]) -> list[str]:
    """Distinct documents of some sets, in the order of their first use."""
    return list(dict.fromkeys(text for one in sets for question in one for text in question.all_documents))


def bucket_of(prompt_tokens: int) -> str:
    """Name of the bucket of a prompt."""
    return BUCKETS[sum(prompt_tokens > edge for edge in _EDGES)]


def check(question: Question) -> Question:
    """The question, if its options can be told apart.

    Raises:
        ValueError: an option is the beginning of another one, or there is no such gold.
    """
    options = question.options
    for one in options:
        if sum(other.startswith(one) for other in options) > 1:
            raise ValueError(f"option {one!r} is the beginning of another of {options}; choose values that differ")
    if not 0 <= question.gold < len(options):
        raise ValueError(f"gold is {question.gold}, but there are {len(options)} options")
    return question


def digest(texts: Sequence[str]) -> str:
    """Short identity of a text pool, so that figures over different texts are never mixed."""
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]


def _asked(documents: tuple[str, ...], question: str) -> str:
    if not documents:
        return f"Question: {question}"
    context = "\n\n".join(documents)
    return f"Context:\n\n{context}\n\nQuestion: {question}"
