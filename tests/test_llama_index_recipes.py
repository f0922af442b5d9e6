"""Recipes of LlamaIndex's tutorials, with only the model exchanged; real FAISS, real embeddings, real engines."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import faiss
import pytest
from llama_index.core import (
    Document,
    Settings,
    SimpleDirectoryReader,
    StorageContext,
    VectorStoreIndex,
    load_index_from_storage,
)
from llama_index.core.agent.workflow import AgentStream, FunctionAgent, ReActAgent, ToolCallResult
from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.base.response.schema import RESPONSE_TYPE
from llama_index.core.ingestion import IngestionCache, IngestionPipeline
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.instrumentation.events import BaseEvent
from llama_index.core.node_parser import SentenceSplitter
from llama_index.core.postprocessor.llm_rerank import LLMRerank
from llama_index.core.query_engine import SubQuestionQueryEngine
from llama_index.core.question_gen import LLMQuestionGenerator
from llama_index.core.response_synthesizers import CompactAndRefine
from llama_index.core.schema import NodeWithScore, QueryBundle
from llama_index.core.tools import QueryEngineTool, ToolMetadata
from llama_index.core.utils import get_tokenizer, set_global_tokenizer
from llama_index.core.workflow import Context, Event, StartEvent, StopEvent, Workflow, step
from llama_index.vector_stores.faiss import FaissVectorStore
from pydantic import Field, PrivateAttr

from kvboost_rag import Engine, EngineConfig
from langchain_kvboost.demo.embeddings import MeanPoolingEmbeddings
from llama_index.llms.kvboost import KVBoost, configure_settings
from tests.scripted import DOCUMENTS as FACTS
from tests.scripted import ScriptedEngine, call, scripted

WIDTH = 384  # of the embeddings
PATIENCE = 120  # seconds until a test that hangs is given up
TEXTS = {str(document.id): document.page_content for document in FACTS}
DOCUMENTS = [Document(id_=name, text=text, metadata={"source": name}) for name, text in TEXTS.items()]
# LlamaIndex's own: its agents' workflows look at every attribute, and ask whether they run.
agents = [
    pytest.mark.filterwarnings("ignore:.*attribute.* is deprecated:pydantic.PydanticDeprecationWarning"),
    pytest.mark.filterwarnings("ignore:is_running called from within a step:DeprecationWarning"),
]


def marked(marks: list[pytest.MarkDecorator]) -> Any:
    def decorate(test: Any) -> Any:
        for mark in marks:
            test = mark(test)
        return test

    return decorate


class Embeddings(BaseEmbedding):
    """The real encoder, in LlamaIndex's form."""

    model_name: str = "minilm"
    _encoder: Any = PrivateAttr()
    _seen: list[str] = PrivateAttr(default_factory=list)

    def __init__(self, folder: str) -> None:
        super().__init__()
        self._encoder = MeanPoolingEmbeddings(folder)

    def _get_text_embedding(self, text: str) -> list[float]:
        self._seen.append(text)
        vector: list[float] = self._encoder.embed_query(text)
        return vector

    def _get_query_embedding(self, query: str) -> list[float]:
        vector: list[float] = self._encoder.embed_query(query)
        return vector

    async def _aget_query_embedding(self, query: str) -> list[float]:
        return await asyncio.to_thread(self._get_query_embedding, query)


class Usages(BaseEventHandler):
    """Collects the usage of every answer, as a tracer does."""

    found: list[dict[str, Any]] = Field(default_factory=list)

    @classmethod
    def class_name(cls) -> str:
        return "Usages"

    def handle(self, event: BaseEvent, **_: Any) -> None:
        if event.class_name() in ("LLMChatEndEvent", "LLMCompletionEndEvent"):
            self.found.append(event.response.raw["usage"])  # type: ignore[attr-defined]

    def cached(self, at: int = -1) -> int:
        """Prompt tokens of an answer that were not read again."""
        found: int = self.found[at]["prompt_tokens_details"]["cached_tokens"]
        return found


@pytest.fixture(scope="module")
def encoder(embeddings_path: Path) -> Embeddings:
    return Embeddings(str(embeddings_path))


@pytest.fixture
def settings(encoder: Embeddings) -> Iterator[Any]:
    """LlamaIndex's global settings with the real encoder, as they were afterwards."""
    before, tokenizer = dict(vars(Settings)), get_tokenizer()
    Settings.embed_model = encoder
    encoder._seen.clear()
    yield Settings
    vars(Settings).clear()
    vars(Settings).update(before)
    set_global_tokenizer(tokenizer)


@pytest.fixture
def usages() -> Iterator[Usages]:
    dispatcher, handler = get_dispatcher(), Usages()
    dispatcher.add_event_handler(handler)
    yield handler
    dispatcher.event_handlers.remove(handler)


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(work, PATIENCE))


def llm_on(engine: Engine, **options: Any) -> KVBoost:
    return configure_settings(KVBoost(**{"engine": engine, "max_tokens": 200, **options}))


def sources(response: Any) -> list[str]:
    return [found.node.metadata["source"] for found in response.source_nodes]


def tokens_of(engine: ScriptedEngine, *names: str) -> int:
    return sum(engine.tokens(TEXTS[name]) for name in names)


HARBOUR = "When does the harbour of Vell open in the morning?"
MARKET = "On which day do farmers sell cheese at the market of Vell?"


class TestStarter:
    """Recipe 10."""

    def test_an_index_over_a_folder(self, settings: Any, usages: Usages, tmp_path: Path) -> None:
        engine = scripted("smollm2", "At six.", "Still at six.")
        for name, content in TEXTS.items():
            (tmp_path / f"{name}.txt").write_text(content)
        llm_on(engine)
        documents = SimpleDirectoryReader(str(tmp_path), file_metadata=lambda path: {"source": Path(path).stem})
        index = VectorStoreIndex.from_documents(documents.load_data())
        query_engine = index.as_query_engine()
        response = query_engine.query(HARBOUR)
        assert str(response) == "At six."
        assert sources(response)[0] == "harbour"
        again = query_engine.query(f"{HARBOUR} Please.")
        assert str(again) == "Still at six."
        assert usages.cached() > 0.9 * tokens_of(engine, *sources(again))

    @marked(agents)
    def test_a_function_agent_with_an_index(self, settings: Any, usages: Usages) -> None:
        engine = scripted(
            "qwen2.5",
            [*call("search_documents", query=HARBOUR), *call("multiply", a=7, b=8)],
            "At six.",
            "At six, and 56.",
        )
        index = VectorStoreIndex.from_documents(DOCUMENTS)
        llm = llm_on(engine)
        query_engine = index.as_query_engine(similarity_top_k=1)

        def multiply(a: float, b: float) -> float:
            """Useful for multiplying two numbers."""
            return a * b

        async def search_documents(query: str) -> str:
            """Useful for answering natural language questions about Vell."""
            response = await query_engine.aquery(query)
            return str(response)

        agent = FunctionAgent(
            tools=[multiply, search_documents],
            llm=llm,
            system_prompt="You are a helpful assistant that can search documents and multiply.",
        )

        async def main() -> str:
            return str(await agent.run("When does the harbour open? Also, what's 7 * 8?"))

        assert run(main()) == "At six, and 56."
        assert TEXTS["harbour"] in engine.prompts[1]
        assert "At six." in engine.prompts[2]
        assert "56" in engine.prompts[2]
        assert usages.cached() > 0.9 * usages.found[0]["prompt_tokens"]  # the first turn is not read again


class TestFaiss:
    """Recipe 11."""

    def test_persist_and_reload(self, settings: Any, usages: Usages, tmp_path: Path) -> None:
        engine = scripted("smollm2", "At six.", "On Thursdays.", "At six.")
        llm_on(engine)
        vector_store = FaissVectorStore(faiss_index=faiss.IndexFlatL2(WIDTH))
        storage_context = StorageContext.from_defaults(vector_store=vector_store)
        index = VectorStoreIndex.from_documents(DOCUMENTS, storage_context=storage_context)
        assert str(index.as_query_engine(similarity_top_k=2).query(HARBOUR)) == "At six."
        index.storage_context.persist(persist_dir=str(tmp_path))

        vector_store = FaissVectorStore.from_persist_dir(str(tmp_path))
        storage_context = StorageContext.from_defaults(vector_store=vector_store, persist_dir=str(tmp_path))
        index = load_index_from_storage(storage_context=storage_context)
        query_engine = index.as_query_engine(similarity_top_k=2)
        response = query_engine.query(MARKET)
        assert (str(response), sources(response)[0]) == ("On Thursdays.", "market")
        response = query_engine.query(HARBOUR)
        assert (str(response), sources(response)[0]) == ("At six.", "harbour")
        assert usages.cached() > 0.9 * tokens_of(engine, *sources(response))

    def test_async_and_streaming(self, settings: Any) -> None:
        engine = scripted("smollm2", "It opens at six in the morning.", "It opens at six in the morning.")
        llm_on(engine)
        vector_store = FaissVectorStore(faiss_index=faiss.IndexFlatL2(WIDTH))
        storage_context = StorageContext.from_defaults(vector_store=vector_store)
        index = VectorStoreIndex.from_documents(DOCUMENTS, storage_context=storage_context)
        streaming = index.as_query_engine(streaming=True, similarity_top_k=1)
        pieces = list(streaming.query(HARBOUR).response_gen)
        assert len(pieces) > 5
        assert "".join(pieces) == "It opens at six in the morning."

        async def main() -> list[str]:
            response = await streaming.aquery(HARBOUR)
            return [piece async for piece in response.async_response_gen()]

        pieces = run(main())
        assert len(pieces) > 5
        assert "".join(pieces) == "It opens at six in the morning."


class TestIngestion:
    """Recipe 12."""

    def test_a_pipeline_with_a_cache(self, settings: Any, usages: Usages, encoder: Embeddings, tmp_path: Path) -> None:
        engine = scripted("smollm2", "At six.", "At six.")
        llm_on(engine)

        def pipeline() -> tuple[IngestionPipeline, FaissVectorStore]:
            store = FaissVectorStore(faiss_index=faiss.IndexFlatL2(WIDTH))
            steps = [SentenceSplitter(chunk_size=400, chunk_overlap=0), encoder]
            return IngestionPipeline(transformations=steps, cache=IngestionCache()), store

        first, _ = pipeline()
        nodes = first.run(documents=DOCUMENTS)
        assert encoder._seen
        first.persist(str(tmp_path))
        encoder._seen.clear()
        second, store = pipeline()
        second.load(str(tmp_path))
        again = second.run(documents=DOCUMENTS)
        assert not encoder._seen  # all from the cache
        assert [node.text for node in again] == [node.text for node in nodes]

        context = StorageContext.from_defaults(vector_store=store)
        index = VectorStoreIndex(again, storage_context=context)
        query_engine = index.as_query_engine(similarity_top_k=2)
        assert sources(query_engine.query(HARBOUR))[0] == "harbour"
        response = query_engine.query("In the morning, when does the harbour of Vell open?")
        assert str(response) == "At six."
        found = sum(engine.tokens(node.node.text) for node in response.source_nodes)
        assert usages.cached() > 0.9 * found


class TestChat:
    """Recipe 13."""

    @pytest.fixture
    def index(self, settings: Any) -> VectorStoreIndex:
        return VectorStoreIndex.from_documents(DOCUMENTS)

    def test_condense_plus_context(self, index: VectorStoreIndex, usages: Usages) -> None:
        engine = scripted("smollm2", "At six.", HARBOUR, "It closes when the tide turns.")
        llm = llm_on(engine)
        chat_engine = index.as_chat_engine(
            chat_mode="condense_plus_context", llm=llm, similarity_top_k=1, system_prompt="You know Vell."
        )
        first = chat_engine.chat(HARBOUR)
        assert (str(first), sources(first)) == ("At six.", ["harbour"])
        second = chat_engine.chat("And when does it close?")
        assert (str(second), sources(second)) == ("It closes when the tide turns.", ["harbour"])
        assert "At six." in engine.prompts[1]
        assert "And when does it close?" in engine.prompts[2]
        assert "You know Vell." in engine.prompts[2]
        assert usages.cached() > 0.9 * tokens_of(engine, "harbour")

    def test_streaming(self, index: VectorStoreIndex, usages: Usages) -> None:
        engine = scripted("smollm2", "It opens at six in the morning.", HARBOUR, "It closes when the tide turns.")
        chat_engine = index.as_chat_engine(chat_mode="condense_plus_context", llm=llm_on(engine), similarity_top_k=1)
        pieces = list(chat_engine.stream_chat(HARBOUR).response_gen)
        assert len(pieces) > 5
        assert "".join(pieces) == "It opens at six in the morning."

        async def main() -> str:
            response = await chat_engine.astream_chat("And when does it close?")
            return "".join([piece async for piece in response.async_response_gen()])

        assert run(main()) == "It closes when the tide turns."
        assert [message.content for message in chat_engine.chat_history] == [
            HARBOUR,
            "It opens at six in the morning.",
            "And when does it close?",
            "It closes when the tide turns.",
        ]

    def test_context_mode_reuses_the_history(self, index: VectorStoreIndex, usages: Usages) -> None:
        engine = scripted("smollm2", "At six.", "On Thursdays.")
        chat_engine = index.as_chat_engine(chat_mode="context", llm=llm_on(engine), similarity_top_k=2)
        assert str(chat_engine.chat(HARBOUR)) == "At six."
        answer = chat_engine.chat(MARKET)
        assert str(answer) == "On Thursdays."
        known = set(sources(answer)) & {"harbour", "market"}
        assert usages.cached() > 0.6 * tokens_of(engine, *known)


class TestReAct:
    """Recipe 14."""

    @marked(agents)
    def test_an_agent_with_query_engine_tools(self, settings: Any, usages: Usages) -> None:
        engine = scripted(
            "smollm2",
            'Thought: I need the harbour tool.\nAction: harbour\nAction Input: {"input": "When does it open?"}',
            "It opens at six.",
            "Thought: I can answer without any more tools.\nAnswer: At six.",
        )
        llm = llm_on(engine)
        tools = [
            QueryEngineTool.from_defaults(
                VectorStoreIndex.from_documents([document]).as_query_engine(llm=llm),
                name=str(document.id_),
                description=f"Provides information about the {document.id_} of Vell.",
            )
            for document in DOCUMENTS[:2]
        ]
        agent = ReActAgent(tools=tools, llm=llm)

        async def main() -> tuple[str, list[Any]]:
            handler = agent.run("When does the harbour open?")
            events = [event async for event in handler.stream_events()]
            return str(await handler), events

        answer, events = run(main())
        assert answer == "At six."
        [result] = [event for event in events if isinstance(event, ToolCallResult)]
        assert (result.tool_name, str(result.tool_output)) == ("harbour", "It opens at six.")
        assert result.tool_output.raw_output.source_nodes[0].node.metadata["source"] == "harbour"
        assert TEXTS["harbour"] in engine.prompts[1]
        assert len([event for event in events if isinstance(event, AgentStream)]) > 10
        assert usages.cached() > 0.9 * usages.found[0]["prompt_tokens"]


class RetrieverEvent(Event):
    """Result of running retrieval."""

    nodes: list[NodeWithScore]


class RerankEvent(Event):
    """Result of running reranking on retrieved nodes."""

    nodes: list[NodeWithScore]


class RAGWorkflow(Workflow):
    """The tutorial's workflow."""

    @step
    async def retrieve(self, ctx: Context, ev: StartEvent) -> RetrieverEvent:
        query = ev.get("query")
        await ctx.store.set("query", query)
        retriever = ev.get("index").as_retriever(similarity_top_k=3)
        return RetrieverEvent(nodes=await retriever.aretrieve(query))

    @step
    async def rerank(self, ctx: Context, ev: RetrieverEvent) -> RerankEvent:
        ranker = LLMRerank(choice_batch_size=5, top_n=2, llm=Settings.llm)
        query = await ctx.store.get("query", default=None)
        nodes = await asyncio.to_thread(ranker.postprocess_nodes, ev.nodes, query_bundle=QueryBundle(query))
        return RerankEvent(nodes=nodes)

    @step
    async def synthesize(self, ctx: Context, ev: RerankEvent) -> StopEvent:
        summarizer = CompactAndRefine(llm=Settings.llm, streaming=True, verbose=False)
        query = await ctx.store.get("query", default=None)
        return StopEvent(result=await summarizer.asynthesize(query, nodes=ev.nodes))


class TestWorkflow:
    """Recipe 15."""

    def test_retrieve_rerank_synthesise(self, settings: Any, usages: Usages) -> None:
        engine = scripted("smollm2", "Doc: 2, Relevance: 9\nDoc: 1, Relevance: 4", "It opens at six.")
        llm_on(engine)
        index = VectorStoreIndex.from_documents(DOCUMENTS)

        async def main() -> tuple[str, list[str], list[str]]:
            retrieved = [
                found.node.metadata["source"]
                for found in await index.as_retriever(similarity_top_k=3).aretrieve(HARBOUR)
            ]
            result: RESPONSE_TYPE = await RAGWorkflow(timeout=PATIENCE).run(query=HARBOUR, index=index)
            pieces = [piece async for piece in result.async_response_gen()]
            assert len(pieces) > 5
            return "".join(pieces), sources(result), retrieved

        answer, used, retrieved = run(main())
        assert answer == "It opens at six."
        assert used == [retrieved[1], retrieved[0]]
        # The reranker has read them in another order.
        assert usages.cached() > 0.9 * tokens_of(engine, *used)


class TestSubQuestions:
    """Recipe 16."""

    QUESTIONS = (
        '```json\n{"items": [{"sub_question": "When does it open?", "tool_name": "harbour"}, '
        '{"sub_question": "On which day is it held?", "tool_name": "market"}]}\n```'
    )

    @pytest.mark.parametrize("use_async", [False, pytest.param(True, marks=pytest.mark.slow)])
    def test_sub_question_query_engine(self, settings: Any, usages: Usages, use_async: bool) -> None:
        engine = scripted("smollm2", self.QUESTIONS, "Thursday at six.", "Thursday at six.", "At six, on Thursdays.")
        llm = llm_on(engine, max_tokens=400)
        tools = [
            QueryEngineTool(
                query_engine=VectorStoreIndex.from_documents([document]).as_query_engine(llm=llm),
                metadata=ToolMetadata(name=str(document.id_), description=f"All about the {document.id_} of Vell."),
            )
            for document in DOCUMENTS[1:3]
        ]
        query_engine = SubQuestionQueryEngine.from_defaults(
            query_engine_tools=tools,
            question_gen=LLMQuestionGenerator.from_defaults(llm=llm),
            llm=llm,
            use_async=use_async,
            verbose=False,
        )
        question = "When does the harbour open, and on which day is the market held?"
        response = query_engine.query(question)
        assert str(response) == "At six, on Thursdays."
        assert question in engine.prompts[0]
        assert any(TEXTS["harbour"] in prompt for prompt in engine.prompts[1:3])
        assert any(TEXTS["market"] in prompt for prompt in engine.prompts[1:3])
        assert engine.prompts[3].count("Thursday at six.") == 2
        assert len(usages.found) == 4
        if not use_async:
            return
        engine.script = [self.QUESTIONS, "Thursday at six.", "Thursday at six.", "At six, on Thursdays."]
        query_engine.query("On which day is the market held, and when does the harbour open?")
        assert all(usages.cached(at) > 0.8 * tokens_of(engine, "harbour") for at in (5, 6))


@pytest.mark.model
@pytest.mark.slow
class TestRealModel:
    def test_answers_from_documents_in_another_order(self, settings: Any, usages: Usages, model_path: Path) -> None:
        config = EngineConfig(selector="deviation", fallback=False)
        with Engine.from_pretrained(str(model_path), config=config) as engine:
            llm_on(engine, max_tokens=24)
            index = VectorStoreIndex.from_documents(DOCUMENTS)
            query_engine = index.as_query_engine(similarity_top_k=3)
            assert "six" in str(query_engine.query("When does the harbour of Vell open?"))
            assert "Thursday" in str(query_engine.query("On which day is the market of Vell held?"))
            assert usages.cached() > 0.4 * usages.found[-1]["prompt_tokens"]
