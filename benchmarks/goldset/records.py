"""Questions about Debian packages: one field of one of five.

`SplitRecords`: what a package is and its figures are two passages, and only the first names the package; so the second
must have seen the first, which a blindly moved cache has not. `Records`: the same facts in one passage.
`Conversations`: the records of a chat, asked about turn by turn, with a document added on the way.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from .debian import Record, load
from .questions import Question, Turn, check, digest

DOCS = 5  # packages of a prompt, so chance is 1 / 5
TRIES = 2000
PREAMBLES = (
    "You are a helpful assistant. Answer the question from the context only.",
    "You answer questions about software packages. Use only the records given by the user, and be brief.",
    "You are a careful system administrator. Read the package records below and answer precisely.",
    "Answer in one short sentence. The context holds everything that is needed.",
)


@dataclass(frozen=True)
class Field:
    """A fact of a record: how it is asked for, how an answer begins, and its value."""

    name: str
    asked: tuple[str, ...]
    prefix: str
    value: Callable[[Record], str]


FIELDS = (
    Field(
        "version",
        ("What is the version of the package {name}?", "Which version does the package {name} have?"),
        "The version of the package {name} is ",
        lambda record: record.version,
    ),
    Field(
        "maintainer",
        ("Who is the maintainer of the package {name}?", "Who maintains the package {name}?"),
        "The maintainer of the package {name} is ",
        lambda record: record.maintainer,
    ),
    Field(
        "size",
        ("What is the installed size of the package {name}?", "How large is the package {name} when installed?"),
        "The installed size of the package {name} is ",
        lambda record: f"{record.size_kb} KB",
    ),
)


def split_passages(record: Record) -> tuple[str, ...]:
    """What the package is; its figures, which do not name it."""
    return (_about(record), f"More about the package above. {_facts(record)}")


def one_passage(record: Record) -> tuple[str, ...]:
    """Everything about a package in one passage."""
    return (f"{_about(record)} {_facts(record)}",)


def _about(record: Record) -> str:
    end = "" if record.description.endswith((".", "!")) else "."
    return f"{record.name}: {record.summary}. {record.description}{end}"


def _facts(record: Record) -> str:
    return (
        f"Its version is {record.version}. Its maintainer is {record.maintainer}. "
        f"Its installed size is {record.size_kb} KB."
    )


class Records:
    """Sets of one-shot questions; a set's prompts hold the same packages, in other orders, behind other preambles.

    Args:
        per_set: questions of a set.
        seed: of all choices.
        passages: makes the documents of a record.
        records: to draw from; the fixture by default.
    """

    def __init__(
        self,
        *,
        per_set: int = 2,
        seed: int = 0,
        passages: Callable[[Record], tuple[str, ...]] = one_passage,
        records: Sequence[Record] | None = None,
    ) -> None:
        self.per_set, self._seed, self._passages = per_set, seed, passages
        self.records = list(load() if records is None else records)
        self.source = f"Debian records {digest([repr(record) for record in self.records])}"

    def questions(self, number: int) -> tuple[Question, ...]:
        """A set: every question asks another field or package than the ones before it."""
        rng = random.Random(f"records {self._seed} {number}")
        chosen = draw(self.records, DOCS, rng)
        asked = rng.sample([(record, field) for record in chosen for field in FIELDS], self.per_set)
        preambles = _varied(rng, self.per_set)
        orders = _orders(chosen, self.per_set, rng)
        return tuple(
            question_about(record, field, order, preamble, self._passages, rng)
            for (record, field), order, preamble in zip(asked, orders, preambles, strict=True)
        )


class Conversations:
    """Sets are chats: documents come with the first question and with a later one; each turn asks another field.

    Args:
        per_set: turns.
        seed: of all choices.
        records: to draw from; the fixture by default.
    """

    ADDS = 2  # the turn that brings one more document

    def __init__(self, *, per_set: int = 4, seed: int = 0, records: Sequence[Record] | None = None) -> None:
        self.per_set, self._seed = per_set, seed
        self.records = list(load() if records is None else records)
        self.source = f"Debian records {digest([repr(record) for record in self.records])}"

    def questions(self, number: int) -> tuple[Question, ...]:
        """The turns of a chat, each with all turns before it, answered rightly."""
        rng = random.Random(f"conversations {self._seed} {number}")
        packages = draw(self.records, DOCS, rng)
        known, late = packages[:-1], packages[-1]
        preamble = rng.choice(PREAMBLES)
        fields = rng.sample(FIELDS, len(FIELDS))
        made: list[Question] = []
        history: tuple[Turn, ...] = ()
        unasked = list(known)
        for turn in range(self.per_set):
            new = known if turn == 0 else [late] if turn == self.ADDS else []
            unasked += [late] if turn == self.ADDS else []
            shown = known if turn < self.ADDS else packages
            record = rng.choice(unasked or shown)
            unasked = [other for other in unasked if other != record]
            question = question_about(record, fields[turn % len(fields)], shown, preamble, one_passage, rng)
            documents = tuple(text for one in new for text in one_passage(one))
            question = replace(question, documents=documents, history=history)
            made.append(question)
            history = (*history, Turn(documents, question.question, question.answer))
        return tuple(made)


def question_about(
    record: Record,
    field: Field,
    order: Sequence[Record],
    preamble: str,
    passages: Callable[[Record], tuple[str, ...]],
    rng: random.Random,
) -> Question:
    """Ask a field of one of the records, which stand in this order."""
    options = [field.value(other) for other in order]
    rng.shuffle(options)
    return check(
        Question(
            preamble=preamble,
            documents=tuple(text for other in order for text in passages(other)),
            question=rng.choice(field.asked).format(name=record.name),
            prefix=field.prefix.format(name=record.name),
            options=tuple(options),
            gold=options.index(field.value(record)),
        )
    )


def draw(records: Sequence[Record], count: int, rng: random.Random) -> list[Record]:
    """Records of which every field can be asked: no value is, or begins, another's."""
    for _ in range(TRIES):
        chosen = rng.sample(records, count)
        if all(_distinct([field.value(record) for record in chosen]) for field in FIELDS):
            return chosen
    raise ValueError(f"no {count} of {len(records)} records have distinct values; give more records")


def _distinct(values: Sequence[str]) -> bool:
    return not any(one.startswith(other) for i, one in enumerate(values) for j, other in enumerate(values) if i != j)


def _varied(rng: random.Random, count: int) -> list[str]:
    """Preambles, all of them before any comes again."""
    made: list[str] = []
    while len(made) < count:
        made += rng.sample(PREAMBLES, len(PREAMBLES))
    return made[:count]


def _orders(chosen: Sequence[Record], count: int, rng: random.Random) -> list[list[Record]]:
    """Different orders, none twice."""
    orders: list[list[Record]] = []
    while len(orders) < count:
        order = rng.sample(chosen, len(chosen))
        if order not in orders:
            orders.append(order)
    return orders
