"""What `peers.py` asks, in which order: pure planning over `workload.py`'s passages, no model.

Every scenario of every prompt has documents of its own draw. A step may be preceded by a prompt that is not timed: the
peers that learn from prompts only must have seen the same documents before. Ours does not see that prompt where its
documents were warmed, so that nothing but `engine.warm` helps it there.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from workload import PREAMBLES, QUESTIONS, Item, Passage, items

Messages: TypeAlias = list[dict[str, str]]

REORDERED = "documents reordered"
SAME = "same prompt again"
QUESTION = "same documents and order, new question"
PREAMBLE = "reordered behind another preamble"
UNSEEN = "never seen"
SCENARIOS = (REORDERED, SAME, QUESTION, PREAMBLE, UNSEEN)


@dataclass(frozen=True)
class Step:
    """One timed prompt.

    Attributes:
        scenario: one of `SCENARIOS`.
        number: of the prompt within its scenario.
        before: a prompt that is asked first and not timed; None if there is none.
        everyone: ``before`` is asked of every arm, not only of those that learn from prompts alone.
        messages: the timed prompt.
    """

    scenario: str
    number: int
    before: Messages | None
    everyone: bool
    messages: Messages


@dataclass(frozen=True)
class Schedule:
    """Documents that arms may warm, a prompt that wakes everything up, and the steps."""

    collection: tuple[Passage, ...]
    first: Messages
    steps: tuple[Step, ...]


def plan(
    pool: Sequence[Passage],
    *,
    prompts: int,
    docs: int,
    collection: int,
    seed: int,
    scenarios: Sequence[str] = SCENARIOS,
) -> Schedule:
    """The steps, prompt by prompt through the scenarios.

    Raises:
        ValueError: the pool is too small for the collection and the documents that nobody has seen.
    """
    strangers = prompts * docs if UNSEEN in scenarios else 0
    if len(pool) < collection + strangers or collection < docs:
        raise ValueError(
            f"{len(pool)} passages are there; {collection} to warm and {strangers} never seen are asked for, and each "
            f"prompt has {docs}; lower --collection or --prompts"
        )
    shuffled = random.Random(f"peers {seed}").sample(list(pool), len(pool))
    known, unseen = shuffled[:collection], shuffled[collection:]
    steps = []
    drawn = {
        scenario: items(known, prompts, docs=docs, seed=seed + 1 + place, preamble=PREAMBLES[0])
        for place, scenario in enumerate(SCENARIOS)
    }
    for number in range(prompts):
        for scenario in scenarios:
            rng = random.Random(f"{seed} {scenario} {number}")
            item = drawn[scenario][number]
            if scenario == UNSEEN:
                chosen = tuple(unseen[number * docs : (number + 1) * docs])
                item = Item(PREAMBLES[0], chosen, QUESTIONS[number % len(QUESTIONS)].format(name=chosen[0].name))
            steps.append(_step(scenario, number, item, rng))
    first = items(known, 1, docs=docs, seed=seed, preamble=PREAMBLES[0])[0]
    return Schedule(tuple(known), first.messages(), tuple(steps))


def _step(scenario: str, number: int, item: Item, rng: random.Random) -> Step:
    if scenario == UNSEEN:
        return Step(scenario, number, None, False, item.messages())
    if scenario == SAME:
        return Step(scenario, number, item.messages(), True, item.messages())
    asked = rng.choice([q for q in QUESTIONS if q.format(name=item.passages[0].name) != item.question])
    other = replace(item, question=asked.format(name=item.passages[0].name))
    if scenario == QUESTION:
        return Step(scenario, number, item.messages(), True, other.messages())
    moved = replace(other, passages=reordered(item.passages, rng))
    if scenario == PREAMBLE:  # the number comes first, so that no two of these prompts begin alike
        moved = replace(moved, preamble=f"Session {number + 1}. {PREAMBLES[-1]}")
    return Step(scenario, number, item.messages(), False, moved.messages())


def reordered(documents: tuple[Passage, ...], rng: random.Random) -> tuple[Passage, ...]:
    """Another order of the documents.

    Raises:
        ValueError: there are fewer than two, so there is no other order.
    """
    if len(documents) < 2:
        raise ValueError("one document has no other order; --docs must be at least 2")
    order = list(documents)
    while tuple(order) == documents:
        rng.shuffle(order)
    return tuple(order)
