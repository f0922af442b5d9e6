"""Work in threads that is never left running: a thread cannot be stopped, so cancelling waits until it is done."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import Any, TypeVar

T = TypeVar("T")


def at_once(work: Sequence[Callable[[], T]], threads: int) -> list[T]:
    """Run all, so many at a time, each in a copy of this context; raises at the end what the first to fail raised."""
    if len(work) == 1:
        return [work[0]()]
    with ThreadPoolExecutor(max(1, min(threads, len(work))), thread_name_prefix="kvboost-batch") as pool:
        return [done.result() for done in [pool.submit(copy_context().run, one) for one in work]]


async def all_of(work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Await all at once; when one fails or the task is cancelled, not before all are done."""
    results = await asyncio.gather(*work, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results  # type: ignore[return-value]


async def off_loop(work: Callable[[], T]) -> T:
    """Run in a thread; a thread cannot be stopped, so that cancelling the task takes effect when it is done."""
    return await finished(asyncio.to_thread(work))


async def finished(work: Coroutine[Any, Any, T]) -> T:
    """Await, and when cancelled let the work end first: what comes next must not run beside it."""
    running, cancelled = await settled(work)
    if cancelled is not None:
        raise cancelled
    return running.result()


async def settled(work: Coroutine[Any, Any, T]) -> tuple[asyncio.Task[T], asyncio.CancelledError | None]:
    """The work, done however often the task was cancelled meanwhile, and the last such cancellation."""
    running = asyncio.ensure_future(work)
    cancelled = None
    while not running.done():
        try:
            await asyncio.wait([running])
        except asyncio.CancelledError as error:
            cancelled = error
    if not running.cancelled():
        running.exception()  # seen: asyncio would report an error nobody asked for
    return running, cancelled
