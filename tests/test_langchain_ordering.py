"""PrefixOrderCompressor: orders that continue served ones, and what that saves in exact mode."""

from __future__ import annotations

import copy
import pickle
import random
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from langchain_classic.retrievers import ContextualCompressionRetriever
from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.runnables import RunnableLambda
from langchain_core.vectorstores import InMemoryVectorStore

from kvboost_rag import Engine, EngineConfig
from kvboost_rag.frameworks.ordering import NAMESPACES
from langchain_kvboost.ordering import PrefixOrderCompressor
from tests.tiny import engine_of, prompt_of, text


def named(names: str) -> list[Document]:
    return [Document(page_content=name * 10, id=name) for name in names]


def letters(documents) -> str:
    return "".join(doc.page_content[:1] for doc in documents)


@pytest.fixture
def ordering() -> PrefixOrderCompressor:
    return PrefixOrderCompressor()


class TestOrder:
    def test_best_last(self, ordering):
        assert letters(ordering.order(named("abc"))) == "cba"  # nothing served yet: worst first
        assert ordering.order(named("a")) == named("a")
        assert ordering.order([]) == []

    def test_continues_what_was_served(self, ordering):
        assert letters(ordering.order(named("abc"))) == "cba"
        assert letters(ordering.order(named("dabc"))) == "cbad"  # all of it, in spite of other ranks
        assert letters(ordering.order(named("xbqc"))) == "cbqx"
        assert letters(ordering.order(named("cab"))) == "bac"  # the best may not stand in front

    def test_longest_beginning_counts_text(self, ordering):
        long, short = Document(page_content="L" * 900), [Document(page_content=c) for c in "pqrs"]
        ordering.order([short[2], short[1], short[0]])  # p q r
        ordering.order([short[3], long])  # L s
        found = ordering.order([Document(page_content="z"), short[0], short[1], long])
        assert letters(found) == "Lqpz"

    def test_changed_content_is_another_document(self, ordering):
        ordering.order(named("abc"))
        changed = [*named("z"), Document(page_content="new", id="c"), *named("b")]
        assert letters(ordering.order(changed)) == "bnz"

    def test_documents_without_id(self, ordering):
        plain = [Document(page_content=c, metadata={"turn": 1}) for c in "abc"]
        ordering.order(plain)
        later = [Document(page_content=c, metadata={"turn": 2}) for c in "zbca"]
        assert letters(ordering.order(later)) == "cbaz"

    def test_half_a_surrogate_pair(self, ordering):
        odd = Document.model_construct(page_content="\ud800", metadata={}, id=None, type="Document")
        assert len(ordering.order([odd, *named("a")])) == 2

    @given(calls=st.lists(st.lists(st.sampled_from("abcdef"), max_size=7), max_size=12))
    @settings(max_examples=60, deadline=None)
    def test_nothing_is_dropped_or_doubled(self, calls):
        one, two = PrefixOrderCompressor(max_orders=3), PrefixOrderCompressor(max_orders=3)
        for names in calls:
            documents = named("".join(names))
            ordered = one.order(documents)
            assert sorted(map(id, ordered)) == sorted(map(id, documents))
            assert ordered == two.order(documents)
            if documents:
                assert ordered[-1] is documents[0]

    def test_deterministic_whatever_else_runs(self):
        draws = [[random.Random(n).choice("abcdefgh") for _ in range(4)] for n in range(40)]
        runs = [[letters(o.order(named("".join(d)))) for d in draws] for o in (PrefixOrderCompressor() for _ in "12")]
        assert runs[0] == runs[1]


class TestMemory:
    def test_namespaces_do_not_see_each_other(self, ordering):
        ordering.order(named("abc"), "one")
        assert letters(ordering.order(named("zcab"), "two")) == "bacz"
        assert letters(ordering.order(named("zcab"), "one")) == "cbaz"
        assert letters(ordering.order(named("zcab"))) == "bacz"

    def test_namespace_of_the_compressor(self):
        ordering = PrefixOrderCompressor(namespace="one")
        ordering.compress_documents(named("abc"), "q")
        assert letters(ordering.order(named("zcab"), "one")) == "cbaz"

    def test_bounded(self):
        ordering = PrefixOrderCompressor(max_orders=2)
        for names in ("abc", "def", "ghi"):
            ordering.order(named(names))
        assert letters(ordering.order(named("zcab"))) == "bacz"  # the oldest is no more
        orders = ordering._orders._spaces[None]
        assert len(orders._orders) == 2
        for n in range(NAMESPACES + 5):
            ordering.order(named("ab"), f"n{n}")
        assert len(ordering._orders._spaces) == NAMESPACES
        with pytest.raises(ValueError, match="max_orders"):
            PrefixOrderCompressor(max_orders=0)

    def test_copies(self, ordering):
        ordering.order(named("abc"))
        for other in (copy.deepcopy(ordering), pickle.loads(pickle.dumps(ordering))):
            assert letters(other.order(named("zcab"))) == "cbaz"
        assert letters(ordering.model_copy().order(named("zcab"))) == "cbaz"

    def test_threads(self):
        ordering = PrefixOrderCompressor(max_orders=8)
        errors = []

        def work(seed: int) -> None:
            draw = random.Random(seed)
            try:
                for _ in range(200):
                    documents = named("".join(draw.sample("abcdefgh", 4)))
                    assert sorted(letters(ordering.order(documents))) == sorted(letters(documents))
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors


class TestInChains:
    @pytest.fixture
    def store(self) -> InMemoryVectorStore:
        store = InMemoryVectorStore(DeterministicFakeEmbedding(size=8))
        store.add_documents(named("abcdef"))
        return store

    @pytest.mark.asyncio
    async def test_compression_retriever(self, store, ordering):
        base = store.as_retriever(search_kwargs={"k": 3})
        retriever = ContextualCompressionRetriever(base_compressor=ordering, base_retriever=base)
        found = base.invoke("q")
        assert retriever.invoke("q") == found[::-1]
        assert await retriever.ainvoke("q") == found[::-1]

    def test_lcel(self, store, ordering):
        base = store.as_retriever(search_kwargs={"k": 3})
        found = base.invoke("q")
        assert (base | ordering.order).invoke("q") == found[::-1]
        assert (base | RunnableLambda(ordering.order) | len).invoke("q") == 3

    def test_retriever_that_finds_nothing(self, ordering):
        empty = InMemoryVectorStore(DeterministicFakeEmbedding(size=8)).as_retriever()
        retriever = ContextualCompressionRetriever(base_compressor=ordering, base_retriever=empty)
        assert retriever.invoke("q") == []
        assert ordering.compress_documents([], "q") == []


def exact_tokens(engine: Engine, rankings: list[list[Document]], ordering: PrefixOrderCompressor | None) -> int:
    """Exact tokens of prompts over ranked documents."""
    engine.clear()
    total = 0
    for turn, ranked in enumerate(rankings):
        documents = ordering.order(ranked) if ordering is not None else ranked
        prompt = prompt_of([doc.page_content for doc in documents], question=f"Question {turn}: which river?")
        total += engine.prefill(prompt).usage.exact_tokens
    return total


def rankings(contents: list[str], questions: int, k: int) -> list[list[Document]]:
    """What a retriever finds in a conversation: a few subjects, whose documents change rank and neighbours."""
    draw = random.Random(7)
    documents = [Document(page_content=content, id=str(n)) for n, content in enumerate(contents)]
    subjects = [documents[n : n + k + 1] for n in range(0, len(documents), k + 1)]
    return [draw.sample(draw.choice(subjects), k) for _ in range(questions)]


class TestExactMode:
    def test_more_is_exact(self):
        engine = engine_of(reuse="exact")
        found = rankings([text(n, 20) for n in range(30)], questions=40, k=4)
        plain = exact_tokens(engine, found, None)
        ordered = exact_tokens(engine, found, PrefixOrderCompressor())
        assert ordered > 1.5 * plain

    @pytest.mark.model
    @pytest.mark.slow
    def test_more_is_exact_on_the_real_model(self, model_path):
        engine = Engine.from_pretrained(str(model_path), config=EngineConfig(reuse="exact", fallback=False))
        found = rankings([text(n, 60) for n in range(20)], questions=20, k=4)
        plain = exact_tokens(engine, found, None)
        ordered = exact_tokens(engine, found, PrefixOrderCompressor())
        print(f"exact tokens of 20 prompts: rank order {plain}, prefix order {ordered}")  # noqa: T201
        assert ordered > 1.5 * plain
