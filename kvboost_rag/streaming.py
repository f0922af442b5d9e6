"""Deltas from a worker thread to a plain or an async iterator; giving up on either side stops the other."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import AsyncGenerator, Callable, Iterator
from typing import TypeAlias, TypeVar

from .stats import Delta, Generation

Feed: TypeAlias = Callable[[Callable[[Delta], None]], Generation]
_Item: TypeAlias = Delta | BaseException
T = TypeVar("T")


class Deltas(Iterator[Delta]):
    """Deltas of ``feed``, run in a thread of its own from the first step on.

    Closing sets ``cancel`` and waits for the thread. One that is dropped unclosed only sets it: the garbage collector
    runs in any thread, whatever locks that holds, and must not wait for another.
    """

    def __init__(self, feed: Feed, cancel: threading.Event) -> None:
        self._cancel = cancel
        self._out: queue.SimpleQueue[_Item] = queue.SimpleQueue()
        self._worker = threading.Thread(target=_run, args=(feed, self._out.put), name="kvboost-answer", daemon=True)
        self._begun = self._ended = False

    def __next__(self) -> Delta:
        """The next piece; the last one has the generation."""
        if self._ended:
            raise StopIteration
        try:
            if not self._begun:
                self._begun = True
                self._worker.start()
            delta = _delta_or_raise(self._out.get())
        except BaseException:
            self.close()
            raise
        self._ended = delta.generation is not None
        return delta

    def close(self) -> None:
        """Stop the computation."""
        self._ended = True
        self._cancel.set()
        if self._begun:
            self._worker.join()

    def __del__(self) -> None:
        self._cancel.set()


async def astream(feed: Feed, cancel: threading.Event) -> AsyncGenerator[Delta, None]:
    """Deltas of ``feed`` off the event loop; closing the iterator sets ``cancel`` and waits for the thread."""
    loop = asyncio.get_running_loop()
    out: asyncio.Queue[_Item] = asyncio.Queue()

    def put(item: _Item) -> None:
        try:
            loop.call_soon_threadsafe(out.put_nowait, item)
        except RuntimeError:  # the loop is gone, and with it whoever read
            cancel.set()

    work = _own_thread(lambda: _run(feed, put))
    try:
        while True:
            delta = _delta_or_raise(await out.get())
            yield delta
            if delta.generation is not None:
                return
    finally:
        cancel.set()
        if not loop.is_closed():  # dropped after its loop, it cannot wait
            await _ended(work)


async def in_thread(work: Callable[[], Generation], cancel: threading.Event) -> Generation:
    """Run ``work`` off the event loop; cancelling the task sets ``cancel`` and waits for the thread."""
    running = _own_thread(work)
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        cancel.set()
        with contextlib.suppress(Exception):
            await _ended(running)
        raise


async def _ended(work: asyncio.Future[T]) -> T:
    """Wait for a thread that was told to stop, also when the waiting is cancelled: it still runs its last forward."""
    cancelled: asyncio.CancelledError | None = None
    while not work.done():
        try:
            await asyncio.shield(work)
        except asyncio.CancelledError as error:
            cancelled = error
        except BaseException:
            break
    if cancelled is not None:
        raise cancelled
    return work.result()


def _own_thread(work: Callable[[], T]) -> asyncio.Future[T]:
    """Run ``work`` in a thread of its own.

    Requests wait for the model: in asyncio's shared pool a few dozen of them would leave no worker to anybody else.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if done.cancelled():
            return
        if error is None:
            done.set_result(result)  # type: ignore[arg-type]
        else:
            done.set_exception(error)

    def run() -> None:
        result, error = None, None
        try:
            result = work()
        except BaseException as raised:  # it is raised again in whoever waits
            error = raised
        with contextlib.suppress(RuntimeError):  # the loop may be gone when a cancelled answer ends
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=run, name="kvboost-answer", daemon=True).start()
    return done


def _run(feed: Feed, put: Callable[[_Item], None]) -> None:
    try:
        put(Delta(text="", generation=feed(put)))
    except BaseException as error:  # it is raised again on the consumer's side
        put(error)


def _delta_or_raise(item: _Item) -> Delta:
    if isinstance(item, BaseException):
        raise item
    return item
