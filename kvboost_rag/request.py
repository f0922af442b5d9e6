"""A request on its way: what it asks, who follows it, when it ends without an answer, and how many compute at once."""

from __future__ import annotations

import math
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import Context, copy_context
from dataclasses import dataclass, field
from typing import Literal

from .chunks import IntArray, Scope
from .config import Reuse, SamplingParams
from .errors import EngineClosedError, RequestTimeoutError
from .kv import Cancelled
from .scheduler import PATIENCE_S, Scheduler, Turn
from .stats import Fallback, Generation, Timing, Usage

Method = Literal["generate", "stream", "prefill"]


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """How a request was made.

    Attributes:
        method: of the engine; "generate" and "stream" are also their async forms.
        chat: whether the prompt is messages.
        started: `time.perf_counter` at call entry.
        context: of the caller: its current span, for instance.
    """

    method: Method
    chat: bool
    started: float = field(default_factory=time.perf_counter)
    context: Context = field(default_factory=copy_context, repr=False)


def is_chat(prompt: object) -> bool:
    """Whether a prompt is chat messages."""
    return isinstance(prompt, Sequence) and len(prompt) > 0 and isinstance(prompt[0], Mapping)


@dataclass(slots=True, eq=False, weakref_slot=True)
class Request:
    """A prompt on its way.

    Attributes:
        call: how it was made.
        ids: int32 ``(n,)``.
        scope: whose chunks it may use.
        reuse: mode of this call.
        sampling: how to continue.
        store: whether to keep new text.
        tokenize_s: seconds from entry to ids.
        timeout_s: seconds after `started` when to give up; None never.
        narrowed: why `reuse` is narrower than what was asked for; None if it is not.
        forgotten: whether text that it may hold was forgotten meanwhile.
        cancel: set by whoever gives up.
    """

    call: Call
    ids: IntArray
    scope: Scope
    reuse: Reuse
    sampling: SamplingParams
    store: bool
    tokenize_s: float
    timeout_s: float | None = None
    narrowed: Fallback | None = None
    forgotten: bool = False
    cancel: threading.Event = field(default_factory=threading.Event)

    @property
    def started(self) -> float:
        """`time.perf_counter` at call entry."""
        return self.call.started


class Live:
    """Requests on their way. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # a set that grows while it is read raises
        self._requests: weakref.WeakSet[Request] = weakref.WeakSet()

    def add(self, request: Request) -> None:
        """Follow a request until nobody holds it any more."""
        with self._lock:
            self._requests.add(request)

    def keep_nothing_of(self, namespace: str) -> None:
        """Let no request of a tenant store its prompt."""
        with self._lock:
            requests = list(self._requests)
        for request in requests:
            if request.scope.namespace == namespace:
                request.store, request.forgotten = False, True


class Doors:
    """Who may compute: so many requests at once, in the order in which they came; none once it is closed. Thread-safe.

    Args:
        limit: most requests inside; each holds KV.
        scheduler: of the model.
        clear: undoes what was kept by whoever was inside while it was closed.

    Attributes:
        closed: whether `close` was called.
    """

    def __init__(self, limit: int, scheduler: Scheduler, clear: Callable[[], object]) -> None:
        self._free, self._scheduler, self._clear = limit, scheduler, clear
        self._mutex = threading.Lock()
        self._queue: deque[threading.Event] = deque()
        self.closed = False

    def close(self) -> None:
        """Let nobody in any more. Who is inside finishes."""
        self.closed = True

    def must_be_open(self) -> None:
        """Raise EngineClosedError once it is closed."""
        if self.closed:
            raise EngineClosedError("the engine was closed; make a new one")

    @contextmanager
    def request(self, cancel: threading.Event) -> Iterator[None]:
        """Be inside until the block is left.

        Raises:
            Cancelled: ``cancel`` was set, also while waiting.
            EngineClosedError: it was closed meanwhile.
        """
        called = threading.Event()
        with self._mutex:
            self._queue.append(called)
            self._call()
        try:
            while not (called.is_set() or called.wait(PATIENCE_S)):
                if cancel.is_set():
                    raise Cancelled
            if cancel.is_set():
                raise Cancelled
            with self._inside():
                yield
        finally:
            with self._mutex:
                if called.is_set():
                    self._free += 1
                else:
                    self._queue.remove(called)
                self._call()

    @contextmanager
    def warming(self) -> Iterator[None]:
        """Compute documents: requests come first, but not for ever."""
        with self._inside(), self._scheduler.turn(Turn(math.inf)):
            yield

    @contextmanager
    def _inside(self) -> Iterator[None]:
        self.must_be_open()
        try:
            yield
        finally:
            if self.closed:
                self._clear()

    def _call(self) -> None:
        while self._free and self._queue:
            self._free -= 1
            self._queue.popleft().set()


@contextmanager
def deadline(request: Request) -> Iterator[None]:
    """Cancel the request when its time is over.

    Raises:
        RequestTimeoutError: it was over before the block was left.
    """
    if request.timeout_s is None:
        yield
        return
    expired = threading.Event()

    def expire() -> None:
        expired.set()
        request.cancel.set()

    left = request.started + request.timeout_s - time.perf_counter()
    timer = threading.Timer(max(left, 0.0), expire)
    timer.daemon = True
    timer.start()
    try:
        yield
    except Cancelled:
        if not expired.is_set():
            raise
    finally:
        timer.cancel()
    if expired.is_set():
        raise RequestTimeoutError(
            f"no answer within timeout_s={request.timeout_s:g}; allow more time, fewer max_tokens or a shorter prompt"
        )


def cancelled(request: Request) -> Generation:
    """The answer of a request that was cancelled before its first token."""
    elapsed = time.perf_counter() - request.started
    usage = Usage(prompt_tokens=len(request.ids))
    timing = Timing(tokenize_s=request.tokenize_s, total_s=elapsed)
    return Generation(text="", token_ids=(), finish_reason="cancelled", usage=usage, timing=timing)
