"""What every integration must do, written once and run through each: ChatKVBoost of LangChain, KVBoost of LlamaIndex.

An adapter says how a framework asks and where it puts its answer. All else is the behaviour.
"""

from __future__ import annotations

import asyncio
import functools
import threading
import time
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import pytest
from langchain_core.messages import AIMessage, AIMessageChunk
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.prompts import PromptTemplate
from pydantic import BaseModel

from kvboost_rag import (
    ConfigError,
    ContextOverflowError,
    Engine,
    EngineConfig,
    PromptError,
    RequestTimeoutError,
    SamplingParams,
)
from kvboost_rag.frameworks import EngineOptions, engines
from langchain_kvboost import ChatKVBoost
from llama_index.llms.kvboost import KVBoost
from tests.recording import RecordingEngine, recording
from tests.tiny import Forwards, model_of, text, tokenizer_of

LONG = 3000  # tokens of an answer that nobody waits for
ROOMY = 400  # tokens of an answer with a call, by tiny tokenizers
PATIENCE = 30  # seconds until a test that hangs is given up
QUIET = EngineConfig(calibration_dir=None)
Turn = tuple[str, str]  # role and text


@dataclass(frozen=True)
class Answer:
    """An answer in no framework's words."""

    text: str
    calls: tuple[tuple[str, Mapping[str, Any]], ...]
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    created_tokens: int
    reuse: Mapping[str, Any]
    finish_reason: str


class LangChain:
    """How LangChain asks."""

    @staticmethod
    def make(**options: Any) -> ChatKVBoost:
        return ChatKVBoost(**options)

    @staticmethod
    def _bound(llm: Any, call: dict[str, Any]) -> Any:
        tools, choice = call.pop("tools", None), call.pop("tool_choice", None)
        return llm if tools is None else llm.bind_tools(tools, tool_choice=choice)

    def ask(self, llm: Any, turns: Sequence[Turn], **call: Any) -> Answer:
        return self._answer(self._bound(llm, call).invoke(list(turns), **call))

    async def aask(self, llm: Any, turns: Sequence[Turn], **call: Any) -> Answer:
        return self._answer(await self._bound(llm, call).ainvoke(list(turns), **call))

    def stream(self, llm: Any, turns: Sequence[Turn], **call: Any) -> Iterator[Any]:
        return iter(self._bound(llm, call).stream(list(turns), **call))

    async def astream(self, llm: Any, turns: Sequence[Turn], **call: Any) -> AsyncIterator[Any]:
        return self._bound(llm, call).astream(list(turns), **call)

    @staticmethod
    def delta(piece: AIMessageChunk) -> str:
        return str(piece.content)

    def whole(self, pieces: Sequence[AIMessageChunk]) -> Answer:
        return self._answer(functools.reduce(lambda one, other: one + other, pieces))

    def structured(self, llm: Any, schema: type[BaseModel], question: str) -> Any:
        return llm.with_structured_output(schema).invoke(question)

    def structured_stream(self, llm: Any, schema: type[BaseModel], question: str) -> list[Any]:
        return list(llm.with_structured_output(schema).stream(question))

    @staticmethod
    def _answer(message: AIMessage) -> Answer:
        usage, details = message.usage_metadata, message.response_metadata
        assert usage is not None
        return Answer(
            str(message.content),
            tuple((call["name"], call["args"]) for call in message.tool_calls),
            usage["input_tokens"],
            usage["output_tokens"],
            usage["input_token_details"]["cache_read"],
            usage["input_token_details"]["cache_creation"],
            details,
            details["finish_reason"],
        )


class LlamaIndex:
    """How LlamaIndex asks."""

    @staticmethod
    def make(**options: Any) -> KVBoost:
        return KVBoost(**options)

    @staticmethod
    def _messages(turns: Sequence[Turn]) -> list[ChatMessage]:
        roles = {"human": "user", "ai": "assistant"}
        return [ChatMessage(role=roles.get(role, role), content=content) for role, content in turns]

    def ask(self, llm: Any, turns: Sequence[Turn], **call: Any) -> Answer:
        return self._answer(llm.chat(self._messages(turns), **call))

    async def aask(self, llm: Any, turns: Sequence[Turn], **call: Any) -> Answer:
        return self._answer(await llm.achat(self._messages(turns), **call))

    def stream(self, llm: Any, turns: Sequence[Turn], **call: Any) -> Iterator[Any]:
        return iter(llm.stream_chat(self._messages(turns), **call))

    async def astream(self, llm: Any, turns: Sequence[Turn], **call: Any) -> AsyncIterator[Any]:
        pieces: AsyncIterator[Any] = await llm.astream_chat(self._messages(turns), **call)
        return pieces

    @staticmethod
    def delta(piece: Any) -> str:
        return str(piece.delta)

    def whole(self, pieces: Sequence[Any]) -> Answer:
        return self._answer(pieces[-1])

    def structured(self, llm: Any, schema: type[BaseModel], question: str) -> Any:
        return llm.structured_predict(schema, PromptTemplate(question))

    def structured_stream(self, llm: Any, schema: type[BaseModel], question: str) -> list[Any]:
        return list(llm.stream_structured_predict(schema, PromptTemplate(question)))

    @staticmethod
    def _answer(response: Any) -> Answer:
        usage = response.raw["usage"]
        made = [block for block in response.message.blocks if block.block_type == "tool_call"]
        return Answer(
            response.message.content or "",
            tuple((block.tool_name, block.tool_kwargs) for block in made),
            usage["prompt_tokens"],
            usage["completion_tokens"],
            usage["prompt_tokens_details"]["cached_tokens"],
            usage["prompt_tokens_details"]["cache_creation_tokens"],
            response.raw,
            response.raw["finish_reason"],
        )


Adapter = LangChain | LlamaIndex
ADAPTERS: list[Adapter] = [LangChain(), LlamaIndex()]


@pytest.fixture(params=ADAPTERS, ids=lambda adapter: type(adapter).__name__)
def side(request: pytest.FixtureRequest) -> Adapter:
    adapter: Adapter = request.param
    return adapter


@functools.cache
def engine_for(family: str | None) -> RecordingEngine:
    return recording(family, window=8192)


def fresh_engine(family: str | None = None) -> RecordingEngine:
    engine = engine_for(family)
    engine.clear()
    engine.asked.clear()
    engine.says = None
    return engine


@pytest.fixture
def engine() -> RecordingEngine:
    return fresh_engine()


@pytest.fixture
def caller() -> RecordingEngine:
    """Whose template shows tools."""
    return fresh_engine("qwen2.5")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("models") / "tiny"
    model_of("llama").save_pretrained(path)
    tokenizer_of().save_pretrained(path)
    return str(path)


@pytest.fixture
def unloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "_engines", {})


def user(content: str) -> list[Turn]:
    return [("human", content)]


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(work, PATIENCE))


async def astreamed(side: Adapter, llm: Any, turns: Sequence[Turn], **call: Any) -> list[Any]:
    return [piece async for piece in await side.astream(llm, turns, **call)]


Form = Literal["ask", "aask", "stream", "astream"]
FORMS: list[Form] = ["ask", "aask", "stream", "astream"]
every_form = pytest.mark.parametrize("form", FORMS)
# Where each costs more: two show plain and streamed, blocking and on the loop.
costly_forms = pytest.mark.parametrize(
    "form", [pytest.param(form, marks=() if form in ("ask", "astream") else pytest.mark.slow) for form in FORMS]
)


def asked(side: Adapter, form: Form, llm: Any, turns: Sequence[Turn], **call: Any) -> Answer:
    """The answer, in any of the four forms."""
    if form == "ask":
        return side.ask(llm, turns, **call)
    if form == "aask":
        answer: Answer = run(side.aask(llm, turns, **call))
        return answer
    if form == "stream":
        return side.whole(list(side.stream(llm, turns, **call)))
    return side.whole(run(astreamed(side, llm, turns, **call)))


TOOL = {
    "type": "function",
    "function": {
        "name": "switch",
        "description": "Switch the lamp.",
        "parameters": {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"]},
    },
}
CALL = '<tool_call>\n{"name": "switch", "arguments": {"on": true}}\n</tool_call>'


class Lamp(BaseModel):
    """A lamp."""

    on: bool
    colour: Literal["red", "green"]


class TestAnswers:
    def test_every_form_says_the_same(self, side: Adapter, engine: RecordingEngine) -> None:
        llm = side.make(engine=engine, max_tokens=8)
        answers = [asked(side, form, llm, user(text(1, 20))) for form in FORMS]
        assert len({(a.text, a.calls, a.prompt_tokens, a.completion_tokens, a.finish_reason) for a in answers}) == 1
        assert answers[0].text
        assert answers[0].completion_tokens == 8

    def test_pieces_add_up(self, side: Adapter, engine: RecordingEngine) -> None:
        llm = side.make(engine=engine, max_tokens=12)
        for pieces in (list(side.stream(llm, user("q"))), run(astreamed(side, llm, user("q")))):
            assert len(pieces) > 3
            assert "".join(side.delta(piece) for piece in pieces) == side.ask(llm, user("q")).text

    def test_max_tokens(self, side: Adapter, engine: RecordingEngine) -> None:
        llm = side.make(engine=engine, max_tokens=5)
        assert side.ask(llm, user("q")).completion_tokens == 5
        short = side.ask(llm, user("q"), max_tokens=2)
        assert (short.completion_tokens, short.finish_reason) == (2, "length")

    def test_seeds(self, side: Adapter, engine: RecordingEngine) -> None:
        llm = side.make(engine=engine, max_tokens=12, temperature=1.0, seed=1)
        one, two, other = (side.ask(llm, user("q"), **call).text for call in ({}, {}, {"seed": 2}))
        assert one == two != other

    @every_form
    def test_sampling_reaches_the_engine(self, side: Adapter, engine: RecordingEngine, form: Form) -> None:
        values: dict[str, Any] = {"temperature": 0.5, "top_p": 0.5, "top_k": 3, "min_p": 0.2, "seed": 4}
        llm = side.make(engine=engine, max_tokens=3, namespace="a", timeout=60.0, reuse="exact", stop=["A"], **values)
        asked(side, form, llm, user("q"))
        assert engine.sampling == SamplingParams(max_tokens=3, stop=("A",), **values)
        asked(side, form, llm, user("q"), temperature=0.0, namespace="b", timeout=30.0, reuse="off", stop=["B"])
        assert (engine.sampling.temperature, engine.sampling.stop) == (0.0, ("A", "B"))
        assert [engine.options[name] for name in ("namespace", "timeout_s", "reuse")] == ["b", 30.0, "off"]

    @every_form
    @pytest.mark.parametrize(
        "call",
        [{"kindness": 1}, {"temperature": -1.0}, {"max_tokens": 0}, {"namespace": ""}, {"stop": [""]}, {"stop": 3}],
        ids=str,
    )
    def test_what_cannot_take_effect_raises(
        self, side: Adapter, engine: RecordingEngine, form: Form, call: dict[str, Any]
    ) -> None:
        with pytest.raises(ConfigError, match=next(iter(call))):
            asked(side, form, side.make(engine=engine), user("q"), **call)


class TestStops:
    @every_form
    def test_stops_end_an_answer_and_never_leak(self, side: Adapter, engine: RecordingEngine, form: Form) -> None:
        engine.says = "river </st stone </stop> paper"
        answer = asked(side, form, side.make(engine=engine, max_tokens=60), user("q"), stop=["</stop>"])
        assert (answer.text, answer.finish_reason) == ("river </st stone ", "stop")

    def test_no_piece_shows_a_part_of_one(self, side: Adapter, engine: RecordingEngine) -> None:
        engine.says = "river </st stone </stop> paper"
        llm, shown = side.make(engine=engine, max_tokens=60, stop=["</stop>"]), ""
        for piece in side.stream(llm, user("q")):
            shown += side.delta(piece)
            assert "</stop" not in shown


class TestBothTheSame:
    """One prompt, one engine, two frameworks."""

    TURNS = (("system", "Be kind."), ("human", "Which river?"), ("ai", "The Rhine."), ("human", f"And? {text(3, 30)}"))

    def answers(self, engine: RecordingEngine, **call: Any) -> list[tuple[list[int], Answer]]:
        found = []
        for side in ADAPTERS:
            engine.clear()
            tokens = ROOMY if call.get("tool_choice", "auto") != "auto" else 12
            answer = side.ask(side.make(engine=engine, max_tokens=tokens), list(self.TURNS), **call)
            found.append((engine.ids, answer))
        return found

    def test_prompt_answer_and_usage(self, engine: RecordingEngine) -> None:
        (ids, one), (other_ids, other) = self.answers(engine)
        assert ids == other_ids
        numbers = ("prompt_tokens", "completion_tokens", "cached_tokens", "created_tokens", "text", "finish_reason")
        for name in numbers:
            assert getattr(one, name) == getattr(other, name), name
        for name in ("exact_tokens", "approximate_tokens", "repaired_tokens", "computed_tokens", "fallback_reason"):
            assert one.reuse[name] == other.reuse[name], name

    @pytest.mark.parametrize("family", [None, "qwen2.5"])
    @pytest.mark.parametrize("choice", ["any", pytest.param("switch", marks=pytest.mark.slow), "auto"])
    def test_tools(self, family: str | None, choice: str) -> None:
        (ids, one), (other_ids, other) = self.answers(fresh_engine(family), tools=[TOOL], tool_choice=choice)
        assert ids == other_ids
        assert (one.text, one.calls, one.finish_reason) == (other.text, other.calls, other.finish_reason)
        assert bool(one.calls) or choice == "auto"

    def test_what_one_read_the_other_reuses(self, engine: RecordingEngine) -> None:
        document = text(4, 300)
        for reader, heir in (ADAPTERS, ADAPTERS[::-1]):
            engine.clear()
            reader.ask(reader.make(engine=engine, max_tokens=1), user(f"Read this. {document}"))
            answer = heir.ask(heir.make(engine=engine, max_tokens=1), user(f"Now that: {document} So?"))
            assert answer.cached_tokens > 0.7 * answer.prompt_tokens


class TestTools:
    @costly_forms
    def test_forced(self, side: Adapter, form: Form) -> None:
        llm = side.make(engine=fresh_engine(), max_tokens=ROOMY)
        answer = asked(side, form, llm, user("q"), tools=[TOOL], tool_choice="any")
        [(name, arguments)] = answer.calls
        assert name == "switch"
        assert isinstance(arguments["on"], bool)
        assert (answer.text, answer.finish_reason) == ("", "tool_calls")

    @costly_forms
    def test_voluntary(self, side: Adapter, caller: RecordingEngine, form: Form) -> None:
        caller.says = f"I look.\n{CALL}"
        answer = asked(side, form, side.make(engine=caller, max_tokens=ROOMY), user("q"), tools=[TOOL])
        assert (answer.text, answer.calls) == ("I look.", (("switch", {"on": True}),))

    @costly_forms
    def test_none(self, side: Adapter, caller: RecordingEngine, form: Form) -> None:
        caller.says = "No."
        llm = side.make(engine=caller, max_tokens=ROOMY)
        answer = asked(side, form, llm, user("q"), tools=[TOOL], tool_choice="none")
        assert (answer.text, answer.calls) == ("No.", ())
        assert "switch" not in caller.text

    def test_text_streams_while_calls_wait(self, side: Adapter, caller: RecordingEngine) -> None:
        caller.says = f"I will look at the lamp first.\n{CALL}"
        pieces = list(side.stream(side.make(engine=caller, max_tokens=ROOMY), user("q"), tools=[TOOL]))
        assert len([piece for piece in pieces if side.delta(piece)]) > 10
        assert "".join(map(side.delta, pieces)) == "I will look at the lamp first."

    @pytest.mark.parametrize("choice", ["shout", 7])
    def test_unknown_choices_raise(self, side: Adapter, caller: RecordingEngine, choice: Any) -> None:
        with pytest.raises(ConfigError, match=str(choice)):
            side.ask(side.make(engine=caller), user("q"), tools=[TOOL], tool_choice=choice)

    def test_structured_output(self, side: Adapter, engine: RecordingEngine) -> None:
        llm = side.make(engine=engine, max_tokens=ROOMY, temperature=1.5, seed=1)
        assert isinstance(side.structured(llm, Lamp, "q"), Lamp)
        assert isinstance(side.structured_stream(llm, Lamp, "q")[-1], Lamp)

    def test_no_room_for_structured_output(self, side: Adapter, engine: RecordingEngine) -> None:
        with pytest.raises(ConfigError, match="max_tokens is 2"):
            side.structured(side.make(engine=engine, max_tokens=2), Lamp, "q")


class TestLimits:
    @every_form
    def test_overflow_names_both_counts(self, side: Adapter, engine: RecordingEngine, form: Form) -> None:
        with pytest.raises(ContextOverflowError) as raised:
            asked(side, form, side.make(engine=engine), user("q " * engine.window_tokens))
        assert raised.value.prompt_tokens > raised.value.window_tokens == engine.window_tokens
        assert str(raised.value.prompt_tokens) in str(raised.value)
        assert str(raised.value.window_tokens) in str(raised.value)

    @costly_forms
    def test_timeout_raises_and_stops(self, side: Adapter, engine: RecordingEngine, form: Form) -> None:
        llm = side.make(engine=engine, max_tokens=LONG, timeout=0.2)
        with Forwards(engine.model) as forwards:
            with pytest.raises(RequestTimeoutError, match="timeout_s"):
                asked(side, form, llm, user("q"))
            assert stays(forwards)

    @every_form
    def test_errors_of_the_model_reach_the_reader(self, side: Adapter, engine: RecordingEngine, form: Form) -> None:
        left = [3]

        def fail(*_: Any, **__: Any) -> None:
            left[0] -= 1
            if left[0] < 0:
                raise RuntimeError("out of luck")

        handle = engine.model.register_forward_pre_hook(fail)
        try:
            with pytest.raises(RuntimeError, match="out of luck"):
                asked(side, form, side.make(engine=engine, max_tokens=50), user("q"))
        finally:
            handle.remove()
        assert side.ask(side.make(engine=engine, max_tokens=2), user("q")).completion_tokens == 2

    @every_form
    def test_what_a_text_model_cannot_read_raises(self, side: Adapter, engine: RecordingEngine, form: Form) -> None:
        with pytest.raises(PromptError, match="message"):
            asked(side, form, side.make(engine=engine), [])


def stays(forwards: Forwards) -> bool:
    """Whether the model has stopped, before the end of a long answer."""
    before = len(forwards.rows)
    time.sleep(0.15)
    return len(forwards.rows) == before < LONG


class TestCancelling:
    def test_closing_a_stream(self, side: Adapter, engine: RecordingEngine) -> None:
        with Forwards(engine.model) as forwards:
            stream: Any = side.stream(side.make(engine=engine, max_tokens=LONG), user("q"))
            next(stream)
            stream.close()
            assert stays(forwards)

    def test_closing_an_async_stream(self, side: Adapter, engine: RecordingEngine) -> None:
        async def leave() -> None:
            stream: Any = await side.astream(side.make(engine=engine, max_tokens=LONG), user("q"))
            await anext(stream)
            await stream.aclose()
            await asyncio.sleep(0.05)  # LangChain leaves the inner stream to the loop

        with Forwards(engine.model) as forwards:
            run(leave())
            assert stays(forwards)

    @pytest.mark.parametrize("form", ["aask", "astream"])
    def test_cancelling_a_task(self, side: Adapter, engine: RecordingEngine, form: Form) -> None:
        llm = side.make(engine=engine, max_tokens=LONG)

        async def give_up() -> None:
            work = side.aask(llm, user("q")) if form == "aask" else astreamed(side, llm, user("q"))
            task = asyncio.create_task(work)
            while len(forwards.rows) < 3:
                await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

        with Forwards(engine.model) as forwards:
            run(give_up())
            assert stays(forwards)


class TestReuse:
    def test_namespaces_are_apart(self, side: Adapter, engine: RecordingEngine) -> None:
        document = text(7, 60)
        for name in ("one", "two"):
            engine.clear(name)
        one, two = (side.make(engine=engine, max_tokens=1, namespace=name) for name in ("one", "two"))
        assert side.ask(one, user(document)).cached_tokens == 0
        assert side.ask(two, user(document)).cached_tokens == 0
        assert side.ask(one, user(document)).cached_tokens > 0

    def test_modes(self, side: Adapter, engine: RecordingEngine) -> None:
        llm, document = side.make(engine=engine, max_tokens=4), text(8, 200)
        first = side.ask(llm, user(document))
        assert (first.cached_tokens, first.created_tokens) == (0, first.prompt_tokens)
        off = side.ask(llm, user(document), reuse="off")
        exact = side.ask(llm, user(document), reuse="exact")
        moved = side.ask(llm, [("system", "Other words in front."), *user(document)])
        still = side.ask(llm, [("system", "Still other words."), *user(document)], reuse="exact")
        assert off.text == exact.text == first.text
        assert (off.cached_tokens, off.created_tokens) == (0, 0)
        assert exact.cached_tokens >= exact.prompt_tokens - 1
        assert moved.reuse["approximate_tokens"] > 0.5 * moved.prompt_tokens
        assert still.reuse["approximate_tokens"] == 0


class TestEngines:
    def test_loaded_late_and_once_for_both(self, unloaded: None, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
        loads: list[Any] = []
        load = Engine.from_pretrained
        monkeypatch.setattr(Engine, "from_pretrained", lambda *a, **k: loads.append(a) or load(*a, **k))
        llms: list[tuple[Adapter, EngineOptions]] = [
            (side, side.make(model=folder, engine_config=QUIET, max_tokens=1)) for side in ADAPTERS * 3
        ]
        assert not loads
        threads = [threading.Thread(target=side.ask, args=(llm, user("q"))) for side, llm in llms]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(loads) == 1
        assert len({id(llm.get_engine()) for _, llm in llms}) == 1

    def test_one_of_engine_and_model(self, side: Adapter, engine: RecordingEngine) -> None:
        for given in ({}, {"engine": engine, "model": "m"}):
            with pytest.raises(ValueError, match="engine= or model="):
                side.make(**given)

    @pytest.mark.parametrize(
        "bad",
        [{"max_tokens": 0}, {"max_tokens": True}, {"temperature": True}, {"kindness": 1}, {"engine_config": QUIET}],
        ids=str,
    )
    def test_bad_values_raise_at_once(self, side: Adapter, engine: RecordingEngine, bad: dict[str, Any]) -> None:
        with pytest.raises(ValueError, match=next(iter(bad))):
            side.make(engine=engine, **bad)

    def test_at_once(self, engine: RecordingEngine) -> None:
        """Threads of both frameworks on one engine get their own answers."""
        questions = [text(seed, 4) for seed in range(4)]
        llms = [(side, side.make(engine=engine, max_tokens=8)) for side in ADAPTERS * 2]
        alone = [side.ask(llm, user(question)).text for (side, llm), question in zip(llms, questions, strict=True)]
        found: list[str] = [""] * len(llms)

        def ask(i: int) -> None:
            side, llm = llms[i]
            found[i] = asked(side, "stream" if i % 2 else "ask", llm, user(questions[i])).text

        threads = [threading.Thread(target=ask, args=(i,)) for i in range(len(llms))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == alone
