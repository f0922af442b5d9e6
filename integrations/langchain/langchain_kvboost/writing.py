"""Writes to a wrapped vector store: the inner store and the KV change together, or not at all."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, TypeAlias, TypeVar

from langchain_core.documents import Document
from langchain_core.vectorstores import VectorStore

from kvboost_rag import EngineClosedError, PromptError, WarmReport
from kvboost_rag.frameworks import Records, Turns, add_reports, off_loop, progress, settled

from .documents import (
    DocumentWarmer,
    copies,
    documents_of,
    drop_vectors,
    names_of,
    stored_count,
    stored_documents,
    vector_count,
)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Inner:
    """A step: call a method of the inner store; in an async call, its async form."""

    name: str
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)


class Mark(Enum):
    """A step that concerns the driver."""

    TAKE_TURN = auto()  # wait until no other write is between its look at the inner store and its records
    UNSTOPPABLE = auto()  # from here on the write runs to its end, and a cancelled task is cancelled after it


# A write is a generator of steps, so that its sync and async forms cannot differ. Every other step is work that may
# take long or wait for a lock, and so must not run on an event loop.
Step: TypeAlias = Inner | Mark | Callable[[], Any]
Steps: TypeAlias = Generator[Step, Any, T]


class Writer:
    """Writes to a store and keeps the KV in step.

    Args:
        inner: the store.
        warmer: renders, warms and forgets.
        show_progress: draw a progress bar while warming.
    """

    def __init__(self, inner: VectorStore, warmer: DocumentWarmer, *, show_progress: bool) -> None:
        self.inner, self._warmer, self._show_progress = inner, warmer, show_progress
        # Without get_by_ids the text of a deleted document can only come from a record of one's own.
        self._gives_back = type(inner).get_by_ids is not VectorStore.get_by_ids
        self._records = Records(keep_texts=not self._gives_back)
        # One batch or one forgetting at a time: what is encoded behind a text must be known when that is forgotten.
        self._encoding = threading.Lock()
        # One write at a time. Taken before the other locks, never while holding one.
        self._turns = Turns()

    def run(self, steps: Steps[T]) -> T:
        """Run a write in the calling thread."""
        self._turns.check()
        value: Any = None
        error: BaseException | None = None
        while True:
            try:
                step = steps.send(value) if error is None else steps.throw(error)
            except StopIteration as stop:
                return stop.value  # type: ignore[no-any-return]
            try:
                value, error = self._do(step), None
            except BaseException as raised:
                error = raised

    async def arun(self, steps: Steps[T]) -> T:
        """As `run`, awaiting every step. A cancelled task's write is told so once, and then ends undisturbed."""
        value: Any = None
        error: BaseException | None = None
        cancelled: asyncio.CancelledError | None = None
        stoppable = True
        while True:
            try:
                step = steps.send(value) if error is None else steps.throw(error)
            except StopIteration as stop:
                if cancelled is not None:
                    raise cancelled from None
                return stop.value  # type: ignore[no-any-return]
            except Exception as raised:
                if cancelled is not None:
                    raise cancelled from raised
                raise
            value, error = None, None
            if step is Mark.UNSTOPPABLE:
                stoppable = False
            elif cancelled is not None and stoppable:
                error, stoppable = cancelled, False
            elif step is Mark.TAKE_TURN and stoppable:
                try:
                    await self._ado(step)
                except asyncio.CancelledError as raised:
                    error = cancelled = raised
                    stoppable = False
            else:
                done, stopped = await settled(self._ado(step))
                cancelled = cancelled or stopped
                error = asyncio.CancelledError() if done.cancelled() else done.exception()
                value = done.result() if error is None else None

    def _do(self, step: Step) -> Any:
        if isinstance(step, Inner):
            return getattr(self.inner, step.name)(*step.args, **step.kwargs)
        if not isinstance(step, Mark):
            return step()
        if step is Mark.TAKE_TURN:
            turn = self._turns.join()
            try:
                turn.result()
            except BaseException:
                self._turns.leave(turn)
                raise
        return None

    async def _ado(self, step: Step) -> Any:
        if isinstance(step, Inner):
            return await getattr(self.inner, f"a{step.name}")(*step.args, **step.kwargs)
        if not isinstance(step, Mark):
            return await off_loop(step)
        turn = self._turns.join()
        try:
            return await asyncio.wrap_future(turn)
        except BaseException:
            self._turns.leave(turn)
            raise

    def adding_documents(self, documents: Iterable[Document], kwargs: dict[str, Any]) -> Steps[list[str]]:
        """Add documents by the inner store's `add_documents`; `kwargs` are those of the call."""
        documents = copies(documents)
        names, given = names_of(documents, kwargs.pop("ids", None))
        call = Inner("add_documents", (documents,), {**kwargs, "ids": list(names)})
        return (yield from self.adding(documents, names, given, call))

    def adding_texts(
        self,
        texts: Iterable[str],
        metadatas: Iterable[dict[str, Any]] | None,
        ids: Iterable[str] | None,
        kwargs: dict[str, Any],
    ) -> Steps[list[str]]:
        """Add texts by the inner store's `add_texts`; `kwargs` are the further ones of the call."""
        texts = list(texts)
        metadatas = None if metadatas is None else [dict(metadata) for metadata in metadatas]
        documents = documents_of(texts, metadatas)
        names, given = names_of(documents, ids)
        call = Inner("add_texts", (texts, metadatas), {**kwargs, "ids": list(names)})
        return (yield from self.adding(documents, names, given, call))

    def adding(
        self, documents: list[Document], names: list[str], given: set[str], call: Inner | None
    ) -> Steps[list[str]]:
        """Warm, then add.

        Args:
            documents: to add.
            names: their ids.
            given: ids the caller chose, which may be stored already.
            call: adds them; None if the inner store holds them already.
        """
        if not documents:
            return []
        texts: list[str] = yield lambda: [self._warmer.render(document) for document in documents]
        yield lambda: self._records.claim(texts)
        touched, vectors, our_turn = call is None, None, False
        before: dict[str, Document] = {}
        replaced: dict[str, str] = {}
        forgets = self._records.forgets
        try:
            try:
                yield from self._warming(texts, show_progress=self._show_progress)
                yield Mark.TAKE_TURN
                our_turn = True
                before = yield from self._held(given)
                replaced = yield from self._texts(given, before)
                vectors = vector_count(self.inner) if call else None
                touched = True
                answer: list[str] | None = (yield call) if call else names
                added = list(names if answer is None else answer)
                meant = dict(zip(names, texts, strict=True))
                meant = {name: meant.get(name, text) for name, text in zip(added, texts, strict=False)}
                # Only the inner store knows what it made of a text, and of an id that was there or came twice.
                actual = (yield from self._texts(meant)) if self._gives_back and call else {}
                yield lambda: self._records.put_all({**meant, **actual}.items())
                others = list(set(actual.values()).difference(texts))
                if self._records.forgets != forgets:  # and what was not recorded yet may have gone with it
                    others += texts
                yield from self._warming(others)
            except BaseException as error:
                yield Mark.UNSTOPPABLE
                if touched:
                    yield from self._undo(error, names, given, before, replaced, vectors)
                raise
            finally:
                if our_turn:
                    self._turns.end()
        finally:
            yield Mark.UNSTOPPABLE
            yield lambda: self._records.release(texts)
            yield from self._forgetting([*texts, *replaced.values()])
        return added

    def _undo(
        self,
        error: BaseException,
        names: list[str],
        given: set[str],
        before: dict[str, Document],
        replaced: dict[str, str],
        vectors: int | None,
    ) -> Steps[None]:
        """Put the inner store back to what it was; what cannot be is noted on the error that is raised.

        Args:
            error: why.
            names: ids of the call.
            given: those the caller chose.
            before: documents that had one of them, as far as the store gives documents back.
            replaced: their texts.
            vectors: see `vector_count`.
        """
        try:
            yield lambda: drop_vectors(self.inner, vectors)
            now = yield from self._held(names)
            # Of a store that gives nothing back, nobody knows whether a given id was there before.
            added = [name for name in now if name not in before] if self._gives_back else sorted({*names} - given)
            if added:
                yield Inner("delete", (added,))
            changed = {name: document for name, document in before.items() if now.get(name) != document}
            if changed:
                yield Inner("add_documents", (copies(changed.values()),), {"ids": list(changed)})
            if given and not self._gives_back:
                error.add_note(
                    f"the {type(self.inner).__name__} cannot say what it holds, so that documents of the failed call "
                    f"with given ids were left as they are: {list(given)[:8]}"
                )
            yield lambda: self._records.drop(names)
            yield lambda: self._records.put_all(replaced.items())
        except Exception as failure:
            error.add_note(f"the {type(self.inner).__name__} may hold a part of the failed call: {failure!r}")

    def deleting(self, ids: Iterable[str] | None, kwargs: dict[str, Any]) -> Steps[bool | None]:
        """Delete, then forget what is gone."""
        ids = None if ids is None else list(ids)
        gone: dict[str, str] = {}
        yield Mark.TAKE_TURN
        try:
            yield Mark.UNSTOPPABLE
            if ids is None:
                yield self._synchronise
            texts = yield from self._texts((yield self._records.ids) if ids is None else ids)
            done, refused = False, False
            unread: Exception | None = None
            try:
                answer: bool | None = yield Inner("delete", (None if ids is None else list(ids),), kwargs)
                done, refused = answer is not False, answer is False
            finally:  # a store may have deleted some before it failed
                try:
                    left = yield from self._held(texts)
                except Exception as error:  # KV can be computed again, but must not outlive its document
                    unread, left = error, {}
                if unread is not None:
                    gone = {} if refused else texts
                else:
                    gone = {n: text for n, text in texts.items() if (n not in left if self._gives_back else done)}
                yield lambda: self._records.drop(gone)
            if unread is not None:
                raise unread
        finally:
            self._turns.end()
            yield from self._forgetting(list(gone.values()))
        return answer

    def warming_all(self) -> Steps[WarmReport]:
        """Warm all the inner store holds."""
        report = yield lambda: self._warmer.warm([])
        documents = stored_documents(self.inner)
        batches = self._warmer.batches_of(documents)
        with progress(stored_count(self.inner), self._show_progress) as bar:
            while (batch := (yield lambda: next(batches, None))) is not None:
                count, texts = batch
                report = add_reports(report, (yield from self._warming(texts)))
                bar.update(count)
        yield from self._synchronising()
        return report  # type: ignore[no-any-return]

    def _warming(self, texts: Sequence[str], *, show_progress: bool = False) -> Steps[WarmReport]:
        report = WarmReport()
        distinct = list(dict.fromkeys(texts))
        with progress(len(distinct), show_progress) as bar:
            for start in range(0, len(distinct), self._warmer.batch_size):
                batch = distinct[start : start + self._warmer.batch_size]
                done: WarmReport = yield functools.partial(self._warm_batch, batch)
                report = add_reports(report, done)
                bar.update(len(batch))
        return report

    def _warm_batch(self, batch: list[str]) -> WarmReport:
        with self._encoding:
            report = self._warmer.warm(batch)
            self._records.warmed(batch, computed=report.chunks > 0)
            return report

    def _forgetting(self, texts: list[str]) -> Steps[None]:
        """Forget texts no document has, then warm what may have gone with them."""
        if not (yield lambda: self._records.unneeded(texts)):
            return
        yield from self._synchronising()
        concerned: set[str] = yield lambda: self._forget(texts)
        others = list((yield from self._texts(concerned)).values())
        if not others:
            return
        yield lambda: self._records.claim(others)
        try:
            with suppress(EngineClosedError):
                yield from self._warming(others)
        finally:
            yield lambda: self._records.release(others)
            yield lambda: self._forget(others)  # what was deleted meanwhile

    def _forget(self, texts: list[str]) -> set[str]:
        """Forget texts nobody needs; returns ids of the documents whose KV may have gone with theirs."""
        records = self._records
        with self._encoding, records.lock:  # or an add could find a text warm that is being forgotten
            unneeded = records.unneeded(texts)
            try:
                dropped = self._warmer.forget(unneeded) if unneeded else 0
            except EngineClosedError:  # a closed engine holds no KV
                return set()
            concerned = records.forgotten(unneeded)
        return concerned if dropped else set()

    def _synchronising(self) -> Steps[None]:
        yield Mark.TAKE_TURN
        try:
            yield self._synchronise
        finally:
            self._turns.end()

    def _synchronise(self) -> None:
        """Record what the inner store held before it was wrapped, or got by another way."""
        if stored_count(self.inner) in (None, len(self._records)):
            return
        texts = {}
        for document in stored_documents(self.inner):
            texts[str(document.id)] = ""
            with suppress(PromptError):  # then it was never warmed either
                texts[str(document.id)] = self._warmer.render(document)
        self._records.replace(texts)

    def _held(self, names: Iterable[str]) -> Steps[dict[str, Document]]:
        """Documents the inner store holds, by id, if it can give them back."""
        wanted = list(dict.fromkeys(names))
        if not wanted or not self._gives_back:
            return {}
        found: list[Document] = yield Inner("get_by_ids", (list(wanted),))
        # Documents of FAISS stores that an older version wrote do not know their ids.
        names_found = wanted if len(found) == len(wanted) else [""] * len(found)
        return {document.id or name: document for name, document in zip(names_found, found, strict=True)}

    def _texts(self, names: Iterable[str], held: dict[str, Document] | None = None) -> Steps[dict[str, str]]:
        """Rendered texts of documents the inner store holds, by id; `held` if they were read already."""
        wanted = list(names)
        if not self._gives_back:
            return (yield lambda: self._records.texts(wanted))  # type: ignore[no-any-return]
        documents = (yield from self._held(wanted)) if held is None else held
        return (yield lambda: self._render_all(documents))  # type: ignore[no-any-return]

    def _render_all(self, documents: dict[str, Document]) -> dict[str, str]:
        texts = {}
        for name, document in documents.items():
            with suppress(PromptError):  # then it was never warmed either
                texts[name] = self._warmer.render(document)
        return texts
