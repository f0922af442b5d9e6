"""Writes to a wrapped vector store: the inner store and the KV change together, or not at all."""

from __future__ import annotations

import functools
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar

import numpy as np
from langchain_core.documents import Document
from langchain_core.vectorstores import VectorStore

from kvboost_rag import EngineClosedError, PromptError, WarmReport

from .documents import DocumentWarmer, add_reports, finished, off_loop, progress, stored_count, stored_documents
from .records import Records

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Inner:
    """A step: call a method of the inner store; in an async call, its async form."""

    name: str
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)


# A write is a generator of steps, so that its sync and async forms cannot differ. Every other step is work that may
# take long or wait for a lock, and so must not run on an event loop.
Step: TypeAlias = Inner | Callable[[], Any]
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

    def run(self, steps: Steps[T]) -> T:
        """Run a write in the calling thread."""
        return _drive(steps, self._do)

    async def arun(self, steps: Steps[T]) -> T:
        """As `run`, awaiting every step."""
        value: Any = None
        error: BaseException | None = None
        while True:
            try:
                step = steps.send(value) if error is None else steps.throw(error)
            except StopIteration as stop:
                return stop.value  # type: ignore[no-any-return]
            try:
                value, error = await self._ado(step), None
            except BaseException as raised:
                error = raised

    def _do(self, step: Step) -> Any:
        return getattr(self.inner, step.name)(*step.args, **step.kwargs) if isinstance(step, Inner) else step()

    async def _ado(self, step: Step) -> Any:
        if isinstance(step, Inner):
            return await finished(getattr(self.inner, f"a{step.name}")(*step.args, **step.kwargs))
        return await off_loop(step)

    def adding_documents(self, documents: Sequence[Document], kwargs: dict[str, Any]) -> Steps[list[str]]:
        """Add documents by the inner store's `add_documents`; `kwargs` are those of the call."""
        documents = list(documents)
        names, given = names_of(documents, kwargs.pop("ids", None))
        call = Inner("add_documents", (documents,), {**kwargs, "ids": names})
        return (yield from self.adding(documents, names, given, call))

    def adding_texts(
        self,
        texts: list[str],
        metadatas: list[dict[str, Any]] | None,
        ids: Sequence[str] | None,
        kwargs: dict[str, Any],
    ) -> Steps[list[str]]:
        """Add texts by the inner store's `add_texts`; `kwargs` are the further ones of the call."""
        documents = documents_of(texts, metadatas)
        names, given = names_of(documents, ids)
        call = Inner("add_texts", (texts, metadatas), {**kwargs, "ids": names})
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
        before = yield from self._held(given)
        replaced = yield from self._texts(given)
        yield lambda: self._records.claim(texts)
        touched, vectors = call is None, None
        forgets = self._records.forgets
        try:
            yield from self._warming(texts, show_progress=self._show_progress)
            vectors = _vectors(self.inner) if call else None
            touched = True
            added: list[str] = names if call is None else (yield call)
            repeated = {name for name, times in Counter(added).items() if times > 1}
            # Only the inner store knows what it made of an id that was there, or came twice.
            actual = (yield from self._texts(repeated | given.intersection(added))) if self._gives_back else {}
            yield lambda: self._records.put_all(
                (name, actual.get(name, text)) for name, text in zip(added, texts, strict=False)
            )
            if self._records.forgets != forgets:  # and what was not recorded yet may have gone with it
                yield from self._warming(texts)
        except BaseException as error:
            if touched:
                yield from self._undo(error, names, before, replaced, vectors)
            raise
        finally:
            try:
                yield lambda: self._records.release(texts)
            finally:  # also when it is cancelled here
                yield from self._forgetting([*texts, *replaced.values()])
        return added

    def _undo(
        self,
        error: BaseException,
        names: list[str],
        before: dict[str, Document],
        replaced: dict[str, str],
        vectors: int | None,
    ) -> Steps[None]:
        """Put the inner store back to what it was; what cannot be is noted on the error that is raised.

        Args:
            error: why.
            names: ids of the call.
            before: documents that had one of them, as far as the store gives documents back.
            replaced: their texts.
            vectors: see `_vectors`.
        """
        try:
            yield lambda: _drop_vectors(self.inner, vectors)
            now = yield from self._held(names)
            added = [name for name in (now if self._gives_back else set(names)) if name not in {**before, **replaced}]
            if added:
                yield Inner("delete", (added,))
            changed = {name: document for name, document in before.items() if now.get(name) != document}
            if changed:
                yield Inner("add_documents", (list(changed.values()),), {"ids": list(changed)})
            yield lambda: self._records.drop(names)
            yield lambda: self._records.put_all(replaced.items())
        except Exception as failure:
            error.add_note(f"the {type(self.inner).__name__} may hold a part of the failed call: {failure!r}")

    def deleting(self, ids: Sequence[str] | None, kwargs: dict[str, Any]) -> Steps[bool | None]:
        """Delete, then forget what is gone."""
        named = ids
        if named is None:
            yield self._synchronise
            named = yield self._records.ids
        texts = yield from self._texts(named)
        surely = False
        try:
            done: bool | None = yield Inner("delete", (ids,), kwargs)
            surely = done is not False
        finally:  # a store may have deleted some before it failed
            left = yield from self._held(texts)
            gone = {name: text for name, text in texts.items() if (name not in left if self._gives_back else surely)}
            yield lambda: self._records.drop(gone)
            yield from self._forgetting(list(gone.values()))
        return done

    def warming_all(self) -> Steps[WarmReport]:
        """Warm all the inner store holds."""
        report = yield lambda: self._warmer.warm([])
        documents = stored_documents(self.inner)
        batches = self._warmer.batches(documents)
        with progress(stored_count(self.inner), self._show_progress) as bar:
            while (batch := (yield lambda: next(batches, None))) is not None:
                count, texts = batch
                report = add_reports(report, (yield from self._warming(texts)))
                bar.update(count)
        yield self._synchronise
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
        if not records.unneeded(texts):
            return set()
        self._synchronise()
        with self._encoding, records.lock:  # or an add could find a text warm that is being forgotten
            unneeded = records.unneeded(texts)
            try:
                dropped = self._warmer.forget(unneeded) if unneeded else 0
            except EngineClosedError:  # a closed engine holds no KV
                return set()
            concerned = records.forgotten(unneeded)
        return concerned if dropped else set()

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
        found: list[Document] = yield Inner("get_by_ids", (wanted,))
        # Documents of FAISS stores that an older version wrote do not know their ids.
        names_found = wanted if len(found) == len(wanted) else [""] * len(found)
        return {document.id or name: document for name, document in zip(names_found, found, strict=True)}

    def _texts(self, names: Iterable[str]) -> Steps[dict[str, str]]:
        """Rendered texts of documents the inner store holds, by id."""
        wanted = list(names)
        if not self._gives_back:
            return (yield lambda: self._records.texts(wanted))  # type: ignore[no-any-return]
        held = yield from self._held(wanted)
        return (yield lambda: self._render_all(held))  # type: ignore[no-any-return]

    def _render_all(self, documents: dict[str, Document]) -> dict[str, str]:
        texts = {}
        for name, document in documents.items():
            with suppress(PromptError):  # then it was never warmed either
                texts[name] = self._warmer.render(document)
        return texts


def _drive(steps: Steps[T], do: Callable[[Step], Any]) -> T:
    """Run the steps; an error of a step is raised where the step was asked for."""
    value: Any = None
    error: BaseException | None = None
    while True:
        try:
            step = steps.send(value) if error is None else steps.throw(error)
        except StopIteration as stop:
            return stop.value  # type: ignore[no-any-return]
        try:
            value, error = do(step), None
        except BaseException as raised:
            error = raised


def documents_of(texts: list[str], metadatas: list[dict[str, Any]] | None) -> list[Document]:
    """Texts and their metadata as documents."""
    if metadatas and len(metadatas) != len(texts):
        raise ValueError(f"{len(texts)} texts, but {len(metadatas)} metadatas; give one for each text")
    return [
        Document(page_content=text, metadata=metadata)
        for text, metadata in zip(texts, metadatas or [{}] * len(texts), strict=True)
    ]


def names_of(documents: list[Document], ids: Sequence[str] | None) -> tuple[list[str], set[str]]:
    """An id for each document, known before anything is stored; and which of them were given."""
    if ids and len(ids) != len(documents):
        raise ValueError(f"{len(documents)} documents, but {len(ids)} ids; give one for each document")
    chosen = list(ids) if ids else [document.id for document in documents]
    return [name or str(uuid.uuid4()) for name in chosen], {name for name in chosen if name}


def _vectors(store: Any) -> int | None:
    """Vectors of a FAISS store that has a document for each of them."""
    count = getattr(getattr(store, "index", None), "ntotal", None)
    return count if isinstance(count, int) and count == stored_count(store) else None


def _drop_vectors(store: Any, count: int | None) -> None:
    """Take vectors out again that FAISS added before it found their documents' ids taken.

    Without a document they would make every search fail that finds them.
    """
    if count is not None and stored_count(store) == count < store.index.ntotal:
        store.index.remove_ids(np.arange(count, store.index.ntotal))
