"""Who is told of every request when it has ended: metrics, traces, logs. One place says what they are told."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import Context
from dataclasses import dataclass
from typing import Literal, TypeAlias, TypeVar

from .config import Reuse, SamplingParams
from .planner import Plan
from .request import Call, Method, Request
from .stats import Fallback, FinishReason, Generation, Prefill, Timing, Usage

Outcome = Literal["stop", "length", "cancelled", "prefilled", "failed"]
R = TypeVar("R", Generation, Prefill)
_log = logging.getLogger("kvboost_rag")


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """A request that has ended, however it did. Holds no text and no token ids of prompts or answers.

    Attributes:
        method: of the engine: "generate", "stream" (also their async forms) or "prefill".
        chat: whether the prompt was chat messages.
        namespace: of the tenant; None if the call was refused before that was known.
        reuse: mode that was used; narrower than asked for where `fallback` says so.
        sampling: how it was to be continued; None if the call was refused.
        began_s: call entry, seconds since the epoch.
        usage, timing: see there; of a request that failed, `prompt_tokens` and `total_s` alone are known.
        exact_hits, approximate_hits, transferred_hits: runs of stored tokens that were used.
        misses: runs of tokens that were computed, whatever was stored; the last token, which always runs, is none.
        finish_reason: why the answer ended; None without an answer.
        fallback: why less was reused than was asked for, or found.
        error: name of the exception's class; None if there was none.
        context: of the caller, as `contextvars` has it; to be run in, for instance to find the caller's span.
    """

    method: Method
    chat: bool
    namespace: str | None
    reuse: Reuse | None
    sampling: SamplingParams | None
    began_s: float
    usage: Usage
    timing: Timing
    exact_hits: int = 0
    approximate_hits: int = 0
    transferred_hits: int = 0
    misses: int = 0
    finish_reason: FinishReason | None = None
    fallback: Fallback | None = None
    error: str | None = None
    context: Context

    @property
    def outcome(self) -> Outcome:
        """The finish reason, "prefilled" or "failed"."""
        if self.error is not None:
            return "failed"
        return self.finish_reason or "prefilled"


Observer: TypeAlias = Callable[[RequestRecord], None]


class Observers:
    """Told of every ended request, in the thread that ran it, before its result is returned. Thread-safe.

    An observer that raises breaks no answer: its first error is logged, and it is told of the next request all the
    same. What it does takes time of the request, so it should only note.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._observers: tuple[Observer, ...] = ()
        self._broken: set[Observer] = set()

    def add(self, observer: Observer) -> Callable[[], None]:
        """Tell it of every request that ends from now on; returns what ends that."""

        def told(record: RequestRecord) -> None:  # the same one may be added twice, and each is ended for itself
            observer(record)

        with self._lock:
            self._observers += (told,)

        def end() -> None:
            with self._lock:
                self._observers = tuple(one for one in self._observers if one is not told)
                self._broken.discard(told)

        return end

    @contextmanager
    def refusing(self, call: Call) -> Iterator[None]:
        """Tell of a call that raises before it is a request: bad input, for instance."""
        try:
            yield
        except Exception as error:
            self._tell(call, None, Ending(error))
            raise

    @contextmanager
    def following(self, request: Request) -> Iterator[Ending]:
        """Tell of a request when the block is left, with what was noted in the ending."""
        ending = Ending()
        try:
            yield ending
        except BaseException as error:
            self._tell(request.call, request, Ending(error))
            raise
        self._tell(request.call, request, ending)

    def _tell(self, call: Call, request: Request | None, ending: Ending) -> None:
        if not self._observers:
            return
        record = _record(call, request, ending)
        for observer in self._observers:
            try:
                observer(record)
            except Exception as error:
                with self._lock:
                    first = observer not in self._broken
                    self._broken.add(observer)
                if first:
                    _log.warning(
                        "an observer of requests raised %s, which no answer feels; further errors of it are not "
                        "logged; mend it, or end it with what observers.add(…) returned",
                        type(error).__name__,
                        exc_info=error,
                    )


class Ending:
    """How a request ends: with an error, or with what is noted."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error
        self.result: Generation | Prefill | None = None
        self.plan: Plan | None = None
        self.fallback: Fallback | None = None

    def note(self, result: R, plan: Plan | None = None, fallback: Fallback | None = None) -> R:
        """Note the result, which is returned; without a plan, it was cancelled before there was one."""
        self.result, self.plan, self.fallback = result, plan, fallback
        return result


def _record(call: Call, request: Request | None, ending: Ending) -> RequestRecord:
    elapsed = time.perf_counter() - call.started
    result, plan = ending.result, ending.plan
    kinds = [] if plan is None else [segment.kind for segment in plan.segments]
    return RequestRecord(
        method=call.method,
        chat=call.chat,
        namespace=None if request is None else request.scope.namespace,
        reuse=None if request is None else request.reuse,
        sampling=None if request is None else request.sampling,
        began_s=time.time() - elapsed,
        usage=Usage(prompt_tokens=0 if request is None else len(request.ids)) if result is None else result.usage,
        timing=Timing(total_s=elapsed) if result is None else result.timing,
        exact_hits=kinds.count("exact"),
        approximate_hits=kinds.count("approximate"),
        transferred_hits=kinds.count("transferred"),
        misses=0 if plan is None else _misses(plan),
        finish_reason=result.finish_reason if isinstance(result, Generation) else None,
        fallback=ending.fallback,
        error=None if ending.error is None else type(ending.error).__name__,
        context=call.context,
    )


def _misses(plan: Plan) -> int:
    last = plan.prompt_tokens - 1
    return sum(segment.kind == "compute" and segment.start < last for segment in plan.segments)
