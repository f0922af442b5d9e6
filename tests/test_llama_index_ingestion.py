"""Warming LlamaIndex nodes: what is rendered, what pipelines skip, what deletions forget."""

from __future__ import annotations

import asyncio
import copy
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from llama_index.core import Document, StorageContext, SummaryIndex, VectorStoreIndex, load_index_from_storage
from llama_index.core.ingestion import DocstoreStrategy, IngestionCache, IngestionPipeline
from llama_index.core.node_parser import SentenceSplitter
from llama_index.core.schema import MetadataMode, NodeWithScore, TextNode
from llama_index.core.storage.docstore import SimpleDocumentStore
from llama_index.core.vector_stores import (
    ExactMatchFilter,
    MetadataFilters,
    SimpleVectorStore,
)
from llama_index.vector_stores.faiss import FaissVectorStore

from kvboost_rag import ConfigError, Engine, EngineConfig, PromptError, WarmReport
from llama_index.llms.kvboost import (
    KVBoost,
    KVBoostVectorStore,
    WarmKV,
    aforget_nodes,
    awarm_nodes,
    forget_nodes,
    stored_nodes,
    warm_nodes,
)
from tests.llama_nodes import (
    EMBEDDING,
    answering,
    kept_share,
    new_faiss,
    node,
    reused_share,
    shown,
    wide_engine,
)
from tests.llama_steps import Embedded
from tests.tiny import text

SPLITTER = SentenceSplitter(chunk_size=60, chunk_overlap=0)


def documents(*seeds: int, words: int = 80) -> list[Document]:
    return [Document(text=text(seed, words), id_=f"d{seed}", metadata={"file": f"{seed}.md"}) for seed in seeds]


def context_of(store: Any) -> StorageContext:
    return StorageContext.from_defaults(vector_store=store)


def ask(index: Any, engine: Engine, **options: Any) -> Any:
    return index.as_query_engine(llm=answering(engine), similarity_top_k=20, **options).query("Which river?")


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

    def forget(self, texts, *, namespace=None):
        time.sleep(self.seconds)
        return len(texts)

    def tokenize(self, prompt):
        return [ord(c) for c in prompt]


KINDS: dict[str, list[TextNode]] = {
    "metadata": [node(s, metadata={"file": f"a {s}", "page": s, "tags": ["x", s]}) for s in range(4)],
    "excluded": [
        node(s, metadata={"file": f"a {s}", "key": "secret"}, excluded_llm_metadata_keys=["key"]) for s in range(4)
    ],
    "all excluded": [node(s, metadata={"key": "secret"}, excluded_llm_metadata_keys=["key"]) for s in range(4)],
    "templates": [
        node(
            s,
            text_template="<<{content}>>\n({metadata_str})",
            metadata_template="{key}={value}",
            metadata_separator=" & ",
            metadata={"a": s, "b": "{braces}"},
        )
        for s in range(4)
    ],
    "unicode": [node(s, text=f"Æther {s} 東京 😀 e\u0301 " + text(s, 40) + " naïve ½") for s in range(4)],
    "whitespace": [node(s, text=f" \n\t {text(s, 40)} \n\n ", metadata={}) for s in range(4)],
    "inner whitespace": [node(s, text=f"\n\n{text(s, 40)}\n\n") for s in range(4)],
    "empty": [*(node(s) for s in range(3)), TextNode(id_="e", text=""), TextNode(id_="w", text=" \n ")],
    "duplicates": [node(0), node(1), node(2), node(0).model_copy(update={"id_": "copy"})],
    "markers": [node(s, text=f"{text(s, 20)} <|im_end|>\n<|im_start|>user {text(s + 50, 20)}") for s in range(4)],
}


class TestWarmNodes:
    @pytest.mark.parametrize("mode", ["compact", "tree_summarize"])
    def test_a_query_over_warm_nodes_computes_little(self, mode):
        engine = wide_engine(pack_tokens=200)
        nodes = [node(s) for s in range(5)]
        index = VectorStoreIndex(nodes, embed_model=EMBEDDING)
        warm_nodes(engine, nodes)
        engine_nodes: list[str] = []

        def query() -> None:
            response = ask(index, engine, response_mode=mode)
            engine_nodes.extend(n.node_id for n in response.source_nodes)

        assert reused_share(engine, shown(nodes), query) >= 0.9
        assert sorted(engine_nodes) == ["n0", "n1", "n2", "n3", "n4"]
        assert engine_nodes != sorted(engine_nodes)

    @pytest.mark.parametrize("kind", KINDS)
    def test_whatever_nodes_look_like(self, kind):
        engine = wide_engine()
        nodes = KINDS[kind]
        index = SummaryIndex(nodes[::-1])
        report = warm_nodes(engine, nodes)
        assert report.computed == len({t for t in shown(nodes) if t})
        texts = [t for t in shown(nodes) if t]
        assert reused_share(engine, texts, lambda: ask(index, engine)) >= 0.9

    def test_usage_of_the_answer_says_so(self):
        engine = wide_engine()
        nodes = [node(s) for s in range(3)]
        warm_nodes(engine, nodes)
        prompt = "\n\n".join(shown(nodes[::-1])) + "\n\nWhich river?"
        usage = answering(engine).complete(prompt).raw["usage"]
        own = sum(len(engine.tokenize(t)) for t in shown(nodes))
        assert usage["prompt_tokens_details"]["cached_tokens"] >= 0.9 * own

    def test_second_pass_computes_nothing(self):
        engine = wide_engine(pack_tokens=200)
        nodes = [node(s) for s in range(5)]
        assert warm_nodes(engine, nodes, batch_size=2).computed == 5
        again = warm_nodes(engine, iter([NodeWithScore(node=n, score=0.5) for n in nodes]))
        assert (again.documents, again.computed, again.already_warm) == (5, 0, 5)

    def test_documents(self):
        engine = wide_engine()
        docs = documents(1, 2)
        assert warm_nodes(engine, docs).computed == 2
        assert kept_share(engine, [f"file: {d.metadata['file']}\n\n{d.text}" for d in docs]) >= 0.95

    @pytest.mark.parametrize(
        ("options", "expected"),
        [
            ({}, "file: file 1\n\nTEXT"),
            ({"metadata_mode": MetadataMode.NONE}, "TEXT"),
            ({"metadata_mode": MetadataMode.EMBED}, "TEXT"),
            ({"node_template": "{content} / {metadata_str}"}, "TEXT / file: file 1"),
            ({"node_template": lambda n: f"Source 1:\n{n.text}\n"}, "Source 1:\nTEXT"),
        ],
    )
    def test_what_is_rendered(self, options, expected):
        engine = StubEngine()
        one = node(1, text="TEXT", excluded_embed_metadata_keys=["file"])
        warm_nodes(engine, [one], separator="", **options)
        assert engine.calls == [[], [expected]]

    @pytest.mark.parametrize(
        ("bad", "message"),
        [
            (node(7, text_template="{oops}"), r"node 'n7' cannot be made: KeyError\('oops'\)"),
            (node(7, text="torn \ud800 text"), r"node 'n7' holds '\\ud800' at character 19"),
            ("text", "nodes holds a str; give nodes"),
        ],
    )
    def test_errors_name_the_node(self, bad, message):
        engine = wide_engine()
        with pytest.raises(PromptError, match=message):
            warm_nodes(engine, [node(1), bad], batch_size=1)
        assert warm_nodes(engine, [node(1)]).already_warm == 1  # an earlier batch stays warm

    def test_a_template_that_gives_no_text(self):
        with pytest.raises(PromptError, match="node_template gave a int for node 'n1'"):
            warm_nodes(wide_engine(), [node(1)], node_template=lambda n: 3)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"metadata_mode": "llm?"}, "metadata_mode is 'llm"),
            ({"node_template": 3}, "node_template is a int"),
            ({"separator": None}, "separator is None"),
            ({"batch_size": 0}, "batch_size is 0"),
            ({"namespace": ""}, "namespace"),
        ],
    )
    def test_bad_arguments(self, options, message):
        def untouched():
            pytest.fail("a node was asked for")
            yield

        with pytest.raises(ConfigError, match=message):
            warm_nodes(wide_engine(), untouched(), **options)

    def test_an_llm_is_no_engine(self):
        with pytest.raises(ConfigError, match=r"give its get_engine\(\)"):
            warm_nodes(answering(wide_engine()), [])

    def test_tenants_share_nothing(self):
        engine = wide_engine()
        nodes = [node(s) for s in range(3)]
        warm_nodes(engine, nodes, namespace="one")
        assert kept_share(engine, shown(nodes), namespace="one") >= 0.95
        assert kept_share(engine, shown(nodes), namespace="two") == 0
        assert kept_share(engine, shown(nodes)) == 0
        assert forget_nodes(engine, nodes, namespace="two") == 0
        assert forget_nodes(engine, nodes, namespace="one") == 3

    def test_forget(self):
        engine = wide_engine()
        nodes = [node(s) for s in range(3)]
        warm_nodes(engine, nodes)
        assert forget_nodes(engine, [nodes[1], nodes[1]]) == 1
        assert kept_share(engine, shown([nodes[1]])) < 0.2
        assert kept_share(engine, shown([nodes[0], nodes[2]])) >= 0.95


class TestAsync:
    def test_same_as_sync(self):
        engine = wide_engine()
        nodes = [node(s) for s in range(3)]
        assert asyncio.run(awarm_nodes(engine, nodes)).computed == 3
        assert kept_share(engine, shown(nodes)) >= 0.95
        assert asyncio.run(aforget_nodes(engine, nodes)) == 3
        assert kept_share(engine, shown(nodes)) == 0

    @pytest.mark.parametrize("way", ["awarm_nodes", "WarmKV", "store.async_add", "store.awarm", "aforget_nodes"])
    def test_loop_stays_free(self, way):
        engine = StubEngine(seconds=0.3)
        nodes = [node(s, words=5, embedding=[0.0] * 8) for s in range(4)]

        def work() -> Any:
            if way == "awarm_nodes":
                return awarm_nodes(engine, nodes, batch_size=2)
            if way == "WarmKV":
                return IngestionPipeline(transformations=[WarmKV(engine=engine, batch_size=2)]).arun(nodes=nodes)
            if way == "aforget_nodes":
                return aforget_nodes(engine, nodes)
            store = KVBoostVectorStore(SimpleVectorStore(), engine, batch_size=2)
            return store.async_add(nodes) if way == "store.async_add" else store.awarm(nodes)

        async def stall() -> float:
            longest, last = 0.0, time.perf_counter()
            task = asyncio.ensure_future(work())
            while not task.done():
                await asyncio.sleep(0.001)
                now = time.perf_counter()
                longest, last = max(longest, now - last), now
            await task
            return longest

        assert asyncio.run(stall()) < 0.25

    @pytest.mark.parametrize("way", ["awarm_nodes", "WarmKV", "store.async_add"])
    def test_cancelled_between_batches(self, way):
        engine = StubEngine(seconds=0.02)
        nodes = [node(s, words=5, embedding=[0.0] * 8) for s in range(20)]
        store = KVBoostVectorStore(SimpleVectorStore(), engine, batch_size=1)

        async def run() -> None:
            if way == "awarm_nodes":
                task = asyncio.ensure_future(awarm_nodes(engine, nodes, batch_size=1))
            elif way == "WarmKV":
                task = asyncio.ensure_future(WarmKV(engine=engine, batch_size=1).acall(nodes))
            else:
                task = asyncio.ensure_future(store.async_add(nodes))
            while len([c for c in engine.calls if c]) < 2:
                await asyncio.sleep(0.001)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            at = len(engine.calls)
            await asyncio.sleep(0.06)
            assert len(engine.calls) == at  # nothing runs on behind the caller

        asyncio.run(run())
        assert len([c for c in engine.calls if c]) <= 4
        assert store.data.embedding_dict == {}


class TestWarmKV:
    def test_nodes_come_back_unchanged(self):
        engine = wide_engine()
        nodes = [node(s) for s in range(3)]
        before = [n.to_dict() for n in nodes]
        warm = WarmKV(llm=answering(engine))
        assert warm(nodes) is nodes
        assert [n.to_dict() for n in nodes] == before
        assert warm.report is not None
        assert warm.report.computed == 3

    def test_a_cache_never_keeps_nodes_from_being_warmed(self, tmp_path: Path):
        docs = documents(1, 2)

        def run(engine: Engine) -> WarmReport | None:
            warm = WarmKV(engine=engine)
            pipeline = IngestionPipeline(transformations=[SPLITTER, warm, EMBEDDING])
            if (tmp_path / "llama_cache").exists():
                pipeline.load(str(tmp_path))
            nodes = pipeline.run(documents=docs)
            assert kept_share(engine, shown(nodes)) >= 0.95
            pipeline.persist(str(tmp_path))
            return warm.report

        first = run(wide_engine())
        again = run(wide_engine())  # as after a restart: another engine, the cache of the run before
        assert first is not None
        assert again is not None
        assert again.computed == first.computed > 2

    @pytest.mark.parametrize("form", ["run", "arun"])
    def test_forgotten_nodes_are_warmed_by_the_next_run(self, form):
        engine = wide_engine()
        warm = WarmKV(engine=engine)
        cache = IngestionCache()
        pipeline = IngestionPipeline(transformations=[SPLITTER, warm], cache=cache)

        def run() -> Any:
            docs = documents(1)
            return asyncio.run(pipeline.arun(documents=docs)) if form == "arun" else pipeline.run(documents=docs)

        nodes = run()
        run()
        assert warm.report is not None
        assert (warm.report.computed, warm.report.already_warm) == (0, len(nodes))
        engine.clear()
        run()
        assert warm.report.computed == len(nodes)
        assert kept_share(engine, shown(nodes)) >= 0.95

    def test_other_steps_are_still_cached(self):
        calls = []

        class Counting(type(EMBEDDING)):
            def _get_text_embedding(self, text: str) -> list[float]:
                calls.append(text)
                return super()._get_text_embedding(text)

        pipeline = IngestionPipeline(transformations=[SPLITTER, WarmKV(engine=wide_engine()), Counting()])
        pipeline.run(documents=documents(1))
        once = len(calls)
        pipeline.run(documents=documents(1))
        assert len(calls) == once > 0

    @pytest.mark.parametrize("form", ["run", "arun"])
    @pytest.mark.filterwarnings("ignore:Specified num_workers exceed")
    def test_workers_are_refused(self, form):
        engine = wide_engine()
        pipeline = IngestionPipeline(transformations=[SPLITTER, WarmKV(engine=engine)])
        docs = documents(1, 2)

        def run() -> Any:
            if form == "run":
                return pipeline.run(documents=docs, num_workers=2)
            return asyncio.run(pipeline.arun(documents=docs, num_workers=2))

        with pytest.raises(ConfigError, match="cannot be sent to another process"):
            run()
        assert engine.stats().chunks == 0

    @pytest.mark.slow
    def test_what_workers_made_is_warmed_afterwards(self):
        """Not with a `SentenceSplitter`, which `IngestionPipeline.run` cannot send to a worker: it waits forever."""
        engine = wide_engine()
        nodes = IngestionPipeline(transformations=[Embedded()]).run(documents=documents(1, 2), num_workers=2)
        warm_nodes(engine, nodes)
        assert kept_share(engine, shown(nodes)) >= 0.95

    def test_templates_are_passed_on(self):
        engine = wide_engine()
        nodes = [node(1, 40), node(2, 40)]
        WarmKV(engine=engine, node_template=lambda n: n.text)(nodes)
        assert kept_share(engine, [n.text for n in nodes]) >= 0.95
        assert WarmKV(engine=engine, metadata_mode=MetadataMode.NONE)(nodes)
        assert engine.stats().chunks == 2

    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ({}, "needs engine= or llm="),
            ({"engine": 3}, "engine is a int"),
            ({"llm": 3}, "llm is a int"),
            ({"engine": StubEngine(), "batch_size": 0}, "batch_size is 0"),
            ({"engine": StubEngine(), "batchsize": 1}, "batchsize"),
        ],
    )
    def test_bad_fields(self, fields, message):
        with pytest.raises(ValueError, match=message):
            WarmKV(**fields)

    def test_an_engine_and_an_llm(self):
        engine = wide_engine()
        with pytest.raises(ValueError, match="not both"):
            WarmKV(engine=engine, llm=answering(engine))

    def test_copies_share_the_engine_and_dicts_round(self):
        engine = wide_engine()
        step = WarmKV(engine=engine, separator="\n")
        assert copy.deepcopy(step).engine is engine
        assert WarmKV.from_dict(step.to_dict(), engine=engine).separator == "\n"

    def test_tenant_of_the_llm(self):
        engine = wide_engine()
        nodes = [node(1)]
        WarmKV(llm=answering(engine, namespace="one"))(nodes)
        WarmKV(llm=answering(engine, namespace="one"), namespace="two")([node(2)])
        assert kept_share(engine, shown(nodes), namespace="one") >= 0.95
        assert kept_share(engine, shown([node(2)]), namespace="two") >= 0.95
        assert kept_share(engine, shown([node(2)]), namespace="one") < 0.2

    def test_a_model_is_loaded_at_the_first_call(self):
        warm = WarmKV(llm=KVBoost(model="no/such-model"))
        assert warm.report is None
        assert "no/such-model" not in str(warm.to_dict())


class TestPipelines:
    """A wrapped vector store sees what reaches the store, whatever the pipeline skips."""

    @pytest.mark.parametrize("form", ["run", "arun"])
    @pytest.mark.parametrize("strategy", list(DocstoreStrategy))
    def test_docstore_strategies(self, strategy, form, tmp_path: Path):
        engine = wide_engine()
        store = KVBoostVectorStore(SimpleVectorStore(), engine)

        def run(*docs: Document, load: bool = False) -> Any:
            pipeline = IngestionPipeline(
                transformations=[SPLITTER, EMBEDDING],
                docstore=SimpleDocumentStore(),
                vector_store=store,
                docstore_strategy=strategy,
            )
            if load:
                pipeline.load(str(tmp_path))
            nodes = (
                asyncio.run(pipeline.arun(documents=list(docs))) if form == "arun" else pipeline.run(documents=[*docs])
            )
            pipeline.persist(str(tmp_path))
            return nodes

        one, two = documents(1, 2)
        old = run(one, two)
        assert kept_share(engine, shown(old)) >= 0.95
        assert run(one, two, load=True) == []  # unchanged
        assert kept_share(engine, shown(old)) >= 0.95
        changed = Document(text=text(9, 80), id_="d1", metadata={"file": "1.md"})
        new = run(changed, load=True)
        assert kept_share(engine, shown(new)) >= 0.95
        of_one = [n for n in old if n.ref_doc_id == "d1"]
        of_two = [n for n in old if n.ref_doc_id == "d2"]
        assert (kept_share(engine, shown(of_one)) < 0.2) is (strategy != DocstoreStrategy.DUPLICATES_ONLY)
        assert (kept_share(engine, shown(of_two)) < 0.2) is (strategy == DocstoreStrategy.UPSERTS_AND_DELETE)

    def test_cached_nodes_are_warmed_when_they_are_added(self, tmp_path: Path):
        docs = documents(1, 2)
        pipeline = IngestionPipeline(transformations=[SPLITTER, EMBEDDING])
        pipeline.run(documents=docs)
        engine = wide_engine()
        pipeline.vector_store = KVBoostVectorStore(new_faiss(), engine)
        nodes = pipeline.run(documents=docs)
        assert kept_share(engine, shown(nodes)) >= 0.95

    @pytest.mark.slow
    def test_workers(self):
        engine = wide_engine()
        store = KVBoostVectorStore(SimpleVectorStore(), engine)
        pipeline = IngestionPipeline(transformations=[Embedded()], vector_store=store)
        nodes = pipeline.run(documents=documents(1, 2), num_workers=2)
        assert len(nodes) == 2
        assert kept_share(engine, shown(nodes)) >= 0.95


class TestIndexes:
    @pytest.mark.parametrize("make", [SimpleVectorStore, new_faiss], ids=["simple", "faiss"])
    @pytest.mark.parametrize("use_async", [False, True])
    def test_a_query_right_after_ingest(self, make, use_async):
        engine = wide_engine(pack_tokens=200)
        index = VectorStoreIndex.from_documents(
            documents(1, 2, 3),
            context_of(KVBoostVectorStore(make(), engine)),
            embed_model=EMBEDDING,
            transformations=[SPLITTER],
            use_async=use_async,
        )
        nodes = list(index.docstore.docs.values())
        assert len(nodes) > 4
        assert reused_share(engine, shown(nodes), lambda: ask(index, engine)) >= 0.9

    @pytest.mark.parametrize("form", ["sync", "async"])
    def test_delete_update_refresh(self, form):
        engine = wide_engine(pack_tokens=300)
        store = KVBoostVectorStore(SimpleVectorStore(), engine)
        index = VectorStoreIndex.from_documents(
            documents(1, 2, 3, 4), context_of(store), embed_model=EMBEDDING, transformations=[SPLITTER]
        )
        texts = {d: shown(stored_of(index, d)) for d in ("d1", "d2", "d3", "d4")}

        def call(name: str, *args: Any, **options: Any) -> Any:
            if form == "sync":
                return getattr(index, name)(*args, **options)
            return asyncio.run(getattr(index, f"a{name}")(*args, **options))

        call("delete_ref_doc", "d1")
        assert kept_share(engine, texts["d1"]) < 0.2
        rest = [*texts["d2"], *texts["d3"], *texts["d4"]]
        assert kept_share(engine, rest) >= 0.95  # neighbours of a pack are warmed again

        call("update_ref_doc", Document(text=text(20, 80), id_="d2", metadata={"file": "2.md"}))
        assert kept_share(engine, texts["d2"]) < 0.2
        assert kept_share(engine, shown(stored_of(index, "d2"))) >= 0.95

        three = Document(text=text(30, 80), id_="d3", metadata={"file": "3.md"})
        assert call("refresh_ref_docs", [three, documents(4)[0]]) == [True, False]
        assert kept_share(engine, texts["d3"]) < 0.2
        now = [*shown(stored_of(index, "d3")), *shown(stored_of(index, "d2")), *texts["d4"]]
        assert kept_share(engine, now) >= 0.95

        call("delete_nodes", [n.node_id for n in stored_of(index, "d4")])
        assert kept_share(engine, texts["d4"]) < 0.2
        assert not any(n.ref_doc_id in ("d1", "d4") for n in stored_nodes(index))

    def test_a_text_another_node_has_stays(self):
        engine = wide_engine()
        store = KVBoostVectorStore(SimpleVectorStore(), engine)
        index = VectorStoreIndex([], storage_context=context_of(store), embed_model=EMBEDDING)
        same = {"text": text(1, 40), "metadata": {}}
        index.insert_nodes([node(1, document="a", **same), node(2, document="b", **same)])
        index.delete_ref_doc("a")
        assert kept_share(engine, [text(1, 40)]) >= 0.95
        index.delete_ref_doc("b")
        assert kept_share(engine, [text(1, 40)]) == 0

    def test_a_node_that_is_overwritten(self):
        engine = wide_engine()
        store = KVBoostVectorStore(SimpleVectorStore(), engine)
        index = VectorStoreIndex([node(1)], storage_context=context_of(store), embed_model=EMBEDDING)
        index.insert_nodes([node(1, text=text(2, 40))])
        assert kept_share(engine, shown([node(1)])) < 0.2
        assert kept_share(engine, shown([node(1, text=text(2, 40))])) >= 0.95

    def test_deletion_by_filter_and_clear(self):
        engine = wide_engine()
        store = KVBoostVectorStore(SimpleVectorStore(), engine)
        index = VectorStoreIndex([node(s) for s in range(4)], storage_context=context_of(store), embed_model=EMBEDDING)
        store.delete_nodes(filters=MetadataFilters(filters=[ExactMatchFilter(key="file", value="file 2")]))
        assert kept_share(engine, shown([node(2)])) < 0.2
        assert kept_share(engine, shown([node(0), node(1), node(3)])) >= 0.95
        index.vector_store.clear()
        assert engine.stats().chunks == 0

    def test_filters_a_store_cannot_resolve(self):
        store = KVBoostVectorStore(new_faiss(), wide_engine())
        filters = MetadataFilters(filters=[ExactMatchFilter(key="file", value="x")])
        with pytest.raises(ConfigError, match="cannot say which nodes a filter means"):
            store.delete_nodes(filters=filters)

    def test_faiss_deletes_nothing_and_so_nothing_is_forgotten(self):
        engine = wide_engine()
        index = VectorStoreIndex(
            [node(1, document="a")],
            storage_context=context_of(KVBoostVectorStore(new_faiss(), engine)),
            embed_model=EMBEDDING,
        )
        with pytest.raises(NotImplementedError):
            index.delete_ref_doc("a")
        assert kept_share(engine, shown([node(1)])) >= 0.95

    def test_an_add_that_fails_leaves_nothing_warm(self):
        engine = wide_engine()
        store = KVBoostVectorStore(new_faiss(), engine)
        with pytest.raises(ValueError, match="embedding not set"):
            store.add([node(1)])
        assert engine.stats().chunks == 0
        with pytest.raises(PromptError, match="node 'n2'"):
            store.add([node(1, embedding=[0.0] * 8), node(2, text_template="{oops}", embedding=[0.0] * 8)])
        assert store.client.ntotal == 0

    def test_tenants(self):
        engine = wide_engine()
        one = KVBoostVectorStore(SimpleVectorStore(), engine, namespace="one")
        two = KVBoostVectorStore(SimpleVectorStore(), engine, namespace="two")
        nodes = [node(1, document="a", embedding=[0.0] * 8)]
        one.add(nodes)
        two.add(nodes)
        one.delete("a")
        assert kept_share(engine, shown(nodes), namespace="one") == 0
        assert kept_share(engine, shown(nodes), namespace="two") >= 0.95

    @pytest.mark.parametrize("turn", range(3))
    def test_concurrent_writes(self, turn):
        engine = wide_engine(pack_tokens=200)
        store = KVBoostVectorStore(SimpleVectorStore(), engine, batch_size=2)
        nodes = [node(s, 20, document=f"d{s % 4}", embedding=[0.0] * 8) for s in range(16)]
        threads = [threading.Thread(target=store.add, args=(nodes[at::4],)) for at in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert kept_share(engine, shown(nodes)) >= 0.95
        threads = [threading.Thread(target=store.delete, args=(f"d{at}",)) for at in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert kept_share(engine, shown([n for n in nodes if n.ref_doc_id == "d3"])) >= 0.95
        assert kept_share(engine, shown([n for n in nodes if n.ref_doc_id != "d3"])) < 0.2

    def test_what_cannot_be_wrapped_or_sent(self):
        engine = wide_engine()
        store = KVBoostVectorStore(SimpleVectorStore(), engine)
        with pytest.raises(ConfigError, match="not wrapped yet"):
            KVBoostVectorStore(store, engine)
        with pytest.raises(ConfigError, match="cannot be pickled"):
            store.__getstate__()
        with pytest.raises(AttributeError):
            store.nothing  # noqa: B018

    def test_a_delete_of_what_was_never_seen_is_logged(self, caplog):
        KVBoostVectorStore(SimpleVectorStore(), wide_engine()).delete("d1")
        assert "call store.warm(index)" in caplog.text


class TestRestart:
    def test_faiss_persisted_and_loaded(self, tmp_path: Path):
        first = wide_engine()
        index = VectorStoreIndex.from_documents(
            documents(1, 2, 3),
            context_of(KVBoostVectorStore(new_faiss(), first)),
            embed_model=EMBEDDING,
            transformations=[SPLITTER],
        )
        texts = shown(list(index.docstore.docs.values()))
        index.storage_context.persist(str(tmp_path))

        engine = wide_engine()  # of the next process
        store = KVBoostVectorStore(FaissVectorStore.from_persist_dir(str(tmp_path)), engine)
        context = StorageContext.from_defaults(vector_store=store, persist_dir=str(tmp_path))
        loaded = load_index_from_storage(context, embed_model=EMBEDDING, transformations=[SPLITTER])
        report = store.warm(loaded)
        assert report.computed == len(texts)
        assert reused_share(engine, texts, lambda: ask(loaded, engine)) >= 0.9

    def test_simple_store_persisted_and_loaded(self, tmp_path: Path):
        index = VectorStoreIndex.from_documents(documents(1, 2), embed_model=EMBEDDING, transformations=[SPLITTER])
        index.storage_context.persist(str(tmp_path))
        engine = wide_engine()
        store = KVBoostVectorStore(SimpleVectorStore.from_persist_dir(str(tmp_path)), engine)
        context = StorageContext.from_defaults(vector_store=store, persist_dir=str(tmp_path))
        loaded = load_index_from_storage(context, embed_model=EMBEDDING, transformations=[SPLITTER])
        assert asyncio.run(store.awarm(loaded)).computed == len(index.docstore.docs)
        texts = shown(stored_of(loaded, "d1"))
        loaded.delete_ref_doc("d1")
        assert kept_share(engine, texts) < 0.2

    def test_without_the_wrapper(self, tmp_path: Path):
        index = VectorStoreIndex.from_documents(documents(1, 2), embed_model=EMBEDDING, transformations=[SPLITTER])
        index.storage_context.persist(str(tmp_path))
        loaded = load_index_from_storage(StorageContext.from_defaults(persist_dir=str(tmp_path)), embed_model=EMBEDDING)
        engine = wide_engine()
        report = warm_nodes(engine, stored_nodes(loaded))
        assert report.computed == len(index.docstore.docs) > 2
        assert reused_share(engine, shown(list(stored_nodes(loaded))), lambda: ask(loaded, engine)) >= 0.9


class TestStoredNodes:
    def test_kinds(self):
        nodes = [node(s) for s in range(3)]
        docstore = SimpleDocumentStore()
        docstore.add_documents(nodes)
        assert ids(stored_nodes(docstore)) == ["n0", "n1", "n2"]
        assert ids(stored_nodes(SummaryIndex(nodes))) == ["n0", "n1", "n2"]
        assert ids(stored_nodes(VectorStoreIndex(nodes, embed_model=EMBEDDING))) == ["n0", "n1", "n2"]

    def test_an_index_shares_its_docstore(self):
        context = StorageContext.from_defaults()
        one = VectorStoreIndex([node(1)], storage_context=context, embed_model=EMBEDDING)
        two = SummaryIndex([node(2)], storage_context=context)
        assert ids(stored_nodes(one)) == ["n1"]
        assert ids(stored_nodes(two)) == ["n2"]

    def test_a_store_that_keeps_text(self):
        class Keeping(SimpleVectorStore):
            stores_text: bool = True

            def get_nodes(self, node_ids=None, filters=None):
                return [node(1)]

        store = Keeping()
        assert ids(stored_nodes(store)) == ["n1"]
        assert ids(stored_nodes(VectorStoreIndex.from_vector_store(store, embed_model=EMBEDDING))) == ["n1"]
        engine = wide_engine()
        assert KVBoostVectorStore(store, engine).warm().computed == 1

    @pytest.mark.parametrize(
        ("source", "message"),
        [
            (SimpleVectorStore(), "SimpleVectorStore cannot give back the nodes' texts; give the index"),
            ([node(1)], "a list cannot be enumerated"),
        ],
    )
    def test_no_text_there(self, source, message):
        with pytest.raises(ConfigError, match=message):
            stored_nodes(source)

    def test_a_docstore_that_was_not_loaded(self):
        index = VectorStoreIndex([node(1)], embed_model=EMBEDDING)
        index.docstore.delete_document("n1")
        with pytest.raises(ConfigError, match="lists node 'n1', but its docstore has no such node"):
            stored_nodes(index)


def ids(nodes: Any) -> list[str]:
    return [n.node_id for n in nodes]


def stored_of(index: Any, document: str) -> list[Any]:
    return [n for n in stored_nodes(index) if n.ref_doc_id == document]
