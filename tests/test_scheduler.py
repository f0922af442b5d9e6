"""Turns of one model: what is gathered, who comes first, and that nobody is lost, whatever fails."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from kvboost_rag.kv import Cancelled
from kvboost_rag.scheduler import GATHER_LEAST_S, STALL_S, Decoding, Scheduler, Turn

WAIT_S = 30.0


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(16) as made:
        yield made


class Model:
    """Runs jobs, and notes batches; fails if two threads use it at once."""

    def __init__(self) -> None:
        self.batches: list[list[Any]] = []
        self._busy = threading.Lock()

    def run(self, jobs: Sequence[Any]) -> list[Any]:
        assert self._busy.acquire(blocking=False), "two users at once"
        try:
            self.batches.append(list(jobs))
            return [job() if callable(job) else job for job in jobs]
        finally:
            self._busy.release()

    @contextmanager
    def used(self) -> Iterator[None]:
        assert self._busy.acquire(blocking=False), "two users at once"
        try:
            yield
        finally:
            self._busy.release()


def until(true: Callable[[], bool]) -> None:
    """Wait for what other threads are about to do."""
    end = time.perf_counter() + WAIT_S
    while not true():
        assert time.perf_counter() < end, "it never came true"
        time.sleep(0.001)


def results(futures: Sequence[Future[Any]]) -> list[Any]:
    return [future.result(WAIT_S) for future in futures]


def stepping(
    scheduler: Scheduler, model: Model, jobs: Sequence[Any], key: Any = "model", cancel: threading.Event | None = None
) -> tuple[Decoding, Callable[[], list[Any]]]:
    """A request, and what its thread does: one step for each job."""
    decoding = Decoding(key, cancel)

    def work() -> list[Any]:
        try:
            return [scheduler.step(decoding, job, model.run) for job in jobs]
        finally:
            scheduler.leave(decoding)

    return decoding, work


# ---- steps -----------------------------------------------------------------------------------------------------------


def test_a_lone_step_runs_in_its_own_thread_and_waits_for_nobody() -> None:
    scheduler, model, threads = Scheduler(), Model(), list[int]()
    _, work = stepping(scheduler, model, [lambda: threads.append(threading.get_ident())] * 3)
    work()
    assert threads == [threading.get_ident()] * 3
    assert [len(batch) for batch in model.batches] == [1, 1, 1]


def test_steps_of_all_who_decode_run_together_and_each_gets_its_own(pool: ThreadPoolExecutor) -> None:
    scheduler, model = Scheduler(), Model()
    works = [stepping(scheduler, model, [(name, step) for step in range(20)])[1] for name in "abcdefgh"]
    with scheduler.alone():
        futures = [pool.submit(work) for work in works]
        until(lambda: len(scheduler._steps) == 8)
    assert results(futures) == [[(name, step) for step in range(20)] for name in "abcdefgh"]
    assert len(model.batches[0]) == 8
    assert sum(map(len, model.batches)) == 160
    assert len(model.batches) < 80  # usually twenty; a busy machine may be late now and then


def test_steps_of_different_models_do_not_mix_and_what_cannot_be_batched_runs_alone(pool: ThreadPoolExecutor) -> None:
    scheduler, model = Scheduler(), Model()
    keys = ["one", "other", None, "one", "other", None]
    with scheduler.alone():
        futures = [pool.submit(stepping(scheduler, model, [(key, i)], key)[1]) for i, key in enumerate(keys)]
        until(lambda: len(scheduler._steps) == 6)
    results(futures)
    assert sorted(len(batch) for batch in model.batches) == [1, 1, 2, 2]
    assert all(len({key for key, _ in batch}) == 1 for batch in model.batches)
    assert not any(key is None for batch in model.batches if len(batch) > 1 for key, _ in batch)


def test_one_that_dawdles_is_waited_for_once_and_joins_again(pool: ThreadPoolExecutor) -> None:
    scheduler, model = Scheduler(), Model()
    slow, quick = Decoding("model", None), Decoding("model", None)
    with scheduler.alone():
        first = [pool.submit(scheduler.step, d, d, model.run) for d in (slow, quick)]
        until(lambda: len(scheduler._steps) == 2)
    results(first)
    assert model.batches in ([[slow, quick]], [[quick, slow]])
    for _ in range(3):  # the slow one thinks
        pool.submit(scheduler.step, quick, quick, model.run).result(WAIT_S)
        assert slow.late
    assert model.batches[1:] == [[quick]] * 3
    with scheduler.alone():
        again = [pool.submit(scheduler.step, d, d, model.run) for d in (slow, quick)]
        until(lambda: len(scheduler._steps) == 2)
    results(again)
    assert len(model.batches[-1]) == 2
    assert not slow.late


def test_two_halves_that_missed_each_other_meet_again(pool: ThreadPoolExecutor) -> None:
    scheduler, model = Scheduler(), Model()
    first, second = Decoding("model", None), Decoding("model", None)
    running, go = threading.Event(), threading.Event()

    def slowly() -> None:
        running.set()
        assert go.wait(WAIT_S)

    one = pool.submit(scheduler.step, first, slowly, model.run)
    assert running.wait(WAIT_S)
    two = pool.submit(scheduler.step, second, "second", model.run)
    until(lambda: len(scheduler._steps) == 1)
    time.sleep(2 * GATHER_LEAST_S)  # the second has waited long enough by its own clock
    scheduler._step_s = 2 * WAIT_S
    with scheduler._mutex:
        scheduler._stepped = time.perf_counter()
    go.set()
    one.result(WAIT_S)
    scheduler._step_s = 2 * WAIT_S  # the machine may be busy; the first comes at once
    again = pool.submit(scheduler.step, first, "first", model.run)
    assert two.result(WAIT_S) == "second"
    again.result(WAIT_S)
    assert sorted(model.batches[-1]) == ["first", "second"]


def test_an_error_of_one_job_is_raised_where_it_belongs(pool: ThreadPoolExecutor) -> None:
    scheduler, model = Scheduler(), Model()
    with scheduler.alone():
        jobs = ["a", ZeroDivisionError("b"), "c"]
        futures = [pool.submit(stepping(scheduler, model, [job])[1]) for job in jobs]
        until(lambda: len(scheduler._steps) == 3)
    assert futures[0].result(WAIT_S) == ["a"]
    assert futures[2].result(WAIT_S) == ["c"]
    with pytest.raises(ZeroDivisionError):
        futures[1].result(WAIT_S)


def test_an_interrupted_thread_takes_only_its_own_request_with_it(pool: ThreadPoolExecutor) -> None:
    scheduler, model = Scheduler(), Model()
    hit = threading.Event()

    def run(jobs: Sequence[Any]) -> list[Any]:
        if not hit.is_set():
            hit.set()
            raise KeyboardInterrupt
        return model.run(jobs)

    def step(name: str) -> Any:
        decoding = Decoding("model", None)
        try:
            return scheduler.step(decoding, name, run)
        except KeyboardInterrupt:
            return "interrupted"
        finally:
            scheduler.leave(decoding)

    with scheduler.alone():
        futures = [pool.submit(step, name) for name in "abcd"]
        until(lambda: len(scheduler._steps) == 4)
    found = results(futures)
    assert found.count("interrupted") == 1
    assert set(found) - {"interrupted"} < set("abcd")


def test_a_step_that_waits_can_be_cancelled_and_one_that_runs_is_finished(pool: ThreadPoolExecutor) -> None:
    scheduler, model = Scheduler(), Model()
    cancel = threading.Event()
    with scheduler.alone():
        waiting = pool.submit(stepping(scheduler, model, ["x"], cancel=cancel)[1])
        until(lambda: len(scheduler._steps) == 1)
        cancel.set()
        with pytest.raises(Cancelled):
            waiting.result(WAIT_S)
        assert scheduler._steps == []
    assert model.batches == []
    running, go, cancel = threading.Event(), threading.Event(), threading.Event()

    def slowly() -> str:
        running.set()
        assert go.wait(WAIT_S)
        return "done"

    with scheduler.alone():
        leader = pool.submit(stepping(scheduler, model, [slowly])[1])
        until(lambda: len(scheduler._steps) == 1)
        follower = pool.submit(stepping(scheduler, model, ["y"], cancel=cancel)[1])
        until(lambda: len(scheduler._steps) == 2)
    assert running.wait(WAIT_S)
    cancel.set()
    time.sleep(0.15)
    assert not follower.done()  # somebody is writing into its KV
    go.set()
    assert (leader.result(WAIT_S), follower.result(WAIT_S)) == (["done"], ["y"])


# ---- passes ----------------------------------------------------------------------------------------------------------


def passing(scheduler: Scheduler, model: Model, turn: Turn, layers: int, log: list[Any], name: Any) -> None:
    """A pass of some layers that offers the model between them."""
    with scheduler.turn(turn), scheduler.taking(turn.size) as mine:
        assert mine is turn
        for layer in range(layers):
            if layer and scheduler.is_wanted(turn):
                scheduler.give_way(turn)
            with model.used():
                log.append(name)


def test_the_smallest_pass_comes_first_and_every_fourth_turn_is_the_oldest_ones(pool: ThreadPoolExecutor) -> None:
    scheduler, model, log = Scheduler(), Model(), list[int]()
    with scheduler.alone():
        futures = []
        for size in (1000, 900, 7, 6, 5, 4, 3, 2, 1):
            futures.append(pool.submit(passing, scheduler, model, Turn(size), 1, log, size))
            until(lambda: len(scheduler._passes) == len(futures))
    results(futures)
    assert log == [1, 2, 3, 1000, 4, 5, 6, 900, 7]


def test_equal_passes_run_one_after_the_other(pool: ThreadPoolExecutor) -> None:
    scheduler, model, log = Scheduler(), Model(), list[str]()
    with scheduler.alone():
        futures = []
        for name in "abcd":
            futures.append(pool.submit(passing, scheduler, model, Turn(5), 30, log, name))
            until(lambda: len(scheduler._passes) == len(futures))
    results(futures)
    assert "".join(log) == "a" * 30 + "b" * 30 + "c" * 30 + "d" * 30


def test_a_short_pass_overtakes_a_long_one_at_its_next_layer(pool: ThreadPoolExecutor) -> None:
    scheduler, model, log = Scheduler(), Model(), list[str]()
    begun, go = threading.Event(), threading.Event()
    long = Turn(1000)

    def read() -> None:
        with scheduler.turn(long), scheduler.taking(1000):
            begun.set()
            assert go.wait(WAIT_S)
            for _ in range(10):
                log.append("long")
                if scheduler.is_wanted(long):
                    scheduler.give_way(long)

    first = pool.submit(read)
    assert begun.wait(WAIT_S)
    second = pool.submit(passing, scheduler, model, Turn(10), 3, log, "short")
    until(lambda: len(scheduler._passes) == 1)
    go.set()
    results([first, second])
    assert log == ["long", *["short"] * 3, *["long"] * 9]
    assert long.waited_s > 0


def test_answers_and_a_long_prompt_share_the_model(pool: ThreadPoolExecutor) -> None:
    scheduler, model, log = Scheduler(), Model(), list[str]()
    stop = threading.Event()

    def answer() -> int:
        decoding, count = Decoding("model", None), 0

        def one() -> None:
            log.append("step")
            time.sleep(0.002)

        while not stop.is_set():
            scheduler.step(decoding, one, model.run)
            count += 1
        scheduler.leave(decoding)
        return count

    def read() -> None:
        turn = Turn(1000)
        with scheduler.turn(turn), scheduler.taking(1000):
            for _ in range(60):
                with model.used():
                    log.append("layer")
                    time.sleep(0.002)
                if scheduler.is_wanted(turn):
                    scheduler.give_way(turn)
        stop.set()

    answering = pool.submit(answer)
    until(lambda: "step" in log)
    pool.submit(read).result(WAIT_S)
    assert answering.result(WAIT_S) >= 5
    between = "".join("s" if entry == "step" else "l" for entry in log[log.index("layer") :])
    assert (
        max(map(len, between.split("l"))) <= 2
    )  # the prompt never waits for more than a step, but for the odd slow one


@pytest.mark.parametrize(
    ("passes", "decoding", "step_s", "share_s"),
    [(1, 1, 0.1, 0.3), (4, 4, 0.1, 0.3), (1, 7, 0.1, 0.1), (7, 1, 0.1, STALL_S), (7, 1, 0.01, 0.21), (1, 1, 2.0, 2.0)],
)
def test_passes_get_more_of_the_time_the_more_of_them_wait(
    passes: int, decoding: int, step_s: float, share_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = Scheduler()
    scheduler._passes = [Turn(1.0) for _ in range(passes)] + [Turn(1.0, background=True)]
    scheduler._decoding = {Decoding("model", None) for _ in range(decoding)}
    scheduler._step_s, scheduler._stepped = step_s, 0.0
    for now, due in ((0.9 * share_s, False), (1.1 * share_s, True)):
        monkeypatch.setattr(time, "perf_counter", lambda now=now: now)
        assert scheduler._steps_are_due() is due


def test_a_pass_that_is_cancelled_while_others_run_leaves_the_model_to_them(pool: ThreadPoolExecutor) -> None:
    scheduler, cancel = Scheduler(), threading.Event()
    long, go = Turn(1000, cancel), threading.Event()
    held = threading.Event()

    def read() -> None:
        with scheduler.turn(long), scheduler.taking(1000):
            until(lambda: scheduler.is_wanted(long))
            scheduler.give_way(long)

    def other() -> None:
        with scheduler.taking(1):
            held.set()
            assert go.wait(WAIT_S)

    first = pool.submit(read)
    until(lambda: scheduler._holder is long)
    second = pool.submit(other)
    assert held.wait(WAIT_S)
    cancel.set()
    with pytest.raises(Cancelled):
        first.result(WAIT_S)
    assert scheduler._holder is not None  # it is still the other's
    third = pool.submit(other)
    time.sleep(0.02)
    assert len(scheduler._passes) == 1
    go.set()
    results([second, third])
    assert scheduler._holder is None


def test_background_work_runs_only_while_nobody_wants_the_model(pool: ThreadPoolExecutor) -> None:
    scheduler, model, log = Scheduler(), Model(), list[str]()
    idle = Turn(1000, background=True)
    decoding = Decoding("model", None)
    scheduler.step(decoding, "first", model.run)  # somebody is choosing a token now
    later = pool.submit(passing, scheduler, model, idle, 20, log, "background")
    until(lambda: len(scheduler._passes) == 1)
    passing(scheduler, model, Turn(5000), 3, log, "request")
    assert log == ["request"] * 3
    scheduler.leave(decoding)
    later.result(WAIT_S)
    assert log.count("background") == 20


def test_inside_alone_passes_and_steps_of_the_same_thread_run_at_once() -> None:
    scheduler, model = Scheduler(), Model()
    with scheduler.alone():
        with scheduler.taking(5) as turn:
            assert turn is None
        assert scheduler.step(Decoding("model", None), "job", model.run) == "job"
    assert scheduler._holder is None
    assert not scheduler._decoding


# ---- everything at once ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_whatever_happens_the_model_has_one_user_and_nobody_is_lost(seed: int, pool: ThreadPoolExecutor) -> None:
    scheduler, model = Scheduler(), Model()

    def request(number: int) -> int:
        draw = random.Random(f"{seed} {number}")
        cancel = threading.Event()
        timer = threading.Timer(draw.random() * 0.1, cancel.set)
        if draw.random() < 0.3:
            timer.start()
        done = 0
        decoding = Decoding(draw.choice(["one", "one", "other", None]), cancel)
        try:
            for _ in range(draw.randrange(1, 4)):
                turn = Turn(draw.randrange(100), cancel, background=draw.random() < 0.1)
                passing(scheduler, model, turn, draw.randrange(1, 20), [], number)
            for _ in range(draw.randrange(30)):
                job: Any = (number, done) if draw.random() < 0.98 else ZeroDivisionError()
                assert scheduler.step(decoding, job, model.run) == (number, done)
                done += 1
                time.sleep(draw.random() * 0.001)
        except (Cancelled, ZeroDivisionError):
            pass
        finally:
            scheduler.leave(decoding)
            timer.cancel()
        return done

    counted = sum(results([pool.submit(request, number) for number in range(40)]))
    assert scheduler._holder is None
    assert (scheduler._passes, scheduler._steps, scheduler._decoding) == ([], [], set())
    assert sum(len(batch) for batch in model.batches) >= counted
