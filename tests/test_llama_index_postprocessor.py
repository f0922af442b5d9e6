"""The node postprocessor: orders that continue served ones, hidden metadata, nodes warmed on the way."""

from __future__ import annotations

import asyncio
import copy
import pickle
import random
import time
from typing import Any

import pytest
from llama_index.core import (
    QueryBundle,
    StorageContext,
    SummaryIndex,
    VectorStoreIndex,
    get_response_synthesizer,
    load_index_from_storage,
)
from llama_index.core.schema import IndexNode, MetadataMode, NodeWithScore

from kvboost_rag import ConfigError, Engine, PromptError
from kvboost_rag.frameworks import PrefixOrders
from llama_index.llms.kvboost import KVBoost, KVBoostNodePostprocessor, warm_nodes
from tests.llama_nodes import EMBEDDING, answering, kept_share, new_faiss, node, reused_share, shown, wide_engine


def ranked(*seeds: int) -> list[NodeWithScore]:
    return [NodeWithScore(node=node(seed), score=1.0 - at / 10) for at, seed in enumerate(seeds)]


def seeds(nodes: list[NodeWithScore]) -> list[int]:
    return [int(n.node.node_id[1:]) for n in nodes]


def order(processor: KVBoostNodePostprocessor, *ranks: int) -> list[int]:
    return seeds(processor.postprocess_nodes(ranked(*ranks), query_str="Which river?"))


class TestOrder:
    def test_the_best_last(self):
        processor = KVBoostNodePostprocessor()
        assert order(processor, 1, 2, 3, 4) == [4, 3, 2, 1]
        assert order(processor, 2, 4, 1, 3) == [4, 3, 1, 2]  # goes on from 4, 3
        assert order(processor, 9, 2, 3, 4) == [4, 3, 2, 9]

    def test_the_best_first(self):
        processor = KVBoostNodePostprocessor(order="best_first")
        assert order(processor, 1, 2, 3, 4) == [1, 2, 3, 4]
        assert order(processor, 1, 4, 3, 2) == [1, 2, 3, 4]
        assert order(processor, 1, 5, 3, 2) == [1, 2, 3, 5]
        assert order(processor, 2, 4, 3, 1) == [2, 4, 3, 1]  # no served order begins with the best one

    @pytest.mark.parametrize("way", ["best_last", "best_first"])
    def test_nothing_is_dropped_or_doubled(self, way):
        processor = KVBoostNodePostprocessor(order=way)
        draw = random.Random(0)
        for _ in range(50):
            ranks = [draw.randrange(5) for _ in range(draw.randrange(6))]
            new = order(processor, *ranks)
            assert sorted(new) == sorted(ranks)
            if ranks:
                assert new[-1 if way == "best_last" else 0] == ranks[0]

    @pytest.mark.parametrize("best", ["first", "last"])
    def test_of_equal_ones_the_best_stands_at_its_place(self, best):
        items = ["best", "other", "copy"]
        new = PrefixOrders(8).arrange(items, [("", "same"), ("", "other"), ("", "same")], best=best)
        assert new[0 if best == "first" else -1] == "best"
        assert sorted(new) == sorted(items)

    def test_kept(self):
        processor = KVBoostNodePostprocessor(order="keep", hide_metadata=["x"])
        assert order(processor, 3, 1, 2) == [3, 1, 2]

    def test_tenants_do_not_see_each_other(self):
        processors = [KVBoostNodePostprocessor(namespace=name) for name in ("one", "two")]
        assert order(processors[0], 1, 2, 3) == [3, 2, 1]
        assert order(processors[1], 1, 3, 2) == [2, 3, 1]
        engine = wide_engine()
        of_llm = KVBoostNodePostprocessor(llm=answering(engine, namespace="three"))
        assert of_llm.tenant == "three"

    def test_a_text_that_changed_under_its_id_is_another(self):
        processor = KVBoostNodePostprocessor()
        order(processor, 1, 2, 3)
        changed = ranked(1, 2, 3)
        changed[2].node.set_content("Another text.")
        assert seeds(processor.postprocess_nodes([changed[0], changed[2], changed[1]])) == [2, 3, 1]

    def test_inputs_stay_untouched(self):
        nodes = ranked(1, 2, 3)
        before = [n.to_dict() for n in nodes]
        processor = KVBoostNodePostprocessor(hide_metadata=["file"])
        new = processor.postprocess_nodes(nodes)
        assert [n.to_dict() for n in nodes] == before
        assert [n.score for n in new] == [0.8, 0.9, 1.0]
        assert "file" not in new[0].get_content(metadata_mode=MetadataMode.LLM)

    def test_async_is_the_same(self):
        one, two = KVBoostNodePostprocessor(), KVBoostNodePostprocessor()
        for ranks in ((1, 2, 3), (2, 3, 1), (3, 4, 2)):
            new = asyncio.run(two.apostprocess_nodes(ranked(*ranks), QueryBundle("Which river?")))
            assert seeds(new) == order(one, *ranks)


class TestInAQueryEngine:
    @pytest.mark.parametrize("way", ["best_last", "best_first"])
    def test_exact_mode_reuses_the_common_beginning(self, way):
        def reused(processor: KVBoostNodePostprocessor | None) -> int:
            engine = wide_engine(reuse="exact")
            synthesizer = get_response_synthesizer(llm=answering(engine), response_mode="compact")
            for ranks in ((1, 2, 3, 4), (1, 4, 3, 2), (1, 3, 2, 4)):
                nodes = ranked(*ranks)
                synthesizer.synthesize("Which river?", processor.postprocess_nodes(nodes) if processor else nodes)
            return engine.stats().exact_tokens

        assert reused(KVBoostNodePostprocessor(order=way)) > 1.3 * reused(None)

    def test_reuse_in_a_query_engine(self):
        def reused(processors: list[Any]) -> int:
            engine = wide_engine(reuse="exact")
            index = VectorStoreIndex([node(s) for s in range(6)], embed_model=EMBEDDING)
            asking = index.as_query_engine(
                llm=answering(engine), similarity_top_k=6, node_postprocessors=processors, response_mode="compact"
            )
            for question in ("Which river?", "What stone?", "Which garden?", "What signal?"):
                asking.query(question)
            return engine.stats().exact_tokens

        assert reused([KVBoostNodePostprocessor()]) > 1.3 * reused([])

    def test_hidden_scores_keep_the_text_that_is_warm(self):
        """As of `SentenceTransformerRerank(keep_retrieval_score=True)`, which writes into the nodes."""
        engine = wide_engine()
        nodes = [node(s, 12) for s in range(8)]
        warm_nodes(engine, nodes)
        draw = random.Random(0)
        scored = [
            NodeWithScore(node=n.model_copy(update={"metadata": {"retrieval_score": draw.random(), **n.metadata}}))
            for n in nodes
        ]
        hiding = KVBoostNodePostprocessor(hide_metadata=["retrieval_score"], order="keep")
        hidden = hiding.postprocess_nodes(scored)
        assert shown(hidden) == shown(nodes)
        assert shown(scored) != shown(nodes)

    def test_nothing_else_differs_between_warm_and_retrieved_text(self, tmp_path):
        """What a store gives back, after it was persisted, has the text that was warmed: nothing needs aligning."""
        nodes = [node(s, metadata={"a": 1.5, "b": [1, "x"], "c": None, "d": {"k": True}}) for s in range(3)]
        context = StorageContext.from_defaults(vector_store=new_faiss())
        VectorStoreIndex(nodes, storage_context=context, embed_model=EMBEDDING)
        context.persist(str(tmp_path))
        loaded = load_index_from_storage(
            StorageContext.from_defaults(
                vector_store=type(context.vector_store).from_persist_dir(str(tmp_path)), persist_dir=str(tmp_path)
            ),
            embed_model=EMBEDDING,
        )
        found = loaded.as_retriever(similarity_top_k=3).retrieve("Which river?")
        assert sorted(shown(found)) == sorted(shown(nodes))


class TestWarming:
    @pytest.mark.parametrize("form", ["sync", "async"])
    def test_nodes_are_warmed_first(self, form):
        engine = wide_engine(store_prompts=False)
        processor = KVBoostNodePostprocessor(llm=answering(engine), warm=True)
        nodes = ranked(1, 2, 3)
        if form == "sync":
            processor.postprocess_nodes(nodes)
        else:
            asyncio.run(processor.apostprocess_nodes(nodes))
        assert kept_share(engine, shown(nodes)) >= 0.95
        chunks = engine.stats().chunks
        processor.postprocess_nodes(nodes[::-1])
        assert engine.stats().chunks == chunks

    def test_what_is_warmed_is_what_is_shown(self):
        engine = wide_engine()
        index = SummaryIndex([node(s, metadata={"file": s, "score": 0.1 * s}) for s in range(4)])
        processor = KVBoostNodePostprocessor(engine=engine, warm=True, hide_metadata=["score"])
        texts = [f"file: {s}\n\n{node(s).text}" for s in range(4)]
        asking = index.as_query_engine(llm=answering(engine), node_postprocessors=[processor])
        assert reused_share(engine, texts, lambda: asking.query("Which river?")) >= 0.9

    def test_tenants(self):
        engine = wide_engine()
        nodes = ranked(1, 2)
        KVBoostNodePostprocessor(engine=engine, warm=True, namespace="one").postprocess_nodes(nodes)
        assert kept_share(engine, shown(nodes), namespace="one") >= 0.95
        assert kept_share(engine, shown(nodes)) == 0

    def test_errors_name_the_node(self):
        bad = [*ranked(1), NodeWithScore(node=node(7, text_template="{oops}"))]
        with pytest.raises(PromptError, match="node 'n7'"):
            KVBoostNodePostprocessor(engine=wide_engine(), warm=True).postprocess_nodes(bad)
        with pytest.raises(PromptError, match="holds a str"):
            KVBoostNodePostprocessor().postprocess_nodes(["text"])

    def test_loop_stays_free(self):
        class Slow(Engine):
            config: Any = wide_engine().config

            def __init__(self) -> None:
                pass

            def warm(self, texts, *, namespace=None):
                time.sleep(0.3 if texts else 0)
                return EMPTY

            def tokenize(self, prompt):
                return [ord(c) for c in prompt]

        EMPTY = wide_engine().warm([])
        processor = KVBoostNodePostprocessor(engine=Slow(), warm=True)

        async def stall() -> float:
            longest, last = 0.0, time.perf_counter()
            task = asyncio.ensure_future(processor.apostprocess_nodes(ranked(1, 2)))
            while not task.done():
                await asyncio.sleep(0.001)
                now = time.perf_counter()
                longest, last = max(longest, now - last), now
            await task
            return longest

        assert asyncio.run(stall()) < 0.25


class TestArguments:
    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ({"order": "keep"}, "would change nothing"),
            ({"order": "worst"}, "order"),
            ({"warm": True}, "nothing to warm with"),
            ({"warm": True, "engine": 3}, "engine is a int"),
            ({"separator": "\n"}, "no effect without warm=True"),
            ({"max_orders": 0}, "max_orders"),
            ({"hide": ["x"]}, "hide"),
        ],
    )
    def test_bad_fields(self, fields, message):
        with pytest.raises(ValueError, match=message):
            KVBoostNodePostprocessor(**fields)

    def test_an_engine_without_use(self):
        with pytest.raises(ValueError, match="no effect without warm=True"):
            KVBoostNodePostprocessor(engine=wide_engine())

    def test_pickling(self):
        engine = wide_engine()
        for fields in ({"engine": engine}, {"llm": answering(engine)}):
            processor = KVBoostNodePostprocessor(warm=True, **fields)
            with pytest.raises(ConfigError, match="cannot be pickled"):
                pickle.dumps(processor)
        kept = pickle.loads(pickle.dumps(KVBoostNodePostprocessor(llm=KVBoost(model="some/model"), warm=True)))
        assert kept.llm.model == "some/model"
        assert kept.warm

    def test_dicts_round(self):
        made = KVBoostNodePostprocessor(order="best_first", hide_metadata=["k"])
        again = KVBoostNodePostprocessor.from_dict(made.to_dict())
        assert (again.order, again.hide_metadata) == ("best_first", ["k"])

    def test_copies_share_the_engine(self):
        engine = wide_engine()
        for fields in ({"engine": engine}, {"llm": answering(engine)}):
            copied = copy.deepcopy(KVBoostNodePostprocessor(warm=True, **fields))
            assert (copied.engine or copied.llm.engine) is engine

    def test_an_index_node_is_not_copied_deep(self):
        class Uncopyable:
            def __deepcopy__(self, memo):
                pytest.fail("copied")

        thing = Uncopyable()
        found = NodeWithScore(node=IndexNode(text="x", index_id="i", obj=thing, metadata={"k": 1}))
        [new] = KVBoostNodePostprocessor(hide_metadata=["k"]).postprocess_nodes([found])
        assert new.node.obj is thing
        assert new.get_content(metadata_mode=MetadataMode.LLM) == "x"
