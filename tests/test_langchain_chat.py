"""ChatKVBoost on real engines: what reaches them, what comes back, and how it streams, stops and is cached.

Numbers in names and comments are the issues of other local-model classes that must not happen here.
"""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import functools
import pickle
import threading
import time

import pytest
import torch
from langchain_core.caches import InMemoryCache
from langchain_core.callbacks import AsyncCallbackHandler, BaseCallbackHandler
from langchain_core.exceptions import ContextOverflowError as LangChainContextOverflowError
from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    ChatMessage,
    FunctionMessage,
    HumanMessage,
    RemoveMessage,
    SystemMessage,
    ToolMessage,
    trim_messages,
)
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.rate_limiters import InMemoryRateLimiter
from langchain_core.runnables import ConfigurableField
from pydantic import create_model

from kvboost_rag import (
    ConfigError,
    ContextOverflowError,
    Engine,
    EngineConfig,
    PromptError,
    RequestTimeoutError,
    SamplingParams,
)
from kvboost_rag.frameworks import engines
from langchain_kvboost import ChatKVBoost, PromptOverflowError, release_engines, shared_engine
from tests.chat_tokenizers import MAKERS
from tests.recording import recording
from tests.tiny import Forwards, engine_of, model_of, new_model, text, tokenizer_of

LONG = 3000  # tokens of an answer that nobody waits for


@pytest.fixture(scope="module")
def shared():
    return recording()


@pytest.fixture
def engine(shared):
    shared.clear()
    shared.asked.clear()
    shared.says = None
    return shared


@pytest.fixture
def chat(engine):
    return ChatKVBoost(engine=engine, max_tokens=8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny model as it is saved by Hugging Face."""
    path = tmp_path_factory.mktemp("models") / "tiny"
    model_of("llama").save_pretrained(path)
    tokenizer_of().save_pretrained(path)
    return path


@pytest.fixture
def fresh(monkeypatch):
    """No engine is loaded yet in this process."""
    monkeypatch.setattr(engines, "_engines", {})


QUIET = EngineConfig(calibration_dir=None)


def merged(pieces):
    pieces = list(pieces)
    return sum(pieces[1:], pieces[0])


def same_answer(one, other):
    assert one.content == other.content
    assert one.usage_metadata["output_tokens"] == other.usage_metadata["output_tokens"]
    assert one.usage_metadata["input_tokens"] == other.usage_metadata["input_tokens"]
    assert one.response_metadata["finish_reason"] == other.response_metadata["finish_reason"]


async def collected(stream):
    return [piece async for piece in stream]


class TestRequest:
    def test_roles(self, chat, engine):
        chat.invoke([SystemMessage("s"), HumanMessage("h"), AIMessage("a"), ChatMessage(role="critic", content="c")])
        assert engine.prompt == [
            {"role": "system", "content": "s"},
            {"role": "user", "content": "h"},
            {"role": "assistant", "content": "a"},
            {"role": "critic", "content": "c"},
        ]

    def test_results_of_tools(self, chat, engine):
        chat.invoke(
            [
                HumanMessage("h"),
                AIMessage("", tool_calls=[{"name": "f", "args": {"a": 1}, "id": "1"}]),
                ToolMessage("t", tool_call_id="1"),
                FunctionMessage(name="g", content="u"),
            ]
        )
        assert engine.prompt[1:] == [
            {"role": "assistant", "content": '[{"name": "f", "arguments": {"a": 1}}]'},
            {"role": "user", "content": "Result of the tool f:\nt"},
            {"role": "user", "content": "Result of the tool g:\nu"},
        ]

    def test_text_blocks_are_joined(self, chat, engine):
        chat.invoke([HumanMessage([{"type": "text", "text": "one "}, "two"])])
        assert engine.prompt == [{"role": "user", "content": "one two"}]

    def test_llama_index_13204_a_value_may_be_bound_and_given(self, chat, engine):
        chat.bind(temperature=0.5, max_tokens=3).invoke("q", temperature=0.0, stop=["x"])
        assert engine.sampling == SamplingParams(temperature=0.0, max_tokens=3, stop=("x",))

    def test_reasoning_of_earlier_answers_is_not_shown_again(self, chat, engine):
        blocks = [{"type": "reasoning", "reasoning": "hm"}, {"type": "text", "text": "yes"}]
        chat.invoke([HumanMessage("q"), AIMessage(blocks), HumanMessage("r")])
        assert engine.prompt[1] == {"role": "assistant", "content": "yes"}

    def test_names_go_to_the_template(self, chat, engine):
        chat.invoke([HumanMessage("h", name="anna")])
        assert engine.prompt == [{"role": "user", "content": "h", "name": "anna"}]

    def test_an_openai_developer_message_keeps_its_role(self, chat, engine):
        chat.invoke([SystemMessage("s", additional_kwargs={"__openai_role__": "developer"}), HumanMessage("h")])
        assert engine.prompt[0]["role"] == "developer"

    @pytest.mark.parametrize("block", [{"type": "image_url", "image_url": {"url": "data:,"}}, {"type": "audio"}])
    def test_what_a_text_model_cannot_read_raises(self, chat, engine, block):
        with pytest.raises(PromptError, match=block["type"]):
            chat.invoke([HumanMessage([block])])
        assert not engine.asked

    def test_messages_without_a_role_raise(self, chat):
        with pytest.raises(PromptError, match="RemoveMessage"):
            chat.invoke([HumanMessage("q"), RemoveMessage(id="1")])

    def test_instance_sampling(self, engine):
        values = {"temperature": 0.5, "max_tokens": 9, "top_p": 0.9, "top_k": 4, "min_p": 0.1, "seed": 3}
        chat = ChatKVBoost(engine=engine, repetition_penalty=1.2, stop=["A"], timeout=60.0, reuse="exact", **values)
        chat.invoke("q")
        assert engine.sampling == SamplingParams(**values, repetition_penalty=1.2, stop=("A",))
        assert engine.options["timeout_s"] == 60.0
        assert engine.options["reuse"] == "exact"

    def test_a_call_overrides_the_instance(self, engine):
        chat = ChatKVBoost(engine=engine, temperature=0.5, max_tokens=9, namespace="a", timeout=60.0)
        values = {"temperature": 0.25, "max_tokens": 2, "top_p": 0.5, "top_k": 3, "min_p": 0.2, "seed": 4}
        chat.invoke("q", **values, repetition_penalty=1.1, namespace="b", reuse="exact", timeout=30.0)
        assert engine.sampling == SamplingParams(**values, repetition_penalty=1.1)
        assert (engine.options["namespace"], engine.options["reuse"], engine.options["timeout_s"]) == ("b", "exact", 30)

    @pytest.mark.parametrize(
        ("argument", "other"),
        [("temperature", 5.0), ("repetition_penalty", 0.3), ("seed", 9), ("top_k", 1), ("min_p", 1.0), ("top_p", 1e-6)],
    )
    def test_sampling_changes_answers(self, engine, argument, other):
        chat = ChatKVBoost(engine=engine, max_tokens=12, temperature=1.0, seed=1)
        plain = chat.invoke("q").content
        assert chat.invoke("q").content == plain  # the seed makes it repeatable
        assert chat.bind(**{argument: other}).invoke("q").content != plain

    def test_stops_merge(self, engine):
        chat = ChatKVBoost(engine=engine, stop=["A", "B"], max_tokens=2)
        chat.invoke("q", stop=["B", "C"])
        assert engine.sampling.stop == ("A", "B", "C")
        list(chat.bind(stop=["D"]).stream("q"))
        assert engine.sampling.stop == ("A", "B", "D")

    @pytest.mark.parametrize("call", ["invoke", "stream", "ainvoke", "astream"])
    def test_unknown_arguments_raise(self, chat, engine, call):
        run = {
            "invoke": lambda: chat.invoke("q", max_new_tokens=5),
            "stream": lambda: list(chat.stream("q", max_new_tokens=5)),
            "ainvoke": lambda: asyncio.run(chat.ainvoke("q", max_new_tokens=5)),
            "astream": lambda: asyncio.run(collected(chat.astream("q", max_new_tokens=5))),
        }[call]
        with pytest.raises(ConfigError, match="max_new_tokens"):
            run()
        assert not engine.asked

    @pytest.mark.parametrize("call", [{"logprobs": True}, {"n": 2}, {"logit_bias": {}}, {"frequency_penalty": 1.0}])
    def test_arguments_without_effect_raise(self, chat, call):
        with pytest.raises(ConfigError, match=next(iter(call))):
            chat.invoke("q", **call)


family_engine = functools.cache(recording)


class TestTemplates:
    def plain(self, engine, messages):
        """Ids of plain Hugging Face."""
        return engine.tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]

    def test_19933_the_chat_template_is_used(self, chat, engine):
        messages = [("system", "Be kind."), ("human", "Which river?")]
        message = chat.invoke(messages)
        given = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Which river?"}]
        assert engine.ids == self.plain(engine, given)
        assert message.usage_metadata["input_tokens"] == len(engine.ids)

    def test_llama_cpp_1501_one_bos(self):
        engine = recording("llama3")
        ChatKVBoost(engine=engine, max_tokens=1).invoke([("system", "s"), ("human", "h")])
        bos = engine.tokenizer.bos_token_id
        assert engine.ids.count(bos) == 1
        assert engine.ids[0] == bos
        given = [{"role": "system", "content": "s"}, {"role": "user", "content": "h"}]
        assert engine.ids == self.plain(engine, given)

    def test_15232_an_ai_message_may_be_last(self, chat, engine):
        chat.invoke([("human", "h"), ("ai", "well")])
        assert engine.ids == self.plain(
            engine, [{"role": "user", "content": "h"}, {"role": "assistant", "content": "well"}]
        )

    @pytest.mark.parametrize("family", ["mistral", "mistral-legacy", "gemma2"])
    @pytest.mark.parametrize(
        ("messages", "fitted"),
        [
            ([("system", "s"), ("human", "h")], [("user", "s\n\nh")]),
            ([("human", "a"), ("human", "b")], [("user", "a\n\nb")]),
            (
                [("system", "s"), ("human", "a"), ("ai", "b"), ("ai", "c"), ("human", "d")],
                [("user", "s\n\na"), ("assistant", "b\n\nc"), ("user", "d")],
            ),
        ],
    )
    def test_13728_roles_that_must_alternate(self, family, messages, fitted):
        engine = family_engine(family)
        ChatKVBoost(engine=engine, max_tokens=1).invoke(messages)
        assert engine.ids == self.plain(engine, [{"role": role, "content": content} for role, content in fitted])

    def test_the_system_prompt_is_kept_where_a_template_refuses_it(self):
        engine = family_engine("gemma2")
        ChatKVBoost(engine=engine, max_tokens=1).invoke([("system", "Be kind to the fox."), ("human", "h")])
        assert "Be kind to the fox." in engine.text

    def test_no_template_says_so(self):
        tokenizer = MAKERS["smollm2"]()
        tokenizer.chat_template = None
        with pytest.raises(PromptError, match="no chat template"):
            ChatKVBoost(engine=recording(tokenizer)).invoke("q")

    def test_no_messages(self, chat):
        with pytest.raises(PromptError, match="message"):
            chat.invoke([])


class TestConstruction:
    def test_one_of_engine_and_model(self, engine):
        with pytest.raises(ValueError, match="engine= or model="):
            ChatKVBoost()
        with pytest.raises(ValueError, match="engine= or model="):
            ChatKVBoost(engine=engine, model="m")

    @pytest.mark.parametrize("given", [{"engine_config": QUIET}, {"model_kwargs": {"revision": "x"}}, {"api_key": "k"}])
    def test_what_has_no_effect_on_an_engine_raises(self, engine, given):
        with pytest.raises(ValueError, match=next(iter(given))):
            ChatKVBoost(engine=engine, **given)

    @pytest.mark.parametrize(
        "bad",
        [
            {"temperature": -1},
            {"max_tokens": 0},
            {"stop": [""]},
            {"max_new_tokens": 3},
            {"timeout": 0},
            {"min_p": 2.0},
            {"repetition_penalty": 0.0},
            {"reuse": "some"},
            {"max_retries": -1},
        ],
    )
    def test_bad_values_raise_at_once(self, engine, bad):
        with pytest.raises(ValueError, match=next(iter(bad))):
            ChatKVBoost(engine=engine, **bad)

    @pytest.mark.parametrize("bad", [{"timeout": -1.0}, {"namespace": ""}, {"reuse": "some"}, {"max_tokens": 0}])
    def test_bad_values_of_a_call_raise(self, chat, engine, bad):
        with pytest.raises(ConfigError, match=next(iter(bad))):
            chat.invoke("q", **bad)

    def test_unknown_tool_format(self, engine):
        with pytest.raises(ConfigError, match="xml"):
            ChatKVBoost(engine=engine, tool_format="xml").invoke("q")

    def test_17678_ten_instances_cost_one_model_loaded_late(self, fresh, folder, monkeypatch):
        loads = []
        load = Engine.from_pretrained
        monkeypatch.setattr(
            Engine, "from_pretrained", lambda *a, **k: loads.append(a) or time.sleep(0.05) or load(*a, **k)
        )
        chats = [ChatKVBoost(model=str(folder), engine_config=QUIET, max_tokens=n + 1) for n in range(10)]
        assert not loads
        threads = [threading.Thread(target=chat.invoke, args=("q",)) for chat in chats]  # all at once
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(loads) == 1
        assert len({id(chat.get_engine()) for chat in chats}) == 1
        assert shared_engine(str(folder), QUIET) is chats[0].get_engine()
        assert shared_engine(str(folder), QUIET, options={"dtype": "float32"}) is not chats[0].get_engine()
        assert chats[3].invoke("q").usage_metadata["input_token_details"]["cache_read"] > 0  # they share their KV

    def test_release_frees_and_loads_again(self, fresh, folder):
        chat = ChatKVBoost(model=str(folder), engine_config=QUIET, max_tokens=1)
        chat.invoke("q")
        engine = chat.get_engine()
        release_engines()
        assert engine.stats().chunks == 0
        chat.invoke("q")
        assert chat.get_engine() is not engine

    def test_no_engine_config_is_the_default_one(self, fresh, monkeypatch, engine):
        monkeypatch.setattr(Engine, "from_pretrained", lambda *a, **k: engine)
        shared_engine("some/model")
        shared_engine("some/model", EngineConfig())
        assert len(engines._engines) == 1

    def test_api_key_is_the_token_of_the_hub(self, fresh, monkeypatch, engine):
        given = []
        monkeypatch.setattr(Engine, "from_pretrained", lambda model, **options: given.append(options) or engine)
        chat = ChatKVBoost(model="some/gated", api_key="hf_secret", model_kwargs={"revision": "r"}, max_tokens=1)
        chat.invoke("q")
        assert given == [{"config": None, "token": "hf_secret", "revision": "r"}]
        assert "hf_secret" not in repr(chat)
        assert "hf_secret" not in chat._get_llm_string()
        monkeypatch.setenv("HF_TOKEN", "hf_env")
        ChatKVBoost(model="some/gated", max_tokens=1).invoke("q")
        assert given[-1]["token"] == "hf_env"

    def test_a_failed_download_is_tried_again(self, fresh, monkeypatch, folder):
        load, tries = Engine.from_pretrained, []

        def flaky(*arguments, **options):
            tries.append(1)
            if len(tries) < 3:
                raise OSError("connection lost")
            return load(*arguments, **options)

        monkeypatch.setattr(Engine, "from_pretrained", flaky)
        with pytest.raises(OSError, match="connection"):
            ChatKVBoost(model=str(folder), engine_config=QUIET).invoke("q")
        assert len(tries) == 1
        ChatKVBoost(model=str(folder), engine_config=QUIET, max_retries=1, max_tokens=1).invoke("q")
        assert len(tries) == 3

    def test_5431_pickling(self, fresh, folder, engine):
        chat = ChatKVBoost(model=str(folder), engine_config=QUIET, max_tokens=3)
        chat.invoke("q")  # the engine is loaded by now
        copied = pickle.loads(pickle.dumps(chat))
        assert copied.max_tokens == 3
        assert copied.invoke("q").content == chat.invoke("q").content
        with pytest.raises(ConfigError, match="make it with model="):
            pickle.dumps(ChatKVBoost(engine=engine))

    def test_copies_share_the_engine(self, engine):
        chat = ChatKVBoost(engine=engine, stop=["x"])
        copied = copy.deepcopy(chat)
        assert copied.engine is engine
        assert copied.stop == chat.stop
        assert copied.stop is not chat.stop
        assert chat.model_copy(deep=True).engine is engine

    def test_tracing_parameters(self):
        parameters = ChatKVBoost(model="m", temperature=0.5, max_tokens=3, stop=["x"])._get_ls_params(stop=["y"])
        assert parameters["ls_provider"] == "kvboost"
        assert (parameters["ls_model_name"], parameters["ls_temperature"], parameters["ls_max_tokens"]) == ("m", 0.5, 3)
        assert parameters["ls_stop"] == ["x", "y"]

    def test_17251_profile(self, engine):
        profile = ChatKVBoost(engine=engine).profile
        assert profile["max_input_tokens"] == engine.window_tokens
        assert profile["tool_calling"]
        assert profile["structured_output"]
        assert not profile["image_inputs"]
        assert "max_input_tokens" not in ChatKVBoost(model="not/loaded").profile


class TestResponse:
    def test_metadata(self, engine):
        chat = ChatKVBoost(engine=engine, max_tokens=4)
        document = text(1, 200)
        first = chat.invoke(document)
        details = first.response_metadata
        assert (details["model_provider"], details["finish_reason"], details["fallback_reason"]) == (
            "kvboost",
            "length",
            None,
        )
        assert 0 < details["ttft_s"] < 60
        assert details["computed_tokens"] == first.usage_metadata["input_tokens"]
        again = chat.invoke([("system", "Other words in front."), ("human", document)])
        details = again.response_metadata
        assert details["approximate_tokens"] > 0.5 * again.usage_metadata["input_tokens"]
        assert details["repaired_tokens"] > 0
        read = again.usage_metadata["input_token_details"]["cache_read"]
        assert read == details["exact_tokens"] + details["approximate_tokens"]

    def test_a_turn_continues_the_one_before(self, chat, engine):
        """Of gendox-core 542: the next turn replays what was sent, so all of it is an exact hit."""
        question = HumanMessage(f"{text(8, 40)} Which river?")
        first = chat.invoke([SystemMessage("s"), question])
        answer = first.content or "-"
        second = chat.invoke([SystemMessage("s"), question, AIMessage(answer), HumanMessage("And?")])
        assert second.response_metadata["exact_tokens"] >= first.usage_metadata["input_tokens"] - 1

    def test_raglite_49_documents_in_another_order(self, chat):
        """And open-webui 23583: a document that moves."""
        documents = [text(seed, 40) for seed in (20, 21, 22)]
        chat.invoke("\n\n".join(["Read this.", *documents, "Which river?"]))
        usage = chat.invoke("\n\n".join(["Now that.", *documents[::-1], "Which stone?"])).usage_metadata
        assert usage["input_token_details"]["cache_read"] > 0.7 * usage["input_tokens"]

    def test_fallback_reason(self):
        engine = recording(fallback=True)
        document = text(2, 40)
        chat = ChatKVBoost(engine=engine, max_tokens=1)
        chat.invoke(document)
        answer = chat.invoke(f"New words. {document}")
        assert "not worth" in answer.response_metadata["fallback_reason"]

    def test_cache_creation_is_what_was_stored(self, engine):
        chat = ChatKVBoost(engine=engine, max_tokens=4)
        one = chat.invoke(text(3, 60)).usage_metadata
        assert one["input_token_details"] == {"cache_read": 0, "cache_creation": one["input_tokens"]}
        two = chat.invoke(text(3, 60)).usage_metadata
        assert two["input_token_details"]["cache_read"] >= two["input_tokens"] - 1
        assert two["input_token_details"]["cache_creation"] == 0
        off = chat.invoke(text(4, 60), reuse="off").usage_metadata
        assert off["input_token_details"] == {"cache_read": 0, "cache_creation": 0}

    def test_nothing_is_created_where_prompts_are_not_kept(self):
        engine = engine_of(store_prompts=False)
        usage = ChatKVBoost(engine=engine, max_tokens=2).invoke("q").usage_metadata
        assert usage["input_token_details"] == {"cache_read": 0, "cache_creation": 0}

    def test_usage_sums(self, chat):
        usage = chat.invoke("q").usage_metadata
        assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
        assert usage["output_tokens"] == 8

    def test_24430_the_answer_does_not_hold_the_prompt(self, chat, engine):
        engine.says = "walnut"
        answer = chat.invoke("Which tree is that?")
        assert answer.content == "walnut"
        assert answer.response_metadata["finish_reason"] == "stop"

    def test_19770_an_answer_ends(self, engine):
        engine.says = "the end"
        assert ChatKVBoost(engine=engine, max_tokens=LONG).invoke("q").content == "the end"

    def test_token_counts(self, chat, engine):
        assert chat.get_token_ids("Hello world") == engine.tokenizer("Hello world", add_special_tokens=False).input_ids
        assert chat.get_num_tokens("Hello world") == len(chat.get_token_ids("Hello world"))
        messages = [SystemMessage("s"), HumanMessage("Hello")]
        assert chat.get_num_tokens_from_messages(messages) == chat.invoke(messages).usage_metadata["input_tokens"]
        assert ChatKVBoost(engine=engine, custom_get_token_ids=lambda text: [1, 2]).get_num_tokens("x") == 2

    def test_trimming_counts_with_the_model(self, chat):
        messages = [HumanMessage("word " * 60), AIMessage("a"), HumanMessage("b")]
        least = chat.get_num_tokens_from_messages(messages[-1:])
        kept = trim_messages(messages, max_tokens=least, token_counter=chat, strategy="last", start_on="human")
        assert kept == messages[-1:]


class TestStreaming:
    def test_streaming_equals_invoke(self, chat):
        pieces = list(chat.stream(text(5, 20)))
        assert len(pieces) > 3  # 18782: nothing streamed
        same_answer(merged(pieces), chat.invoke(text(5, 20)))
        same_answer(merged(pieces), asyncio.run(chat.ainvoke(text(5, 20))))
        same_answer(merged(asyncio.run(collected(chat.astream(text(5, 20))))), chat.invoke(text(5, 20)))

    def test_batches_equal_invoke(self, chat):
        questions = [text(seed, 5) for seed in range(4)]
        one_by_one = [chat.invoke(question) for question in questions]
        for answers in (chat.batch(questions), asyncio.run(chat.abatch(questions))):  # 16824
            assert [answer.content for answer in answers] == [answer.content for answer in one_by_one]

    def test_30429_usage_is_on_the_last_piece_only(self, chat):
        pieces = list(chat.stream("q"))
        assert [piece.usage_metadata is not None for piece in pieces] == [False] * (len(pieces) - 1) + [True]
        assert [piece.chunk_position for piece in pieces] == [None] * (len(pieces) - 1) + ["last"]
        assert all("ttft_s" not in piece.response_metadata for piece in pieces[:-1])
        whole = merged(pieces)
        assert isinstance(whole, AIMessageChunk)
        assert whole.usage_metadata["output_tokens"] == 8  # 32818, 19740
        assert whole.response_metadata["ttft_s"] > 0

    def test_stream_usage(self, chat, engine):
        quiet = ChatKVBoost(engine=engine, max_tokens=4, stream_usage=False)
        assert merged(quiet.stream("q")).usage_metadata is None
        assert merged(quiet.stream("q")).response_metadata["finish_reason"] == "length"
        assert merged(quiet.stream("q", stream_usage=True)).usage_metadata["output_tokens"] == 4
        assert merged(chat.stream("q", stream_usage=False)).usage_metadata is None
        assert merged(asyncio.run(collected(quiet.astream("q")))).usage_metadata is None
        assert quiet.invoke("q").usage_metadata is not None

    def test_17024_pieces_arrive_while_the_model_runs(self, engine):
        with Forwards(engine.model) as forwards:
            stream = ChatKVBoost(engine=engine, max_tokens=LONG).stream("q")
            next(stream)
            assert len(forwards.rows) < LONG / 2
            stream.close()

    def test_streaming_invoke_tells_callbacks_every_piece(self, engine):
        heard, ends = [], []

        class Listener(BaseCallbackHandler):
            def on_llm_new_token(self, token, *, chunk=None, **_):
                heard.append((token, chunk))

            def on_llm_end(self, response, **_):
                ends.append(response)

        chat = ChatKVBoost(engine=engine, max_tokens=8, streaming=True)
        answer = chat.invoke("q", config={"callbacks": [Listener()]})
        assert "".join(token for token, _ in heard) == answer.content
        assert len(heard) > 3
        assert all(chunk.message.content == token for token, chunk in heard)
        assert ends[0].generations[0][0].message.usage_metadata == answer.usage_metadata
        heard.clear()
        streamed = merged(ChatKVBoost(engine=engine, max_tokens=8).stream("q", config={"callbacks": [Listener()]}))
        assert "".join(token for token, _ in heard) == streamed.content
        assert len(ends) == 2

    def test_async_callbacks(self, engine):
        heard = []

        class Listener(AsyncCallbackHandler):
            async def on_llm_new_token(self, token, **_):
                heard.append(token)

        chat = ChatKVBoost(engine=engine, max_tokens=8, streaming=True)
        answer = asyncio.run(chat.ainvoke("q", config={"callbacks": [Listener()]}))
        assert "".join(heard) == answer.content
        assert len(heard) > 3

    def test_configured_models_stream_too(self, engine):
        """A configurable model is made anew from all its fields, and LangChain takes streaming=False for an order."""
        engine.says = "12345678 and so on"  # sampled tokens may be parts of one character
        chat = ChatKVBoost(engine=engine, max_tokens=8).configurable_fields(temperature=ConfigurableField(id="heat"))
        pieces = list(chat.with_config(configurable={"heat": 0.5}).stream("q"))
        assert len(pieces) > 3
        assert engine.sampling.temperature == 0.5

    @pytest.mark.parametrize(("streaming", "pieces"), [(False, 1), (True, 8), (None, 8)])
    def test_streaming_field(self, engine, streaming, pieces):
        engine.says = "12345678 and so on"
        chat = ChatKVBoost(engine=engine, max_tokens=8, streaming=streaming)
        assert len([piece for piece in chat.stream("q") if piece.content]) == pieces

    def test_events(self, chat):
        async def events():
            return [event async for event in chat.astream_events("q")]

        told = asyncio.run(events())
        texts = [e["data"]["chunk"].content for e in told if e["event"] == "on_chat_model_stream"]
        assert "".join(texts) == chat.invoke("q").content
        assert told[-1]["event"] == "on_chat_model_end"
        assert told[-1]["data"]["output"].usage_metadata["output_tokens"] == 8

    def test_disable_streaming(self, engine):
        chat = ChatKVBoost(engine=engine, max_tokens=4, disable_streaming=True)
        assert len([piece for piece in chat.stream("q") if piece.content]) == 1

    def test_rate_limiter(self, engine):
        limiter = InMemoryRateLimiter(requests_per_second=20, check_every_n_seconds=0.01, max_bucket_size=1)
        chat = ChatKVBoost(engine=engine, max_tokens=1, rate_limiter=limiter)
        began = time.monotonic()
        for _ in range(4):
            chat.invoke("q")
        assert time.monotonic() - began > 0.1

    def test_errors_of_a_stream_reach_its_reader(self, chat, engine):
        def fail(*args, **kwargs):
            raise RuntimeError("out of luck")

        handle = engine.model.register_forward_pre_hook(fail)
        try:
            with pytest.raises(RuntimeError, match="out of luck"):
                list(chat.stream("q"))
            with pytest.raises(RuntimeError, match="out of luck"):
                asyncio.run(collected(chat.astream("q")))
        finally:
            handle.remove()
        assert chat.invoke("q").content


class TestStops:
    def test_22601_stops_end_invoke_and_stream(self, engine):
        chat = ChatKVBoost(engine=engine, max_tokens=40)
        engine.says = "river stone\nObservation: paper"
        for answer in (
            chat.invoke("q", stop=["\nObservation"]),
            merged(chat.stream("q", stop=["\nObservation"])),
            asyncio.run(chat.ainvoke("q", stop=["\nObservation"])),
        ):
            assert answer.content == "river stone"
            assert answer.response_metadata["finish_reason"] == "stop"

    def test_a_stop_over_many_tokens_never_leaks(self, engine):
        engine.says = "river </st stone </stop> paper"
        assert len(engine.tokenizer("</stop>").input_ids) > 4
        chat = ChatKVBoost(engine=engine, max_tokens=60, stop=["</stop>"])
        pieces = [piece.content for piece in chat.stream("q", stop=["never"])]
        assert "".join(pieces) == "river </st stone "
        assert not any("</stop" in "".join(pieces[: i + 1]) for i in range(len(pieces)))

    def test_instance_and_call_stops_both_end(self, engine):
        engine.says = "river stone paper winter"
        chat = ChatKVBoost(engine=engine, max_tokens=40, stop=["winter"])
        assert chat.invoke("q").content == "river stone paper "
        assert chat.invoke("q", stop=["stone"]).content == "river "

    def test_a_stop_as_a_string(self, engine):
        engine.says = "river stone"
        assert ChatKVBoost(engine=engine, max_tokens=40).invoke("q", stop="stone").content == "river "


class TestLimits:
    def test_17496_overflow(self, engine):
        chat = ChatKVBoost(engine=engine, max_tokens=4)
        with pytest.raises(PromptOverflowError, match="context window") as raised:
            chat.invoke("q " * engine.window_tokens)
        assert isinstance(raised.value, LangChainContextOverflowError)
        assert isinstance(raised.value, ContextOverflowError)
        assert raised.value.window_tokens == engine.window_tokens
        assert raised.value.prompt_tokens > engine.window_tokens
        assert str(raised.value.prompt_tokens) in str(raised.value)
        copied = pickle.loads(pickle.dumps(raised.value))
        assert str(copied) == str(raised.value)
        assert copied.prompt_tokens == raised.value.prompt_tokens

    @pytest.mark.parametrize("form", ["stream", "ainvoke", "astream"])
    def test_overflow_in_every_form(self, chat, engine, form):
        long = "q " * engine.window_tokens
        run = {
            "stream": lambda: list(chat.stream(long)),
            "ainvoke": lambda: asyncio.run(chat.ainvoke(long)),
            "astream": lambda: asyncio.run(collected(chat.astream(long))),
        }[form]
        with pytest.raises(PromptOverflowError):
            run()

    @pytest.mark.parametrize("form", ["invoke", "stream", "ainvoke", "astream"])
    def test_timeout_raises_and_stops(self, engine, form):
        chat = ChatKVBoost(engine=engine, max_tokens=LONG, timeout=0.3)
        run = {
            "invoke": lambda: chat.invoke("q"),
            "stream": lambda: list(chat.stream("q")),
            "ainvoke": lambda: asyncio.run(chat.ainvoke("q")),
            "astream": lambda: asyncio.run(collected(chat.astream("q"))),
        }[form]
        with Forwards(engine.model) as forwards:
            with pytest.raises(RequestTimeoutError, match="timeout_s"):
                run()
            stopped = len(forwards.rows)
            assert stopped < LONG
            time.sleep(0.1)
            assert len(forwards.rows) == stopped

    def test_a_window_almost_full_gives_a_short_answer(self, engine):
        chat = ChatKVBoost(engine=engine, max_tokens=50)
        around = chat.get_num_tokens_from_messages([HumanMessage("")])
        prompt = "é" * ((engine.window_tokens - around - 4) // len(engine.tokenizer("é").input_ids))
        message = chat.invoke(prompt)
        usage = message.usage_metadata
        assert usage["input_tokens"] + usage["output_tokens"] == engine.window_tokens + 1
        assert message.response_metadata["finish_reason"] == "length"


class TestCancelling:
    """Transformers 27927: a computation that nobody waits for must stop."""

    def ran_on(self, forwards):
        before = len(forwards.rows)
        time.sleep(0.15)
        return len(forwards.rows) - before

    def test_closing_a_stream(self, engine):
        with Forwards(engine.model) as forwards:
            stream = ChatKVBoost(engine=engine, max_tokens=LONG).stream("q")
            next(stream)
            stream.close()
            assert self.ran_on(forwards) == 0
            assert len(forwards.rows) < LONG

    def test_closing_an_async_stream(self, engine):
        async def leave():
            stream = ChatKVBoost(engine=engine, max_tokens=LONG).astream("q")
            await anext(stream)
            await stream.aclose()

        with Forwards(engine.model) as forwards:
            asyncio.run(leave())
            # LangChain leaves the inner stream to the loop, which may end before the forward that is under way.
            assert self.ran_on(forwards) <= 1
            assert self.ran_on(forwards) == 0
            assert len(forwards.rows) < LONG

    @pytest.mark.parametrize("form", ["ainvoke", "astream"])
    def test_cancelling_a_task(self, engine, form):
        chat = ChatKVBoost(engine=engine, max_tokens=LONG)

        async def give_up():
            work = chat.ainvoke("q") if form == "ainvoke" else collected(chat.astream("q"))
            task = asyncio.create_task(work)
            while len(forwards.rows) < 3:
                await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

        with Forwards(engine.model) as forwards:
            asyncio.run(give_up())
            assert self.ran_on(forwards) == 0
            assert len(forwards.rows) < LONG
        assert ChatKVBoost(engine=engine, max_tokens=2).invoke("q").content is not None

    def test_wait_for(self, engine):
        async def impatient():
            await asyncio.wait_for(ChatKVBoost(engine=engine, max_tokens=LONG).ainvoke("q"), 0.2)

        with Forwards(engine.model) as forwards:
            with pytest.raises(TimeoutError):
                asyncio.run(impatient())
            assert self.ran_on(forwards) == 0


class TestThreads:
    def test_18182_the_loop_goes_on(self, fresh, tmp_path):
        """Also while the first call loads a model."""
        new_model("llama", num_hidden_layers=6, hidden_size=128).save_pretrained(tmp_path)
        tokenizer_of().save_pretrained(tmp_path)
        chat = ChatKVBoost(model=str(tmp_path), engine_config=QUIET, max_tokens=150)

        async def longest_stall():
            stalls = []

            async def watch():
                while True:
                    before = time.monotonic()
                    await asyncio.sleep(0.005)
                    stalls.append(time.monotonic() - before)

            watcher = asyncio.create_task(watch())
            began = time.monotonic()
            await chat.ainvoke("q")
            await collected(chat.astream(text(1, 100)))
            took = time.monotonic() - began
            watcher.cancel()
            return max(stalls), took

        stall, took = asyncio.run(longest_stall())
        assert took > 0.5
        assert stall < 0.5 * took

    def test_10719_async_requests_share_the_loop(self, engine):
        chat = ChatKVBoost(engine=engine, max_tokens=30)

        async def both():
            order = []

            async def ask():
                await chat.ainvoke("q")
                order.append("answer")

            async def other():
                for _ in range(5):
                    await asyncio.sleep(0.001)
                order.append("other")

            await asyncio.gather(ask(), other())
            return order

        assert asyncio.run(both()) == ["other", "answer"]

    def test_llama_cpp_1367_threads_get_their_own_answers(self, chat):
        questions = [text(seed, 4) for seed in range(6)]
        alone = [chat.invoke(question).content for question in questions]
        found = [None] * len(questions)

        def ask(i):
            found[i] = merged(chat.stream(questions[i])).content if i % 2 else chat.invoke(questions[i]).content

        threads = [threading.Thread(target=ask, args=(i,)) for i in range(len(questions))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == alone

    def test_two_chains_of_one_engine_are_apart(self, engine):
        document = text(7, 60)
        one, two = (ChatKVBoost(engine=engine, max_tokens=1, namespace=name) for name in ("chain-a", "chain-b"))
        one.invoke(document)
        assert two.invoke(document).usage_metadata["input_token_details"]["cache_read"] == 0
        assert one.invoke(document).usage_metadata["input_token_details"]["cache_read"] > 0
        assert one.invoke(document, namespace="chain-c").usage_metadata["input_token_details"]["cache_read"] == 0


class TestResponseCache:
    """14590: LangChain's response cache must tell apart whatever changes an answer."""

    @pytest.fixture
    def cached(self, engine):
        return ChatKVBoost(engine=engine, max_tokens=3, cache=InMemoryCache())

    def test_the_same_is_a_hit(self, cached, engine):
        answer = cached.invoke("q")
        assert cached.invoke("q").content == answer.content
        assert len(engine.asked) == 1

    @pytest.mark.parametrize(
        "other",
        [
            {"temperature": 1.0},
            {"max_tokens": 2},
            {"top_p": 0.5},
            {"top_k": 3},
            {"min_p": 0.1},
            {"repetition_penalty": 1.5},
            {"seed": 1},
            {"stop": ["x"]},
            {"namespace": "x"},
            {"reuse": "off"},
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}]},
            {"response_format": {"type": "json_object"}, "max_tokens": 60},
        ],
        ids=lambda other: next(iter(other)),
    )
    def test_a_call_that_differs_is_a_miss(self, cached, engine, other):
        cached.invoke("q")
        cached.invoke("q", **other)
        assert len(engine.asked) == 2
        cached.invoke("q", **other)
        assert len(engine.asked) == 2

    @pytest.mark.parametrize("field", ["temperature", "seed", "namespace", "reuse", "stop", "tool_format", "min_p"])
    def test_an_instance_that_differs_is_a_miss(self, cached, engine, field):
        values = {"temperature": 1.0, "seed": 1, "namespace": "x", "reuse": "off", "stop": ["x"], "min_p": 0.5}
        other = cached.model_copy(update={field: values.get(field, "hermes")})
        cached.invoke("q")
        other.invoke("q")
        assert len(engine.asked) == 2

    def test_tool_choice(self, cached, engine):
        tools = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in ("f", "g")]
        for choice in ("f", "g", "any"):
            cached.bind_tools(tools, tool_choice=choice).invoke("q", max_tokens=80)
        assert len(engine.asked) == 3

    def test_two_classes_of_one_name(self, cached, engine):
        for fields in ({"a": (bool, ...)}, {"b": (bool, ...)}):
            answer = create_model("Answer", **fields)
            bound = cached.bind_tools([], response_format=answer)
            assert next(iter(fields)) in bound.invoke("q", max_tokens=60).content
        assert len(engine.asked) == 2

    def test_recipe(self, cached, engine):
        cached.invoke("q")
        before = engine.recipe
        engine.recipe = dataclasses.replace(before, ratio=0.5)
        try:
            cached.invoke("q")
        finally:
            engine.recipe = before
        assert len(engine.asked) == 2

    def test_weights_that_change_after_they_were_loaded(self, tmp_path):
        model = new_model("llama")
        model.save_pretrained(tmp_path)
        tokenizer_of().save_pretrained(tmp_path)
        chat = ChatKVBoost(
            model=str(tmp_path),
            max_tokens=3,
            cache=InMemoryCache(),
            engine_config=EngineConfig(fallback=False, calibration_dir=None),
        )
        unread = chat._get_llm_string()
        loaded = chat.get_engine()
        before = chat._get_llm_string()
        with torch.no_grad():
            for weight in loaded.model.parameters():
                weight.mul_(-0.7)  # as an adapter does
        assert len({unread, before, chat._get_llm_string()}) == 3
        release_engines()
        assert chat._get_llm_string() == unread

    def test_models_of_one_name(self):
        models = [new_model("llama", seed=seed) for seed in (0, 1)]
        keys = [ChatKVBoost(engine=engine_of(model))._get_llm_string() for model in models]
        assert keys[0] != keys[1]
        assert keys[0] == ChatKVBoost(engine=engine_of(models[0]))._get_llm_string()

    def test_folders_and_revisions(self, folder, tmp_path):
        for name in ("config.json", "model.safetensors"):
            (tmp_path / name).write_bytes((folder / name).read_bytes())
        keys = [
            ChatKVBoost(**given)._get_llm_string()
            for given in (
                {"model": str(folder)},
                {"model": str(tmp_path)},
                {"model": "m"},
                {"model": "n"},
                {"model": "m", "model_kwargs": {"revision": "a"}},
                {"model": "m", "model_kwargs": {"revision": "b"}},
                {"model": "m", "engine_config": EngineConfig(repair_ratio=0.5)},
            )
        ]
        assert len(set(keys)) == len(keys)
        before = ChatKVBoost(model=str(tmp_path))._get_llm_string()
        (tmp_path / "model.safetensors").write_bytes(b"other weights")
        assert ChatKVBoost(model=str(tmp_path))._get_llm_string() != before


DOCUMENTS = [
    "The lighthouse of Vell was built in 1872 by Mara Osk. Its lamp burns whale oil and can be seen for thirty miles "
    "on a clear night. The keeper climbs two hundred and eleven steps every evening to light it before the sun sets.",
    "The harbour of Vell opens at six in the morning and closes when the tide turns. Ships that arrive late must wait "
    "outside the mole until the next day. The harbour master, a woman called Ilse Brandt, keeps the list of berths.",
    "The market of Vell is held on Thursdays in the square behind the church. Farmers sell cheese, apples and wool "
    "there, and the town brewer sells a dark beer that is made only in autumn, when the barley has been brought in.",
]


@pytest.fixture(scope="module")
def real(model_path):
    engine = Engine.from_pretrained(str(model_path), config=EngineConfig(fallback=False))
    engine.warm(DOCUMENTS)
    yield engine
    engine.close()


@pytest.mark.model
class TestRealModel:
    @pytest.fixture
    def prompt(self):
        return ChatPromptTemplate.from_messages(
            [("system", "Answer from the context."), ("human", "{context}\n\nQuestion: {question}")]
        )

    @pytest.fixture
    def inputs(self):
        return {"context": "\n\n".join(reversed(DOCUMENTS)), "question": "On which day is the market held?"}

    def test_reordered_documents_in_a_chain(self, real, prompt, inputs):
        message = (prompt | ChatKVBoost(engine=real, max_tokens=24)).invoke(inputs)
        assert "Thursdays" in message.content
        usage, details = message.usage_metadata, message.response_metadata
        roles = {"system": "system", "human": "user"}
        given = [{"role": roles[m.type], "content": m.content} for m in prompt.invoke(inputs).to_messages()]
        assert usage["input_tokens"] == len(real.tokenize(given))
        assert usage["input_token_details"]["cache_read"] == details["exact_tokens"] + details["approximate_tokens"]
        assert details["approximate_tokens"] > 0.5 * usage["input_tokens"]
        assert 0 < details["computed_tokens"] < usage["input_tokens"]
        assert details["fallback_reason"] is None

    @pytest.mark.slow
    def test_stream_equals_invoke_and_async(self, real, prompt, inputs):
        chain = prompt | ChatKVBoost(engine=real, max_tokens=12) | StrOutputParser()
        answer = chain.invoke(inputs)
        pieces = list(chain.stream(inputs))
        assert len(pieces) > 3
        assert "".join(pieces) == answer

        async def both():
            return await chain.ainvoke(inputs), "".join([piece async for piece in chain.astream(inputs)])

        assert asyncio.run(both()) == (answer, answer)

    @pytest.mark.slow
    def test_reuse_off_equals_exact(self, real, prompt, inputs):
        chat = ChatKVBoost(engine=real, max_tokens=8)
        off, exact = ((prompt | chat.bind(reuse=reuse)).invoke(inputs) for reuse in ("off", "exact"))
        assert off.content == exact.content
        assert off.usage_metadata["input_token_details"]["cache_read"] == 0

    @pytest.mark.slow
    def test_stop_max_tokens_seed(self, real):
        chat = ChatKVBoost(engine=real, max_tokens=12)
        plain = chat.invoke("Count from one to ten in words.")
        assert plain.usage_metadata["output_tokens"] <= 12
        word = plain.content.split()[2]
        stopped = chat.invoke("Count from one to ten in words.", stop=[word])
        assert stopped.content == plain.content[: plain.content.index(word)]
        assert stopped.response_metadata["finish_reason"] == "stop"
        hot = ChatKVBoost(engine=real, max_tokens=8, temperature=1.0, seed=7)
        assert hot.invoke("Tell me a story.").content == hot.invoke("Tell me a story.").content

    @pytest.mark.slow
    def test_async_does_not_block_the_loop(self, real):
        async def longest_stall():
            stalls = []

            async def watch():
                while True:
                    before = time.monotonic()
                    await asyncio.sleep(0.01)
                    stalls.append(time.monotonic() - before)

            watcher = asyncio.create_task(watch())
            began = time.monotonic()
            await ChatKVBoost(engine=real, max_tokens=24).ainvoke("Write about the sea.")
            took = time.monotonic() - began
            watcher.cancel()
            return max(stalls), took

        stall, took = asyncio.run(longest_stall())
        assert stall < max(0.5, 0.5 * took)
