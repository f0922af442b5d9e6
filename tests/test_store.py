"""The RAM store: budget, pins, eviction, and what other threads may see."""

from __future__ import annotations

import random
import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvboost_rag.chunks import ChunkHeader, Scope, as_ids
from kvboost_rag.config import Eviction
from kvboost_rag.store import LRU, Chunk, Entry, MemoryStore, Reservation, Tier
from kvboost_rag.store.eviction import Worth
from kvboost_rag.store.policies import GDSF, POLICIES, policy_of

ALICE = Scope("f1", "alice")
BOB = Scope("f1", "bob")
OTHER_MODEL = Scope("f2", "alice")


@dataclass(frozen=True)
class FakeKV:
    nbytes: int
    tag: object = None


def chunk(tokens: Any, nbytes: int = 96, scope: Scope = ALICE, *, base: int = 0, exact: bool = True) -> Chunk[FakeKV]:
    """A chunk; its tokens (4 bytes each) and history come on top of ``nbytes``."""
    history = as_ids([0] * base) if exact else None
    header = ChunkHeader.of(scope, as_ids(tokens), base=base, history=history, origin="warm")
    return Chunk(header, FakeKV(nbytes, (scope, tuple(header.tokens.tolist()))))


def numbered(i: int, scope: Scope = ALICE, nbytes: int = 96) -> Chunk[FakeKV]:
    """100 bytes: one token and 96 bytes of KV."""
    return chunk([i], nbytes, scope)


def keys(store: MemoryStore[FakeKV], scope: Scope | None = None) -> set[str]:
    return {header.key for header in store.scan(scope)}


def reserved(store: MemoryStore[FakeKV], nbytes: int) -> Reservation:
    reservation = store.reserve(nbytes)
    assert reservation is not None
    return reservation


def test_is_a_tier() -> None:
    tier: Tier[FakeKV] = MemoryStore(1000)
    one = numbered(1)
    assert tier.put(one)
    assert tier.get(one.header.key) is one
    assert one.header.key in tier
    assert tier.nbytes == 100
    assert [header.key for header in tier.scan()] == [one.header.key]
    assert tier.delete(one.header.key)
    assert not tier.delete(one.header.key)
    assert tier.get(one.header.key) is None
    assert tier.nbytes == 0


def test_counts_tensors_and_every_token_id() -> None:
    store: MemoryStore[FakeKV] = MemoryStore(10_000)
    store.put(chunk(range(10), 1000, base=5))
    assert store.nbytes == 1000 + 10 * 4 + 5 * 4
    store.clear()
    store.put(chunk(range(10), 1000, base=5, exact=False))
    assert store.nbytes == 1000 + 10 * 4


def test_evicts_least_recently_used() -> None:
    store: MemoryStore[FakeKV] = MemoryStore(300)
    a, b, c, d, e = map(numbered, range(5))
    for each in (a, b, c):
        assert store.put(each)
    store.get(a.header.key)
    assert store.put(d)
    assert keys(store) == {a.header.key, c.header.key, d.header.key}
    assert c.header.key in store  # looking is not using
    assert store.put(e)
    assert keys(store) == {a.header.key, d.header.key, e.header.key}
    assert store.stats().evictions == 2


def test_put_again_uses_the_stored_chunk() -> None:
    store: MemoryStore[FakeKV] = MemoryStore(200)
    a, b, c = map(numbered, range(3))
    store.put(a)
    store.put(b)
    assert store.put(numbered(0))
    assert store.get(a.header.key) is a
    store.put(b)
    store.put(numbered(0))
    store.put(c)
    assert keys(store) == {a.header.key, c.header.key}
    assert store.nbytes == 200


def test_a_colliding_key_is_refused() -> None:
    store: MemoryStore[FakeKV] = MemoryStore(1000)
    honest = numbered(1)
    store.put(honest)
    for tokens, scope, base, history in (
        ([2], ALICE, 0, []),
        ([1], BOB, 0, []),
        ([1], ALICE, 1, [7]),
        ([1], ALICE, 0, None),
    ):
        header = ChunkHeader(
            honest.header.key, scope, as_ids(tokens), base, None if history is None else as_ids(history), "warm"
        )
        assert not store.put(Chunk(header, FakeKV(96)))
    assert store.get(honest.header.key) is honest
    assert store.stats().rejections == 4


def test_too_big_is_refused_without_evicting() -> None:
    store: MemoryStore[FakeKV] = MemoryStore(300)
    for i in range(3):
        store.put(numbered(i))
    assert not store.put(numbered(9, nbytes=297))
    assert store.reserve(301) is None
    assert len(store) == 3
    assert store.stats().rejections == 2
    assert store.stats().evictions == 0


def test_nothing_is_evicted_when_pins_make_it_useless() -> None:
    store: MemoryStore[FakeKV] = MemoryStore(300)
    a, b, c = map(numbered, range(3))
    for each in (a, b, c):
        store.put(each)
    with store.pin([a.header.key, b.header.key]):
        assert store.reserve(200) is None
        assert len(store) == 3
        with reserved(store, 100):
            assert keys(store) == {a.header.key, b.header.key}
            assert store.reserve(1) is None


def test_zero_budget_stores_nothing() -> None:
    store: MemoryStore[FakeKV] = MemoryStore(0)
    assert not store.put(numbered(1))
    assert store.reserve(1) is None
    with reserved(store, 0):
        assert not store.put(numbered(1))
    assert store.get(numbered(1).header.key) is None
    with store.pin([numbered(1).header.key]) as held:
        assert held == [None]
    assert list(store.scan()) == []
    assert store.clear() == 0
    assert store.stats().rejections == 3


@pytest.mark.parametrize("call", [lambda: MemoryStore(-1), lambda: MemoryStore(1).reserve(-1)])
def test_negative_bytes_are_refused(call: Any) -> None:
    with pytest.raises(ValueError, match="-1; it must be 0 or more"):
        call()


def test_reservation_makes_room_at_once_and_is_used_by_puts() -> None:
    store: MemoryStore[FakeKV] = MemoryStore(300)
    for i in range(3):
        store.put(numbered(i))
    with reserved(store, 200) as reservation:
        assert store.stats().stored_bytes == 100
        assert store.stats().reserved_bytes == 200
        assert store.put(numbered(7), reservation)
        assert reservation.left_bytes == 100
        assert store.put(numbered(7), reservation)  # already there: nothing is used
        assert reservation.left_bytes == 100
        assert store.stats().stored_bytes + store.stats().reserved_bytes == 300
    assert store.stats().reserved_bytes == 0
    reservation.release()
    assert store.stats().reserved_bytes == 0
    assert store.put(numbered(8), reservation)  # a used-up reservation is no reservation
    assert store.nbytes == 300


def test_put_beyond_its_reservation_takes_free_bytes() -> None:
    store: MemoryStore[FakeKV] = MemoryStore(300)
    store.put(numbered(1))
    with reserved(store, 50) as reservation:
        assert store.put(numbered(2), reservation)
        assert reservation.left_bytes == 0
        assert not store.put(numbered(3, nbytes=400), reservation)
    assert len(store) == 2


def test_reservation_is_given_back_after_an_error() -> None:
    store: MemoryStore[FakeKV] = MemoryStore(100)
    with pytest.raises(RuntimeError, match="forward failed"), reserved(store, 100):
        raise RuntimeError("forward failed")
    assert store.stats().reserved_bytes == 0


def test_pins_nest_and_survive_delete() -> None:
    gone: list[str] = []
    store: MemoryStore[FakeKV] = MemoryStore(100, on_evict=lambda header: gone.append(header.key))
    a = numbered(1)
    key = a.header.key
    store.put(a)
    with store.pin([key, "unknown", key]) as outer:
        assert outer == [a, None, a]
        with store.pin([key]) as inner:
            assert inner == [a]
            assert store.delete(key)
            assert gone == [key]
            assert key not in store
            assert store.get(key) is None
            with store.pin([key]) as late:
                assert late == [None]
            assert not store.delete(key)
            assert store.nbytes == 100
        assert store.nbytes == 100
        assert store.stats().pinned_bytes == 100
        assert not store.put(a)  # the deleted one still takes the room
    assert store.nbytes == store.stats().pinned_bytes == 0
    assert store.put(a)
    assert gone == [key]


def test_unpinned_entries_can_be_evicted_again() -> None:
    store: MemoryStore[FakeKV] = MemoryStore(200)
    a, b, c = map(numbered, range(3))
    store.put(a)
    store.put(b)
    with store.pin([a.header.key]):
        assert store.put(c)
        assert keys(store) == {a.header.key, c.header.key}
        assert not store.put(numbered(5, nbytes=150))
    assert store.put(numbered(6, nbytes=196))
    assert len(store) == 1


def test_pin_is_released_after_an_error() -> None:
    store: MemoryStore[FakeKV] = MemoryStore(100)
    store.put(numbered(1))
    with pytest.raises(RuntimeError, match="x"), store.pin([numbered(1).header.key]):
        raise RuntimeError("x")
    assert store.stats().pinned_bytes == 0
    assert store.put(numbered(2))


def test_scopes_are_apart() -> None:
    gone: list[Scope] = []
    store: MemoryStore[FakeKV] = MemoryStore(10_000, on_evict=lambda header: gone.append(header.scope))
    mine, theirs, other = numbered(1), numbered(1, BOB), numbered(1, OTHER_MODEL)
    for each in (mine, theirs, other):
        store.put(each)
    assert len({mine.header.key, theirs.header.key, other.header.key}) == 3
    assert keys(store, BOB) == {theirs.header.key}
    assert store.clear(BOB) == 1
    assert store.clear(BOB) == 0
    assert gone == [BOB]
    assert keys(store) == {mine.header.key, other.header.key}
    assert store.clear() == 2
    assert store.nbytes == 0


def test_scan_is_a_snapshot() -> None:
    store: MemoryStore[FakeKV] = MemoryStore(1000)
    for i in range(5):
        store.put(numbered(i))
    seen = [store.delete(header.key) for header in store.scan()]
    assert seen == [True] * 5


def test_on_evict_may_read_the_store() -> None:
    seen: list[bool] = []

    def on_evict(header: ChunkHeader) -> None:
        seen.append(header.key in store or store.get(header.key) is not None)

    store: MemoryStore[FakeKV] = MemoryStore(100, on_evict=on_evict)
    for i in range(3):
        store.put(numbered(i))
    assert seen == [False, False]


def test_another_policy_fits() -> None:
    policy = GDSF()
    store: MemoryStore[FakeKV] = MemoryStore(400, policy)
    small, big = numbered(1), numbered(2, nbytes=196)
    store.put(small)
    store.put(big)
    store.get(big.header.key)
    store.get(big.header.key)
    store.put(numbered(3))
    store.put(numbered(4))  # 1 and 3 have the lowest frequency per byte; the older goes
    assert small.header.key not in store
    assert big.header.key in store
    assert policy.clock > 0


def test_lru_is_the_default() -> None:
    entry = Entry(nbytes=1, created=0, last_used=7)
    assert LRU().key(entry) == 7


@pytest.mark.parametrize(
    ("pinned", "eviction"), [(0, "lru"), (10_000, "lru"), (10_000, "gdsf"), (0, "s3fifo"), (10_000, "importance")]
)
def test_eviction_stays_cheap_with_many_entries(pinned: int, eviction: Eviction) -> None:
    store: MemoryStore[FakeKV] = MemoryStore(20_000 * 100, policy_of(eviction, 20_000 * 100))
    names = []
    for i in range(20_000):
        each = numbered(i)
        names.append(each.header.key)
        store.put(each)
    new = [numbered(100_000 + i) for i in range(2000)]
    with store.pin(names[:pinned]):
        started = time.process_time()
        for each in new:
            store.put(each)
        # One sort of all entries per put would take 2,000 times 4 ms.
        assert time.process_time() - started < 3.0
    assert len(store) == 20_000


@pytest.mark.parametrize("eviction", sorted(POLICIES))
def test_heap_does_not_keep_deleted_chunks(eviction: Eviction) -> None:
    store: MemoryStore[FakeKV] = MemoryStore(10**9, policy_of(eviction, 10**9))
    for i in range(5000):
        store.put(numbered(i))
        if i >= 10:
            store.delete(numbered(i).header.key)
    assert len(store) == 10
    assert len(store._queue._heap) < 100


SCOPES = st.sampled_from([ALICE, BOB, OTHER_MODEL])
NUMBERS = st.integers(0, 7)
SIZES = st.sampled_from([0, 96, 96, 196, 396])


class StoreMachine(RuleBasedStateMachine):
    """Compares the store with a plain dictionary; the size of a chunk follows from its number."""

    BUDGET = 500

    def __init__(self) -> None:
        super().__init__()
        self.visible: dict[str, Chunk[FakeKV]] = {}
        self.pins: list[tuple[ExitStack, list[Chunk[FakeKV]]]] = []
        self.reservations: list[Reservation] = []
        self.store: MemoryStore[FakeKV] = MemoryStore(self.BUDGET)

    @initialize(eviction=st.sampled_from(sorted(POLICIES)), worths=st.lists(st.integers(0, 4), min_size=8, max_size=8))
    def choose_policy(self, eviction: Eviction, worths: list[int]) -> None:
        def worth(chunk: Chunk[FakeKV]) -> Worth:
            value = worths[int(chunk.header.tokens[0])]
            return Worth(saved_s=value / 4, importance=value)

        policy = policy_of(eviction, self.BUDGET)
        self.store = MemoryStore(self.BUDGET, policy, self.gone, worth)

    def gone(self, header: ChunkHeader) -> None:
        assert self.visible.pop(header.key).header is header
        self.removed_now.append(header.key)

    removed_now: list[str] = []  # noqa: RUF012

    def pinned_visible(self) -> set[str]:
        held = {id(c) for _, chunks in self.pins for c in chunks}
        return {key for key, c in self.visible.items() if id(c) in held}

    @rule(i=NUMBERS, scope=SCOPES, size=SIZES, use_reservation=st.booleans())
    def put(self, i: int, scope: Scope, size: int, use_reservation: bool) -> None:
        new = numbered(i, scope, size)
        before, pinned = self.visible.get(new.header.key), self.pinned_visible()
        self.removed_now = []
        reservation = self.reservations[-1] if use_reservation and self.reservations else None
        left = reservation.left_bytes if reservation else 0
        room = self.BUDGET - self.store.stats().reserved_bytes - self.store.stats().pinned_bytes
        kept = self.store.put(new, reservation)
        assert not pinned & set(self.removed_now)
        if before is not None:
            assert kept
            assert self.removed_now == []
            return
        assert kept == (new.nbytes - min(left, new.nbytes) <= room)
        if kept:
            self.visible[new.header.key] = new
        else:
            assert self.removed_now == []

    @rule(i=NUMBERS, scope=SCOPES)
    def get(self, i: int, scope: Scope) -> None:
        key = numbered(i, scope).header.key
        found = self.store.get(key)
        assert found is self.visible.get(key)
        if found is not None:
            assert found.kv.tag == (scope, (i,))

    @rule(i=NUMBERS, scope=SCOPES)
    def delete(self, i: int, scope: Scope) -> None:
        key = numbered(i, scope).header.key
        self.removed_now = []
        there = key in self.visible
        assert self.store.delete(key) == there
        assert self.removed_now == [key] * there

    @rule(scope=st.one_of(st.none(), SCOPES))
    def clear(self, scope: Scope | None) -> None:
        expected = {key for key, c in self.visible.items() if scope in (None, c.header.scope)}
        self.removed_now = []
        assert self.store.clear(scope) == len(expected)
        assert set(self.removed_now) == expected

    @rule(wanted=st.lists(st.tuples(NUMBERS, SCOPES), max_size=4))
    def pin(self, wanted: list[tuple[int, Scope]]) -> None:
        names = [numbered(i, scope).header.key for i, scope in wanted]
        stack = ExitStack()
        held = stack.enter_context(self.store.pin(names))
        assert held == [self.visible.get(name) for name in names]
        self.pins.append((stack, [c for c in held if c is not None]))

    @rule(which=st.integers(0, 9))
    def unpin(self, which: int) -> None:
        if self.pins:
            self.pins.pop(which % len(self.pins))[0].close()

    @rule(nbytes=st.integers(0, 600))
    def reserve(self, nbytes: int) -> None:
        pinned = self.pinned_visible()
        self.removed_now = []
        stats = self.store.stats()
        reservation = self.store.reserve(nbytes)
        assert (reservation is not None) == (nbytes <= self.BUDGET - stats.reserved_bytes - stats.pinned_bytes)
        assert not pinned & set(self.removed_now)
        if reservation is None:
            assert self.removed_now == []
        else:
            self.reservations.append(reservation)

    @rule(which=st.integers(0, 9))
    def release(self, which: int) -> None:
        if self.reservations:
            self.reservations.pop(which % len(self.reservations)).release()

    @invariant()
    def counts_agree(self) -> None:
        stats = self.store.stats()
        pinned = {id(c): c for _, chunks in self.pins for c in chunks}
        stored = pinned | {id(c): c for c in self.visible.values()}
        assert stats.pinned_bytes == sum(c.nbytes for c in pinned.values())
        assert stats.stored_bytes == sum(c.nbytes for c in stored.values()) == self.store.nbytes
        assert stats.reserved_bytes == sum(r.left_bytes for r in self.reservations)
        assert stats.stored_bytes + stats.reserved_bytes <= self.BUDGET
        assert stats.chunks == len(self.visible) == len(self.store)

    @invariant()
    def scans_agree(self) -> None:
        for scope in (ALICE, BOB, OTHER_MODEL):
            expected = {key for key, c in self.visible.items() if c.header.scope == scope}
            assert keys(self.store, scope) == expected
        assert keys(self.store) == set(self.visible)

    def teardown(self) -> None:
        for stack, _ in self.pins:
            stack.close()
        for reservation in self.reservations:
            reservation.release()
        assert self.store.stats().pinned_bytes == self.store.stats().reserved_bytes == 0
        self.store.clear()
        assert self.store.nbytes == 0
        assert self.visible == {}


StoreMachine.TestCase.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
TestStoreMachine = StoreMachine.TestCase


def hammer(store: MemoryStore[FakeKV], rng: random.Random) -> None:
    scope = rng.choice([ALICE, BOB])
    items = [numbered(rng.randrange(60), scope) for _ in range(3)]
    names = [item.header.key for item in items]
    match rng.randrange(6):
        case 0 | 1:
            store.put(items[0])
        case 2:
            reservation = store.reserve(300)
            if reservation is not None:
                with reservation:
                    assert all([store.put(item, reservation) for item in items])
        case 3:
            with store.pin(names) as held:
                store.put(items[1])
                assert all(c is None or c.kv.tag == i.kv.tag for i, c in zip(items, held, strict=True))
        case 4:
            found = store.get(names[0])
            assert found is None or found.kv.tag == items[0].kv.tag
        case _:
            store.delete(names[0])


@pytest.mark.parametrize("eviction", sorted(POLICIES))
def test_threads_keep_the_invariants(eviction: Eviction) -> None:
    budget = 20 * 100
    gone: list[str] = []
    policy = policy_of(eviction, budget)
    store: MemoryStore[FakeKV] = MemoryStore(budget, policy, on_evict=lambda header: gone.append(header.key))
    errors: list[BaseException] = []
    stop = threading.Event()

    def worker(seed: int) -> None:
        rng = random.Random(seed)
        try:
            for _ in range(1500):
                hammer(store, rng)
        except BaseException as error:
            errors.append(error)

    def watcher() -> None:
        while not stop.is_set():
            stats = store.stats()
            if stats.stored_bytes + stats.reserved_bytes > budget or min(stats.stored_bytes, stats.pinned_bytes) < 0:
                errors.append(AssertionError(f"over budget: {stats}"))
                return
            time.sleep(0.001)

    workers = [threading.Thread(target=worker, args=(seed,)) for seed in range(6)]
    watch = threading.Thread(target=watcher)
    watch.start()
    for each in workers:
        each.start()
    for each in workers:
        each.join()
    stop.set()
    watch.join()
    assert errors == []
    stats = store.stats()
    assert stats.pinned_bytes == stats.reserved_bytes == 0
    assert stats.stored_bytes == 100 * len(store)
    assert stats.evictions <= len(gone)
    store.clear()
    assert store.nbytes == 0


def test_a_pinned_chunk_stays_while_others_churn() -> None:
    store: MemoryStore[FakeKV] = MemoryStore(500)
    mine = numbered(0)
    store.put(mine)
    done = threading.Event()

    def churn(start: int) -> None:
        for i in range(start, start + 2000):
            store.put(numbered(i))

    with store.pin([mine.header.key]) as held:
        threads = [threading.Thread(target=churn, args=(start,)) for start in (1000, 5000, 9000)]
        for each in threads:
            each.start()
        while any(each.is_alive() for each in threads):
            assert store.get(mine.header.key) is mine
            done.wait(0.001)
        for each in threads:
            each.join()
        assert held == [mine]
    churn(20_000)
    assert mine.header.key not in store
