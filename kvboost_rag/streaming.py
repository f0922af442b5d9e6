"""Deltas from a worker thread to a plain or an async iterator; giving up on either side stops the other."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import AsyncGenerator, Callable, Iterator
from typing import TypeAlias

from .stats import Delta, Generation

Feed: TypeAlias = Callable[[Callable[[Delta], None]], Generation]
_Item: TypeAlias = Delta | BaseException


def stream(feed: Feed, cancel: threading.Event) -> Iterator[Delta]:
    """Deltas of ``feed``, run in a thread of its own; closing the iterator sets ``cancel`` and waits for the thread."""
    out: queue.SimpleQueue[_Item] = queue.SimpleQueue()
    worker = threading.Thread(target=_run, args=(feed, out.put), name="kvboost-answer", daemon=True)
    worker.start()
    try:
        while True:
            delta = _delta_or_raise(out.get())
            yield delta
            if delta.generation is not None:
                return
    finally:
        cancel.set()
        worker.join()


async def astream(feed: Feed, cancel: threading.Event) -> AsyncGenerator[Delta, None]:
    """The same off the event loop."""
    loop = asyncio.get_running_loop()
    out: asyncio.Queue[_Item] = asyncio.Queue()

    def put(item: _Item) -> None:
        with contextlib.suppress(RuntimeError):  # the loop may be gone when a cancelled answer ends
            loop.call_soon_threadsafe(out.put_nowait, item)

    work = asyncio.ensure_future(asyncio.to_thread(_run, feed, put))
    try:
        while True:
            delta = _delta_or_raise(await out.get())
            yield delta
            if delta.generation is not None:
                return
    finally:
        cancel.set()
        await asyncio.shield(work)


async def in_thread(work: Callable[[], Generation], cancel: threading.Event) -> Generation:
    """Run ``work`` off the event loop; cancelling the task sets ``cancel`` and waits for the thread."""
    running = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        cancel.set()
        with contextlib.suppress(Exception):
            await running
        raise


def _run(feed: Feed, put: Callable[[_Item], None]) -> None:
    try:
        put(Delta(text="", generation=feed(put)))
    except BaseException as error:  # it is raised again on the consumer's side
        put(error)


def _delta_or_raise(item: _Item) -> Delta:
    if isinstance(item, BaseException):
        raise item
    return item
