"""Warming LangChain documents: rendered as the chain will render them, in batches, from any iterable."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeAlias

import numpy as np
from langchain_core.documents import Document
from langchain_core.prompts import BasePromptTemplate, format_document
from langchain_core.vectorstores import InMemoryVectorStore, VectorStore

from kvboost_rag import ConfigError, Engine, PromptError, WarmReport
from kvboost_rag.frameworks import BATCH_DOCUMENTS, TextWarmer, awarm_all, size_of, untorn, warm_all

DocumentPrompt: TypeAlias = BasePromptTemplate[Any] | Callable[[Document], str]


def warm_documents(
    engine: Engine,
    docs: Iterable[Document],
    *,
    document_prompt: DocumentPrompt | None = None,
    separator: str = "\n\n",
    namespace: str | None = None,
    batch_size: int = BATCH_DOCUMENTS,
    show_progress: bool = False,
) -> WarmReport:
    """Compute and keep the KV of documents, as the text a chain will render: for stores filled earlier, or a restart.

    A second call over the same documents computes nothing. Batches that were warmed before an error stay warm. In exact
    mode an engine finds a document only at the very beginning of a prompt; see `PrefixOrderCompressor` for that mode.

    Args:
        engine: the engine the chat model uses.
        docs: any iterable; read batch by batch, and never held as a whole.
        document_prompt: how the chain renders a document: the prompt of `create_stuff_documents_chain`, or a function;
            its `page_content` if None.
        separator: what the chain puts between two documents. It is warmed with the text only if this tokenizer merges
            it with the end of the text, so that the text's last tokens would not be found without it.
        namespace: tenant that may use them; the engine's default if None.
        batch_size: documents per call of the engine, which encodes neighbours together.
        show_progress: draw a progress bar.

    Returns:
        The engine's report, summed over distinct texts; a duplicate is warmed once and counted once.

    Raises:
        PromptError: a document cannot be rendered; says which, and why.
        ConfigError: an argument has no such value, or the engine reuses nothing.
    """
    warmer = DocumentWarmer(
        engine, document_prompt=document_prompt, separator=separator, namespace=namespace, batch_size=batch_size
    )
    return warm_all(warmer, map(warmer.render, docs), total=size_of(docs), show_progress=show_progress)


async def awarm_documents(
    engine: Engine,
    docs: Iterable[Document],
    *,
    document_prompt: DocumentPrompt | None = None,
    separator: str = "\n\n",
    namespace: str | None = None,
    batch_size: int = BATCH_DOCUMENTS,
    show_progress: bool = False,
) -> WarmReport:
    """`warm_documents` off the event loop. Cancelling the task ends it after the batch that is running."""
    warmer = DocumentWarmer(
        engine, document_prompt=document_prompt, separator=separator, namespace=namespace, batch_size=batch_size
    )
    return await awarm_all(warmer, map(warmer.render, docs), total=size_of(docs), show_progress=show_progress)


def stored_documents(vector_store: VectorStore) -> Iterator[Document]:
    """Every document of a vector store that can be enumerated, with its id: FAISS and `InMemoryVectorStore`.

    Example:
        >>> warm_documents(engine, stored_documents(FAISS.load_local(...)))

    Raises:
        ConfigError: this store cannot be enumerated.
    """
    store = unwrapped(vector_store)
    if isinstance(store, InMemoryVectorStore):
        entries = list(store.store.values())
        return (Document(id=e["id"], page_content=e["text"], metadata=e["metadata"]) for e in entries)
    if _is_faiss(store):
        ids = list(store.index_to_docstore_id.values())
        return (found for found in (_from_docstore(store.docstore, name) for name in ids) if found is not None)
    raise ConfigError(
        f"a {type(store).__name__} cannot be enumerated; give the documents themselves: warm_documents(engine, docs)"
    )


def stored_count(vector_store: VectorStore) -> int | None:
    """How many documents `stored_documents` will give; None for a store that cannot be enumerated."""
    store = unwrapped(vector_store)
    if isinstance(store, InMemoryVectorStore):
        return len(store.store)
    return len(store.index_to_docstore_id) if _is_faiss(store) else None


def unwrapped(vector_store: VectorStore) -> Any:
    """The store inside a `KVBoostVectorStore`; another store itself."""
    return getattr(vector_store, "inner", vector_store)


def copies(documents: Iterable[Document]) -> list[Document]:
    """Documents for an inner store, which may change what it is given."""
    return [
        document.model_copy(update={"metadata": dict(document.metadata)})
        if isinstance(document, Document)
        else document
        for document in documents
    ]


def documents_of(texts: list[str], metadatas: list[dict[str, Any]] | None) -> list[Document]:
    """Texts and their metadata as documents."""
    if metadatas and len(metadatas) != len(texts):
        raise ValueError(f"{len(texts)} texts, but {len(metadatas)} metadatas; give one for each text")
    return [
        Document(page_content=text, metadata=dict(metadata))
        for text, metadata in zip(texts, metadatas or [{}] * len(texts), strict=True)
    ]


def names_of(documents: list[Document], ids: Iterable[str | None] | None) -> tuple[list[str], set[str]]:
    """An id for each document, known before anything is stored; and which of them were given."""
    chosen = list(ids or []) or [document.id for document in documents]
    if len(chosen) != len(documents):
        raise ValueError(f"{len(documents)} documents, but {len(chosen)} ids; give one for each document")
    return [name or str(uuid.uuid4()) for name in chosen], {name for name in chosen if name}


def vector_count(store: Any) -> int | None:
    """Vectors of a FAISS store that has a document for each of them."""
    count = getattr(getattr(store, "index", None), "ntotal", None)
    return count if isinstance(count, int) and count == stored_count(store) else None


def drop_vectors(store: Any, count: int | None) -> None:
    """Take vectors out again that FAISS added before it found their documents' ids taken.

    Without a document they would make every search fail that finds them.
    """
    if count is not None and stored_count(store) == count < store.index.ntotal:
        store.index.remove_ids(np.arange(count, store.index.ntotal))


class DocumentWarmer(TextWarmer):
    """Renders documents as a chain does and warms the texts; the arguments are those of `warm_documents`."""

    def __init__(
        self,
        engine: Engine,
        *,
        document_prompt: DocumentPrompt | None,
        separator: str,
        namespace: str | None,
        batch_size: int,
    ) -> None:
        if (
            document_prompt is not None
            and not isinstance(document_prompt, BasePromptTemplate)
            and not callable(document_prompt)
        ):
            raise ConfigError(
                f"document_prompt is a {type(document_prompt).__name__}; give a prompt template, as to "
                "create_stuff_documents_chain, or a function from a Document to a string"
            )
        super().__init__(engine, separator=separator, namespace=namespace, batch_size=batch_size)
        self._prompt = document_prompt

    def batches_of(self, docs: Iterable[Document]) -> Iterator[tuple[int, list[str]]]:
        """Distinct rendered texts in batches, each with the number of documents they stand for."""
        return self.batches(self.render(doc) for doc in docs)

    def render(self, doc: Document) -> str:
        """The text of a document inside a prompt.

        Raises:
            PromptError: it cannot be rendered, or the result is not text.
        """
        if not isinstance(doc, Document):
            raise PromptError(f"docs holds a {type(doc).__name__}; give LangChain Documents")
        text = self._rendered(doc)
        if not isinstance(text, str):
            raise PromptError(f"document_prompt gave a {type(text).__name__} for {_name(doc)}; it must give a string")
        return untorn(text, _name(doc))

    def _rendered(self, doc: Document) -> Any:
        prompt = self._prompt
        if prompt is None:
            return doc.page_content
        if isinstance(prompt, BasePromptTemplate):
            missing = sorted(set(prompt.input_variables) - {"page_content", *doc.metadata})
            if missing:
                raise PromptError(
                    f"{_name(doc)} has no metadata {', '.join(map(repr, missing))}, which document_prompt asks for; "
                    f"add it to the document, or take it out of the prompt (the document has {sorted(doc.metadata)})"
                )
        try:
            return format_document(doc, prompt) if isinstance(prompt, BasePromptTemplate) else prompt(doc)
        except Exception as error:
            raise PromptError(f"document_prompt failed on {_name(doc)}: {error!r}; mend it or the document") from error


def _name(doc: Document) -> str:
    return f"document {doc.id!r}" if doc.id else f"the document that begins {doc.page_content[:40]!r}"


def _is_faiss(store: Any) -> bool:
    """Whether it is laid out as the FAISS store of langchain-community is, which is not imported for this."""
    ids, docstore = getattr(store, "index_to_docstore_id", None), getattr(store, "docstore", None)
    return isinstance(ids, Mapping) and hasattr(docstore, "search")


def _from_docstore(docstore: Any, name: str) -> Document | None:
    found = docstore.search(name)
    if not isinstance(found, Document):  # a docstore answers with a message instead
        return None
    return found if found.id is not None else found.model_copy(update={"id": name})
