"""ChatKVBoost: what reaches the engine, and what comes back. A scripted engine for the rules, then the real model."""

from __future__ import annotations

import asyncio
import copy
import pickle
import time
from types import SimpleNamespace

import pytest
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    ChatMessage,
    FunctionMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
)
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate

from kvboost_rag import (
    ConfigError,
    Delta,
    Engine,
    EngineConfig,
    Generation,
    PromptError,
    SamplingParams,
    Timing,
    Usage,
)
from langchain_kvboost import ChatKVBoost, engines, release_engines, shared_engine
from tests.tiny import engine_of, new_model

GENERATION = Generation(
    text="Paris, of course.",
    token_ids=(5, 6, 7),
    finish_reason="stop",
    usage=Usage(
        prompt_tokens=100,
        exact_tokens=20,
        approximate_tokens=50,
        repaired_tokens=9,
        computed_tokens=41,
        completion_tokens=3,
    ),
    timing=Timing(ttft_s=0.25, total_s=0.5),
)


class ScriptedEngine:
    """Answers `GENERATION` and remembers what it was asked."""

    def __init__(self) -> None:
        self.config = EngineConfig()
        self.model = SimpleNamespace(name_or_path="scripted")
        self.fingerprint = "scripted"
        self.calls: list[tuple[object, dict[str, object]]] = []
        self.closed = False

    def generate(self, prompt, **arguments):
        self.calls.append((prompt, arguments))
        return GENERATION

    def stream(self, prompt, **arguments):
        self.calls.append((prompt, arguments))
        try:
            yield Delta(text="Paris", token_ids=(5,))
            yield Delta(text="", token_ids=(6,))  # half a character: no text yet
            yield Delta(text=", of course.", token_ids=(7,), generation=GENERATION)
        finally:
            self.closed = True

    async def agenerate(self, prompt, **arguments):
        return self.generate(prompt, **arguments)

    async def astream(self, prompt, **arguments):
        self.calls.append((prompt, arguments))
        try:
            for text, generation in (("Paris", None), (", of course.", GENERATION)):
                yield Delta(text=text, generation=generation)
        finally:
            self.closed = True


@pytest.fixture
def scripted() -> ScriptedEngine:
    return ScriptedEngine()


@pytest.fixture
def chat(scripted) -> ChatKVBoost:
    return ChatKVBoost(engine=scripted)


def sampling_of(scripted: ScriptedEngine) -> SamplingParams:
    return scripted.calls[-1][1]["sampling"]


class TestRequest:
    def test_roles(self, chat, scripted):
        chat.invoke(
            [
                SystemMessage("s"),
                HumanMessage("h"),
                AIMessage("a"),
                ToolMessage("t", tool_call_id="1"),
                ChatMessage(role="critic", content="c"),
            ]
        )
        assert scripted.calls[0][0] == [
            {"role": "system", "content": "s"},
            {"role": "user", "content": "h"},
            {"role": "assistant", "content": "a"},
            {"role": "tool", "content": "t"},
            {"role": "critic", "content": "c"},
        ]

    def test_text_blocks_are_joined(self, chat, scripted):
        chat.invoke([HumanMessage([{"type": "text", "text": "one "}, "two"])])
        assert scripted.calls[0][0] == [{"role": "user", "content": "one two"}]

    @pytest.mark.parametrize(
        "message",
        [
            HumanMessage([{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}]),
            FunctionMessage(name="f", content="x"),
            AIMessage("", tool_calls=[{"name": "f", "args": {"a": 1}, "id": "1"}]),
        ],
    )
    def test_what_a_text_model_cannot_read_raises(self, chat, scripted, message):
        with pytest.raises(PromptError, match=r"image|FunctionMessage|tool calls"):
            chat.invoke([message])
        assert not scripted.calls

    def test_instance_sampling(self, scripted):
        chat = ChatKVBoost(engine=scripted, temperature=0.5, max_tokens=9, top_p=0.9, top_k=4, seed=3, stop=["A"])
        chat.invoke("q")
        assert sampling_of(scripted) == SamplingParams(
            temperature=0.5, max_tokens=9, top_p=0.9, top_k=4, seed=3, stop=("A",)
        )

    def test_call_overrides_instance(self, scripted):
        chat = ChatKVBoost(engine=scripted, temperature=0.5, max_tokens=9, namespace="a")
        chat.invoke("q", max_tokens=2, temperature=0.0, namespace="b", reuse="exact")
        assert sampling_of(scripted) == SamplingParams(temperature=0.0, max_tokens=2)
        assert scripted.calls[0][1]["namespace"] == "b"
        assert scripted.calls[0][1]["reuse"] == "exact"

    def test_stops_merge(self, scripted):
        chat = ChatKVBoost(engine=scripted, stop=["A", "B"])
        chat.invoke("q", stop=["B", "C"])
        assert sampling_of(scripted).stop == ("A", "B", "C")
        list(chat.bind(stop=["D"]).stream("q"))
        assert sampling_of(scripted).stop == ("A", "B", "D")

    def test_unknown_argument_raises(self, chat, scripted):
        with pytest.raises(ConfigError, match="max_new_tokens"):
            chat.invoke("q", max_new_tokens=5)
        assert not scripted.calls


class TestConstruction:
    def test_one_of_engine_and_model(self, scripted):
        with pytest.raises(ValueError, match="engine= or model="):
            ChatKVBoost()
        with pytest.raises(ValueError, match="engine= or model="):
            ChatKVBoost(engine=scripted, model="m")
        with pytest.raises(ValueError, match="engine_config"):
            ChatKVBoost(engine=scripted, engine_config=EngineConfig())

    @pytest.mark.parametrize("bad", [{"temperature": -1}, {"max_tokens": 0}, {"stop": [""]}, {"max_new_tokens": 3}])
    def test_bad_values_raise_at_once(self, scripted, bad):
        with pytest.raises(ValueError, match=next(iter(bad))):
            ChatKVBoost(engine=scripted, **bad)

    def test_model_is_loaded_late_and_once(self, monkeypatch, scripted):
        loads = []

        def load(model, *, config=None):
            loads.append((model, config))
            time.sleep(0.01)
            return scripted

        monkeypatch.setattr(engines.Engine, "from_pretrained", load)
        monkeypatch.setattr(engines, "_engines", {})
        chats = [ChatKVBoost(model="some/model", max_tokens=n + 1) for n in range(10)]
        assert not loads
        ChatKVBoost(model="some/model").batch(["a", "b", "c"])  # three threads at once
        for chat in chats:
            chat.invoke("q")
        assert loads == [("some/model", None)]
        assert shared_engine("some/model") is scripted
        shared_engine("some/model", EngineConfig())  # the same as none
        assert len(loads) == 1
        assert shared_engine("some/model", EngineConfig(reuse="exact")) is scripted
        assert len(loads) == 2

    def test_release(self, monkeypatch):
        closed = []
        monkeypatch.setattr(engines, "_engines", {("m", None): SimpleNamespace(close=lambda: closed.append(1))})
        release_engines()
        assert closed == [1]
        assert not engines._engines

    def test_pickle(self):
        chat = ChatKVBoost(model="m", max_tokens=7)
        assert pickle.loads(pickle.dumps(chat)).max_tokens == 7

    def test_response_cache_key_names_what_changes_answers(self, scripted):
        keys = {
            ChatKVBoost(**arguments)._get_llm_string()
            for arguments in (
                {"model": "m"},
                {"model": "n"},
                {"model": "m", "engine_config": EngineConfig(repair_ratio=0.5)},
                {"model": "m", "temperature": 1.0},
                {"model": "m", "seed": 1},
                {"model": "m", "stop": ["x"]},
                {"model": "m", "namespace": "x"},
                {"engine": scripted},
            )
        }
        assert len(keys) == 8

    def test_response_cache_key_tells_models_of_one_name_apart(self):
        models = [new_model("llama", seed=seed) for seed in (0, 1)]
        keys = [ChatKVBoost(engine=engine_of(model))._get_llm_string() for model in models]
        assert keys[0] != keys[1]
        assert keys[0] == ChatKVBoost(engine=engine_of(models[0]))._get_llm_string()

    def test_copies_share_the_engine(self):
        engine = engine_of()
        chat = ChatKVBoost(engine=engine, stop=["x"])
        copied = copy.deepcopy(chat)
        assert copied.engine is engine
        assert copied.stop == chat.stop
        assert copied.stop is not chat.stop
        assert chat.model_copy(deep=True).engine is engine

    def test_tracing_parameters(self, chat):
        parameters = ChatKVBoost(model="m", temperature=0.5, max_tokens=3)._get_ls_params()
        assert parameters["ls_provider"] == "kvboost"
        assert (parameters["ls_model_name"], parameters["ls_temperature"], parameters["ls_max_tokens"]) == ("m", 0.5, 3)


class TestResponse:
    def check(self, message):
        assert message.content == "Paris, of course."
        assert message.usage_metadata == {
            "input_tokens": 100,
            "output_tokens": 3,
            "total_tokens": 103,
            "input_token_details": {"cache_read": 70, "cache_creation": 30},
        }
        details = message.response_metadata
        assert details["model_name"] == "scripted"
        assert (details["exact_tokens"], details["approximate_tokens"]) == (20, 50)
        assert (details["repaired_tokens"], details["computed_tokens"]) == (9, 41)
        assert (details["ttft_s"], details["finish_reason"], details["fallback_reason"]) == (0.25, "stop", None)

    def test_invoke(self, chat):
        self.check(chat.invoke("q"))

    def test_streamed_pieces_merge_to_the_same(self, chat, scripted):
        pieces = list(chat.stream("q"))
        assert [piece.content for piece in pieces] == ["Paris", ", of course."]
        assert [piece.usage_metadata is None for piece in pieces] == [True, False]
        assert [piece.chunk_position for piece in pieces] == [None, "last"]
        assert not pieces[0].response_metadata.get("ttft_s")
        merged = pieces[0] + pieces[1]
        assert isinstance(merged, AIMessageChunk)
        self.check(merged)

    def test_async(self, chat):
        self.check(asyncio.run(chat.ainvoke("q")))

        async def collect():
            return [piece async for piece in chat.astream("q")]

        pieces = asyncio.run(collect())
        self.check(pieces[0] + pieces[1])

    def test_streaming_invoke_tells_callbacks_every_piece(self, scripted):
        heard = []

        class Listener(BaseCallbackHandler):
            def on_llm_new_token(self, token, **_):
                heard.append(token)

        chat = ChatKVBoost(engine=scripted, streaming=True)
        self.check(chat.invoke("q", config={"callbacks": [Listener()]}))
        assert heard == ["Paris", ", of course."]

    def test_leaving_a_stream_closes_the_engines(self, chat, scripted):
        stream = chat.stream("q")
        next(stream)
        stream.close()
        assert scripted.closed

    def test_leaving_an_async_stream_closes_the_engines(self, chat, scripted):
        async def leave():
            stream = chat.astream("q")
            await anext(stream)
            await stream.aclose()

        asyncio.run(leave())
        assert scripted.closed

    def test_nothing_is_written_when_prompts_are_not_kept(self, chat, scripted):
        scripted.config = EngineConfig(store_prompts=False)
        assert chat.invoke("q").usage_metadata["input_token_details"]["cache_creation"] == 0
        scripted.config = EngineConfig()
        assert chat.invoke("q", reuse="off").usage_metadata["input_token_details"]["cache_creation"] == 0


DOCUMENTS = [
    "The lighthouse of Vell was built in 1872 by Mara Osk. Its lamp burns whale oil and can be seen for thirty miles "
    "on a clear night. The keeper climbs two hundred and eleven steps every evening to light it before the sun sets.",
    "The harbour of Vell opens at six in the morning and closes when the tide turns. Ships that arrive late must wait "
    "outside the mole until the next day. The harbour master, a woman called Ilse Brandt, keeps the list of berths.",
    "The market of Vell is held on Thursdays in the square behind the church. Farmers sell cheese, apples and wool "
    "there, and the town brewer sells a dark beer that is made only in autumn, when the barley has been brought in.",
]


@pytest.fixture(scope="module")
def engine(model_path):
    engine = Engine.from_pretrained(str(model_path), config=EngineConfig(fallback=False))
    engine.warm(DOCUMENTS)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def prompt():
    return ChatPromptTemplate.from_messages(
        [("system", "Answer from the context."), ("human", "{context}\n\nQuestion: {question}")]
    )


@pytest.mark.model
class TestRealModel:
    @pytest.fixture
    def inputs(self):
        return {"context": "\n\n".join(reversed(DOCUMENTS)), "question": "On which day is the market held?"}

    def test_reordered_documents_in_a_chain(self, engine, prompt, inputs):
        message = (prompt | ChatKVBoost(engine=engine, max_tokens=24)).invoke(inputs)
        assert "Thursdays" in message.content
        usage, details = message.usage_metadata, message.response_metadata
        assert usage["input_tokens"] == len(engine.tokenize(ids_prompt(prompt, inputs)))
        assert usage["input_token_details"]["cache_read"] == details["exact_tokens"] + details["approximate_tokens"]
        assert details["approximate_tokens"] > 0.5 * usage["input_tokens"]
        assert 0 < details["computed_tokens"] < usage["input_tokens"]
        assert details["fallback_reason"] is None

    def test_stream_equals_invoke_and_async(self, engine, prompt, inputs):
        chain = prompt | ChatKVBoost(engine=engine, max_tokens=16) | StrOutputParser()
        answer = chain.invoke(inputs)
        pieces = list(chain.stream(inputs))
        assert len(pieces) > 3
        assert "".join(pieces) == answer

        async def both():
            return await chain.ainvoke(inputs), "".join([piece async for piece in chain.astream(inputs)])

        assert asyncio.run(both()) == (answer, answer)

    def test_reuse_off_equals_exact(self, engine, prompt, inputs):
        chat = ChatKVBoost(engine=engine, max_tokens=16)
        off, exact = ((prompt | chat.bind(reuse=reuse)).invoke(inputs) for reuse in ("off", "exact"))
        assert off.content == exact.content
        assert off.usage_metadata["input_token_details"]["cache_read"] == 0

    def test_stop_max_tokens_seed(self, engine):
        chat = ChatKVBoost(engine=engine, max_tokens=12)
        plain = chat.invoke("Count from one to ten in words.")
        assert plain.usage_metadata["output_tokens"] <= 12
        word = plain.content.split()[2]
        stopped = chat.invoke("Count from one to ten in words.", stop=[word])
        assert stopped.content == plain.content[: plain.content.index(word)]
        assert stopped.response_metadata["finish_reason"] == "stop"
        hot = ChatKVBoost(engine=engine, max_tokens=12, temperature=1.0, seed=7)
        assert hot.invoke("Tell me a story.").content == hot.invoke("Tell me a story.").content

    def test_async_does_not_block_the_loop(self, engine):
        async def longest_pause():
            pauses = []

            async def watch():
                while True:
                    before = time.monotonic()
                    await asyncio.sleep(0.01)
                    pauses.append(time.monotonic() - before)

            watcher = asyncio.create_task(watch())
            started = time.monotonic()
            await ChatKVBoost(engine=engine, max_tokens=24).ainvoke("Write about the sea.")
            took = time.monotonic() - started
            watcher.cancel()
            return max(pauses), took

        pause, took = asyncio.run(longest_pause())
        assert pause < max(0.5, 0.5 * took)

    def test_token_counts(self, engine):
        chat = ChatKVBoost(engine=engine)
        assert chat.get_token_ids("Hello world") == engine.tokenizer("Hello world", add_special_tokens=False).input_ids
        assert chat.get_num_tokens_from_messages([HumanMessage("Hello")]) == len(
            engine.tokenize([{"role": "user", "content": "Hello"}])
        )


def ids_prompt(prompt, inputs):
    roles = {"system": "system", "human": "user"}
    return [{"role": roles[m.type], "content": m.content} for m in prompt.invoke(inputs).to_messages()]
