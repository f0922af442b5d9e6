"""Recipes with chains, retrievers and stores, as tutorials have them, with only the model exchanged."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from langchain_classic.chains import create_history_aware_retriever, create_retrieval_chain
from langchain_classic.chains.combine_documents import create_stuff_documents_chain
from langchain_community.vectorstores import FAISS
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.documents import Document
from langchain_core.exceptions import ContextOverflowError
from langchain_core.language_models import BaseChatModel, FakeListChatModel
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate, MessagesPlaceholder, PromptTemplate
from langchain_core.runnables import Runnable, RunnableParallel, RunnablePassthrough
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_text_splitters import RecursiveCharacterTextSplitter

from kvboost_rag import Engine, EngineConfig
from langchain_kvboost import ChatKVBoost
from langchain_kvboost.demo.embeddings import MeanPoolingEmbeddings
from langchain_kvboost.documents import warm_documents
from langchain_kvboost.vectorstores import KVBoostVectorStore
from tests.scripted import DOCUMENTS, ScriptedEngine, WordEmbeddings, prompt_tokens, reused, scripted

QUESTIONS = [
    "When does the harbour open, and on which day is the market held?",
    "Do farmers sell cheese, apples and wool at the market behind the church, and is the harbour closed?",
    "Which lamp burns whale oil in the lighthouse?",
]
PROMPT = ChatPromptTemplate.from_messages(
    [("system", "Answer from the context.\n\n{context}"), ("human", "{question}")]
)


def join(documents: Sequence[Document]) -> str:
    return "\n\n".join(document.page_content for document in documents)


def rag_chain(store: Any, llm: BaseChatModel, k: int = 2) -> Runnable[str, AIMessage]:
    """The chain of every tutorial, up to the message."""
    retriever = store.as_retriever(search_kwargs={"k": k})
    inputs = {"context": retriever | join, "question": RunnablePassthrough()}
    return inputs | PROMPT | llm


def store_on(engine: ScriptedEngine, documents: Sequence[Document] = DOCUMENTS) -> KVBoostVectorStore:
    return KVBoostVectorStore.from_documents(
        list(documents), WordEmbeddings(), engine=engine, store_class=InMemoryVectorStore
    )


class Usages(BaseCallbackHandler):
    """Collects the usage of every answer, as a tracer does."""

    def __init__(self) -> None:
        self.found: list[Any] = []

    def on_llm_end(self, response: Any, **_: Any) -> None:
        self.found.append(response.generations[0][0].message.usage_metadata)


class TestChain:
    def test_the_model_is_the_only_thing_that_changes(self) -> None:
        engine = scripted("smollm2", "At six.", "At six.")
        store = store_on(engine)
        for llm in (FakeListChatModel(responses=["At six."]), ChatKVBoost(engine=engine, max_tokens=16)):
            chain = rag_chain(store, llm) | StrOutputParser()
            assert chain.invoke(QUESTIONS[0]) == "At six."
            assert chain.get_output_jsonschema() == {"title": "StrOutputParserOutput", "type": "string"}
            assert "".join(chain.stream(QUESTIONS[0])) == "At six."

    def test_batch_keeps_the_order_and_reuses_documents(self) -> None:
        engine = scripted("smollm2")
        chain = rag_chain(store_on(engine), ChatKVBoost(engine=engine, max_tokens=4))
        messages = chain.batch(QUESTIONS)
        one_by_one = [chain.invoke(question) for question in QUESTIONS]
        for question, message, again in zip(QUESTIONS, messages, one_by_one, strict=True):
            documents = store_on(engine).similarity_search(question, k=2)
            assert reused(message) > 0.9 * sum(engine.tokens(doc.page_content) for doc in documents)
            assert prompt_tokens(message) == prompt_tokens(again)
            assert reused(again) >= reused(message)
        assert sorted(engine.prompts[:3]) == sorted(engine.prompts[3:])

    def test_abatch_and_batch_as_completed(self) -> None:
        engine = scripted("smollm2")
        chain = rag_chain(store_on(engine), ChatKVBoost(engine=engine, max_tokens=4))
        messages = asyncio.run(chain.abatch(QUESTIONS))
        completed = dict(chain.batch_as_completed(QUESTIONS))
        assert [prompt_tokens(completed[i]) for i in range(3)] == [prompt_tokens(message) for message in messages]

    def test_streams_as_it_is_written(self) -> None:
        engine = scripted("smollm2", "It opens at six in the morning.", "It opens at six in the morning.")
        chain = rag_chain(store_on(engine), ChatKVBoost(engine=engine, max_tokens=64)) | StrOutputParser()
        deltas = list(chain.stream(QUESTIONS[0]))
        assert len(deltas) > 5

        async def collect() -> list[str]:
            return [delta async for delta in chain.astream(QUESTIONS[0])]

        assert "".join(asyncio.run(collect())) == "".join(deltas) == "It opens at six in the morning."

    def test_events_show_the_steps(self) -> None:
        engine = scripted("smollm2", "At six.")
        chain = rag_chain(store_on(engine), ChatKVBoost(engine=engine, max_tokens=16))

        async def collect() -> list[Any]:
            return [event async for event in chain.astream_events(QUESTIONS[0], version="v2")]

        events = asyncio.run(collect())
        names = {event["event"] for event in events}
        assert {"on_retriever_end", "on_prompt_end", "on_chat_model_stream", "on_chat_model_end"} <= names
        [end] = [event for event in events if event["event"] == "on_chat_model_end"]
        assert end["data"]["output"].text == "At six."
        assert reused(end["data"]["output"]) > 0

    def test_sources_beside_the_answer(self) -> None:
        engine = scripted("smollm2", "At six.")
        retriever = store_on(engine).as_retriever(search_kwargs={"k": 1})
        answer = RunnablePassthrough.assign(context=lambda x: join(x["context"])) | PROMPT
        chain = RunnableParallel({"context": retriever, "question": RunnablePassthrough()}).assign(
            answer=answer | ChatKVBoost(engine=engine, max_tokens=16) | StrOutputParser()
        )
        result = chain.invoke("When does the harbour of Vell open?")
        assert result["answer"] == "At six."
        assert [doc.metadata["source"] for doc in result["context"]] == ["harbour"]

    def test_a_fallback_takes_what_is_too_long(self) -> None:
        small, large = scripted("smollm2", window=256), scripted("smollm2", "At six.")
        llm = ChatKVBoost(engine=small, max_tokens=16).with_fallbacks(
            [ChatKVBoost(engine=large, max_tokens=16)], exceptions_to_handle=(ContextOverflowError,)
        )
        message = (PROMPT | llm).invoke({"context": join(DOCUMENTS), "question": QUESTIONS[0]})
        assert message.text == "At six."
        assert len(large.prompts) == 1
        short = (PROMPT | llm).invoke({"context": "", "question": "Hm?"}, max_tokens=2)
        assert prompt_tokens(short) < 256
        assert len(large.prompts) == 1

    def test_a_fallback_streams(self) -> None:
        small, large = scripted("smollm2", window=256), scripted("smollm2", "At six.")
        llm = ChatKVBoost(engine=small).with_fallbacks([ChatKVBoost(engine=large, max_tokens=16)])
        chain = PROMPT | llm | StrOutputParser()
        assert "".join(chain.stream({"context": join(DOCUMENTS), "question": QUESTIONS[0]})) == "At six."


class TestLegacyChains:
    def test_create_retrieval_chain(self) -> None:
        engine = scripted("smollm2", "At six.", "On Thursdays.")
        document_prompt = PromptTemplate.from_template("Source: {source}\nContent: {page_content}")
        store = KVBoostVectorStore.from_documents(
            DOCUMENTS,
            WordEmbeddings(),
            engine=engine,
            store_class=InMemoryVectorStore,
            document_prompt=document_prompt,
        )
        prompt = ChatPromptTemplate.from_messages([("system", "Context:\n\n{context}"), ("human", "{input}")])
        llm = ChatKVBoost(engine=engine, max_tokens=32)
        stuff = create_stuff_documents_chain(llm, prompt, document_prompt=document_prompt)
        chain = create_retrieval_chain(store.as_retriever(search_kwargs={"k": 2}), stuff)
        usages = Usages()
        for question, answer in zip(QUESTIONS[:2], ("At six.", "On Thursdays."), strict=True):
            result = chain.invoke({"input": question}, config={"callbacks": [usages]})
            assert result["answer"] == answer
            rendered = [f"Source: {d.metadata['source']}\nContent: {d.page_content}" for d in result["context"]]
            assert "\n\n".join(rendered) in engine.prompts[-1]
            assert usages.found[-1]["input_token_details"]["cache_read"] > 0.9 * sum(map(engine.tokens, rendered))

    def test_history_aware_retriever(self) -> None:
        engine = scripted("smollm2", "On which day is the market held?", "On Thursdays.")
        llm = ChatKVBoost(engine=engine, max_tokens=64)
        history, human = MessagesPlaceholder("chat_history"), ("human", "{input}")
        condense = ChatPromptTemplate.from_messages([("system", "Rewrite the question."), history, human])
        answer = ChatPromptTemplate.from_messages([("system", "Context:\n\n{context}"), history, human])
        retriever = create_history_aware_retriever(llm, store_on(engine).as_retriever(search_kwargs={"k": 1}), condense)
        chain = create_retrieval_chain(retriever, create_stuff_documents_chain(llm, answer))
        turns = [HumanMessage("What is there in Vell?"), AIMessage("A market.")]
        result = chain.invoke({"input": "When is it?", "chat_history": turns})
        assert [doc.metadata["source"] for doc in result["context"]] == ["market"]
        assert result["answer"] == "On Thursdays."
        assert "When is it?" in engine.prompts[1]


class TestSplitterAndStore:
    """Recipe 5."""

    def test_splits_are_found_by_any_question(self) -> None:
        engine = scripted("smollm2")
        splitter = RecursiveCharacterTextSplitter(chunk_size=160, chunk_overlap=30, add_start_index=True)
        splits = splitter.split_documents(DOCUMENTS)
        assert len(splits) > len(DOCUMENTS)
        store = store_on(engine)
        store.add_documents(splits)
        retriever = store.as_retriever(search_kwargs={"k": 2})
        found = retriever.batch(QUESTIONS)
        messages = rag_chain(store, ChatKVBoost(engine=engine, max_tokens=4)).batch(QUESTIONS)
        for documents, message in zip(found, messages, strict=True):
            assert len(documents) == 2
            assert reused(message) > 0.8 * sum(engine.tokens(doc.page_content) for doc in documents)


class TestFAISS:
    """Recipe 6."""

    @pytest.fixture
    def engine(self) -> ScriptedEngine:
        return scripted("smollm2")

    @pytest.fixture
    def store(self, engine: ScriptedEngine) -> KVBoostVectorStore:
        ids = [str(document.id) for document in DOCUMENTS]
        return KVBoostVectorStore.from_documents(DOCUMENTS, WordEmbeddings(), engine=engine, store_class=FAISS, ids=ids)

    def test_add_and_delete(self, engine: ScriptedEngine, store: KVBoostVectorStore) -> None:
        chat = ChatKVBoost(engine=engine, max_tokens=2)
        text = "The chapel of Vell has no tower. Its bell hangs in an oak tree, and is rung by whoever passes by."
        chat.invoke("And so, what?")
        template = reused(chat.invoke("And so, why?"))  # what every prompt begins with
        store.add_documents([Document(id="chapel", page_content=text)])
        assert store.similarity_search("the bell of the chapel in the oak tree", k=1)[0].id == "chapel"
        assert reused(chat.invoke(f"Well: {text}")) - template > 0.8 * engine.tokens(text)
        store.delete(["chapel"])
        assert store.similarity_search("the bell of the chapel in the oak tree", k=1)[0].id != "chapel"
        assert reused(chat.invoke(f"And so, {text}")) - template < 0.2 * engine.tokens(text)

    def test_save_and_load(self, engine: ScriptedEngine, store: KVBoostVectorStore, tmp_path: Path) -> None:
        store.save_local(str(tmp_path))
        later = scripted("smollm2")  # another process would begin cold
        inner = FAISS.load_local(str(tmp_path), WordEmbeddings(), allow_dangerous_deserialization=True)
        loaded = KVBoostVectorStore(inner, later)
        assert loaded.warm().computed == len(DOCUMENTS)
        for one, two in ((store, engine), (loaded, later)):
            message = rag_chain(one, ChatKVBoost(engine=two, max_tokens=4)).invoke(QUESTIONS[1])
            found = one.similarity_search(QUESTIONS[1], k=2)
            assert [doc.id for doc in found] == ["market", "harbour"]
            assert reused(message) > 0.9 * sum(two.tokens(doc.page_content) for doc in found)

    def test_mmr(self, engine: ScriptedEngine, store: KVBoostVectorStore) -> None:
        retriever = store.as_retriever(search_type="mmr", search_kwargs={"k": 3, "fetch_k": 4, "lambda_mult": 0.3})
        found = retriever.invoke(QUESTIONS[0])
        assert len({doc.id for doc in found}) == 3
        chain = {"context": retriever | join, "question": RunnablePassthrough()} | PROMPT
        message = (chain | ChatKVBoost(engine=engine, max_tokens=4)).invoke(QUESTIONS[0])
        assert reused(message) > 0.9 * sum(engine.tokens(doc.page_content) for doc in found)

    def test_a_plain_store_is_warmed_beside_it(self, engine: ScriptedEngine) -> None:
        store = FAISS.from_documents(DOCUMENTS, WordEmbeddings())
        assert warm_documents(engine, DOCUMENTS).computed == len(DOCUMENTS)
        message = rag_chain(store, ChatKVBoost(engine=engine, max_tokens=4)).invoke(QUESTIONS[0])
        assert reused(message) > 0.7 * prompt_tokens(message)


@pytest.mark.model
@pytest.mark.slow
class TestRealModel:
    def test_rag_answers_from_documents_in_another_order(self, model_path: Path, embeddings_path: Path) -> None:
        engine = Engine.from_pretrained(str(model_path), config=EngineConfig(selector="deviation", fallback=False))
        store = KVBoostVectorStore.from_documents(
            DOCUMENTS, MeanPoolingEmbeddings(str(embeddings_path)), engine=engine, store_class=FAISS
        )
        chain = rag_chain(store, ChatKVBoost(engine=engine, max_tokens=24))
        answers = chain.batch(["When does the harbour of Vell open?", "On which day is the market of Vell held?"])
        assert "six" in answers[0].text
        assert "Thursday" in answers[1].text
        assert all(reused(answer) > 0.6 * prompt_tokens(answer) for answer in answers)
        engine.close()
