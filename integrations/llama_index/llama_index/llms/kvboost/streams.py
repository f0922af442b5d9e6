"""Answers piece by piece that stop the model as soon as their reader leaves, whoever else still holds them."""

from __future__ import annotations

import functools
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import aclosing, closing
from types import GeneratorType
from typing import Any, Protocol, TypeAlias, cast

from kvboost_rag.frameworks import Asked, Deltas, off_loop

from .messages import Pieces

Opened: TypeAlias = tuple[Asked, Pieces[Any]]


class Stream(Generator[Any, None, None]):
    """A stream that any thread may close, also while another reads it: for that one it then ends.

    Args:
        reading: what is read.
        deltas: the answer that it makes its pieces of.
    """

    def __init__(self, reading: GeneratorType[Any, None, None], deltas: Deltas) -> None:
        self._reading, self._deltas = reading, deltas

    def send(self, value: None, /) -> Any:
        """The next piece."""
        return self._reading.send(value)

    def throw(self, *error: Any) -> Any:
        """Raise an error where the reading is, as generators do."""
        return self._reading.throw(*error)

    def close(self) -> None:
        """Stop the model."""
        try:
            self._reading.close()
        except ValueError:
            if not self._reading.gi_running:  # it is the closing that failed
                raise
            self._deltas.close()


class _Callback(Protocol):
    """LlamaIndex's decorator of a method, which tells handlers of every piece."""

    def __call__(self) -> Callable[..., Any]: ...


def streamed(callback: _Callback) -> Callable[[Callable[..., Opened]], Callable[..., Generator[Any, None, None]]]:
    """Make a streaming method of one that says what is asked, and how its deltas are shown.

    LlamaIndex's callbacks read our pieces with a generator of their own, and drop ours without closing it. Python would
    close it when nobody holds it; but a handler that keeps the exception of an answer given up keeps our generator with
    it, and the model would go on. So the reader gets a `Stream`, which closes both. Errors of what is asked raise at
    the call, not at the first step.

    Args:
        callback: `llm_chat_callback` or `llm_completion_callback`.
    """

    def decorate(prepare: Callable[..., Opened]) -> Callable[..., Generator[Any, None, None]]:
        @functools.wraps(prepare)
        def method(llm: Any, *args: Any, **kwargs: Any) -> Generator[Any, None, None]:
            opened: list[Deltas] = []

            def call(llm: Any, *args: Any, **kwargs: Any) -> Generator[Any, None, None]:
                asked, pieces = prepare(llm, *args, **kwargs)
                opened.append(asked.stream())  # bad input raises here and not at the first step
                return _pieces(opened[0], pieces)

            told = callback()(call)(llm, *args, **kwargs)

            def read() -> Generator[Any, None, None]:
                with closing(opened[0]), closing(told):
                    yield from told

            return Stream(cast("GeneratorType[Any, None, None]", read()), opened[0])

        return method

    return decorate


def astreamed(callback: _Callback) -> Callable[[Callable[..., Opened]], Callable[..., Any]]:
    """`streamed` for the event loop; what is asked is prepared in a thread."""

    def decorate(prepare: Callable[..., Opened]) -> Callable[..., Any]:
        @functools.wraps(prepare)
        async def method(llm: Any, *args: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
            opened: list[AsyncGenerator[Any, None]] = []

            async def call(llm: Any, *args: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
                opened.append(_apieces(*await off_loop(lambda: prepare(llm, *args, **kwargs))))
                return opened[0]

            told = await callback()(call)(llm, *args, **kwargs)

            async def read() -> AsyncGenerator[Any, None]:
                async with aclosing(opened[0]), aclosing(told):
                    async for piece in told:
                        yield piece

            return read()

        return method

    return decorate


def _pieces(deltas: Deltas, pieces: Pieces[Any]) -> Generator[Any, None, None]:
    for delta in deltas:
        yield from pieces.of(delta)


async def _apieces(asked: Asked, pieces: Pieces[Any]) -> AsyncGenerator[Any, None]:
    async with aclosing(asked.astream()) as deltas:
        async for delta in deltas:
            for piece in pieces.of(delta):
                yield piece
