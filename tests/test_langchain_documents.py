"""Warming LangChain documents: what is rendered, what is computed, what is refused."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
import tracemalloc

import pytest
from langchain_community.vectorstores import FAISS
from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.prompts import PromptTemplate, format_document
from langchain_core.vectorstores import InMemoryVectorStore, VectorStore
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from kvboost_rag import ConfigError, Engine, EngineConfig, PromptError, WarmReport
from langchain_kvboost.documents import awarm_documents, stored_documents, warm_documents
from tests.tiny import TEMPLATE, VOCAB, engine_of, prompt_of, text

EMBEDDINGS = DeterministicFakeEmbedding(size=8)
PROMPT = PromptTemplate.from_template("Source: {source}\nContent: {page_content}")


def documents(count: int, words: int = 30) -> list[Document]:
    return [
        Document(page_content=text(seed, words), metadata={"source": f"file {seed}"}, id=f"d{seed}")
        for seed in range(count)
    ]


def reused_share(engine: Engine, texts: list[str]) -> float:
    """Share of the texts' tokens that a prompt with all of them need not compute; nothing of it is kept."""
    usage = engine.prefill(prompt_of(texts), store=False).usage
    own = sum(len(engine.tokenize(t)) for t in texts)
    return (usage.exact_tokens + usage.approximate_tokens) / own


class StubEngine(Engine):
    """Takes texts, and says it warmed them."""

    config = EngineConfig()

    def __init__(self, seconds: float = 0.0) -> None:
        self.calls: list[list[str]] = []
        self.seconds = seconds

    def warm(self, texts, *, namespace=None):
        time.sleep(self.seconds if texts else 0)
        self.calls.append(list(texts))
        return WarmReport(documents=len(texts), computed=len(texts), seconds=1.0)

    def tokenize(self, prompt):
        return [ord(c) for c in prompt]


class TestWarming:
    @pytest.mark.parametrize("pack_tokens", [0, 200])
    def test_second_pass_computes_nothing(self, pack_tokens):
        engine = engine_of(pack_tokens=pack_tokens)
        docs = documents(7)
        report = warm_documents(engine, docs, batch_size=3)
        assert (report.documents, report.computed, report.already_warm) == (7, 7, 0)
        assert report.chunks == engine.stats().chunks
        again = warm_documents(engine, docs, batch_size=2)  # cut into other batches
        assert (again.documents, again.computed, again.already_warm, again.tokens) == (7, 0, 7, 0)

    def test_warmed_documents_are_reused_in_another_order(self):
        engine = engine_of(pack_tokens=200)
        docs = documents(5)
        warm_documents(engine, docs)
        assert reused_share(engine, [docs[n].page_content for n in (3, 0, 4, 1)]) >= 0.95

    def test_text_as_the_chain_renders_it(self):
        engine = engine_of()
        docs = documents(3)
        report = warm_documents(engine, docs, document_prompt=PROMPT)
        rendered = [format_document(doc, PROMPT) for doc in docs]
        assert engine.warm(rendered).already_warm == 3
        by_function = warm_documents(engine, docs, document_prompt=lambda doc: format_document(doc, PROMPT))
        assert by_function.already_warm == report.computed == 3

    def test_namespace(self):
        engine = engine_of()
        docs = documents(2)
        warm_documents(engine, docs, namespace="a")
        assert warm_documents(engine, docs, namespace="b").computed == 2
        assert warm_documents(engine, docs, namespace="a").computed == 0

    def test_duplicates_are_warmed_and_counted_once(self):
        engine = StubEngine()
        docs = documents(3)
        report = warm_documents(engine, [*docs, *docs, docs[0]], batch_size=2)
        assert [t for call in engine.calls for t in call] == [doc.page_content for doc in docs]
        assert report.documents == 3

    def test_reports_are_summed(self):
        engine = StubEngine()
        report = warm_documents(engine, documents(5), batch_size=2)
        assert report.computed == 5
        assert report.seconds == len(engine.calls)

    def test_a_long_iterable_is_never_held(self):
        engine = StubEngine()
        alive = peak = 0

        class Counted(Document):
            def __del__(self):
                nonlocal alive
                alive -= 1

        def source():
            nonlocal alive, peak
            for n in range(3000):
                alive += 1
                peak = max(peak, alive)
                yield Counted(page_content=f"{n} " * 200)

        engine.warm = lambda texts, namespace=None: WarmReport(documents=len(texts))
        tracemalloc.start()
        report = warm_documents(engine, source(), separator="")
        _, most_bytes = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert report.documents == 3000
        assert peak <= 64
        assert most_bytes < 1_000_000  # the texts together have 3 MB

    def test_empty_and_short_and_long(self):
        engine = engine_of()
        docs = [Document(page_content=""), Document(page_content="river"), Document(page_content=text(1, 14000))]
        report = warm_documents(engine, docs)
        assert (report.documents, report.too_short, report.computed) == (3, 2, 1)
        assert report.chunks > 1  # longer than the context window: the engine cuts it
        again = warm_documents(engine, docs)
        assert (again.too_short, again.already_warm) == (2, 1)

    def test_nothing_to_warm(self):
        assert warm_documents(engine_of(), []).documents == 0
        assert warm_documents(engine_of(), iter(())).documents == 0

    def test_odd_metadata_is_left_alone(self):
        docs = [Document(page_content=text(1, 30), metadata={"set": {1}, "fn": print, "n": None, "doc": object()})]
        assert warm_documents(engine_of(), docs).computed == 1

    def test_progress(self, capsys, monkeypatch):
        monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
        warm_documents(StubEngine(), documents(5), show_progress=True)
        assert "5/5" in capsys.readouterr().err
        warm_documents(StubEngine(), (doc for doc in documents(5)), show_progress=True)
        assert "5doc" in capsys.readouterr().err
        warm_documents(StubEngine(), documents(5))
        assert not capsys.readouterr().err


class TestErrors:
    def test_missing_metadata_names_key_document_and_remedy(self):
        docs = [*documents(1), Document(page_content="x", metadata={"author": "me"}, id="lost")]
        with pytest.raises(PromptError, match=r"'lost'.*'source'.*add it.*\['author'\]"):
            warm_documents(engine_of(), docs, document_prompt=PROMPT)
        nameless = Document(page_content="Beginning of it")
        with pytest.raises(PromptError, match="begins 'Beginning of it'"):
            warm_documents(engine_of(), [nameless], document_prompt=PROMPT)

    def test_failing_function(self):
        with pytest.raises(PromptError, match=r"'d0'.*KeyError\('page'\)"):
            warm_documents(engine_of(), documents(1), document_prompt=lambda doc: doc.metadata["page"])
        with pytest.raises(PromptError, match="gave a int"):
            warm_documents(engine_of(), documents(1), document_prompt=lambda doc: 3)

    def test_half_a_surrogate_pair(self):
        broken = Document.model_construct(page_content="ab\ud800", metadata={}, id="s", type="Document")
        with pytest.raises(PromptError, match=r"'s'.*character 2.*errors='replace'"):
            warm_documents(engine_of(), [broken])

    @pytest.mark.parametrize(
        "bad",
        [{"batch_size": 0}, {"batch_size": True}, {"separator": None}, {"document_prompt": "{x}"}, {"namespace": ""}],
    )
    def test_bad_arguments_raise_before_a_document_is_read(self, bad):
        def source():
            pytest.fail("read")
            yield

        with pytest.raises(ConfigError, match=next(iter(bad))):
            warm_documents(engine_of(), source(), **bad)

    def test_engine_that_reuses_nothing(self):
        with pytest.raises(ConfigError, match="off"):
            warm_documents(engine_of(reuse="off"), documents(1))

    def test_no_documents(self):
        with pytest.raises(PromptError, match="Documents"):
            warm_documents(engine_of(), ["text"])


class TestBorder:
    """Tokens that merge over the border between a text and the separator."""

    def merging(self) -> PreTrainedTokenizerFast:
        """Merges across everything: '.' and the newlines behind it become one token."""
        backend = Tokenizer(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=VOCAB,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            special_tokens=[AddedToken(t, special=True) for t in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")],
            show_progress=False,
        )
        backend.train_from_iterator([".\n\n"] * 50 + ["river stone paper"] * 20, trainer)
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", bos_token=None)
        tokenizer.chat_template = TEMPLATE
        return tokenizer

    def test_separator_is_warmed_where_it_merges(self):
        tokenizer = self.merging()
        docs = [Document(page_content=text(n, 12)) for n in range(4)]
        ids = tokenizer(docs[0].page_content + "\n\nA")["input_ids"]
        assert ids[: len(alone := tokenizer(docs[0].page_content)["input_ids"])] != alone
        reused = {}
        for separator in ("", "\n\n"):
            engine = engine_of(tokenizer=tokenizer)
            warm_documents(engine, docs, separator=separator)
            assert warm_documents(engine, docs, separator=separator).computed == 0
            usage = engine.prefill(prompt_of([doc.page_content for doc in docs[::-1]]), store=False).usage
            reused[separator] = usage.exact_tokens + usage.approximate_tokens
        assert reused["\n\n"] == reused[""] + len(docs)

    def test_text_alone_where_nothing_merges(self):
        engine = StubEngine()
        warm_documents(engine, documents(1), separator="\n---\n")
        assert engine.calls[-1] == [documents(1)[0].page_content]


@pytest.mark.asyncio
class TestAsync:
    async def test_same_as_sync(self):
        engine = engine_of()
        docs = documents(5)
        assert (await awarm_documents(engine, iter(docs), batch_size=2)).computed == 5
        assert warm_documents(engine, docs).computed == 0

    async def test_loop_never_stalls(self):
        engine = StubEngine(seconds=0.2)
        longest, last = 0.0, time.perf_counter()

        async def tick():
            nonlocal longest, last
            while True:
                await asyncio.sleep(0.005)
                now = time.perf_counter()
                longest, last = max(longest, now - last), now

        ticking = asyncio.create_task(tick())
        await awarm_documents(engine, documents(4), batch_size=1)
        ticking.cancel()
        assert longest < 0.15

    async def test_cancelled_between_batches(self):
        engine = StubEngine(seconds=0.1)
        started = threading.Event()
        plain = engine.warm

        def warm(texts, *, namespace=None):
            if texts:
                started.set()
            return plain(texts, namespace=namespace)

        engine.warm = warm
        task = asyncio.create_task(awarm_documents(engine, documents(20), batch_size=1))
        await asyncio.to_thread(started.wait)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        done = len(engine.calls)
        assert 1 < done < 5  # the running one was waited for
        await asyncio.sleep(0.25)
        assert len(engine.calls) == done

    async def test_error_in_a_batch(self):
        with pytest.raises(PromptError, match="source"):
            await awarm_documents(engine_of(), [Document(page_content="x")], document_prompt=PROMPT)


class TestStoredDocuments:
    def test_faiss(self, tmp_path):
        docs = documents(4)
        FAISS.from_documents(docs, EMBEDDINGS).save_local(str(tmp_path))
        loaded = FAISS.load_local(str(tmp_path), EMBEDDINGS, allow_dangerous_deserialization=True)
        assert list(stored_documents(loaded)) == docs
        engine = engine_of()
        assert warm_documents(engine, stored_documents(loaded)).computed == 4
        loaded.delete(["d1"])
        assert [doc.id for doc in stored_documents(loaded)] == ["d0", "d2", "d3"]

    def test_faiss_documents_without_an_id(self):
        store = FAISS.from_documents(documents(1), EMBEDDINGS)
        store.docstore._dict["d0"].id = None  # as stores written by older versions
        assert next(iter(stored_documents(store))).id == "d0"

    def test_in_memory(self):
        store = InMemoryVectorStore(EMBEDDINGS)
        store.add_documents(documents(3))
        assert list(stored_documents(store)) == documents(3)
        assert list(stored_documents(InMemoryVectorStore(EMBEDDINGS))) == []

    def test_other_stores_raise_at_once(self):
        class Remote(VectorStore):
            def similarity_search(self, query, k=4, **kwargs):
                return []

            @classmethod
            def from_texts(cls, texts, embedding, metadatas=None, **kwargs):
                return cls()

        with pytest.raises(ConfigError, match=r"Remote cannot be enumerated.*warm_documents\(engine, docs\)"):
            stored_documents(Remote())
