"""LangChain's own test suites on wrapped stores and their retrievers."""

from __future__ import annotations

import inspect

import pytest
from langchain_community.vectorstores import FAISS
from langchain_core.documents import Document
from langchain_core.vectorstores import InMemoryVectorStore, VectorStore, VectorStoreRetriever
from langchain_tests.integration_tests import RetrieversIntegrationTests, VectorStoreIntegrationTests

from langchain_kvboost.vectorstores import KVBoostVectorStore
from tests.tiny import engine_of

for suite in (VectorStoreIntegrationTests, RetrieversIntegrationTests):
    for _, method in inspect.getmembers(suite, inspect.iscoroutinefunction):
        pytest.mark.asyncio(method)  # the suites leave that to the project's configuration

NO_OVERWRITING = "FAISS raises for an id it holds already, and overwrites nothing"
NO_MISSING = "FAISS raises when an id to delete does not exist"


class TestInMemory(VectorStoreIntegrationTests):
    @pytest.fixture
    def vectorstore(self) -> VectorStore:
        return KVBoostVectorStore(InMemoryVectorStore(self.get_embeddings()), engine_of())


class TestFAISS(VectorStoreIntegrationTests):
    @pytest.fixture
    def vectorstore(self) -> VectorStore:
        inner = FAISS.from_texts(["x"], self.get_embeddings(), ids=["x"])
        inner.delete(["x"])
        return KVBoostVectorStore(inner, engine_of())

    @pytest.mark.xfail(reason=NO_MISSING, raises=ValueError)
    def test_delete_missing_content(self, vectorstore: VectorStore) -> None:
        super().test_delete_missing_content(vectorstore)

    @pytest.mark.xfail(reason=NO_OVERWRITING, raises=ValueError)
    def test_add_documents_with_ids_is_idempotent(self, vectorstore: VectorStore) -> None:
        super().test_add_documents_with_ids_is_idempotent(vectorstore)

    @pytest.mark.xfail(reason=NO_OVERWRITING, raises=ValueError)
    def test_add_documents_by_id_with_mutation(self, vectorstore: VectorStore) -> None:
        super().test_add_documents_by_id_with_mutation(vectorstore)

    @pytest.mark.asyncio
    @pytest.mark.xfail(reason=NO_MISSING, raises=ValueError)
    async def test_delete_missing_content_async(self, vectorstore: VectorStore) -> None:
        await super().test_delete_missing_content_async(vectorstore)

    @pytest.mark.asyncio
    @pytest.mark.xfail(reason=NO_OVERWRITING, raises=ValueError)
    async def test_add_documents_with_ids_is_idempotent_async(self, vectorstore: VectorStore) -> None:
        await super().test_add_documents_with_ids_is_idempotent_async(vectorstore)

    @pytest.mark.asyncio
    @pytest.mark.xfail(reason=NO_OVERWRITING, raises=ValueError)
    async def test_add_documents_by_id_with_mutation_async(self, vectorstore: VectorStore) -> None:
        await super().test_add_documents_by_id_with_mutation_async(vectorstore)


class WrappedRetriever(VectorStoreRetriever):
    """`as_retriever` of a wrapped store, with `k` where the suite expects it."""

    def __init__(self, *, vectorstore: VectorStore, k: int = 4) -> None:
        super().__init__(**dict(vectorstore.as_retriever(search_kwargs={"k": k})))


class Retrieving(RetrieversIntegrationTests):
    @property
    def retriever_constructor(self) -> type[VectorStoreRetriever]:
        return WrappedRetriever

    @property
    def retriever_query_example(self) -> str:
        return "foo"

    def options(self, inner: type[VectorStore]) -> dict[str, VectorStore]:
        docs = [Document(page_content=f"document {n}") for n in range(5)]
        embeddings = VectorStoreIntegrationTests.get_embeddings()
        return {
            "vectorstore": KVBoostVectorStore.from_documents(docs, embeddings, engine=engine_of(), store_class=inner)
        }


class TestRetrieverInMemory(Retrieving):
    @property
    def retriever_constructor_params(self) -> dict[str, VectorStore]:
        return self.options(InMemoryVectorStore)


class TestRetrieverFAISS(Retrieving):
    @property
    def retriever_constructor_params(self) -> dict[str, VectorStore]:
        return self.options(FAISS)


del Retrieving  # only its subclasses are tests
