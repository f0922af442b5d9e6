"""Work in threads that is never left running: a thread cannot be stopped, so cancelling waits until it is done."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


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
