"""Whose turn it is in a model: passes take turns between layers, decode steps of several requests run as one batch.

Every request computes in its caller's thread, and only one of these threads has the model at a time. Nothing runs in a
thread of its own, so there is nothing to end when an engine is closed, and a lone request waits for nobody.

- A **pass** reads tokens of a prompt or a document. Between two layers it gives way to whoever should come first.
- A **step** is one token of one answer. Steps of all requests that are decoding are gathered and run by the thread of
  one of them, together.

While both wait, passes get at least half of the time, and more the more of them wait and the fewer are decoding: a step
costs about the same for one as for many, so answers that begin together had better decode together. Still, reading a
long prompt stalls nobody's answer for long. Among passes the smallest comes first; every fourth turn belongs to the
oldest, which therefore ends, too.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

from .kv import Cancelled

PATIENCE_S = 0.05  # whoever waits looks so often whether it was cancelled
SLICE_S = 0.05  # a pass of another request of the same size waits for no longer than this, and a layer
GATHER_SHARE = 0.5  # of a step: so long do steps wait for requests that are still choosing their last token,
GATHER_LEAST_S = 0.01  # and at least so long; a request that comes later is not waited for until it has come
PASS_WEIGHT = 3.0  # of a request that wants a pass, against one that is decoding, in the model's time
STALL_S = 0.5  # longest that steps wait for passes, beside one layer, unless a step itself takes longer
OLDEST_EVERY = 4

Run: TypeAlias = Callable[[Sequence[Any]], Sequence[Any]]


class _Waiter:
    """Somebody who wants the model."""

    def __init__(self, cancel: threading.Event | None) -> None:
        self.cancel = cancel
        self.thread = threading.get_ident()
        self.called = threading.Event()  # the model is mine, or my step is done

    @property
    def cancelled(self) -> bool:
        return self.cancel is not None and self.cancel.is_set()


class Turn(_Waiter):
    """The passes of one request.

    Args:
        size: tokens that it computes; the fewer, the sooner.
        cancel: set by whoever gives up.
        background: for work that nobody waits for: it runs only while no request wants the model or is decoding.

    Attributes:
        waited_s: seconds that it has waited for the model.
    """

    def __init__(self, size: float = 0.0, cancel: threading.Event | None = None, *, background: bool = False) -> None:
        super().__init__(cancel)
        self.size, self.background = size, background
        self.waited_s = 0.0
        self.number = 0


class Decoding:
    """A request that is choosing its tokens. Its thread calls `Scheduler.step` for each of them.

    Args:
        key: requests of equal keys may share a step; None shares with nobody.
        cancel: set by whoever gives up.
    """

    def __init__(self, key: Hashable | None, cancel: threading.Event | None) -> None:
        self.key, self.cancel = key, cancel
        self.late = False  # it missed a batch, so nobody waits for it until it comes again


class _Step(_Waiter):
    """One token to compute, or a result: what `run` gave for it, or the error it raised."""

    def __init__(self, decoding: Decoding, job: Any, since: float) -> None:
        super().__init__(decoding.cancel)
        self.decoding, self.job, self.since = decoding, job, since
        self.batch: list[_Step] = []  # of the one who runs it for all
        self.done = False
        self.result: Any = None


CURRENT_TURN: ContextVar[Turn | None] = ContextVar("kvboost_rag_turn", default=None)


class Scheduler:
    """Hands one model from thread to thread. Thread-safe."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()  # of everything below; never held while the model runs
        self._holder: _Waiter | None = None
        self._passes: list[Turn] = []
        self._steps: list[_Step] = []
        self._decoding: set[Decoding] = set()
        self._numbers = 0
        self._contested = 0  # turns that more than one pass wanted
        self._began = 0.0  # when the holder got the model
        self._step_s = 0.0  # of the latest step
        self._stepped = 0.0  # when it ended

    # ---- passes ------------------------------------------------------------------------------------------------------

    @contextmanager
    def turn(self, turn: Turn) -> Iterator[Turn]:
        """Let every `taking` of this thread belong to one turn."""
        token = CURRENT_TURN.set(turn)
        try:
            yield turn
        finally:
            CURRENT_TURN.reset(token)

    @contextmanager
    def taking(self, size: float) -> Iterator[Turn | None]:
        """Have the model for a pass of the thread's turn, or of a new one of this size.

        Returns:
            The turn, which should be offered between layers; None inside `alone`, where nobody else may run.

        Raises:
            Cancelled: whoever wanted it gave up.
        """
        if self._is_mine():
            yield None
            return
        turn = CURRENT_TURN.get() or Turn(size)
        try:
            self._take(turn)
            yield turn
        finally:
            self._leave(turn)

    @contextmanager
    def alone(self, cancel: threading.Event | None = None) -> Iterator[None]:
        """Have the model to oneself until the block is left.

        Raises:
            Cancelled: ``cancel`` was set.
        """
        turn = Turn(0.0, cancel)
        try:
            self._take(turn)
            yield
        finally:
            self._leave(turn)

    def is_wanted(self, turn: Turn) -> bool:
        """Whether somebody else should run before the next layer of the pass that has the model."""
        if not (self._steps or self._passes or (turn.background and self._decoding)):
            return False
        with self._mutex:
            if turn.background:
                return True
            if self._steps_are_due() and self._ready():
                return True
            others = [other for other in self._passes if not other.background]
            spent = time.perf_counter() - self._began
            return bool(others) and (spent >= SLICE_S or min(other.size for other in others) < turn.size)

    def give_way(self, turn: Turn) -> None:
        """Let others run, and go on when it is this pass's turn again.

        Raises:
            Cancelled: whoever wanted it gave up; the model is somebody else's now.
        """
        self._leave(turn)
        self._take(turn)

    def _take(self, turn: Turn) -> None:
        if turn.cancelled:
            raise Cancelled
        started = time.perf_counter()
        try:
            with self._mutex:
                turn.thread = threading.get_ident()
                if not turn.number:
                    self._numbers += 1
                    turn.number = self._numbers
                turn.called.clear()
                self._passes.append(turn)
                self._dispatch()
            self._wait(turn)
        except BaseException:
            self._withdraw(turn)
            raise
        finally:
            turn.waited_s += time.perf_counter() - started

    def _leave(self, turn: Turn) -> None:
        with self._mutex:
            if self._holder is turn:  # one that gave way and was cancelled has lost it
                self._holder = None
                self._dispatch()

    def _is_mine(self) -> bool:
        holder = self._holder  # only this thread makes itself the holder's thread, or ends that
        return holder is not None and holder.thread == threading.get_ident()

    # ---- steps -------------------------------------------------------------------------------------------------------

    def step(self, decoding: Decoding, job: Any, run: Run) -> Any:
        """Compute one token, together with those of other requests.

        Args:
            decoding: of the request; it is waited for from now on, until `leave`.
            job: what ``run`` needs to know.
            run: gets the jobs of a batch, its own among them, and returns a result or an exception for each. It runs
                in one of the threads that wait.

        Raises:
            Cancelled: whoever wanted it gave up.
            Exception: what ``run`` gave for this job.
        """
        if self._is_mine():  # inside `alone`
            return _opened(run([job])[0])
        step = _Step(decoding, job, time.perf_counter())
        try:
            with self._mutex:
                self._decoding.add(decoding)
                decoding.late = False
                self._steps.append(step)
                self._dispatch()
            self._wait(step)
            if not step.done:
                self._lead(step, run)
        except BaseException:  # this thread was interrupted; those in its batch did nothing wrong
            self._withdraw(step)
            raise
        return _opened(step.result)

    def leave(self, decoding: Decoding) -> None:
        """Nobody waits for this request any more."""
        with self._mutex:
            self._decoding.discard(decoding)
            self._dispatch()

    def _lead(self, leader: _Step, run: Run) -> None:
        started = time.perf_counter()
        results = run([step.job for step in leader.batch])
        with self._mutex:
            self._stepped = time.perf_counter()
            self._step_s = self._stepped - started
            for step, result in zip(leader.batch, results, strict=True):
                step.result, step.done = result, True
                step.called.set()
            self._holder = None
            self._dispatch()

    def _ready(self) -> list[_Step]:
        """Steps to run now: all that can share a batch, once nobody is missing or has been waited for long enough."""
        if not self._steps:
            return []
        first = self._steps[0]
        if first.decoding.key is None:
            return [first]
        batch = [step for step in self._steps if step.decoding.key == first.decoding.key]
        missing = self._missing(first.decoding.key, batch)
        awaited = any(not decoding.late for decoding in missing)
        return [] if awaited and time.perf_counter() < self._deadline() else batch

    def _missing(self, key: Hashable, batch: Sequence[_Step]) -> set[Decoding]:
        here = {step.decoding for step in batch}
        return {decoding for decoding in self._decoding if decoding.key == key} - here

    def _deadline(self) -> float:
        # Counted from the end of the latest step, or two halves that once missed each other would do so for ever.
        return max(self._steps[0].since, self._stepped) + max(GATHER_SHARE * self._step_s, GATHER_LEAST_S)

    # ---- who is next -------------------------------------------------------------------------------------------------

    def _dispatch(self) -> None:
        """Give the model, if nobody has it, to whoever is next. Under the mutex."""
        if self._holder is not None:
            return
        batch, turn = self._ready(), self._next_pass()
        if batch and (turn is None or turn.background or self._steps_are_due()):
            self._steps = [step for step in self._steps if step not in batch]
            for decoding in self._missing(batch[0].decoding.key, batch):
                decoding.late = True
            batch[0].batch = batch
            self._grant(batch[0])
        elif turn is not None:
            self._passes.remove(turn)
            self._grant(turn)

    def _grant(self, waiter: _Waiter) -> None:
        self._holder, self._began = waiter, time.perf_counter()
        waiter.called.set()

    def _steps_are_due(self) -> bool:
        """Whether passes have had their share of the time since the latest step."""
        passes = sum(not turn.background for turn in self._passes) + isinstance(self._holder, Turn)
        share = min(PASS_WEIGHT * passes / max(len(self._decoding), 1) * self._step_s, STALL_S)
        return time.perf_counter() - self._stepped >= max(share, self._step_s)

    def _next_pass(self) -> Turn | None:
        waiting = [turn for turn in self._passes if not turn.background]
        if not waiting:
            idle = not self._steps and not self._decoding
            return min(self._passes, key=lambda turn: turn.number, default=None) if idle else None
        if len(waiting) > 1:
            self._contested += 1
            if self._contested % OLDEST_EVERY == 0:
                return min(waiting, key=lambda turn: turn.number)
        return min(waiting, key=lambda turn: (turn.size, turn.number))

    # ---- waiting -----------------------------------------------------------------------------------------------------

    def _wait(self, waiter: _Waiter) -> None:
        """Wait until the model is the waiter's, or its step is done."""
        while not (waiter.called.is_set() or waiter.called.wait(self._timeout(waiter))):
            if waiter.cancelled and self._withdraw(waiter):
                raise Cancelled
            with self._mutex:
                self._dispatch()  # steps may have waited for others long enough

    def _timeout(self, waiter: _Waiter) -> float:
        with self._mutex:
            if waiter in self._steps:
                return min(PATIENCE_S, max(self._deadline() - time.perf_counter(), 0.0) + 1e-4)
        return PATIENCE_S

    def _withdraw(self, waiter: _Waiter) -> bool:
        """Want the model no more. False for a step that somebody is running: it must not be taken away under it."""
        with self._mutex:
            if self._holder is waiter:
                if isinstance(waiter, _Step):
                    self._steps[:0] = [step for step in waiter.batch if step is not waiter]
                self._holder = None
            elif waiter in self._passes:
                self._passes.remove(waiter)
            elif waiter in self._steps:
                self._steps.remove(waiter)
            elif isinstance(waiter, _Step):
                return False
            self._dispatch()
            return True


def _opened(result: Any) -> Any:
    if isinstance(result, BaseException):
        raise result
    return result


_SCHEDULERS: WeakKeyDictionary[Any, Scheduler] = WeakKeyDictionary()
_SCHEDULERS_LOCK = threading.Lock()


def scheduler_of(model: Any) -> Scheduler:
    """The one scheduler of a model: engines that share it must not run it at the same time.

    A pass switches the attention of the model's config for its duration, and every layer reads it from there.
    """
    with _SCHEDULERS_LOCK:
        return _SCHEDULERS.setdefault(model.get_decoder(), Scheduler())
