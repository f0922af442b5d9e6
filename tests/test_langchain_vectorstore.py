"""KVBoostVectorStore: the index and the KV change together. Real stores, real tiny engines; then the real models."""

from __future__ import annotations

import asyncio
import inspect
import sys
import threading
import time

import pytest
from langchain_classic.chains.combine_documents import create_stuff_documents_chain
from langchain_community.vectorstores import FAISS
from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.indexing import InMemoryRecordManager, aindex, index
from langchain_core.prompts import ChatPromptTemplate, PromptTemplate
from langchain_core.vectorstores import InMemoryVectorStore, VectorStore, VectorStoreRetriever

from kvboost_rag import ConfigError, Engine, EngineConfig, PromptError
from kvboost_rag.frameworks.records import Records, shingles
from langchain_kvboost import ChatKVBoost
from langchain_kvboost.documents import stored_documents, warm_documents
from langchain_kvboost.vectorstores import KVBoostVectorStore
from tests.tiny import engine_of, text

EMBEDDINGS = DeterministicFakeEmbedding(size=8)


def document(seed: int, words: int = 30, **metadata: object) -> Document:
    return Document(page_content=text(seed, words), metadata={"source": f"s{seed}", **metadata}, id=f"d{seed}")


def documents(count: int) -> list[Document]:
    return [document(seed) for seed in range(count)]


def in_memory() -> InMemoryVectorStore:
    return InMemoryVectorStore(EMBEDDINGS)


def faiss() -> FAISS:
    store = FAISS.from_documents([document(999)], EMBEDDINGS)
    store.delete(["d999"])
    return store


STORES = {"memory": in_memory, "faiss": faiss}


@pytest.fixture
def engine() -> Engine:
    return engine_of()


@pytest.fixture(params=STORES)
def store(request, engine) -> KVBoostVectorStore:
    return KVBoostVectorStore(STORES[request.param](), engine)


@pytest.fixture
def memory(engine) -> KVBoostVectorStore:
    return KVBoostVectorStore(in_memory(), engine)


def is_warm(engine: Engine, content: str, namespace: str | None = None) -> bool:
    """Whether a prompt with this text finds it; changes nothing."""
    usage = engine.prefill(f"Read this.\n\n{content}\n\nWhich?", store=False, namespace=namespace).usage
    reused = usage.exact_tokens + usage.approximate_tokens
    size = len(engine.tokenize(content))
    assert reused <= 16 or reused >= size - 3, "half found"
    return reused > 16


def warm_set(engine: Engine, docs: list[Document]) -> set[str]:
    return {str(doc.id) for doc in docs if is_warm(engine, doc.page_content)}


def stored_ids(store: VectorStore) -> set[str]:
    return {str(doc.id) for doc in stored_documents(store)}


class Fragile(InMemoryVectorStore):
    """Fails when `fail_at` documents of a call are stored; forgets nothing of what it did."""

    fail_at: int | None = None
    fail_delete_at: int | None = None

    def add_documents(self, documents, ids=None, **kwargs):
        names = ids or [doc.id for doc in documents]
        for n, (doc, name) in enumerate(zip(documents, names, strict=True)):
            if n == self.fail_at:
                raise ConnectionError("the database went away")
            super().add_documents([doc], ids=[name])
        return list(names)

    async def aadd_documents(self, documents, ids=None, **kwargs):
        return self.add_documents(documents, ids, **kwargs)

    def delete(self, ids=None, **kwargs):
        for n, name in enumerate(ids or []):
            if n == self.fail_delete_at:
                raise ConnectionError("the database went away")
            super().delete([name])


class Blind(VectorStore):
    """Cannot give a document back by its id, cannot be enumerated, has no async methods."""

    def __init__(self) -> None:
        self.entries: dict[str, Document] = {}
        self.fail = False

    def add_texts(self, texts, metadatas=None, *, ids=None, **kwargs):
        for content, name in zip(texts, ids, strict=True):
            self.entries[name] = Document(page_content=content, id=name)
        if self.fail:
            raise ConnectionError("the database went away")
        return ids

    def delete(self, ids=None, **kwargs):
        for name in ids:
            del self.entries[name]
        return True

    def similarity_search(self, query, k=4, **kwargs):
        return list(self.entries.values())[:k]

    @classmethod
    def from_texts(cls, texts, embedding, metadatas=None, *, ids=None, **kwargs):
        store = cls()
        store.add_texts(texts, metadatas, ids=ids)
        return store


class TestAdding:
    def test_added_is_warm(self, store, engine):
        docs = documents(4)
        assert store.add_documents(docs) == ["d0", "d1", "d2", "d3"]
        assert warm_set(engine, docs) == stored_ids(store) == {"d0", "d1", "d2", "d3"}
        assert warm_documents(engine, docs).computed == 0

    def test_add_texts(self, store, engine):
        names = store.add_texts((text(n, 30) for n in range(3)), [{"n": n} for n in range(3)])
        assert len(set(names)) == 3
        assert all(is_warm(engine, text(n, 30)) for n in range(3))
        assert [doc.metadata for doc in store.get_by_ids(names)] == [{"n": 0}, {"n": 1}, {"n": 2}]
        assert store.add_texts([text(5, 30)], ids=["x"]) == ["x"]
        with pytest.raises(ValueError, match="2 texts, but 1 metadatas"):
            store.add_texts(["a", "b"], [{}])
        with pytest.raises(ValueError, match="2 documents, but 1 ids"):
            store.add_texts(["a", "b"], ids=["1"])

    def test_nothing_to_add(self, store):
        assert store.add_documents([]) == []
        assert store.add_texts([]) == []

    def test_ids_go_before_those_of_documents(self, memory):
        assert memory.add_documents(documents(2), ids=["a", "b"]) == ["a", "b"]

    def test_as_rendered(self, engine):
        prompt = PromptTemplate.from_template("Source: {source}\nContent: {page_content}")
        store = KVBoostVectorStore(in_memory(), engine, document_prompt=prompt, namespace="tenant")
        store.add_documents(documents(2))
        assert is_warm(engine, f"Source: s0\nContent: {text(0, 30)}", namespace="tenant")
        assert not is_warm(engine, text(0, 30))
        store.delete(["d0", "d1"])
        assert engine.stats().chunks == 0

    @pytest.mark.parametrize(
        "odd",
        [
            Document(page_content="", id="o"),
            Document(page_content="river", id="o"),
            Document(page_content=text(77, 14000), id="o"),
            Document(page_content=text(78, 30), metadata={"set": {1}, "fn": print, 3: None}, id="o"),
        ],
        ids=["empty", "short", "long", "metadata"],
    )
    def test_odd_documents(self, store, engine, odd):
        store.add_documents([odd, document(1)])
        assert stored_ids(store) == {"o", "d1"}
        store.delete(["o"])
        assert warm_set(engine, [document(1)]) == stored_ids(store) == {"d1"}

    def test_batches_and_progress(self, engine, capsys, monkeypatch):
        monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
        calls = []
        plain = engine.warm
        engine.warm = lambda texts, **options: calls.append(len(texts)) or plain(texts, **options)
        KVBoostVectorStore(in_memory(), engine, batch_size=2, show_progress=True).add_documents(documents(5))
        assert [n for n in calls if n] == [2, 2, 1]
        assert "5/5" in capsys.readouterr().err

    def test_bad_arguments(self, engine):
        for bad in (in_memory().store, KVBoostVectorStore(in_memory(), engine)):
            with pytest.raises(ConfigError, match="inner"):
                KVBoostVectorStore(bad, engine)
        with pytest.raises(ConfigError, match="namespace"):
            KVBoostVectorStore(in_memory(), engine, namespace="")
        with pytest.raises(ConfigError, match="off"):
            KVBoostVectorStore(in_memory(), engine_of(reuse="off"))


class TestDeleting:
    def test_deleted_is_forgotten(self, store, engine):
        docs = documents(4)
        store.add_documents(docs)
        store.delete(["d1", "d3"])
        assert warm_set(engine, docs) == stored_ids(store) == {"d0", "d2"}

    def test_text_another_document_has_stays(self, store, engine):
        docs = [document(1), Document(page_content=text(1, 30), id="copy")]
        store.add_documents(docs)
        store.delete(["d1"])
        assert is_warm(engine, text(1, 30))
        store.delete(["copy"])
        assert not is_warm(engine, text(1, 30))
        assert engine.stats().chunks == 0

    def test_text_of_a_document_added_before_wrapping_stays(self, store, engine):
        inner = store.inner
        inner.add_documents([document(1)])
        store.add_documents([Document(page_content=text(1, 30), id="copy")])
        store.delete(["copy"])
        assert is_warm(engine, text(1, 30))

    def test_neighbours_of_a_pack_are_warmed_again(self):
        engine = engine_of(pack_tokens=400)
        store = KVBoostVectorStore(in_memory(), engine)
        docs = documents(5)
        store.add_documents(docs)
        store.delete(["d0"])  # the others were encoded behind it
        assert warm_set(engine, docs) == {"d1", "d2", "d3", "d4"}

    def test_behind_a_document_of_the_call_before(self):
        engine = engine_of(pack_tokens=400)
        store = KVBoostVectorStore(in_memory(), engine)
        docs = documents(3)
        for doc in docs:
            store.add_documents([doc])
        store.delete(["d0"])
        assert warm_set(engine, docs) == {"d1", "d2"}

    def test_near_copies_stay_warm(self, store, engine):
        old = document(1, 60)
        new = Document(page_content=old.page_content + " " + text(2, 6), id="new")
        store.add_documents([old])
        store.add_documents([new])
        store.delete(["d1"])
        assert is_warm(engine, new.page_content)
        assert warm_documents(engine, [new]).computed == 0

    def test_prompts_that_held_it_are_forgotten(self, memory, engine):
        memory.add_documents(documents(1))
        engine.generate(f"Read this.\n\n{text(0, 30)}\n\nWhich?")
        memory.delete(["d0"])
        assert not is_warm(engine, text(0, 30))

    def test_unknown_and_none(self, memory, engine):
        memory.add_documents(documents(2))
        memory.delete(["nobody"])
        memory.delete()  # the inner store takes this for nothing
        assert warm_set(engine, documents(2)) == stored_ids(memory) == {"d0", "d1"}

    def test_all(self, engine):
        class Clearing(InMemoryVectorStore):
            def delete(self, ids=None, **kwargs):
                super().delete(list(self.store) if ids is None else ids)

        store = KVBoostVectorStore(Clearing(EMBEDDINGS), engine)
        store.inner.add_documents([document(9)])
        warm_documents(engine, [document(9)])
        store.add_documents(documents(3))
        store.delete()
        assert engine.stats().chunks == 0

    def test_failing_half_way(self, engine):
        store = KVBoostVectorStore(Fragile(EMBEDDINGS), engine)
        store.add_documents(documents(3))
        store.inner.fail_delete_at = 1
        with pytest.raises(ConnectionError):
            store.delete(["d0", "d1"])
        assert warm_set(engine, documents(3)) == stored_ids(store) == {"d1", "d2"}

    @pytest.mark.asyncio
    async def test_cancelled(self, memory, engine):
        await memory.aadd_documents(documents(2))
        plain = memory.inner.adelete

        async def adelete(ids, **kwargs):
            await plain(ids, **kwargs)
            task.cancel()
            await asyncio.sleep(0.01)

        memory.inner.adelete = adelete
        task = asyncio.create_task(memory.adelete(["d0"]))
        with pytest.raises(asyncio.CancelledError):
            await task
        assert warm_set(engine, documents(2)) == stored_ids(memory) == {"d1"}

    def test_store_without_get_by_ids(self, engine):
        store = KVBoostVectorStore(Blind(), engine)
        docs = documents(3)
        store.add_documents(docs)
        assert warm_set(engine, docs) == {"d0", "d1", "d2"}
        store.add_documents([Document(page_content=text(8, 30), id="d1")])
        assert warm_set(engine, docs) == {"d0", "d2"}
        store.delete(["d0"])
        assert warm_set(engine, docs) == {"d2"}
        store.inner.fail = True
        with pytest.raises(ConnectionError):
            store.add_documents([document(5)])
        with pytest.raises(ConnectionError):
            store.add_texts([text(6, 30)])  # an id of our own making: surely not there before
        assert not is_warm(engine, text(5, 30))
        assert not is_warm(engine, text(6, 30))
        assert set(store.inner.entries) == {"d1", "d2", "d5"}
        with pytest.raises(ConfigError, match="Blind"):
            store.warm()

    def test_closed_engine(self, memory, engine):
        memory.add_documents(documents(2))
        engine.close()
        memory.delete(["d0"])
        assert stored_ids(memory) == {"d1"}


class TestExistingIds:
    def test_overwriting_store(self, memory, engine):
        memory.add_documents(documents(2))
        memory.add_documents([Document(page_content=text(50, 30), id="d0")])
        assert not is_warm(engine, text(0, 30))
        assert is_warm(engine, text(50, 30))
        assert is_warm(engine, text(1, 30))

    def test_refusing_store(self, engine):
        store = KVBoostVectorStore(faiss(), engine)
        store.add_documents(documents(2))
        with pytest.raises(ValueError, match="already exist"):
            store.add_documents([Document(page_content=text(50, 30), id="d0"), document(7)])
        assert warm_set(engine, [*documents(2), document(7)]) == stored_ids(store) == {"d0", "d1"}
        assert not is_warm(engine, text(50, 30))
        assert store.index.ntotal == 2  # FAISS had added the vectors
        assert len(store.similarity_search("x", k=4)) == 2

    def test_ignoring_store(self, engine):
        class Ignoring(InMemoryVectorStore):
            def add_documents(self, documents, ids=None, **kwargs):
                for doc, name in zip(documents, ids, strict=True):
                    if name not in self.store:
                        super().add_documents([doc], ids=[name])
                return ids

        store = KVBoostVectorStore(Ignoring(EMBEDDINGS), engine)
        store.add_documents(documents(1))
        store.add_documents([Document(page_content=text(50, 30), id="d0")])
        assert is_warm(engine, text(0, 30))
        assert not is_warm(engine, text(50, 30))

    def test_twice_in_one_call(self, memory, engine):
        twice = [Document(page_content=text(50, 30), id="x"), Document(page_content=text(51, 30), id="x")]
        assert memory.add_documents(twice) == ["x", "x"]
        assert memory.get_by_ids(["x"])[0].page_content == text(51, 30)
        assert is_warm(engine, text(51, 30))
        assert not is_warm(engine, text(50, 30))
        refusing = KVBoostVectorStore(faiss(), engine)
        with pytest.raises(ValueError, match="Duplicate ids"):
            refusing.add_documents([Document(page_content=text(60, 30), id="x"), Document(page_content="b", id="x")])
        assert not is_warm(engine, text(60, 30))

    def test_same_document_again(self, memory, engine):
        memory.add_documents(documents(2))
        memory.add_documents(documents(2))
        assert warm_set(engine, documents(2)) == {"d0", "d1"}


class TestFailures:
    @pytest.fixture
    def fragile(self, engine) -> KVBoostVectorStore:
        store = KVBoostVectorStore(Fragile(EMBEDDINGS), engine)
        store.add_documents(documents(2))
        store.inner.fail_at = 2
        return store

    def attempt(self) -> list[Document]:
        changed = Document(page_content=text(70, 30), id="d0")
        copy = Document(page_content=text(1, 30), id="copy")
        return [changed, copy, document(5), document(6)]

    def check(self, fragile: KVBoostVectorStore, engine: Engine) -> None:
        assert stored_ids(fragile) == {"d0", "d1"}
        assert fragile.get_by_ids(["d0"]) == [document(0)]
        assert warm_set(engine, [*documents(2), document(5), document(6)]) == {"d0", "d1"}
        assert not is_warm(engine, text(70, 30))

    def test_inner_store_fails_half_way(self, fragile, engine):
        with pytest.raises(ConnectionError, match="went away"):
            fragile.add_documents(self.attempt())
        fragile.inner.fail_at = None
        self.check(fragile, engine)
        fragile.add_documents(self.attempt())
        assert stored_ids(fragile) == {"d0", "d1", "copy", "d5", "d6"}

    @pytest.mark.asyncio
    async def test_inner_store_fails_half_way_async(self, fragile, engine):
        with pytest.raises(ConnectionError, match="went away"):
            await fragile.aadd_documents(self.attempt())
        self.check(fragile, engine)

    @pytest.mark.asyncio
    @pytest.mark.parametrize("cancel", [False, True])
    async def test_failing_after_the_inner_store_has_added(self, engine, cancel):
        store = KVBoostVectorStore(Fragile(EMBEDDINGS), engine)
        await store.aadd_documents(documents(2))
        plain, failed = store.inner.aget_by_ids, False

        async def aget_by_ids(ids):
            nonlocal failed
            if "d5" in store.inner.store and not failed:
                failed = True
                if cancel:
                    asyncio.get_running_loop().call_soon(task.cancel)
                    await asyncio.sleep(0.05)
                else:
                    raise ConnectionError("gone")
            return await plain(ids)

        store.inner.aget_by_ids = aget_by_ids
        task = asyncio.create_task(store.aadd_documents(self.attempt()))
        with pytest.raises(asyncio.CancelledError if cancel else ConnectionError):
            await task
        assert failed
        self.check(store, engine)

    def test_what_cannot_be_undone_is_noted(self, fragile):
        fragile.inner.fail_delete_at = 0
        with pytest.raises(ConnectionError) as caught:
            fragile.add_documents(self.attempt())
        assert "Fragile may hold a part" in caught.value.__notes__[0]

    def test_warming_fails_before_the_store_is_touched(self, fragile, engine):
        broken = Document.model_construct(page_content="ab\ud800", metadata={}, id="bad", type="Document")
        fragile.inner.fail_at = 0
        with pytest.raises(PromptError, match="bad"):
            fragile.add_documents([document(5), broken])
        self.check(fragile, engine)

    def test_engine_fails_in_the_second_batch(self, engine):
        store = KVBoostVectorStore(in_memory(), engine, batch_size=1)
        plain = engine.warm

        def warm(texts, **options):
            if texts == [text(1, 30)]:
                raise RuntimeError("out of memory")
            return plain(texts, **options)

        engine.warm = warm
        with pytest.raises(RuntimeError, match="out of memory"):
            store.add_documents(documents(3))
        assert stored_ids(store) == set()
        assert engine.stats().chunks == 0

    @pytest.mark.asyncio
    async def test_cancelled(self, engine):
        store = KVBoostVectorStore(in_memory(), engine, batch_size=1)
        plain, second = engine.warm, threading.Event()

        def warm(texts, **options):
            if texts == [text(1, 30)]:
                second.set()
                time.sleep(0.1)
            return plain(texts, **options)

        engine.warm = warm
        task = asyncio.create_task(store.aadd_documents(documents(6)))
        await asyncio.to_thread(second.wait)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert stored_ids(store) == set()
        assert engine.stats().chunks == 0


class TestRowsOfOthers:
    """A failed write removes no row it did not add, and KV never outlives its document."""

    def test_refused_id_of_a_store_that_gives_nothing_back(self, engine):
        class Refusing(Blind):
            def add_texts(self, texts, metadatas=None, *, ids=None, **kwargs):
                if taken := [name for name in ids if name in self.entries]:
                    raise ValueError(f"duplicate ids {taken}")
                return super().add_texts(texts, metadatas, ids=ids)

        inner = Refusing()
        inner.add_texts(["the contract"], ids=["contract"])
        with pytest.raises(ValueError, match="duplicate") as caught:
            KVBoostVectorStore(inner, engine).add_texts([text(2, 30)], ids=["contract"])
        assert "['contract']" in caught.value.__notes__[0]
        assert set(inner.entries) == {"contract"}
        assert engine.stats().chunks == 0

    @pytest.mark.parametrize("returned", [None, ConnectionError])
    def test_deleted_but_not_read_back(self, engine, returned):
        class Unreadable(InMemoryVectorStore):
            broken = False

            def delete(self, ids=None, **kwargs):
                super().delete(ids, **kwargs)
                self.broken = True
                if returned:
                    raise returned("reset by delete")

            def get_by_ids(self, ids):
                if self.broken:
                    self.broken = False
                    raise ConnectionError("reset by get_by_ids")
                return super().get_by_ids(ids)

        store = KVBoostVectorStore(Unreadable(EMBEDDINGS), engine)
        store.add_documents(documents(2))
        with pytest.raises(ConnectionError, match="by delete" if returned else "by get_by_ids"):
            store.delete(["d0"])
        assert warm_set(engine, documents(2)) == stored_ids(store) == {"d1"}
        store.inner.delete = lambda ids: InMemoryVectorStore.delete(store.inner, ids)
        store.delete(["d0", "d1"])
        assert engine.stats().chunks == 0

    @pytest.mark.parametrize("fails", [False, True])
    def test_inner_store_that_empties_its_arguments(self, engine, fails):
        class Emptying(InMemoryVectorStore):
            def add_documents(self, documents, ids=None, **kwargs):
                names = super().add_documents(list(documents), ids=list(ids), **kwargs)
                documents.clear()
                ids.clear()
                if fails:
                    raise ConnectionError("gone")
                return names

        store = KVBoostVectorStore(Emptying(EMBEDDINGS), engine)
        docs = documents(3)
        if fails:
            with pytest.raises(ConnectionError):
                store.add_documents(docs)
        else:
            assert store.add_documents(docs, ids=(name := ["a", "b", "c"])) == name == ["a", "b", "c"]
        assert len(docs) == 3
        assert len(store.inner.store) == len(warm_set(engine, docs)) == (0 if fails else 3)

    @pytest.mark.parametrize("ids", [None, ["a", "b"]])
    def test_inner_store_that_edits_documents(self, engine, ids):
        class Editing(InMemoryVectorStore):
            def add_documents(self, documents, ids=None, **kwargs):
                for doc in documents:
                    doc.page_content = doc.page_content.upper()
                    doc.metadata["edited"] = True
                return super().add_documents(documents, ids=ids, **kwargs)

        store = KVBoostVectorStore(Editing(EMBEDDINGS), engine)
        docs = [Document(page_content=text(n, 30)) for n in range(2)]
        names = store.add_documents(docs, ids=ids)
        assert docs == [Document(page_content=text(n, 30)) for n in range(2)]  # the caller's are left alone
        assert not any(is_warm(engine, doc.page_content) for doc in docs)
        assert all(is_warm(engine, doc.page_content) for doc in stored_documents(store))
        store.delete(names)
        assert engine.stats().chunks == 0

    def test_inner_store_that_returns_no_ids(self, engine):
        class Silent(InMemoryVectorStore):
            def add_documents(self, documents, ids=None, **kwargs):
                super().add_documents(documents, ids=ids, **kwargs)

        store = KVBoostVectorStore(Silent(EMBEDDINGS), engine)
        assert store.add_documents(documents(2)) == ["d0", "d1"]
        assert warm_set(engine, documents(2)) == stored_ids(store) == {"d0", "d1"}

    def test_generators(self, store, engine):
        docs = documents(4)
        assert store.add_documents((doc for doc in docs[:2]), ids=(name for name in "ab")) == ["a", "b"]
        metadatas = ({"n": n} for n in range(2))
        texts = (doc.page_content for doc in docs[2:])
        assert store.add_texts(texts, metadatas, ids=(name for name in "cd")) == ["c", "d"]
        assert store.get_by_ids(["d"])[0].metadata == {"n": 1}
        store.delete(name for name in "ad")
        assert stored_ids(store) == {"b", "c"}
        assert warm_set(engine, docs) == {"d1", "d2"}
        options = {"engine": engine, "store_class": type(store.inner)}
        arguments = [doc.page_content for doc in docs], EMBEDDINGS, ({"n": n} for n in range(4))
        filled = KVBoostVectorStore.from_texts(*arguments, ids=(name for name in "abcd"), **options)
        assert filled.get_by_ids(["c"])[0].metadata == {"n": 2}


class TestFromTexts:
    @pytest.mark.parametrize("store_class", [FAISS, InMemoryVectorStore])
    def test_filled_and_warm(self, engine, store_class):
        store = KVBoostVectorStore.from_documents(documents(3), EMBEDDINGS, engine=engine, store_class=store_class)
        assert isinstance(store.inner, store_class)
        assert warm_set(engine, documents(3)) == stored_ids(store) == {"d0", "d1", "d2"}
        store.delete(["d1"])
        assert warm_set(engine, documents(3)) == {"d0", "d2"}

    @pytest.mark.asyncio
    @pytest.mark.parametrize("store_class", [FAISS, InMemoryVectorStore])
    async def test_async(self, engine, store_class):
        options = {"engine": engine, "store_class": store_class, "namespace": "n"}
        store = await KVBoostVectorStore.afrom_documents(documents(3), EMBEDDINGS, **options)
        assert all(is_warm(engine, doc.page_content, "n") for doc in documents(3))
        await store.adelete(["d1"])
        assert not is_warm(engine, text(1, 30), "n")

    def test_arguments(self, engine):
        with pytest.raises(ConfigError, match="store_class"):
            KVBoostVectorStore.from_texts(["a"], EMBEDDINGS, engine=engine)
        with pytest.raises(ConfigError, match="engine="):
            KVBoostVectorStore.from_texts(["a"], EMBEDDINGS, store_class=FAISS)
        with pytest.raises(ConfigError, match="batch_size"):
            KVBoostVectorStore.from_texts(["a"], EMBEDDINGS, engine=engine, store_class=FAISS, batch_size=0)
        normal = KVBoostVectorStore.from_texts(
            [text(1, 30)], EMBEDDINGS, [{"n": 1}], ids=["x"], engine=engine, store_class=FAISS, normalize_L2=True
        )
        assert normal.inner._normalize_L2
        assert normal.get_by_ids(["x"])[0].metadata == {"n": 1}

    def test_nothing_is_built_of_what_cannot_be_rendered(self, engine):
        class Unbuildable(InMemoryVectorStore):
            @classmethod
            def from_texts(cls, *args, **kwargs):
                pytest.fail("built")

        prompt = PromptTemplate.from_template("{source} {page_content}")
        options = {"engine": engine, "store_class": Unbuildable, "document_prompt": prompt}
        with pytest.raises(PromptError, match="source"):
            KVBoostVectorStore.from_texts(["a"], EMBEDDINGS, **options)

    def test_failing_engine_leaves_nothing(self, engine):
        kept = in_memory()

        class Shared(InMemoryVectorStore):
            @classmethod
            def from_texts(cls, texts, embedding, metadatas=None, **kwargs):
                kept.add_texts(texts, metadatas, **kwargs)
                return kept

        plain = engine.warm

        def warm(texts, **options):
            if texts:
                raise RuntimeError("out of memory")
            return plain(texts, **options)

        engine.warm = warm
        with pytest.raises(RuntimeError, match="out of memory"):
            KVBoostVectorStore.from_documents(documents(2), EMBEDDINGS, engine=engine, store_class=Shared)
        assert not kept.store


class TestSearching:
    def test_every_method_is_passed_on(self):
        ours = {"add_documents", "aadd_documents", "add_texts", "aadd_texts", "delete", "adelete", "as_retriever"}
        inherited = {"from_documents", "afrom_documents"}  # call from_texts
        for name, member in inspect.getmembers(VectorStore):
            if name.startswith("_") or name in inherited:
                continue
            assert getattr(KVBoostVectorStore, name) is not member, name
            if name not in ours and inspect.iscoroutinefunction(member):
                assert inspect.iscoroutinefunction(getattr(KVBoostVectorStore, name)), name

    @pytest.mark.asyncio
    @pytest.mark.parametrize("kind", STORES)
    async def test_same_results_as_the_inner_store(self, kind, engine):
        inner = STORES[kind]()
        store = KVBoostVectorStore(inner, engine)
        store.add_documents([document(n, even=n % 2 == 0) for n in range(8)])
        filters = {"memory": lambda doc: doc.metadata["even"], "faiss": {"even": True}}
        vector = EMBEDDINGS.embed_query("q")
        calls = [
            ("similarity_search", ("q",), {"k": 3, "filter": filters[kind]}),
            ("similarity_search_with_score", ("q",), {"k": 3}),
            ("similarity_search_by_vector", (vector,), {"k": 2}),
            ("max_marginal_relevance_search", ("q",), {"k": 3, "fetch_k": 5, "lambda_mult": 0.2}),
            ("max_marginal_relevance_search_by_vector", (vector,), {"k": 3}),
            ("search", ("q", "mmr"), {"k": 2}),
            ("get_by_ids", (["d1", "d2", "nobody"],), {}),
        ]
        if kind == "faiss":  # the other one has no relevance scores
            inner.override_relevance_score_fn = lambda distance: 1 / (1 + distance)
            calls.append(("similarity_search_with_relevance_scores", ("q",), {"score_threshold": 0.01}))
        for name, args, kwargs in calls:
            expected = getattr(inner, name)(*args, **kwargs)
            assert expected, name
            assert getattr(store, name)(*args, **kwargs) == expected
            if (kind, name) != ("memory", "max_marginal_relevance_search_by_vector"):
                assert await getattr(store, f"a{name}")(*args, **kwargs) == expected
        assert store.embeddings is EMBEDDINGS

    @pytest.mark.asyncio
    async def test_overridden_methods_are_the_inner_stores(self, engine):
        class Reranking(InMemoryVectorStore):
            def similarity_search(self, query, k=2, *, shout=False, **kwargs):
                found = super().similarity_search(query, k, **kwargs)
                return found[::-1] if shout else found

            async def asimilarity_search(self, query, k=1, **kwargs):
                return self.similarity_search(query, k, **kwargs)

            def similarity_search_with_relevance_scores(self, query, k=4, **kwargs):
                return [(Document(page_content="scored"), 1.0)]

        store = KVBoostVectorStore(Reranking(EMBEDDINGS), engine)
        store.add_documents(documents(4))
        assert len(store.similarity_search("q")) == 2  # its own default
        assert store.similarity_search("q", shout=True) == store.similarity_search("q")[::-1]
        assert len(await store.as_retriever().ainvoke("q")) == 1
        scored = store.as_retriever(search_type="similarity_score_threshold", search_kwargs={"score_threshold": 0.5})
        assert [doc.page_content for doc in scored.invoke("q")] == ["scored"]

    def test_retriever(self, store, engine):
        retriever = store.as_retriever(search_type="mmr", search_kwargs={"k": 2}, tags=None)
        assert retriever.invoke("q") == []  # nothing there yet
        retriever.add_documents(documents(4))
        assert warm_set(engine, documents(4)) == {"d0", "d1", "d2", "d3"}
        assert retriever.invoke("q") == store.inner.as_retriever(search_type="mmr", search_kwargs={"k": 2}).invoke("q")
        assert retriever.tags == ["KVBoostVectorStore", type(store.inner).__name__, "DeterministicFakeEmbedding"]
        with pytest.raises(ValueError, match="score_threshold"):
            store.as_retriever(search_type="similarity_score_threshold")

    def test_retriever_of_the_inner_store(self, engine):
        class OwnRetriever(VectorStoreRetriever):
            pass

        class Store(InMemoryVectorStore):
            def as_retriever(self, **kwargs):
                return OwnRetriever(vectorstore=self, **kwargs)

        store = KVBoostVectorStore(Store(EMBEDDINGS), engine)
        retriever = store.as_retriever(search_kwargs={"k": 1})
        assert isinstance(retriever, OwnRetriever)
        retriever.add_documents(documents(2))
        assert warm_set(engine, documents(2)) == {"d0", "d1"}
        assert len(retriever.invoke("q")) == 1

    def test_other_attributes_are_the_inner_stores(self, engine, tmp_path):
        store = KVBoostVectorStore(faiss(), engine)
        assert store.docstore is store.inner.docstore
        with pytest.raises(AttributeError, match="no_such"):
            store.no_such  # noqa: B018
        assert "FAISS" in repr(store)

    @pytest.mark.parametrize("name", ["merge_from", "add_embeddings", "load_local", "from_embeddings"])
    def test_what_would_bypass_the_wrapper_raises(self, engine, name):
        store = KVBoostVectorStore(faiss(), engine)
        hint = (
            r"store\.inner\..* and then store\.warm"
            if name in ("merge_from", "add_embeddings")
            else (rf"KVBoostVectorStore\(FAISS\.{name}\(...\), engine\)")
        )
        with pytest.raises(ConfigError, match=hint):
            getattr(store, name)(faiss())
        assert not hasattr(KVBoostVectorStore(Blind(), engine), name)
        assert callable(store.save_local)


class TestIndexing:
    """LangChain's index(): it knows by the class whether a store can delete."""

    def versions(self) -> tuple[list[Document], list[Document]]:
        first = [Document(page_content=text(n, 40), metadata={"source": f"s{n}"}) for n in range(4)]
        changed = text(1, 40) + " It was changed since then, by somebody."
        second = [Document(page_content=changed, metadata={"source": "s1"}), *first[2:]]  # 0 is gone, 1 changed
        return first, second

    def check(self, cleanup, result, store, engine, versions) -> None:
        first, second = versions
        kept = {None: {0, 1, 2, 3}, "incremental": {0, 2, 3}, "scoped_full": {0, 2, 3}, "full": {2, 3}}[cleanup]
        assert result["num_added"] == 1
        assert result["num_deleted"] == 4 - len(kept)
        contents = [doc.page_content for doc in stored_documents(store)]
        expected = [first[n].page_content for n in kept] + [second[0].page_content]
        assert sorted(contents) == sorted(expected)
        assert warm_documents(engine, stored_documents(store)).computed == 0
        for gone in {0, 1, 2, 3} - kept:
            found = engine.prefill(f"Read this.\n\n{first[gone].page_content}", store=False).usage
            if gone != 1:  # the new version of 1 holds the old one's text
                assert found.approximate_tokens + found.exact_tokens < 20

    @pytest.mark.parametrize("cleanup", [None, "incremental", "full", "scoped_full"])
    @pytest.mark.parametrize("pack_tokens", [0, 400])
    @pytest.mark.parametrize("kind", STORES)
    def test_index(self, kind, cleanup, pack_tokens):
        engine = engine_of(pack_tokens=pack_tokens)
        store = KVBoostVectorStore(STORES[kind](), engine)
        versions = self.versions()
        records = InMemoryRecordManager(namespace="n")
        records.create_schema()
        options = {"cleanup": cleanup, "source_id_key": "source", "key_encoder": "blake2b"}
        assert index(versions[0], records, store, **options)["num_added"] == 4
        assert index(versions[0], records, store, **options)["num_skipped"] == 4
        self.check(cleanup, index(versions[1], records, store, **options), store, engine, versions)

    @pytest.mark.asyncio
    @pytest.mark.parametrize("cleanup", [None, "incremental", "full", "scoped_full"])
    async def test_aindex(self, store, engine, cleanup):
        versions = self.versions()
        records = InMemoryRecordManager(namespace="n")
        await records.acreate_schema()
        options = {"cleanup": cleanup, "source_id_key": "source", "key_encoder": "blake2b"}
        await aindex(versions[0], records, store, **options)
        self.check(cleanup, await aindex(versions[1], records, store, **options), store, engine, versions)

    def test_force_update(self, memory, engine):
        records = InMemoryRecordManager(namespace="n")
        options = {"cleanup": "full", "key_encoder": "blake2b", "force_update": True}
        docs = self.versions()[0]
        index(docs, records, memory, **options)
        assert index(docs, records, memory, **options)["num_updated"] == 4
        assert warm_documents(engine, docs).computed == 0

    def test_old_version_is_forgotten(self, memory, engine):
        records = InMemoryRecordManager(namespace="n")
        options = {"cleanup": "incremental", "source_id_key": "source", "key_encoder": "blake2b"}
        index([Document(page_content=text(1, 40), metadata={"source": "s"})], records, memory, **options)
        index([Document(page_content=text(2, 40), metadata={"source": "s"})], records, memory, **options)
        assert not is_warm(engine, text(1, 40))
        assert is_warm(engine, text(2, 40))


class TestRestart:
    @pytest.mark.asyncio
    async def test_warm(self, store, engine):
        store.inner.add_documents(documents(4))
        assert store.warm().computed == 4
        assert (await store.awarm()).computed == 0
        store.delete(["d0"])
        assert warm_set(engine, documents(4)) == {"d1", "d2", "d3"}

    def test_warmed_by_somebody_else(self):
        engine = engine_of(pack_tokens=400)
        store = KVBoostVectorStore(in_memory(), engine)
        store.inner.add_documents(documents(4))
        warm_documents(engine, stored_documents(store))
        assert store.warm().computed == 0
        store.delete(["d0"])
        assert warm_set(engine, documents(4)) == {"d1", "d2", "d3"}

    @pytest.mark.parametrize("pack_tokens", [0, 400])
    def test_save_and_load(self, tmp_path, pack_tokens):
        store = KVBoostVectorStore(faiss(), engine_of(pack_tokens=pack_tokens))
        store.add_documents(documents(4))
        store.save_local(str(tmp_path))
        engine = engine_of(pack_tokens=pack_tokens)
        loaded = FAISS.load_local(str(tmp_path), EMBEDDINGS, allow_dangerous_deserialization=True)
        store = KVBoostVectorStore(loaded, engine)
        assert store.warm().computed == 4
        store.delete(["d2"])
        assert warm_set(engine, documents(4)) == {"d0", "d1", "d3"}

    def test_documents_that_do_not_know_their_ids(self, engine):
        store = KVBoostVectorStore(faiss(), engine)
        store.inner.add_documents(documents(2))
        for doc in store.docstore._dict.values():
            doc.id = None  # as stores written by older versions
        store.warm()
        store.delete(["d0"])
        assert not is_warm(engine, text(0, 30))
        assert is_warm(engine, text(1, 30))

    def test_documents_that_cannot_be_rendered_do_not_stand_in_the_way(self, engine):
        prompt = PromptTemplate.from_template("{source} {page_content}")
        store = KVBoostVectorStore(in_memory(), engine, document_prompt=prompt)
        store.inner.add_documents([Document(page_content="no source", id="x")])
        store.add_documents(documents(1))
        store.delete(["d0", "x"])
        assert stored_ids(store) == set()
        assert engine.stats().chunks == 0


def run_threads(threads: list[threading.Thread]) -> None:
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


class TestThreads:
    def test_adds_and_deletes_at_once(self, engine):
        store = KVBoostVectorStore(in_memory(), engine)
        errors = []

        def work(n: int) -> None:
            try:
                for turn in range(3):
                    shared = Document(page_content=text(100 + turn, 30), id=f"shared-{n}-{turn}")
                    store.add_documents([document(n * 10 + turn), shared])
                    store.delete([f"d{n * 10 + turn}"])
            except BaseException as error:
                errors.append(error)

        run_threads([threading.Thread(target=work, args=(n,)) for n in range(4)])
        assert not errors
        assert all(is_warm(engine, text(100 + turn, 30)) for turn in range(3))
        assert not any(is_warm(engine, text(n * 10 + turn, 30)) for n in range(4) for turn in range(3))
        assert warm_documents(engine, stored_documents(store)).computed == 0

    def test_deleted_while_others_are_encoded_behind_it(self):
        engine = engine_of(pack_tokens=400)
        store = KVBoostVectorStore(in_memory(), engine)
        store.add_documents([document(0)])
        deleting = threading.Thread(target=store.delete, args=(["d0"],))
        plain = store._writer._warmer.warm

        def warm(texts):
            if not deleting.ident:
                deleting.start()
                time.sleep(0.1)
            return plain(texts)

        store._writer._warmer.warm = warm
        store.add_documents([document(1)])  # alone in its call, so encoded behind d0
        deleting.join()
        assert stored_ids(store) == warm_set(engine, documents(2)) == {"d1"}
        assert engine.forget([text(0, 30)]) == 0

    def test_two_adds_of_one_id_that_may_not_exist(self, engine):
        store = KVBoostVectorStore(faiss(), engine)
        errors = []

        def add(seed: int) -> None:
            try:
                store.add_documents([document(seed)], ids=["x"])
            except ValueError as error:
                errors.append(error)

        run_threads([threading.Thread(target=add, args=(seed,)) for seed in range(4)])
        assert len(errors) == 3
        (kept,) = store.get_by_ids(["x"])
        assert [n for n in range(4) if is_warm(engine, text(n, 30))] == [
            n for n in range(4) if text(n, 30) == kept.page_content
        ]
        assert store.index.ntotal == len(store.similarity_search("x", k=4)) == 1

    def test_refused_beside_an_add_of_another(self, engine):
        store = KVBoostVectorStore(faiss(), engine)
        store.add_documents(documents(1))
        plain, embedding = EMBEDDINGS.embed_documents, threading.Event()

        class Slow(DeterministicFakeEmbedding):
            def embed_documents(self, texts):
                if threading.current_thread() is refused:
                    embedding.set()
                    time.sleep(0.2)
                return plain(texts)

        store.inner.embedding_function = Slow(size=8)

        def add() -> None:
            with pytest.raises(ValueError, match="already exist"):
                store.add_documents([document(1)], ids=["d0"])

        refused = threading.Thread(target=add)
        refused.start()
        embedding.wait(5)
        store.add_documents([document(2)])
        refused.join()
        assert store.index.ntotal == len(store.similarity_search("x", k=4)) == 2
        assert warm_set(engine, documents(3)) == stored_ids(store) == {"d0", "d2"}

    def test_two_replacements_of_one_id(self, engine):
        class Slow(InMemoryVectorStore):
            def get_by_ids(self, ids):
                found = super().get_by_ids(ids)
                if found and threading.current_thread() is first:
                    reached.set()
                    time.sleep(0.2)
                return found

        store, reached = KVBoostVectorStore(Slow(EMBEDDINGS), engine), threading.Event()
        first = threading.Thread(target=store.add_documents, args=([document(1)],), kwargs={"ids": ["x"]})
        first.start()
        reached.wait(5)
        store.add_documents([document(2)], ids=["x"])
        first.join()
        assert store.get_by_ids(["x"])[0].page_content == text(2, 30)
        assert warm_set(engine, documents(3)) == {"d2"}
        store.delete(["x"])
        assert engine.stats().chunks == 0

    @pytest.mark.asyncio
    async def test_many_async_writes_take_turns(self, store, engine):
        inside = 0
        plain = store.inner.aadd_documents

        async def aadd_documents(documents, **kwargs):
            nonlocal inside
            inside += 1
            assert inside == 1
            await asyncio.sleep(0.002)
            names = await plain(documents, **kwargs)
            inside -= 1
            return names

        store.inner.aadd_documents = aadd_documents
        docs = documents(40)  # more than the default executor has threads
        in_thread = asyncio.to_thread(store.add_documents, [document(40)])
        await asyncio.wait_for(asyncio.gather(in_thread, *(store.aadd_documents([doc]) for doc in docs)), 60)
        assert len(warm_set(engine, documents(41))) == len(stored_ids(store)) == 41

    @pytest.mark.asyncio
    async def test_sync_write_that_would_block_its_own_loop(self, memory, engine):
        plain, inside = memory.inner.aadd_documents, asyncio.Event()

        async def aadd_documents(documents, **kwargs):
            inside.set()
            await asyncio.sleep(0.05)
            return await plain(documents, **kwargs)

        memory.inner.aadd_documents = aadd_documents
        task = asyncio.create_task(memory.aadd_documents(documents(1)))
        await inside.wait()
        with pytest.raises(ConfigError, match="await aadd_documents"):
            memory.add_documents([document(1)])
        await task
        memory.add_documents([document(1)])
        assert warm_set(engine, documents(2)) == stored_ids(memory) == {"d0", "d1"}

    @pytest.mark.asyncio
    @pytest.mark.parametrize("times", [1, 2, 5])
    @pytest.mark.parametrize("where", ["warming", "adding", "waiting"])
    async def test_cancelled_again_and_again(self, memory, engine, where, times):
        reached = asyncio.Event()
        loop, plain_warm, plain_add = asyncio.get_running_loop(), engine.warm, memory.inner.aadd_documents

        def warm(texts, **options):
            if texts and where == "warming":
                loop.call_soon_threadsafe(reached.set)
                time.sleep(0.1)
            return plain_warm(texts, **options)

        async def aadd_documents(documents, **kwargs):
            reached.set()
            await asyncio.sleep(0.1)
            return await plain_add(documents, **kwargs)

        engine.warm, memory.inner.aadd_documents = warm, aadd_documents
        first = asyncio.create_task(memory.aadd_documents([document(5)])) if where == "waiting" else None
        if first:
            await reached.wait()
        task = asyncio.create_task(memory.aadd_documents(documents(1)))
        await (asyncio.sleep(0.05) if first else reached.wait())
        for _ in range(times):
            task.cancel()
            await asyncio.sleep(0.01)
        with pytest.raises(asyncio.CancelledError):
            await task
        if first:
            await first
        expected = {"d5"} if first else set()
        assert stored_ids(memory) == warm_set(engine, [document(0), document(5)]) == expected
        assert engine.stats().chunks == len(expected)
        await memory.aadd_documents([document(7)])  # nobody is left in the line
        assert not memory._writer._turns._line

    @pytest.mark.asyncio
    async def test_loop_never_stalls(self, engine):
        store = KVBoostVectorStore(in_memory(), engine)
        plain = engine.warm

        def warm(texts, **options):
            time.sleep(0.2)
            return plain(texts, **options)

        engine.warm = warm
        longest, last = 0.0, time.perf_counter()

        async def tick() -> None:
            nonlocal longest, last
            while True:
                await asyncio.sleep(0.005)
                now = time.perf_counter()
                longest, last = max(longest, now - last), now

        ticking = asyncio.create_task(tick())
        await store.aadd_documents(documents(3))
        await store.aadd_texts([text(8, 30)], ids=["x"])
        await store.adelete(["d0"])
        ticking.cancel()
        assert longest < 0.15


class TestRecords:
    def test_claims_keep_texts(self):
        records = Records(keep_texts=False)
        records.claim(["a", "b"])
        records.claim(["a"])
        records.release(["a", "b"])
        assert records.unneeded(["a", "b"]) == ["b"]
        records.release(["a"])
        records.put("x", "a")
        assert records.unneeded(["a", "b", "b"]) == ["b"]
        records.drop(["x"])
        assert records.unneeded(["a"]) == ["a"]

    def test_forgotten_leaves_no_trace(self):
        records = Records(keep_texts=True)
        for turn in range(10):
            texts = [text(turn * 10 + n, 40) for n in range(3)]
            for n, content in enumerate(texts):
                records.put(f"{turn}-{n}", content)
            records.warmed(texts)
            records.warmed(texts)
            records.drop([f"{turn}-{n}" for n in range(3)])
            records.forgotten(texts)
        left = {name: value for name, value in vars(records).items() if name not in ("lock", "_keep_texts", "forgets")}
        assert not any(value for name, value in left.items() if name != "_next_group")

    def test_near_copies_share_a_shingle(self):
        base = text(1, 80).split()
        half = " ".join(base[:40] + text(2, 40).split())
        assert set(shingles(" ".join(base))) & set(shingles(half))
        assert not set(shingles(text(3, 80))) & set(shingles(text(4, 80)))


@pytest.mark.model
class TestRealModels:
    def test_ingest_ask_and_restart(self, model_path, embeddings_path, tmp_path):
        from langchain_kvboost.demo.documents import load_passages, write_python_documents
        from langchain_kvboost.demo.embeddings import MeanPoolingEmbeddings

        engine = Engine.from_pretrained(str(model_path), config=EngineConfig(fallback=False))
        embeddings = MeanPoolingEmbeddings(str(embeddings_path))
        folder = write_python_documents(tmp_path / "docs")
        docs = load_passages(folder, lambda t: len(engine.tokenizer(t)["input_ids"]), 120)[::8][:5]
        store = KVBoostVectorStore.from_documents(docs, embeddings, engine=engine, store_class=FAISS)
        assert engine.stats().chunks >= len(docs)
        assert store.warm().computed == 0

        prompt = ChatPromptTemplate.from_messages([("system", "Use this:\n\n{context}"), ("human", "{question}")])
        chat = ChatKVBoost(engine=engine, max_tokens=1)
        chain = create_stuff_documents_chain(chat, prompt)
        found = store.as_retriever(search_kwargs={"k": 3}).invoke("What does a while statement do?")
        before = engine.stats()
        chain.invoke({"context": found[::-1], "question": "What does a while statement do?"})
        after = engine.stats()
        reused = after.approximate_tokens + after.exact_tokens - before.approximate_tokens - before.exact_tokens
        own = sum(len(engine.tokenizer(doc.page_content)["input_ids"]) for doc in found)
        assert reused >= 0.95 * own

        store.save_local(str(tmp_path / "index"))
        engine.clear()
        loaded = FAISS.load_local(str(tmp_path / "index"), embeddings, allow_dangerous_deserialization=True)
        again = KVBoostVectorStore(loaded, engine)
        assert again.warm().computed == len({doc.page_content for doc in docs})
        assert again.warm().tokens == 0
