"""A vector store that warms the nodes that are added to it and forgets the nodes that are deleted from it."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, NoReturn

from llama_index.core.indices.base import BaseIndex
from llama_index.core.schema import BaseNode, MetadataMode
from llama_index.core.vector_stores import (
    MetadataFilters,
    SimpleVectorStore,
    VectorStoreQuery,
    VectorStoreQueryResult,
)
from llama_index.core.vector_stores.types import BasePydanticVectorStore
from pydantic import PrivateAttr

from kvboost_rag import ConfigError, Engine, WarmReport
from kvboost_rag.frameworks import BATCH_DOCUMENTS, add_reports, off_loop

from .forgetting import Entry, NodeKeeper
from .nodes import SEPARATOR, AnyNode, NodeTemplate, NodeWarmer, bare, stored_nodes

_log = logging.getLogger(__name__)


class KVBoostVectorStore(BasePydanticVectorStore):
    """Any vector store, with the KV of its nodes kept in step: added is warmed, deleted is forgotten.

    Example:
        >>> store = KVBoostVectorStore(FaissVectorStore(faiss.IndexFlatL2(384)), llm.get_engine())
        >>> index = VectorStoreIndex.from_documents(documents, StorageContext.from_defaults(vector_store=store))
        >>> index.refresh_ref_docs(documents)

    Indexes and pipelines add and delete through their vector store, whatever caches, workers and docstore strategies
    come before it, so that this is where nothing is missed: `insert`, `update_ref_doc`, `refresh_ref_docs`,
    `delete_ref_doc`, `delete_nodes`, and pipelines that upsert and delete. To persist, use LlamaIndex's way, and wrap
    what it loads; then call ``store.warm(index)``, which also tells the store which nodes it holds.

    Nodes are warmed before they are added; if the inner store does not take them, their KV is forgotten again. A text
    that another node of the store has stays warm. Two stores of one namespace do not know of each other: if both hold a
    text, deleting it from one forgets its KV for both. What a store cannot delete (a `FaissVectorStore` deletes
    nothing) raises as before, and stays warm.

    Args:
        inner: the store to wrap. Write through the wrapper.
        engine: the engine the LLM uses.
        metadata_mode, separator, node_template, namespace, batch_size: see `warm_nodes`.
    """

    _inner: Any = PrivateAttr()
    _keeper: NodeKeeper = PrivateAttr()
    _batch_size: int = PrivateAttr()

    def __init__(
        self,
        inner: BasePydanticVectorStore,
        engine: Engine,
        *,
        metadata_mode: MetadataMode = MetadataMode.LLM,
        separator: str = SEPARATOR,
        node_template: NodeTemplate | None = None,
        namespace: str | None = None,
        batch_size: int = BATCH_DOCUMENTS,
    ) -> None:
        if not isinstance(inner, BasePydanticVectorStore) or isinstance(inner, KVBoostVectorStore):
            raise ConfigError(f"inner is a {type(inner).__name__}; give the vector store to wrap, not wrapped yet")
        warmer = NodeWarmer(
            engine,
            metadata_mode=metadata_mode,
            separator=separator,
            node_template=node_template,
            namespace=namespace,
            batch_size=batch_size,
        )
        warmer.warm([])  # a bad namespace, or an engine that reuses nothing, raises now
        super().__init__(stores_text=inner.stores_text, is_embedding_query=inner.is_embedding_query)
        self._inner = inner
        self._keeper = NodeKeeper(warmer)
        self._batch_size = batch_size

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            return super().__getattr__(name)  # type: ignore[misc]
        return getattr(self._inner, name)

    def __getstate__(self) -> NoReturn:
        raise ConfigError("a KVBoostVectorStore knows an engine and cannot be pickled; persist store.inner instead")

    @classmethod
    def class_name(cls) -> str:
        """Name in serialised pipelines."""
        return "KVBoostVectorStore"

    @property
    def inner(self) -> BasePydanticVectorStore:
        """The wrapped store."""
        return self._inner  # type: ignore[no-any-return]

    @property
    def client(self) -> Any:
        """The inner store's client."""
        return self._inner.client

    def add(self, nodes: Sequence[BaseNode], **kwargs: Any) -> list[str]:
        """Warm nodes and add them to the inner store.

        Raises:
            PromptError: a node cannot be rendered. The inner store was not touched.
        """
        entries = self._keeper.entries(nodes)
        try:
            for batch in self._keeper.batches(entries):
                self._keeper.warm(batch)
            added: list[str] = self._inner.add(nodes, **kwargs)
        except BaseException:
            self._keeper.drop_again(entries)
            raise
        self._keeper.keep(entries)
        return added

    async def async_add(self, nodes: Sequence[BaseNode], **kwargs: Any) -> list[str]:
        """`add` off the event loop; cancelled before the inner store took the nodes, it leaves nothing warm."""
        entries = await off_loop(lambda: self._keeper.entries(nodes))
        try:
            for batch in self._keeper.batches(entries):
                await off_loop(lambda batch=batch: self._keeper.warm(batch))  # type: ignore[misc]
            added: list[str] = await self._inner.async_add(nodes, **kwargs)
        except BaseException:
            await off_loop(lambda: self._keeper.drop_again(entries))
            raise
        await off_loop(lambda: self._keeper.keep(entries))
        return added

    def delete(self, ref_doc_id: str, **delete_kwargs: Any) -> None:
        """Delete a document's nodes from the inner store, and forget the KV of texts that no other node has."""
        self._inner.delete(ref_doc_id, **delete_kwargs)
        self._keeper.gone(self._left(self._known(ref_doc_id)))

    async def adelete(self, ref_doc_id: str, **delete_kwargs: Any) -> None:
        """`delete` off the event loop."""
        await self._inner.adelete(ref_doc_id, **delete_kwargs)
        await off_loop(lambda: self._keeper.gone(self._left(self._known(ref_doc_id))))

    def delete_nodes(
        self, node_ids: list[str] | None = None, filters: MetadataFilters | None = None, **delete_kwargs: Any
    ) -> None:
        """Delete nodes from the inner store, and forget the KV of texts that no other node has.

        Raises:
            ConfigError: by filter, from a store that cannot say which nodes that are. Nothing was deleted.
        """
        leaving = self._leaving(node_ids, filters)
        self._inner.delete_nodes(node_ids, filters, **delete_kwargs)
        self._keeper.gone(self._left(leaving))

    async def adelete_nodes(
        self, node_ids: list[str] | None = None, filters: MetadataFilters | None = None, **delete_kwargs: Any
    ) -> None:
        """`delete_nodes` off the event loop."""
        leaving = await off_loop(lambda: self._leaving(node_ids, filters))
        await self._inner.adelete_nodes(node_ids, filters, **delete_kwargs)
        await off_loop(lambda: self._keeper.gone(self._left(leaving)))

    def clear(self) -> None:
        """Delete all nodes, and forget their KV."""
        self._inner.clear()
        self._keeper.gone(self._keeper.names())

    async def aclear(self) -> None:
        """`clear` off the event loop."""
        await self._inner.aclear()
        await off_loop(lambda: self._keeper.gone(self._keeper.names()))

    def warm(self, nodes: Iterable[AnyNode] | BaseIndex[Any] | None = None) -> WarmReport:
        """Warm nodes that the inner store holds already, and remember them: after wrapping a filled or a loaded one.

        Args:
            nodes: them, or the index over this store. None asks the inner store, if it keeps texts.

        Raises:
            ConfigError: the texts are kept nowhere; see `stored_nodes`.
        """
        report = WarmReport()
        for entries in self._held(nodes):
            try:
                for batch in self._keeper.batches(entries):
                    report = add_reports(report, self._keeper.warm(batch))
            finally:  # warm or not, the store has them
                self._keeper.keep(entries)
        return report

    async def awarm(self, nodes: Iterable[AnyNode] | BaseIndex[Any] | None = None) -> WarmReport:
        """`warm` off the event loop. Cancelling the task ends it after the batch that is running."""
        report = WarmReport()
        pieces = await off_loop(lambda: self._held(nodes))
        while (entries := await off_loop(lambda: next(pieces, None))) is not None:
            try:
                for batch in self._keeper.batches(entries):
                    done = await off_loop(lambda batch=batch: self._keeper.warm(batch))  # type: ignore[misc]
                    report = add_reports(report, done)
            finally:
                await off_loop(lambda entries=entries: self._keeper.keep(entries))  # type: ignore[misc]
        return report

    def query(self, query: VectorStoreQuery, **kwargs: Any) -> VectorStoreQueryResult:
        """The inner store's."""
        return self._inner.query(query, **kwargs)  # type: ignore[no-any-return]

    async def aquery(self, query: VectorStoreQuery, **kwargs: Any) -> VectorStoreQueryResult:
        """The inner store's."""
        return await self._inner.aquery(query, **kwargs)  # type: ignore[no-any-return]

    def get_nodes(self, node_ids: list[str] | None = None, filters: MetadataFilters | None = None) -> list[BaseNode]:
        """The inner store's."""
        return self._inner.get_nodes(node_ids, filters)  # type: ignore[no-any-return]

    async def aget_nodes(
        self, node_ids: list[str] | None = None, filters: MetadataFilters | None = None
    ) -> list[BaseNode]:
        """The inner store's."""
        return await self._inner.aget_nodes(node_ids, filters)  # type: ignore[no-any-return]

    def persist(self, persist_path: str, fs: Any = None) -> None:
        """Persist the inner store. KV stays where the engine has it."""
        self._inner.persist(persist_path, fs=fs)

    def _held(self, nodes: Iterable[AnyNode] | BaseIndex[Any] | None) -> Iterator[list[Entry]]:
        """Nodes the inner store has, in pieces of a batch."""
        if nodes is None or isinstance(nodes, BaseIndex):
            nodes = stored_nodes(self._inner if nodes is None else nodes)
        rest = map(bare, nodes)
        # `iter` with a sentinel ends at the first empty piece.
        pieces = iter(lambda: list(islice(rest, self._batch_size)), [])
        return map(self._keeper.entries, pieces)

    def _known(self, ref_doc_id: str) -> list[str]:
        names = self._keeper.nodes_of(ref_doc_id)
        if not names:
            _log.warning(
                "document %r was deleted, but no node of it was added or warmed through this store, so that no KV of "
                "it was looked for; after loading a store, call store.warm(index)",
                ref_doc_id,
            )
        return names

    def _leaving(self, node_ids: list[str] | None, filters: MetadataFilters | None) -> list[str]:
        """Nodes that a deletion concerns."""
        if filters is None and node_ids is not None:
            return list(node_ids)
        if isinstance(self._inner, SimpleVectorStore):
            return self._keeper.names()
        try:
            return [node.node_id for node in self._inner.get_nodes(node_ids, filters)]
        except NotImplementedError as error:
            raise ConfigError(
                f"a {self._inner.class_name()} cannot say which nodes a filter means, so that their KV could not be "
                "forgotten; give node_ids without filters"
            ) from error

    def _left(self, names: list[str]) -> list[str]:
        """Those of the nodes that are really gone, where that can be seen."""
        if not isinstance(self._inner, SimpleVectorStore):
            return names
        return [name for name in names if name not in self._inner.data.embedding_dict]
