"""A vector store that warms what is added to it and forgets what is deleted from it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.vectorstores import VectorStore, VectorStoreRetriever

from kvboost_rag import ConfigError, Engine, WarmReport
from kvboost_rag.frameworks import BATCH_DOCUMENTS, off_loop

from .documents import DocumentPrompt, DocumentWarmer, documents_of, names_of
from .writing import Writer


def _passed(name: str) -> Any:
    """A method that is the inner store's own, with its defaults and extra arguments."""
    model = getattr(VectorStore, name)

    async def apass(self: KVBoostVectorStore, *args: Any, **kwargs: Any) -> Any:
        return await getattr(self.inner, name)(*args, **kwargs)

    def pass_on(self: KVBoostVectorStore, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.inner, name)(*args, **kwargs)

    method = functools.wraps(model)(apass if inspect.iscoroutinefunction(model) else pass_on)
    method.__dict__.pop("__isabstractmethod__", None)
    return method


class KVBoostVectorStore(VectorStore):
    """Any vector store, with the KV of its documents kept in step: added is warmed, deleted is forgotten.

    Example:
        >>> store = KVBoostVectorStore(FAISS.from_documents(docs, embeddings), llm.get_engine())
        >>> store.warm()
        >>> retriever = store.as_retriever()

    Searches and everything else are the inner store's own. To persist, use the inner store's way (`store.save_local`),
    and wrap what it loads; KV lives in the engine's memory, so call `warm` after a restart.

    A write that fails leaves nothing behind: documents are warmed first, what the inner store took of a failed call is
    deleted from it again, documents it overwrote are put back, and KV nobody else needs is forgotten. In a store
    without `get_by_ids`, ids the caller chose are left as they are, and the error says so. An id that is stored
    already, or comes twice in a call, does what the inner store does; the KV follows what it then holds.

    Writes to the inner store take turns; their warming does not wait. On an event loop, use the async forms.

    Forgetting drops KV that was computed behind the forgotten text, and near copies of it. Documents of this store that
    may have lost theirs that way are warmed again. Two stores of one namespace do not know of each other: if both hold
    a text, deleting it from one forgets its KV for both.

    Args:
        inner: the store to wrap. Write through the wrapper.
        engine: the engine the chat model uses.
        document_prompt, separator, namespace, batch_size, show_progress: see `warm_documents`.
    """

    def __init__(
        self,
        inner: VectorStore,
        engine: Engine,
        *,
        document_prompt: DocumentPrompt | None = None,
        separator: str = "\n\n",
        namespace: str | None = None,
        batch_size: int = BATCH_DOCUMENTS,
        show_progress: bool = False,
    ) -> None:
        if not isinstance(inner, VectorStore) or isinstance(inner, KVBoostVectorStore):
            raise ConfigError(f"inner is a {type(inner).__name__}; give the vector store to wrap, not wrapped yet")
        self.inner = inner
        self.engine = engine
        warmer = DocumentWarmer(
            engine, document_prompt=document_prompt, separator=separator, namespace=namespace, batch_size=batch_size
        )
        warmer.warm([])  # a bad namespace, or an engine that reuses nothing, raises now
        self._writer = Writer(inner, warmer, show_progress=show_progress)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "inner":
            raise AttributeError(name)
        found = getattr(self.inner, name)
        return _refusing(name, self.inner) if name in _WRITING or name in _LOADING else found

    def __repr__(self) -> str:
        return f"KVBoostVectorStore({self.inner!r})"

    @property
    def embeddings(self) -> Embeddings | None:
        """The inner store's embeddings."""
        return self.inner.embeddings

    search = _passed("search")
    asearch = _passed("asearch")
    similarity_search = _passed("similarity_search")
    asimilarity_search = _passed("asimilarity_search")
    similarity_search_by_vector = _passed("similarity_search_by_vector")
    asimilarity_search_by_vector = _passed("asimilarity_search_by_vector")
    similarity_search_with_score = _passed("similarity_search_with_score")
    asimilarity_search_with_score = _passed("asimilarity_search_with_score")
    similarity_search_with_relevance_scores = _passed("similarity_search_with_relevance_scores")
    asimilarity_search_with_relevance_scores = _passed("asimilarity_search_with_relevance_scores")
    max_marginal_relevance_search = _passed("max_marginal_relevance_search")
    amax_marginal_relevance_search = _passed("amax_marginal_relevance_search")
    max_marginal_relevance_search_by_vector = _passed("max_marginal_relevance_search_by_vector")
    amax_marginal_relevance_search_by_vector = _passed("amax_marginal_relevance_search_by_vector")
    get_by_ids = _passed("get_by_ids")
    aget_by_ids = _passed("aget_by_ids")

    def as_retriever(self, **kwargs: Any) -> VectorStoreRetriever:
        """A retriever of the inner store's kind that searches, and writes, through this store."""
        if type(self.inner).as_retriever is VectorStore.as_retriever:
            return super().as_retriever(**kwargs)
        return self.inner.as_retriever(**kwargs).model_copy(update={"vectorstore": self})

    def _get_retriever_tags(self) -> list[str]:
        return [type(self).__name__, *self.inner._get_retriever_tags()]

    @classmethod
    def from_texts(
        cls,
        texts: list[str],
        embedding: Embeddings,
        metadatas: list[dict[str, Any]] | None = None,
        *,
        ids: list[str] | None = None,
        **kwargs: Any,
    ) -> KVBoostVectorStore:
        """A store filled with texts, and warmed. `from_documents` and the async forms take the same arguments.

        Args:
            texts: to embed, store and warm.
            embedding: for the inner store.
            metadatas: one for each text.
            ids: one for each text; made if None.
            kwargs: `engine`, and `store_class`, the class of the inner store, such as `FAISS`: both required. Further
                arguments of the constructor. The rest is for `store_class.from_texts`.
        """
        filling = _Filling.of(texts, metadatas, ids, kwargs)
        inner = filling.store_class.from_texts(*filling.positional(embedding), **filling.keywords())
        store = cls(inner, filling.engine, **filling.options)
        store._writer.run(store._writer.adding(filling.documents, filling.ids, set(), None))
        return store

    @classmethod
    async def afrom_texts(
        cls,
        texts: list[str],
        embedding: Embeddings,
        metadatas: list[dict[str, Any]] | None = None,
        *,
        ids: list[str] | None = None,
        **kwargs: Any,
    ) -> KVBoostVectorStore:
        """`from_texts` off the event loop."""
        filling = await off_loop(lambda: _Filling.of(texts, metadatas, ids, kwargs))
        build = filling.store_class.afrom_texts
        inner = await build(*filling.positional(embedding), **filling.keywords())
        store = await off_loop(lambda: cls(inner, filling.engine, **filling.options))
        await store._writer.arun(store._writer.adding(filling.documents, filling.ids, set(), None))
        return store

    def add_documents(self, documents: list[Document], **kwargs: Any) -> list[str]:
        """Warm documents and add them to the inner store: both, or neither.

        Args:
            documents: to add; an id is made for each that has none.
            kwargs: for the inner store; its `ids` go before those of the documents.

        Raises:
            PromptError: a document cannot be rendered. The inner store was not touched.
        """
        return self._writer.run(self._writer.adding_documents(documents, kwargs))

    async def aadd_documents(self, documents: list[Document], **kwargs: Any) -> list[str]:
        """`add_documents` off the event loop; cancelling it adds nothing, unless all was added already."""
        return await self._writer.arun(self._writer.adding_documents(documents, kwargs))

    def add_texts(
        self,
        texts: Iterable[str],
        metadatas: list[dict[str, Any]] | None = None,
        *,
        ids: list[str] | None = None,
        **kwargs: Any,
    ) -> list[str]:
        """`add_documents` for texts, by the inner store's own `add_texts`."""
        return self._writer.run(self._writer.adding_texts(texts, metadatas, ids, kwargs))

    async def aadd_texts(
        self,
        texts: Iterable[str],
        metadatas: list[dict[str, Any]] | None = None,
        *,
        ids: list[str] | None = None,
        **kwargs: Any,
    ) -> list[str]:
        """`add_texts` off the event loop; cancelling it adds nothing, unless all was added already."""
        return await self._writer.arun(self._writer.adding_texts(texts, metadatas, ids, kwargs))

    def delete(self, ids: list[str] | None = None, **kwargs: Any) -> bool | None:
        """Delete documents from the inner store, and forget the KV of those whose text no other document has."""
        return self._writer.run(self._writer.deleting(ids, kwargs))

    async def adelete(self, ids: list[str] | None = None, **kwargs: Any) -> bool | None:
        """`delete` off the event loop; once it is begun it is finished, even if the task is cancelled."""
        return await self._writer.arun(self._writer.deleting(ids, kwargs))

    def warm(self) -> WarmReport:
        """Warm every document of the inner store: after wrapping a filled or a loaded one. What is warm stays as it is.

        Raises:
            ConfigError: the inner store cannot be enumerated; see `stored_documents`.
        """
        return self._writer.run(self._writer.warming_all())

    async def awarm(self) -> WarmReport:
        """`warm` off the event loop. Cancelling the task ends it after the batch that is running."""
        return await self._writer.arun(self._writer.warming_all())


@dataclass(frozen=True, slots=True)
class _Filling:
    """Checked arguments of `from_texts`: nothing is embedded or stored if one is wrong."""

    texts: list[str]
    metadatas: list[dict[str, Any]] | None
    documents: list[Document]
    ids: list[str]
    engine: Engine
    store_class: type[VectorStore]
    options: dict[str, Any]
    rest: dict[str, Any]

    @classmethod
    def of(
        cls,
        texts: Iterable[str],
        metadatas: Iterable[dict[str, Any]] | None,
        ids: Iterable[str] | None,
        kwargs: dict[str, Any],
    ) -> _Filling:
        rest = dict(kwargs)
        engine, store_class = rest.pop("engine", None), rest.pop("store_class", None)
        if engine is None or not (isinstance(store_class, type) and issubclass(store_class, VectorStore)):
            raise ConfigError(
                "give engine= and store_class=, the class of the inner store, as in "
                "KVBoostVectorStore.from_documents(docs, embeddings, engine=engine, store_class=FAISS)"
            )
        options = {name: rest.pop(name) for name in list(rest) if name in _OPTIONS}
        texts = list(texts)
        metadatas = None if metadatas is None else [dict(metadata) for metadata in metadatas]
        documents = documents_of(texts, metadatas)
        names, _ = names_of(documents, ids)
        checking = {**_OPTIONS, **options}
        checking.pop("show_progress")
        warmer = DocumentWarmer(engine, **checking)
        for document in documents:
            warmer.render(document)
        return cls(texts, metadatas, documents, names, engine, store_class, options, rest)

    def positional(self, embedding: Embeddings) -> tuple[list[str], Embeddings, list[dict[str, Any]] | None]:
        return self.texts, embedding, self.metadatas

    def keywords(self) -> dict[str, Any]:
        return {**self.rest, "ids": list(self.ids)}


_OPTIONS: dict[str, Any] = {
    "document_prompt": None,
    "separator": "\n\n",
    "namespace": None,
    "batch_size": BATCH_DOCUMENTS,
    "show_progress": False,
}

_WRITING = frozenset({"merge_from", "add_embeddings", "aadd_embeddings"})
_LOADING = frozenset({"load_local", "load", "deserialize_from_bytes", "from_embeddings", "afrom_embeddings"})


def _refusing(name: str, inner: VectorStore) -> Callable[..., Any]:
    """In the place of a method of the inner store that would bypass the wrapper: silently nothing would be warm."""
    kind = type(inner).__name__

    def refuse(*args: Any, **kwargs: Any) -> Any:
        if name in _WRITING:
            raise ConfigError(
                f"{name} would put documents into the {kind} that are not warmed; "
                f"call store.inner.{name}(...) and then store.warm()"
            )
        raise ConfigError(
            f"{name} would give a {kind} that is not wrapped; give KVBoostVectorStore({kind}.{name}(...), engine)"
        )

    return refuse
