"""Recipes with `create_agent`, as tutorials have them, with only the model exchanged."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import (
    AgentMiddleware,
    AgentState,
    LLMToolSelectorMiddleware,
    ModelFallbackMiddleware,
    ModelRequest,
    ModelResponse,
    SummarizationMiddleware,
    ToolRetryMiddleware,
    before_model,
    dynamic_prompt,
)
from langchain.agents.structured_output import AutoStrategy, ProviderStrategy, ToolStrategy
from langchain.tools import tool
from langchain_core.documents import Document
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, RemoveMessage, ToolMessage, trim_messages
from langchain_core.tools import BaseTool
from langchain_core.vectorstores import InMemoryVectorStore
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph.message import REMOVE_ALL_MESSAGES
from pydantic import BaseModel, Field

from langchain_kvboost import ChatKVBoost
from langchain_kvboost.vectorstores import KVBoostVectorStore
from tests.scripted import DOCUMENTS, ScriptedEngine, WordEmbeddings, call, prompt_tokens, reused, scripted

FAMILIES = ["qwen2.5", "smollm2"]  # tools shown by the chat template, and by a system prompt
SYSTEM = "You answer questions about Vell. Use the tool if you must."
HARBOUR, MARKET = DOCUMENTS[1].page_content, DOCUMENTS[2].page_content
BOTH = "When does the harbour open, and on which day is the market held?"
MARKET_FIRST = "Do farmers sell cheese, apples and wool at the market behind the church, and is the harbour closed?"


def store_on(engine: ScriptedEngine) -> KVBoostVectorStore:
    return KVBoostVectorStore.from_documents(
        DOCUMENTS, WordEmbeddings(), engine=engine, store_class=InMemoryVectorStore, ids=[doc.id for doc in DOCUMENTS]
    )


def retrieval_tool(store: KVBoostVectorStore, k: int = 2) -> BaseTool:
    @tool(response_format="content_and_artifact")
    def search_vell(query: str) -> tuple[str, list[Document]]:
        """Search what is known about Vell."""
        found = store.similarity_search(query, k=k)
        return "\n\n".join(doc.page_content for doc in found), found

    return search_vell


def chat_on(engine: ScriptedEngine, **options: Any) -> ChatKVBoost:
    return ChatKVBoost(**{"engine": engine, "max_tokens": 160, **options})


def ask(agent: Any, question: str, config: Any = None) -> list[Any]:
    messages: list[Any] = agent.invoke({"messages": [{"role": "user", "content": question}]}, config)["messages"]
    return messages


def document_tokens(engine: ScriptedEngine, documents: Sequence[Document]) -> int:
    return sum(engine.tokens(doc.page_content) for doc in documents)


@pytest.mark.parametrize("family", FAMILIES)
class TestRetrievalTool:
    """Recipe 1."""

    def test_results_reach_the_prompt_and_are_not_read_again(self, family: str) -> None:
        engine = scripted(family, call("search_vell", query=BOTH), "At six.")
        agent = create_agent(chat_on(engine), [retrieval_tool(store_on(engine))], system_prompt=SYSTEM)
        question, asked, result, answer = ask(agent, BOTH)
        assert isinstance(question, HumanMessage)
        assert [(one["name"], one["args"]) for one in asked.tool_calls] == [("search_vell", {"query": BOTH})]
        assert isinstance(result, ToolMessage)
        assert result.tool_call_id == asked.tool_calls[0]["id"]
        assert answer.content == "At six."
        assert not answer.tool_calls
        assert SYSTEM in engine.prompts[0]
        assert "search_vell" in engine.prompts[0]
        assert HARBOUR in engine.prompts[1]
        # The documents were warmed by the store, and the conversation up to here was read for the call.
        assert reused(answer) > 0.9 * (prompt_tokens(asked) + document_tokens(engine, result.artifact))

    def test_another_agent_finds_the_documents_in_another_order(self, family: str) -> None:
        engine = scripted(family)
        search = retrieval_tool(store_on(engine))
        chat, found = chat_on(engine), []
        for system, query in ((SYSTEM, BOTH), ("You are terse.", MARKET_FIRST)):
            engine.script = [call("search_vell", query=query), "Yes."]
            *_, result, answer = ask(create_agent(chat, [search], system_prompt=system), query)
            assert reused(answer) > 0.9 * document_tokens(engine, result.artifact)
            found.append([doc.id for doc in result.artifact])
        assert found == [["harbour", "market"], ["market", "harbour"]]

    def test_tools_are_not_read_again_whatever_the_system_prompt(self, family: str) -> None:
        engine = scripted(family)
        chat, search = chat_on(engine, max_tokens=4), retrieval_tool(store_on(engine))

        @tool
        def weather(place: str) -> str:
            """Tell the weather of a place, as it was seen from the lighthouse."""
            return f"Fine in {place}."

        report = chat.warm_tools([search, weather])
        assert report.computed
        for tools in ([search, weather], [weather, search]):
            engine.script = ["No."]
            answer = ask(create_agent(chat, tools, system_prompt="You wait at the mole."), "Who are you?")[-1]
            assert reused(answer) > 0.5 * prompt_tokens(answer)

    def test_streams(self, family: str) -> None:
        engine = scripted(family, call("search_vell", query=BOTH), "It opens at six in the morning.")
        agent = create_agent(chat_on(engine), [retrieval_tool(store_on(engine))], system_prompt=SYSTEM)
        inputs = {"messages": [HumanMessage(BOTH)]}
        deltas = [message for message, _ in agent.stream(inputs, stream_mode="messages")]
        words = [delta.text for delta in deltas if isinstance(delta, AIMessageChunk) and delta.text]
        assert "".join(words) == "It opens at six in the morning."
        assert len(words) > 5
        assert [delta.name for delta in deltas if isinstance(delta, ToolMessage)] == ["search_vell"]

    def test_async(self, family: str) -> None:
        engine = scripted(family, call("search_vell", query=BOTH), "At six.")
        agent = create_agent(chat_on(engine), [retrieval_tool(store_on(engine))], system_prompt=SYSTEM)

        async def run() -> tuple[list[Any], list[str]]:
            messages = (await agent.ainvoke({"messages": [HumanMessage(BOTH)]}))["messages"]
            engine.script = ["It is open."]
            further = agent.astream({"messages": [*messages, HumanMessage("Is it?")]}, stream_mode="messages")
            return messages, [delta.text async for delta, _ in further]

        messages, words = asyncio.run(run())
        assert messages[-1].content == "At six."
        assert "".join(words) == "It is open."

    def test_an_error_of_a_tool_is_told_to_the_model(self, family: str) -> None:
        engine = scripted(family, call("divide", a=1, b=0), "That cannot be.")

        @tool
        def divide(a: int, b: int) -> float:
            """Divide a by b."""
            return a / b

        middleware = [ToolRetryMiddleware(max_retries=0, on_failure="continue")]
        *_, result, answer = ask(create_agent(chat_on(engine), [divide], middleware=middleware), "1 / 0?")
        assert result.status == "error"
        assert "ZeroDivisionError" in engine.prompts[1]
        assert answer.content == "That cannot be."

    def test_two_calls_in_one_answer(self, family: str) -> None:
        calls = call("search_vell", query="harbour of Vell") + call("search_vell", query="market of Vell")
        engine = scripted(family, calls, "At six, on Thursdays.")
        agent = create_agent(chat_on(engine), [retrieval_tool(store_on(engine), k=1)], system_prompt=SYSTEM)
        _, asked, first, second, answer = ask(agent, BOTH)
        assert [one["id"] for one in asked.tool_calls] == [first.tool_call_id, second.tool_call_id]
        assert engine.prompts[1].index(HARBOUR) < engine.prompts[1].index(MARKET)
        assert answer.content == "At six, on Thursdays."


class TestDocumentsByMiddleware:
    """Recipes 2 and 3."""

    def test_documents_in_the_system_message(self) -> None:
        engine = scripted()
        store = store_on(engine)

        @dynamic_prompt
        def with_context(request: ModelRequest[Any]) -> str:
            found = store.similarity_search(request.messages[-1].text, k=2)
            return "Answer from this context.\n\n" + "\n\n".join(doc.page_content for doc in found)

        agent = create_agent(chat_on(engine, max_tokens=4), [], middleware=[with_context])
        least = document_tokens(engine, DOCUMENTS[1:3])
        for question in (BOTH, MARKET_FIRST):
            answer = ask(agent, question)[-1]
            assert isinstance(answer, AIMessage)
            assert reused(answer) > 0.9 * least
        first, second = engine.prompts
        assert first.index(HARBOUR) < first.index(MARKET) < first.index(BOTH)
        assert second.index(MARKET) < second.index(HARBOUR) < second.index(MARKET_FIRST)

    def test_documents_behind_the_query(self) -> None:
        engine = scripted()
        store = store_on(engine)

        class Context(AgentState[Any]):
            context: list[Document]

        class Retrieve(AgentMiddleware[Context]):
            state_schema = Context

            def before_model(self, state: Context, runtime: Any) -> dict[str, Any]:
                last = state["messages"][-1]
                found = store.similarity_search(last.text, k=2)
                context = "\n\n".join(doc.page_content for doc in found)
                content = f"{last.text}\n\nUse this context:\n\n{context}"
                return {"messages": [last.model_copy(update={"content": content})], "context": found}

        agent = create_agent(chat_on(engine, max_tokens=4), [], middleware=[Retrieve()], checkpointer=InMemorySaver())
        config = {"configurable": {"thread_id": "1"}}
        first = ask(agent, BOTH, config)[-1]
        assert engine.prompts[0].index(BOTH) < engine.prompts[0].index(HARBOUR) < engine.prompts[0].index(MARKET)
        assert reused(first) > 0.9 * document_tokens(engine, DOCUMENTS[1:3])
        second = ask(agent, MARKET_FIRST, config)[-1]
        assert engine.prompts[1].index(MARKET_FIRST) < engine.prompts[1].rindex(MARKET)
        assert reused(second) > 0.9 * (prompt_tokens(first) + document_tokens(engine, DOCUMENTS[1:3]))
        assert [doc.id for doc in agent.get_state(config).values["context"]] == ["market", "harbour"]

    def test_documents_behind_the_query_that_history_does_not_keep(self) -> None:
        engine = scripted()
        store = store_on(engine)

        class Retrieve(AgentMiddleware[Any]):
            def wrap_model_call(
                self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], ModelResponse[Any]]
            ) -> ModelResponse[Any]:
                *before, last = request.messages
                context = "\n\n".join(doc.page_content for doc in store.similarity_search(last.text, k=2))
                return handler(request.override(messages=[*before, HumanMessage(f"{last.text}\n\n{context}")]))

        agent = create_agent(chat_on(engine, max_tokens=4), [], middleware=[Retrieve()], checkpointer=InMemorySaver())
        config = {"configurable": {"thread_id": "1"}}
        ask(agent, BOTH, config)
        answer = ask(agent, MARKET_FIRST, config)[-1]
        assert engine.prompts[1].count(HARBOUR) == 1  # the first turn is replayed without its documents
        assert reused(answer) > 0.9 * document_tokens(engine, DOCUMENTS[1:3])


class Opening(BaseModel):
    """When something opens."""

    place: str = Field(description="what opens")
    hour: int = Field(description="hour of the day", ge=0, le=24)


OPENING = '{"place": "harbour", "hour": 6}'


class TestResponseFormat:
    """Recipe 7."""

    @pytest.mark.parametrize("family", FAMILIES)
    @pytest.mark.parametrize("strategy", [ToolStrategy, ProviderStrategy, AutoStrategy, lambda schema: schema])
    def test_without_tools_any_model_gives_the_object(self, family: str, strategy: Any) -> None:
        engine = scripted(family)  # no script: even random words make an object
        agent = create_agent(chat_on(engine, max_tokens=80), [], response_format=strategy(Opening))
        state = agent.invoke({"messages": [HumanMessage("When does the harbour open?")]})
        assert isinstance(state["structured_response"], Opening)

    @pytest.mark.parametrize("family", FAMILIES)
    @pytest.mark.parametrize("strategy", [ToolStrategy, ProviderStrategy, lambda schema: schema])
    def test_behind_a_tool(self, family: str, strategy: Any) -> None:
        engine = scripted(family)
        last = call("Opening", place="harbour", hour=6) if strategy is ToolStrategy else OPENING
        engine.script = [call("search_vell", query="harbour of Vell"), last]
        tools = [retrieval_tool(store_on(engine), k=1)]
        agent = create_agent(chat_on(engine), tools, system_prompt=SYSTEM, response_format=strategy(Opening))
        state = agent.invoke({"messages": [HumanMessage("When does the harbour open?")]})
        assert state["structured_response"] == Opening(place="harbour", hour=6)
        assert HARBOUR in engine.prompts[1]
        answer = [message for message in state["messages"] if isinstance(message, AIMessage)][-1]
        assert reused(answer) > 0.9 * engine.tokens(HARBOUR)
        assert not engine.script

    def test_a_json_schema_gives_a_dict(self) -> None:
        engine = scripted("qwen2.5", OPENING)
        agent = create_agent(chat_on(engine), [], response_format=Opening.model_json_schema())
        state = agent.invoke({"messages": [HumanMessage("When does the harbour open?")]})
        assert state["structured_response"] == {"place": "harbour", "hour": 6}

    def test_the_profile_decides_for_the_native_way(self) -> None:
        engine = scripted("qwen2.5", OPENING)
        assert chat_on(engine).profile["structured_output"]
        agent = create_agent(chat_on(engine), [], response_format=Opening)
        messages = agent.invoke({"messages": [HumanMessage("When?")]})["messages"]
        assert not any(isinstance(message, ToolMessage) for message in messages)


class TestMemory:
    """Recipe 9."""

    @pytest.mark.parametrize("family", FAMILIES)
    def test_an_earlier_turn_is_found_again(self, family: str) -> None:
        engine = scripted(family, call("search_vell", query=BOTH), "At six.", "On Thursdays.", "Goodbye.")
        tools = [retrieval_tool(store_on(engine))]
        agent = create_agent(chat_on(engine), tools, system_prompt=SYSTEM, checkpointer=InMemorySaver())
        config = {"configurable": {"thread_id": "1"}}
        answers = [ask(agent, text, config)[-1] for text in (BOTH, "And the market?", "Thanks.")]
        assert [answer.content for answer in answers] == ["At six.", "On Thursdays.", "Goodbye."]
        for earlier, later in pairwise(answers):
            assert 0.95 * prompt_tokens(earlier) <= reused(later) < prompt_tokens(later)
        other = ask(agent, BOTH, {"configurable": {"thread_id": "2"}})
        assert len(other) == 2
        assert "Thursdays" not in engine.prompts[-1].split("user\n")[-1]

    def test_namespaces_keep_conversations_apart(self) -> None:
        engine = scripted("qwen2.5", "Hello.", "Hello.", "Hello.")
        found = []
        for namespace in ("a", "b", "a"):
            agent = create_agent(chat_on(engine, namespace=namespace), [], system_prompt=SYSTEM)
            found.append(reused(ask(agent, "Who keeps the list of berths in the harbour?")[-1]))
        assert found[:2] == [0, 0]
        assert found[2] > 0

    def test_trimmed_history(self) -> None:
        engine = scripted("qwen2.5", *["At six."] * 4)
        chat = chat_on(engine)
        limit = chat.get_num_tokens_from_messages([HumanMessage(BOTH), AIMessage("At six."), HumanMessage(BOTH)])

        @before_model
        def trim(state: AgentState[Any], runtime: Any) -> dict[str, Any] | None:
            kept = trim_messages(state["messages"], max_tokens=limit, token_counter=chat, start_on="human")
            return {"messages": [RemoveMessage(id=REMOVE_ALL_MESSAGES), *kept]}

        agent = create_agent(chat, [], middleware=[trim], checkpointer=InMemorySaver())
        config = {"configurable": {"thread_id": "1"}}
        messages = [ask(agent, BOTH, config) for _ in range(4)][-1]
        assert len(messages) == 4
        assert all(prompt_tokens(message) <= limit for message in messages if isinstance(message, AIMessage))

    def test_summarised_history(self) -> None:
        engine = scripted("qwen2.5", "At six.", "On Thursdays.", "Harbour at six, market on Thursdays.", "Goodbye.")
        chat = chat_on(engine)
        summarise = SummarizationMiddleware(model=chat, trigger=("messages", 5), keep=("messages", 1))
        agent = create_agent(chat, [], middleware=[summarise], checkpointer=InMemorySaver())
        config = {"configurable": {"thread_id": "1"}}
        for question in (BOTH, "And the market?"):
            ask(agent, question, config)
        messages = ask(agent, "Thanks.", config)
        assert "At six." in engine.prompts[2]
        assert "Harbour at six, market on Thursdays." in messages[0].text
        assert [message.text for message in messages[1:]] == ["Thanks.", "Goodbye."]
        assert BOTH not in engine.prompts[3]

    def test_summarised_when_the_window_is_nearly_full(self) -> None:
        engine = scripted("qwen2.5", "At six.", "At six.", "Vell, in short.", "Yes.", window=1024)
        chat = chat_on(engine, max_tokens=64)
        summarise = SummarizationMiddleware(
            model=chat, trigger=("fraction", 0.3), keep=("messages", 1), summary_prompt="Summarise:\n{messages}"
        )
        agent = create_agent(chat, [], middleware=[summarise], checkpointer=InMemorySaver())
        config = {"configurable": {"thread_id": "1"}}
        messages = [ask(agent, f"{turn}. {HARBOUR}", config) for turn in range(3)]
        used = [prompt_tokens(turn[-1]) for turn in messages[:2]]
        assert used[0] < 0.3 * 1024 < used[1]  # the middleware goes by the usage that the model told
        assert [len(turn) for turn in messages] == [2, 4, 3]
        assert "Vell, in short." in engine.prompts[-1]


class TestMiddleware:
    def test_fallback_model_takes_a_prompt_that_is_too_long(self) -> None:
        small, large = scripted("qwen2.5", window=256), scripted("qwen2.5", "At six.")
        agent = create_agent(chat_on(small), [], middleware=[ModelFallbackMiddleware(chat_on(large))])
        long = " ".join(doc.page_content for doc in DOCUMENTS)
        assert ask(agent, f"{long}\n\n{BOTH}")[-1].content == "At six."

    def test_the_model_selects_its_tools(self) -> None:
        engine = scripted("qwen2.5", '{"tools": ["search_vell"]}', "Fine.")

        @tool
        def weather(place: str) -> str:
            """Tell the weather."""
            return f"Fine in {place}."

        chat = chat_on(engine)
        tools = [retrieval_tool(store_on(engine)), weather]
        agent = create_agent(chat, tools, middleware=[LLMToolSelectorMiddleware(model=chat, max_tools=1)])
        assert ask(agent, BOTH)[-1].content == "Fine."
        assert "search_vell" in engine.prompts[1]
        assert "weather" not in engine.prompts[1]
