"""Recipes with LangGraph, as tutorials have them, with only the model exchanged."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import pytest
from langchain.agents import create_agent
from langchain.tools import tool
from langchain_core.documents import Document
from langchain_core.messages import AIMessage, AnyMessage, HumanMessage, ToolMessage
from langchain_core.tools import BaseTool
from langchain_core.vectorstores import InMemoryVectorStore
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition
from langgraph.types import Command, Send, interrupt
from pydantic import BaseModel, Field
from typing_extensions import TypedDict

from langchain_kvboost import ChatKVBoost
from langchain_kvboost.vectorstores import KVBoostVectorStore
from tests.scripted import DOCUMENTS, ScriptedEngine, WordEmbeddings, call, prompt_tokens, reused, scripted

FAMILIES = ["qwen2.5", "smollm2"]  # tools shown by the chat template, and by a system prompt
TEXTS = {str(document.id): document.page_content for document in DOCUMENTS}


def search_on(engine: ScriptedEngine, documents: Sequence[Document] = DOCUMENTS, k: int = 1) -> BaseTool:
    store = KVBoostVectorStore.from_documents(
        list(documents), WordEmbeddings(), engine=engine, store_class=InMemoryVectorStore
    )

    @tool
    def search_vell(query: str) -> str:
        """Search what is known about Vell."""
        return "\n\n".join(doc.page_content for doc in store.similarity_search(query, k=k))

    return search_vell


class Grade(BaseModel):
    """Whether a document has to do with the question."""

    binary_score: Literal["yes", "no"] = Field(description="'yes' if it has, 'no' if it has not")


def agentic_rag(llm: ChatKVBoost, search: BaseTool) -> Any:
    """Recipe 4: search or answer, grade what was found, rewrite the question or answer it."""
    searching, grading = llm.bind_tools([search]), llm.with_structured_output(Grade)

    def respond(state: MessagesState) -> dict[str, Any]:
        return {"messages": [searching.invoke(state["messages"])]}

    def grade(state: MessagesState) -> Literal["answer", "rewrite"]:
        question, found = state["messages"][0].text, state["messages"][-1].text
        grade = grading.invoke([HumanMessage(f"Document:\n\n{found}\n\nQuestion: {question}\n\nIs it relevant?")])
        assert isinstance(grade, Grade)
        return "answer" if grade.binary_score == "yes" else "rewrite"

    def rewrite(state: MessagesState) -> dict[str, Any]:
        better = llm.invoke([HumanMessage(f"Improve this question: {state['messages'][0].text}")])
        return {"messages": [HumanMessage(better.text)]}

    def answer(state: MessagesState) -> dict[str, Any]:
        question, found = state["messages"][0].text, state["messages"][-1].text
        return {"messages": [llm.invoke([HumanMessage(f"Question: {question}\n\nContext:\n\n{found}")])]}

    graph = StateGraph(MessagesState)
    graph.add_node(respond)
    graph.add_node("retrieve", ToolNode([search]))
    graph.add_node(rewrite)
    graph.add_node(answer)
    graph.add_edge(START, "respond")
    graph.add_conditional_edges("respond", tools_condition, {"tools": "retrieve", END: END})
    graph.add_conditional_edges("retrieve", grade)
    graph.add_edge("rewrite", "respond")
    graph.add_edge("answer", END)
    return graph.compile()


@pytest.mark.parametrize("family", FAMILIES)
class TestAgenticRAG:
    def run(self, engine: ScriptedEngine, question: str) -> list[AnyMessage]:
        graph = agentic_rag(ChatKVBoost(engine=engine, max_tokens=128), search_on(engine))
        messages: list[AnyMessage] = graph.invoke({"messages": [HumanMessage(question)]})["messages"]
        assert not engine.script
        return messages

    def test_answers_at_once(self, family: str) -> None:
        messages = self.run(scripted(family, "Good morning."), "Hello!")
        assert [message.text for message in messages] == ["Hello!", "Good morning."]

    def test_rewrites_what_finds_nothing(self, family: str) -> None:
        engine = scripted(
            family,
            call("search_vell", query="the school of Vell"),
            '{"binary_score": "no"}',
            "When does the harbour of Vell open?",
            call("search_vell", query="harbour of Vell"),
            '{"binary_score": "yes"}',
            "At six.",
        )
        messages = self.run(engine, "When does it open?")
        assert [message.type for message in messages] == ["human", "ai", "tool", "human", "ai", "tool", "ai"]
        assert messages[2].text == TEXTS["school"]
        assert messages[5].text == TEXTS["harbour"]
        assert messages[-1].text == "At six."
        assert TEXTS["harbour"] in engine.prompts[4]  # the grader's
        assert TEXTS["harbour"] in engine.prompts[5]
        assert reused(messages[-1]) > 0.9 * engine.tokens(TEXTS["harbour"])
        assert reused(messages[4]) > 0.9 * prompt_tokens(messages[1])  # the conversation went on

    def test_any_grade_is_a_grade(self, family: str) -> None:
        engine = scripted(family)
        chat = ChatKVBoost(engine=engine, max_tokens=64)
        for method in ("json_schema", "function_calling"):
            grade = chat.with_structured_output(Grade, method=method).invoke("Is it relevant?")  # type: ignore[arg-type]
            assert isinstance(grade, Grade)


class Route(TypedDict):
    source: Literal["buildings", "people"]
    query: str


class Routes(BaseModel):
    """Knowledge bases to ask, each with a question made for it."""

    routes: list[Route] = Field(min_length=1, max_length=2)


class RouterState(TypedDict):
    query: str
    routes: list[Route]
    results: Annotated[list[tuple[str, AIMessage]], operator.add]
    answer: str


class TestRouter:
    """Recipe 8."""

    def test_knowledge_bases_are_asked_in_parallel(self) -> None:
        routing = (
            '{"routes": [{"source": "buildings", "query": "lighthouse of Vell"}, '
            '{"source": "people", "query": "pupils of the school"}]}'
        )
        engine = scripted("qwen2.5", routing)
        llm = ChatKVBoost(engine=engine, max_tokens=160)
        shelves = {"buildings": DOCUMENTS[:2], "people": DOCUMENTS[2:]}
        searches = {name: search_on(engine, documents) for name, documents in shelves.items()}

        def classify(state: RouterState) -> dict[str, Any]:
            found = llm.with_structured_output(Routes).invoke(state["query"])
            assert isinstance(found, Routes)
            return {"routes": found.routes}

        def fan_out(state: RouterState) -> list[Send]:
            return [Send("ask", route) for route in state["routes"]]

        def ask(route: Route) -> dict[str, Any]:
            context = searches[route["source"]].invoke({"query": route["query"]})
            message = llm.invoke(f"{context}\n\n{route['query']}", max_tokens=8)
            return {"results": [(route["source"], message)]}

        def synthesise(state: RouterState) -> dict[str, Any]:
            engine.script = ["Both."]
            texts = "\n\n".join(f"{source}: {message.text!r}" for source, message in state["results"])
            return {"answer": llm.invoke(f"{texts}\n\n{state['query']}").text}

        graph = StateGraph(RouterState)
        for node in (classify, ask, synthesise):
            graph.add_node(node.__name__, node)  # type: ignore[call-overload]
        graph.add_edge(START, "classify")
        graph.add_conditional_edges("classify", fan_out, ["ask"])
        graph.add_edge("ask", "synthesise")
        graph.add_edge("synthesise", END)
        state = graph.compile().invoke({"query": "Who climbs, and who paints?", "results": []})
        assert state["answer"] == "Both."
        assert [source for source, _ in state["results"]] == ["buildings", "people"]
        for (_, message), name in zip(state["results"], ("lighthouse", "school"), strict=True):
            assert sum(TEXTS[name] in prompt for prompt in engine.prompts[1:3]) == 1
            assert reused(message) > 0.9 * engine.tokens(TEXTS[name])

    @pytest.mark.parametrize("family", FAMILIES)
    def test_knowledge_bases_as_agents_that_are_tools(self, family: str) -> None:
        engine = scripted(family)
        llm = ChatKVBoost(engine=engine, max_tokens=160)
        inner = create_agent(llm, [search_on(engine)], name="librarian")

        @tool
        def ask_librarian(request: str) -> str:
            """Ask the librarian of Vell."""
            text: str = inner.invoke({"messages": [HumanMessage(request)]})["messages"][-1].text
            return text

        engine.script = [
            call("ask_librarian", request="lighthouse of Vell"),
            call("search_vell", query="lighthouse of Vell"),
            "In 1872.",
            "It was built in 1872.",
        ]
        messages = create_agent(llm, [ask_librarian]).invoke({"messages": [HumanMessage("How old is it?")]})["messages"]
        assert [message.text for message in messages[2:]] == ["In 1872.", "It was built in 1872."]
        assert TEXTS["lighthouse"] in engine.prompts[2]
        assert TEXTS["lighthouse"] not in engine.prompts[3]


class Deciding(ChatKVBoost):
    """Binds another tool choice at every step, for a model too weak to choose."""

    choices: list[str]

    def bind_tools(self, tools: Any, **options: Any) -> Any:
        choice = self.choices.pop(0)
        return super().bind_tools(tools, **{**options, "tool_choice": choice})


@pytest.mark.parametrize("family", FAMILIES)
class TestToolLoop:
    def tools(self) -> list[BaseTool]:
        @tool
        def tide(hour: Annotated[int, Field(ge=0, le=23)]) -> str:
            """Tell the tide at an hour."""
            return f"At {hour} the tide is high."

        @tool
        def berths(ship: Literal["Ilse", "Mara"]) -> str:
            """Tell where a ship lies."""
            return f"The {ship} lies at berth 4."

        return [tide, berths]

    def test_forced_calls_can_always_be_run(self, family: str) -> None:
        """Even random words make valid calls: no script here."""
        engine = scripted(family)
        llm = Deciding(engine=engine, max_tokens=96, choices=["tide", "berths", "any", "none"])
        tools = self.tools()

        def step(state: MessagesState) -> dict[str, Any]:
            return {"messages": [llm.bind_tools(tools).invoke(state["messages"])]}

        graph = StateGraph(MessagesState)
        graph.add_node(step)
        graph.add_node("tools", ToolNode(tools))
        graph.add_edge(START, "step")
        graph.add_conditional_edges("step", tools_condition)
        graph.add_edge("tools", "step")
        messages = graph.compile().invoke({"messages": [HumanMessage("Where may I land?")]})["messages"]
        assert not llm.choices
        asked = [message for message in messages if isinstance(message, AIMessage) and message.tool_calls]
        assert [message.tool_calls[0]["name"] for message in asked[:2]] == ["tide", "berths"]
        results = [message for message in messages if isinstance(message, ToolMessage)]
        assert len(results) == 3
        assert all(result.status == "success" for result in results)
        assert all(result.text in engine.prompts[-1] for result in results)
        assert reused(asked[-1]) > 0.9 * prompt_tokens(asked[-2])

    def test_parallel_calls(self, family: str) -> None:
        both = call("tide", hour=6) + call("berths", ship="Mara")
        engine = scripted(family, both, "At six, at berth 4.")
        llm = ChatKVBoost(engine=engine, max_tokens=160)
        tools = self.tools()
        asked = llm.bind_tools(tools, tool_choice="any", parallel_tool_calls=True).invoke("Where may I land?")
        assert [one["name"] for one in asked.tool_calls] == ["tide", "berths"]
        graph = StateGraph(MessagesState)
        graph.add_node("tools", ToolNode(tools))
        graph.add_edge(START, "tools")
        messages = graph.compile().invoke({"messages": [HumanMessage("Where may I land?"), asked]})["messages"]
        answer = llm.bind_tools(tools).invoke(messages)
        assert answer.text == "At six, at berth 4."
        assert "At 6 the tide is high." in engine.prompts[1]
        assert "The Mara lies at berth 4." in engine.prompts[1]

    def test_a_person_is_asked_between_call_and_result(self, family: str) -> None:
        engine = scripted(family, call("land", berth=4), "You may.")

        @tool
        def land(berth: int) -> str:
            """Land at a berth."""
            return f"The harbour master says {interrupt({'berth': berth})}."

        agent = create_agent(ChatKVBoost(engine=engine, max_tokens=96), [land], checkpointer=InMemorySaver())
        config: Any = {"configurable": {"thread_id": "1"}}
        asked = agent.invoke({"messages": [HumanMessage("May I land?")]}, config)
        assert asked["__interrupt__"][0].value == {"berth": 4}
        answer = agent.invoke(Command(resume="yes"), config)["messages"][-1]
        assert answer.text == "You may."
        assert "The harbour master says yes." in engine.prompts[1]
        assert reused(answer) > 0.9 * prompt_tokens(asked["messages"][1])
