"""KVBoostLLM on real engines: text in, text out."""

from __future__ import annotations

import asyncio
import copy
import pickle
import time

import pytest
from langchain_core.caches import InMemoryCache
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import PromptTemplate

from kvboost_rag import ConfigError, EngineConfig, RequestTimeoutError, SamplingParams
from kvboost_rag.frameworks import engines
from langchain_kvboost import KVBoostLLM, PromptOverflowError
from tests.recording import recording
from tests.tiny import Forwards, model_of, new_model, text, tokenizer_of

LONG = 3000


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
def llm(engine):
    return KVBoostLLM(engine=engine, max_tokens=8)


async def collected(stream):
    return [piece async for piece in stream]


class TestAnswers:
    def test_the_prompt_runs_as_it_stands(self, llm, engine):
        llm.invoke("<|im_start|>river")
        assert engine.prompt == "<|im_start|>river"
        assert engine.ids == engine.tokenizer("<|im_start|>river").input_ids

    def test_24430_the_answer_does_not_hold_the_prompt(self, llm, engine):
        engine.says = " stone"
        assert llm.invoke("river") == " stone"

    def test_every_form_gives_the_same(self, llm):
        answer = llm.invoke("river")
        pieces = list(llm.stream("river"))
        assert len(pieces) > 3
        assert "".join(pieces) == answer
        assert asyncio.run(llm.ainvoke("river")) == answer
        assert "".join(asyncio.run(collected(llm.astream("river")))) == answer
        assert llm.batch(["river", "river"]) == [answer, answer]
        assert asyncio.run(llm.abatch(["river", "river"])) == [answer, answer]

    def test_in_a_chain(self, llm, engine):
        chain = PromptTemplate.from_template("Read {what}.") | llm | StrOutputParser()
        assert chain.invoke({"what": "this"}) == llm.invoke("Read this.")

    def test_usage(self, llm):
        document = text(1, 200)
        result = llm.generate([document, f"Again. {document}"])
        infos = [generations[0].generation_info for generations in result.generations]
        assert infos[0]["usage_metadata"]["input_token_details"]["cache_read"] == 0
        assert infos[1]["usage_metadata"]["input_token_details"]["cache_read"] > 50
        assert infos[1]["approximate_tokens"] > 50
        assert all(info["ttft_s"] > 0 and info["finish_reason"] == "length" for info in infos)
        usage = result.llm_output["token_usage"]
        assert usage["completion_tokens"] == 16
        assert usage["prompt_tokens"] == sum(info["usage_metadata"]["input_tokens"] for info in infos)
        assert usage["total_tokens"] == usage["prompt_tokens"] + 16

    def test_usage_is_on_the_last_piece(self, llm):
        chunks = []

        class Listener(BaseCallbackHandler):
            def on_llm_new_token(self, token, *, chunk=None, **_):
                chunks.append((token, chunk))

        llm.invoke("river")
        list(llm.stream("river", config={"callbacks": [Listener()]}))
        assert all(chunk.text == token for token, chunk in chunks)
        assert [bool(chunk.generation_info) for _, chunk in chunks] == [False] * (len(chunks) - 1) + [True]
        assert chunks[-1][1].generation_info["usage_metadata"]["output_tokens"] == 8

    def test_streaming_invoke_tells_callbacks_every_piece(self, engine):
        heard = []

        class Listener(BaseCallbackHandler):
            def on_llm_new_token(self, token, **_):
                heard.append(token)

        plain = KVBoostLLM(engine=engine, max_tokens=8).generate(["river"])
        llm = KVBoostLLM(engine=engine, max_tokens=8, streaming=True)
        for ask in (llm.generate, lambda *a, **k: asyncio.run(llm.agenerate(*a, **k))):
            result = ask(["river"], callbacks=[Listener()])
            assert "".join(heard) == result.generations[0][0].text == plain.generations[0][0].text
            assert len(heard) > 3
            assert result.llm_output["token_usage"] == plain.llm_output["token_usage"]
            heard.clear()

    def test_token_ids_are_the_models(self, llm, engine):
        assert llm.get_token_ids("river stone") == engine.tokenizer("river stone").input_ids
        assert llm.get_num_tokens("river stone") == len(engine.tokenizer("river stone").input_ids)
        assert KVBoostLLM(engine=engine, custom_get_token_ids=lambda text: [1]).get_num_tokens("x") == 1


class TestOptions:
    def test_instance_and_call(self, engine):
        llm = KVBoostLLM(engine=engine, max_tokens=5, temperature=0.5, stop=["A"], timeout=60.0, namespace="n")
        llm.invoke("q")
        assert engine.sampling == SamplingParams(max_tokens=5, temperature=0.5, stop=("A",))
        assert (engine.options["timeout_s"], engine.options["namespace"]) == (60.0, "n")
        values = {"max_tokens": 2, "temperature": 0.25, "top_p": 0.5, "top_k": 3, "min_p": 0.2, "seed": 4}
        for run in (
            lambda **call: llm.invoke("q", **call),
            lambda **call: list(llm.stream("q", **call)),
            lambda **call: asyncio.run(llm.ainvoke("q", **call)),
            lambda **call: asyncio.run(collected(llm.astream("q", **call))),
        ):
            run(stop=["B"], namespace="m", reuse="exact", timeout=30.0, repetition_penalty=1.1, **values)
            assert engine.sampling == SamplingParams(stop=("A", "B"), repetition_penalty=1.1, **values)
            assert (engine.options["timeout_s"], engine.options["namespace"]) == (30.0, "m")
            assert engine.options["reuse"] == "exact"
        assert llm.max_tokens == 5

    @pytest.mark.parametrize("form", ["invoke", "stream", "ainvoke", "astream"])
    def test_unknown_arguments_raise(self, llm, engine, form):
        run = {
            "invoke": lambda: llm.invoke("q", max_new_tokens=3),
            "stream": lambda: list(llm.stream("q", max_new_tokens=3)),
            "ainvoke": lambda: asyncio.run(llm.ainvoke("q", max_new_tokens=3)),
            "astream": lambda: asyncio.run(collected(llm.astream("q", max_new_tokens=3))),
        }[form]
        with pytest.raises(ConfigError, match="max_new_tokens"):
            run()
        assert not engine.asked

    def test_construction(self, engine):
        for bad in ({"max_new_tokens": 3}, {"temperature": -1}, {"stop": [""]}):
            with pytest.raises(ValueError, match=next(iter(bad))):
                KVBoostLLM(engine=engine, **bad)
        with pytest.raises(ValueError, match="engine= or model="):
            KVBoostLLM()

    def test_22601_stops(self, engine):
        engine.says = "river stone paper"
        llm = KVBoostLLM(engine=engine, max_tokens=30, stop=["paper"])
        assert llm.invoke("q") == "river stone "
        assert llm.invoke("q", stop=["stone"]) == "river "
        assert "".join(llm.stream("q", stop=["stone"])) == "river "

    def test_tracing_parameters(self, engine):
        parameters = KVBoostLLM(model="m", temperature=0.5, max_tokens=3, stop=["x"])._get_ls_params(stop=["y"])
        assert parameters["ls_provider"] == "kvboost"
        assert (parameters["ls_model_name"], parameters["ls_temperature"], parameters["ls_max_tokens"]) == ("m", 0.5, 3)
        assert parameters["ls_stop"] == ["x", "y"]
        assert "ls_model_name" in KVBoostLLM(engine=engine)._get_ls_params()

    def test_5431_pickling_and_copies(self, engine, tmp_path, monkeypatch):
        monkeypatch.setattr(engines, "_engines", {})
        model_of("llama").save_pretrained(tmp_path)
        tokenizer_of().save_pretrained(tmp_path)
        llm = KVBoostLLM(model=str(tmp_path), engine_config=EngineConfig(calibration_dir=None), max_tokens=3)
        answer = llm.invoke("q")
        assert pickle.loads(pickle.dumps(llm)).invoke("q") == answer
        with pytest.raises(ConfigError, match="make it with model="):
            pickle.dumps(KVBoostLLM(engine=engine))
        assert copy.deepcopy(KVBoostLLM(engine=engine)).engine is engine


class TestLimits:
    @pytest.mark.parametrize("form", ["invoke", "stream", "ainvoke", "astream"])
    def test_17496_overflow(self, llm, engine, form):
        long = "q " * engine.window_tokens
        run = {
            "invoke": lambda: llm.invoke(long),
            "stream": lambda: list(llm.stream(long)),
            "ainvoke": lambda: asyncio.run(llm.ainvoke(long)),
            "astream": lambda: asyncio.run(collected(llm.astream(long))),
        }[form]
        with pytest.raises(PromptOverflowError) as raised:
            run()
        assert raised.value.window_tokens == engine.window_tokens < raised.value.prompt_tokens

    def test_timeout(self, engine):
        llm = KVBoostLLM(engine=engine, max_tokens=LONG, timeout=0.2)
        with Forwards(engine.model) as forwards:
            for run in (lambda: llm.invoke("q"), lambda: list(llm.stream("q"))):
                with pytest.raises(RequestTimeoutError):
                    run()
            assert len(forwards.rows) < LONG

    @pytest.mark.parametrize("form", ["stream", "ainvoke", "astream"])
    def test_leaving_stops_the_computation(self, engine, form):
        llm = KVBoostLLM(engine=engine, max_tokens=LONG)

        def leave():
            stream = llm.stream("q")
            next(stream)
            stream.close()

        async def cancel():
            work = llm.ainvoke("q") if form == "ainvoke" else collected(llm.astream("q"))
            await asyncio.wait_for(work, 0.2)

        with Forwards(engine.model) as forwards:
            if form == "stream":
                leave()
            else:
                with pytest.raises(TimeoutError):
                    asyncio.run(cancel())
            ran = len(forwards.rows)
            time.sleep(0.15)
            assert len(forwards.rows) == ran < LONG


class TestResponseCache:
    """14590; LangChain keys a text model's cache on its fields and forgets what the call asks for."""

    def test_the_same_is_a_hit(self, engine):
        llm = KVBoostLLM(engine=engine, max_tokens=3, cache=InMemoryCache())
        assert llm.invoke("q") == llm.invoke("q")
        assert len(engine.asked) == 1
        assert llm.invoke("q", max_tokens=3) == llm.invoke("q")
        assert len(engine.asked) == 1

    @pytest.mark.parametrize(
        "other",
        [{"namespace": "x"}, {"temperature": 1.0}, {"max_tokens": 2}, {"seed": 2}, {"reuse": "off"}, {"stop": ["x"]}],
    )
    @pytest.mark.parametrize("form", ["invoke", "ainvoke"])
    def test_a_call_that_differs_is_a_miss(self, engine, other, form):
        llm = KVBoostLLM(engine=engine, max_tokens=3, cache=InMemoryCache())
        ask = llm.invoke if form == "invoke" else lambda *a, **k: asyncio.run(llm.ainvoke(*a, **k))
        ask("q")
        ask("q", **other)
        assert len(engine.asked) == 2
        ask("q", **other)
        assert len(engine.asked) == 2

    def test_models_differ(self, engine):
        llm = KVBoostLLM(engine=engine, max_tokens=3, cache=InMemoryCache())
        llm.invoke("q")
        llm.invoke("q")
        another = recording(model=new_model("llama", seed=1))
        KVBoostLLM(engine=another, max_tokens=3, cache=llm.cache).invoke("q")
        assert len(another.asked) == 1

    def test_a_model_that_changed_differs(self):
        engine = recording()
        llm = KVBoostLLM(engine=engine, max_tokens=3, cache=InMemoryCache())
        llm.invoke("q")
        engine.model.lm_head.weight.data.neg_()
        llm.invoke("q")
        assert len(engine.asked) == 2
