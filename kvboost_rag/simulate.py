"""Replays of a trace through the RAM store under several policies and budgets. Pure: sizes, no tensors.

What is replayed is the store that runs in an engine, with its pins and reservations; only the KV is missing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .chunks import ChunkHeader, Scope, as_ids
from .store.eviction import Entry, Policy, Worth
from .store.memory import MemoryStore
from .store.policies import GDSF, GHOSTS, LFU, policy_of
from .store.tier import Chunk
from .tracing import Asked, Event

_SCOPE, _NO_IDS = Scope("trace", "trace"), as_ids([])


@dataclass(frozen=True, slots=True)
class Sized:
    """Stands for the KV of a chunk."""

    nbytes: int
    worth: Worth


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a policy made of a trace.

    Attributes:
        policy: its name; "bound" is no policy, see `upper_bound`.
        budget_bytes: of the store.
        prompt_tokens: of all requests.
        hit_tokens: those that were stored when they were asked for.
        saved_s: seconds of prefill that they saved, by the costs in the trace.
        evictions: chunks pushed out.
    """

    policy: str
    budget_bytes: int
    prompt_tokens: int
    hit_tokens: int
    saved_s: float
    evictions: int = 0

    @property
    def hit_rate(self) -> float:
        """Share of the prompts' tokens that were stored."""
        return self.hit_tokens / max(self.prompt_tokens, 1)


class Clairvoyant(Policy):
    """What is asked for again latest leaves first, or does not come in (Belady's rule).

    With chunks of one size and one worth, no policy has more hits. With mixed ones that is no longer so: it is a strong
    heuristic, and `upper_bound` is the limit.

    Args:
        uses: at which events each chunk is asked for, ascending, by name.
    """

    def __init__(self, uses: Mapping[str, Sequence[int]]) -> None:
        self._uses = {name: list(reversed(events)) for name, events in uses.items()}
        self._held: dict[str, Entry] = {}
        self.at = 0  # the event that is being replayed

    def again(self, name: str) -> float:
        """The next event that asks for a chunk; infinity if there is none."""
        uses = self._uses.get(name, [])
        while uses and uses[-1] <= self.at:
            uses.pop()
        return uses[-1] if uses else np.inf

    def wants(self, name: str, *, fits: bool) -> bool:
        """Whether a chunk should be stored: it is asked for again, and there is room or something to give up for it."""
        again = self.again(name)
        return again < np.inf and (fits or any(-entry.rank > again for entry in self._held.values()))

    def touch(self, entry: Entry, now: int) -> Iterable[Entry]:
        """It is asked for later now, so it may leave sooner."""
        self._held[entry.name] = entry
        entry.rank = -self.again(entry.name)
        return (entry,)

    def key(self, entry: Entry) -> float:
        """The next use, negative."""
        return entry.rank

    def left(self, entry: Entry, *, evicted: bool) -> None:
        """It is not held any more."""
        del self._held[entry.name]


Make = Callable[[int, Sequence[Event]], Policy]
CANDIDATES: Mapping[str, Make] = {
    "lru": lambda budget, _: policy_of("lru", budget),
    "lfu": lambda budget, _: LFU(),
    "gdsf": lambda budget, _: policy_of("gdsf", budget),
    "gdsf-alone": lambda budget, _: GDSF(GHOSTS * budget),
    "s3fifo": lambda budget, _: policy_of("s3fifo", budget),
    "importance": lambda budget, _: policy_of("importance", budget),
    "belady": lambda _, events: Clairvoyant(uses_of(events)),
}
BOUND = "bound"


def replay(events: Sequence[Event], budget_bytes: int, policy: Policy, name: str = "") -> Outcome:
    """Run a trace through a store: what is asked for is pinned if it is there, and stored after the prompt if not."""
    store: MemoryStore[Sized] = MemoryStore(budget_bytes, policy, worth=lambda chunk: chunk.kv.worth)
    hit_tokens, saved_s = 0, 0.0
    for at, event in enumerate(events):
        if isinstance(policy, Clairvoyant):
            policy.at = at
        for key in event.dropped:
            store.delete(key)
        # A chunk that was only stored was not looked for.
        asked = {each.name: each for each in event.asked if event.op == "request" and (each.wanted or each.hit)}
        with store.pin(list(asked)) as found:
            hits = {chunk.header.key for chunk in found if chunk is not None}
        for each in event.asked:
            if each.name in hits:
                if each is asked.get(each.name):
                    hit_tokens += each.wanted
                    saved_s += each.saved_s * each.wanted / each.tokens
            elif _comes_back(each):
                fits = store.nbytes + each.nbytes <= budget_bytes
                if not isinstance(policy, Clairvoyant) or policy.wants(each.name, fits=fits):
                    _put(store, each)
    return Outcome(
        policy=name,
        budget_bytes=budget_bytes,
        prompt_tokens=sum(event.prompt_tokens for event in events),
        hit_tokens=hit_tokens,
        saved_s=saved_s,
        evictions=store.stats().evictions,
    )


def upper_bound(events: Sequence[Event], budget_bytes: int) -> Outcome:
    """More than any policy can save, even one that knows the future. Tokens and seconds are bounded one by one.

    A hit needs its chunk to be held from one use to the next, so it takes bytes x events out of budget x events. The
    dearest hits per byte and event are granted until that is spent, as if space could be moved through time.

    Source: Berger, Beckmann, Harchol-Balter, Practical bounds on optimal caching with variable object sizes, 2018
    (PFOO-L).
    """
    space, tokens, seconds = [], [], []
    last: dict[str, int] = {}
    for at, event in enumerate(events):
        for each in {each.name: each for each in event.asked}.values():
            before = last.get(each.name)
            if event.op == "request" and before is not None and each.wanted and each.nbytes <= budget_bytes:
                space.append(each.nbytes * (at - before))
                tokens.append(each.wanted)
                seconds.append(each.saved_s * each.wanted / each.tokens)
            last[each.name] = at
    total = float(budget_bytes) * max(len(events) - 1, 0)
    return Outcome(
        policy=BOUND,
        budget_bytes=budget_bytes,
        prompt_tokens=sum(event.prompt_tokens for event in events),
        hit_tokens=int(np.floor(_most(tokens, space, total) + 1e-6)),
        saved_s=_most(seconds, space, total),
    )


def footprint_bytes(events: Iterable[Event]) -> int:
    """Bytes of all different chunks together: with that budget nothing is evicted."""
    return sum({each.name: each.nbytes for event in events for each in event.asked}.values())


def simulate(
    events: Sequence[Event], budgets_bytes: Sequence[int], policies: Sequence[str] = (*CANDIDATES, BOUND)
) -> list[Outcome]:
    """Every policy at every budget.

    Raises:
        KeyError: there is no policy of that name.
    """
    outcomes = []
    for budget in budgets_bytes:
        for name in policies:
            if name == BOUND:
                outcomes.append(upper_bound(events, budget))
            else:
                outcomes.append(replay(events, budget, CANDIDATES[name](budget, events), name))
    return outcomes


def uses_of(events: Sequence[Event]) -> dict[str, list[int]]:
    """At which events each chunk is asked for."""
    uses: defaultdict[str, list[int]] = defaultdict(list)
    for at, event in enumerate(events):
        for name in {each.name for each in event.asked}:
            uses[name].append(at)
    return uses


def _comes_back(asked: Asked) -> bool:
    """Whether missing it means that it is computed and stored again; a prompt as it was served is not."""
    return not (asked.origin == "served" and asked.hit)


def _put(store: MemoryStore[Sized], asked: Asked) -> None:
    header = ChunkHeader(asked.name, _SCOPE, _NO_IDS, 0, _NO_IDS, asked.origin)
    chunk = Chunk(header, Sized(asked.nbytes, Worth(asked.saved_s or None, asked.key_norm)))
    reservation = store.reserve(asked.nbytes)
    if reservation is not None:
        with reservation:
            store.put(chunk, reservation)


def _most(values: Sequence[float], sizes: Sequence[int], room: float) -> float:
    """Most value in so much room, if things could be cut."""
    value, size = np.asarray(values, float), np.asarray(sizes, float)
    order = np.argsort(-value / np.maximum(size, 1.0), kind="stable")
    filled = np.cumsum(size[order])
    whole = int(np.searchsorted(filled, room, side="right"))
    total = float(value[order][:whole].sum())
    if whole < len(order) and size[order][whole] > 0:
        before = float(filled[whole - 1]) if whole else 0.0
        total += float(value[order][whole]) * (room - before) / float(size[order][whole])
    return total


def as_row(outcome: Outcome) -> dict[str, Any]:
    """An outcome as plain values, for JSON."""
    return {
        "policy": outcome.policy,
        "budget_bytes": outcome.budget_bytes,
        "prompt_tokens": outcome.prompt_tokens,
        "hit_tokens": outcome.hit_tokens,
        "hit_rate": round(outcome.hit_rate, 6),
        "saved_s": round(outcome.saved_s, 6),
        "evictions": outcome.evictions,
    }
