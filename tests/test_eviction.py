"""Eviction policies: which chunk leaves first, and what a policy remembers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from kvboost_rag import ConfigError, EngineConfig
from kvboost_rag.chunks import ChunkHeader, Scope, as_ids
from kvboost_rag.costs import CostModel
from kvboost_rag.repair import Recipe
from kvboost_rag.store import Chunk, MemoryStore
from kvboost_rag.store.duel import Duel
from kvboost_rag.store.eviction import LRU, Entry, Policy, Worth
from kvboost_rag.store.policies import GDSF, HALF_LIFE, LFU, S3FIFO, Importance, policy_of
from tests.tiny import engine_of, prompt_of, text

SCOPE = Scope("f", "n")
NONE = as_ids([])


@dataclass(frozen=True)
class Sized:
    nbytes: int
    worth: Worth


class Store:
    """A store of chunks that have names and sizes only."""

    def __init__(self, budget: int, policy: Policy) -> None:
        self.gone: list[str] = []
        self.store: MemoryStore[Sized] = MemoryStore(
            budget, policy, lambda header: self.gone.append(header.key), lambda chunk: chunk.kv.worth
        )

    def put(self, *names: str, nbytes: int = 100, saved_s: float | None = None, norm: float = 0.0) -> None:
        for name in names:
            header = ChunkHeader(name, SCOPE, NONE, 0, NONE, "warm")
            assert self.store.put(Chunk(header, Sized(nbytes, Worth(saved_s, norm))))

    def use(self, *names: str) -> None:
        for name in names:
            assert self.store.get(name) is not None

    def ask(self, name: str) -> bool:
        """Use a chunk, or put it if it is gone; whether it was there."""
        if self.store.get(name) is not None:
            return True
        self.put(name)
        return False


def test_gdsf_evicts_what_saves_least_per_byte() -> None:
    store = Store(400, GDSF())
    store.put("dear", nbytes=100, saved_s=2.0)
    store.put("cheap", nbytes=100, saved_s=0.5)
    store.put("big", nbytes=200, saved_s=2.0)
    store.put("new", nbytes=100, saved_s=2.0)
    store.put("more", nbytes=100, saved_s=2.0)
    assert store.gone == ["cheap", "big"]


def test_gdsf_counts_uses() -> None:
    store = Store(300, GDSF())
    store.put("a", "b", "c")
    store.use("a", "a", "a", "b", "b")
    store.put("d", "e")
    assert store.gone == ["c", "d"]


def test_gdsf_forgets_what_was_popular_once() -> None:
    store = Store(300, GDSF())
    store.put("once popular")
    store.use(*["once popular"] * 5)
    for i in range(40):
        store.ask(f"new {i // 2}")
    assert "once popular" in store.gone


def test_gdsf_remembers_uses_of_what_it_evicted_but_not_for_ever() -> None:
    def goes_first(ghost_bytes: int) -> str:
        store = Store(200, GDSF(ghost_bytes))
        store.put("back", "other")
        store.use("back", "back", *["other"] * 5)
        store.put("x")  # "back" leaves
        assert store.gone == ["back"]
        store.put("back")  # in place of x
        store.put("y")
        return store.gone[-1]

    assert goes_first(1000) == "other"
    assert goes_first(0) == "back"


def test_gdsf_keys_never_fall() -> None:
    policy, entry = GDSF(1000), Entry(100, 0, name="a", worth=Worth(saved_s=1.0))
    before = 0.0
    for i in range(1, 500):
        entry.uses += 1
        policy.clock += 0.37 * (i % 7) / 100
        policy.touch(entry, i)
        assert entry.rank >= before
        assert entry.heat <= HALF_LIFE
        before = entry.rank


@pytest.mark.parametrize("saved_s", [0.0, -1.0, 1e-300])
@pytest.mark.parametrize("make", [lambda: GDSF(1000), lambda: Duel(300, [GDSF(1000)])])
def test_gdsf_takes_chunks_that_save_nothing(make: Callable[[], Policy], saved_s: float) -> None:
    store = Store(300, make())
    store.put("good", saved_s=1.0)
    store.put("useless", saved_s=saved_s)
    store.use("useless", "useless")
    store.put("a", "b", saved_s=1.0)
    assert store.gone == ["useless"]


def test_lfu_never_forgets() -> None:
    store = Store(300, LFU())
    store.put("a", "b", "c")
    store.use("a", "b", "b")
    store.put("d", "e", "f")
    assert store.gone == ["c", "d", "e"]


def test_s3fifo_evicts_one_hit_wonders_before_what_was_used_again() -> None:
    store = Store(1000, S3FIFO(1000))
    store.put(*(f"good {i}" for i in range(8)))
    store.use(*(f"good {i}" for i in range(8)))
    store.put(*(f"once {i}" for i in range(50)))
    assert not any(name.startswith("good") for name in store.gone)
    assert len(store.gone) == 48


def test_s3fifo_lets_what_comes_back_stay() -> None:
    store = Store(1000, S3FIFO(1000))
    store.put(*(f"once {i}" for i in range(12)))
    assert "once 0" in store.gone
    store.put("once 0")
    store.put(*(f"more {i}" for i in range(20)))
    assert store.gone.count("once 0") == 1


def test_s3fifo_remembers_no_more_than_a_budget_of_names() -> None:
    policy = S3FIFO(1000)
    store = Store(1000, policy)
    store.put(*(f"once {i}" for i in range(500)))
    assert len(policy._ghosts) <= 10


def test_s3fifo_evicts_main_entries_in_turn() -> None:
    policy = S3FIFO(500)
    store = Store(500, policy)
    store.put(*"abcde")
    store.use(*"abcde")
    store.put("f")  # all are promoted on the way; the first of them goes
    assert store.gone == ["a"]
    store.put("g")
    assert store.gone == ["a", "f"]  # was seen once


def test_importance_evicts_the_least_norm_but_nothing_recent() -> None:
    store = Store(500, Importance(recent=2))
    for name, norm in zip("abcde", (5.0, 1.0, 9.0, 1.0, 0.1), strict=True):
        store.put(name, norm=norm)
    store.put("f", norm=0.2)  # e is recent
    store.put("g", norm=0.2)
    assert store.gone == ["b", "d"]  # ties: the one used longest ago
    store.use("a")
    store.put("h", norm=0.0)
    assert store.gone[-1] == "e"
    store.put("i", norm=0.0)
    assert store.gone[-1] == "f"


def test_importance_gives_up_recent_ones_when_there_is_nothing_else() -> None:
    store = Store(200, Importance(recent=8))
    store.put(*"abcd")
    assert store.gone == ["a", "b"]


def test_deleted_chunks_are_not_recent() -> None:
    policy = Importance(recent=2)
    store = Store(500, policy)
    store.put(*"abc")
    store.store.clear()
    assert not policy._recent


def names(prefix: str, count: int) -> list[str]:
    return [f"{prefix}{i}" for i in range(count)]


def test_a_duel_follows_frequency_where_popularity_lasts_and_recency_where_it_does_not() -> None:
    policy = Duel(1000, [LRU(), GDSF(4000)])
    store = Store(1000, policy)
    good = names("good", 6)
    for i in range(400):
        store.ask(good[i % 6])
        store.ask(f"once {i}")
        store.ask(f"never again {i}")
    assert policy.leader == 1
    hits = sum(store.ask(name) for name in good)
    assert hits == 6
    for i in range(4000):  # each is asked for often, for a short while
        store.ask(f"new {i // 40 + i % 9}")
    assert policy.leader == 0


def test_a_duel_forgets_what_is_deleted() -> None:
    policy = Duel(1000, [LRU(), GDSF(4000)])
    store = Store(1000, policy)
    store.put("secret")
    store.store.delete("secret")
    assert not policy._entries
    assert not any(shadow._held for shadow in policy._shadows)


def test_the_default_is_gdsf_with_lru_to_fall_back_on() -> None:
    assert EngineConfig().eviction == "gdsf"
    assert isinstance(policy_of("gdsf", 1), Duel)
    with pytest.raises(ConfigError, match="eviction is 'fifo'"):
        EngineConfig(eviction="fifo")  # type: ignore[arg-type]


def test_seconds_saved() -> None:
    costs = CostModel(pass_s=1.0, token_s=0.01, pair_s=0.0001, move_s=0.001)
    exact = costs.saved(100, 50, None)
    assert exact == pytest.approx(100 * (0.01 + 0.0001 * 100) - 0.1)
    recipe = Recipe(ratio=0.05, least_tokens=12, floor_tokens=4)
    assert costs.saved(200, 0, recipe) == pytest.approx(186 * 0.02 - 0.2)
    assert costs.saved(100, 50, recipe) == pytest.approx(84 * 0.02 - 0.1)  # a short one
    assert costs.saved(50, 75, recipe) == pytest.approx(34 * 0.02 - 0.05)
    assert costs.saved(100, 50, Recipe(strategy="none")) == exact
    assert costs.saved(100, 50, Recipe(strategy="selective", floor_tokens=4, window_tokens=16)) < exact
    assert costs.saved(10, 50, recipe) == pytest.approx(-0.01)  # all of it is recomputed
    assert costs.saved(1000, 50, recipe) > 10 * costs.saved(100, 50, recipe)  # short ones are repaired more


DOCUMENTS = [text(seed, 25) for seed in range(400, 412)]


def kept_of(engine: Any) -> set[int]:
    return {i for i, each in enumerate(DOCUMENTS) if engine.warm(each).already_warm}


@pytest.mark.parametrize("eviction", ["gdsf", "lru", "s3fifo", "importance"])
def test_an_engine_keeps_its_budget_and_answers_under_every_policy(eviction: str) -> None:
    engine = engine_of(eviction=eviction, ram_budget_bytes=768 * 500)
    reference = engine_of(ram_budget_bytes=0)
    for i in range(0, 12, 3):
        engine.warm(DOCUMENTS[i : i + 3])
        prompt = prompt_of(DOCUMENTS[i : i + 3][::-1])
        assert engine.prefill(prompt).usage.approximate_tokens > 0
        assert engine.stats().stored_bytes <= 768 * 500
    exact = engine.prefill(prompt_of(DOCUMENTS[:3]), reuse="exact")
    assert (exact.logits - reference.prefill(prompt_of(DOCUMENTS[:3])).logits).abs().max() < 1e-3
    assert engine.stats().evictions > 0


def test_engines_give_the_store_measured_seconds_and_norms() -> None:
    engine = engine_of(eviction="importance")
    engine.warm(DOCUMENTS[:2])
    engine.prefill(prompt_of(DOCUMENTS[1::-1]))
    slots = engine._library._store._ram._slots.values()
    assert {slot.chunk.header.origin for slot in slots} >= {"warm", "served"}
    costs = engine._library._worth.__self__.costs
    for slot in slots:
        header, run = slot.chunk.header, slot.chunk.kv
        recipe = None if header.origin == "served" else engine.recipe
        assert slot.worth.saved_s == costs.saved(len(header), header.base, recipe)
        assert slot.worth.importance == pytest.approx(float(run.keys.norm(dim=-1).mean()), rel=1e-4)


def test_norms_are_not_computed_for_nobody() -> None:
    engine = engine_of()
    engine.warm(DOCUMENTS[:2])
    assert {slot.worth.importance for slot in engine._library._store._ram._slots.values()} == {0.0}
