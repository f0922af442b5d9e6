"""From a finished prefill to text: stops, deltas, sampling, cancelling, and the async forms."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.convert_slow_tokenizer import bytes_to_unicode

from kvboost_rag import ConfigError, Delta, Engine, Generation, PromptError, SamplingParams
from kvboost_rag.decode import Detokenizer, StopFilter
from tests.tiny import (
    LIMIT,
    VOCAB,
    Forwards,
    engine_of,
    new_model,
    off_by,
    plain_answer,
    random_ids,
    text,
    tokenizer_of,
)

PROMPT = random_ids(1, 40)
SHORT = SamplingParams(max_tokens=8)


@pytest.fixture(scope="module")
def engine() -> Engine:
    """One engine for tests that only read answers."""
    return engine_of("llama", reuse="exact")


class Script:
    """A logits processor that makes the model say given tokens; each step may be watched."""

    def __init__(self, ids: Sequence[int], each: Callable[[int], None] | None = None) -> None:
        self._ids, self._each = list(ids), each
        self.steps = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        if self._each is not None:
            self._each(self.steps)
        forced = torch.full_like(scores, float("-inf"))
        forced[:, self._ids[min(self.steps, len(self._ids)) - 1]] = 0.0
        return forced


def saying(words: str | Sequence[int], each: Callable[[int], None] | None = None, **options: Any) -> SamplingParams:
    """Sampling that answers with a text, byte by byte as far as the tokenizer allows, and with a full stop after it."""
    ids = tokenizer_of().encode(words) if isinstance(words, str) else list(words)
    return SamplingParams(**{"max_tokens": len(ids), **options, "logits_processors": (Script(ids, each),)})


def byte_ids(words: str) -> list[int]:
    """One token per byte."""
    names = bytes_to_unicode()
    return [tokenizer_of().convert_tokens_to_ids(names[byte]) for byte in words.encode()]


def _streamed(engine: Engine, sampling: SamplingParams, **options: Any) -> tuple[list[Delta], Generation]:
    deltas = list(engine.stream(PROMPT, sampling=sampling, **options))
    last = deltas[-1].generation
    assert last is not None
    assert all(delta.generation is None for delta in deltas[:-1])
    return deltas, last


# ---- pieces of text --------------------------------------------------------------------------------------------------


def _push_all(detokenizer: Detokenizer, ids: Sequence[int]) -> list[str]:
    return [*(detokenizer.push(token) for token in ids), detokenizer.flush()]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(3, VOCAB - 1), max_size=40))
def test_pieces_of_any_tokens_join_to_their_text(ids: list[int]) -> None:
    tokenizer = tokenizer_of()
    assert "".join(_push_all(Detokenizer(tokenizer.decode), ids)) == tokenizer.decode(ids)


@settings(max_examples=100, deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\ufffd"), max_size=30))
def test_half_a_character_is_held_back(words: str) -> None:
    pieces = _push_all(Detokenizer(tokenizer_of().decode), byte_ids(words))
    assert "".join(pieces) == words
    assert not any("\ufffd" in piece for piece in pieces)


def test_an_unfinished_character_at_the_end_is_given_out_at_last() -> None:
    pieces = _push_all(Detokenizer(tokenizer_of().decode), byte_ids("a€")[:-1])
    assert pieces[0] == "a"
    assert pieces[-1] == "\ufffd"


STOPS = st.lists(st.text("ab\n", min_size=1, max_size=4), min_size=1, max_size=3)


@settings(max_examples=400, deadline=None)
@given(st.lists(st.text("ab\n", max_size=4), max_size=12), STOPS)
def test_a_stop_ends_the_text_and_no_piece_of_it_comes_out(pieces: list[str], stops: list[str]) -> None:
    filter_, whole, out = StopFilter(stops), "".join(pieces), ""
    for piece in pieces:
        out += filter_.push(piece)
        assert whole.startswith(out)
        assert not any(stop in out for stop in stops)
    out += filter_.flush()
    if any(stop in whole for stop in stops):
        assert filter_.stopped
        assert any(whole.startswith(stop, len(out)) for stop in stops)
        assert not any(stop in out for stop in stops)
    else:
        assert not filter_.stopped
        assert out == whole


@settings(max_examples=200, deadline=None)
@given(st.lists(st.text("ab", min_size=1, max_size=3), max_size=12), STOPS)
def test_text_is_held_back_only_while_it_may_become_a_stop(pieces: list[str], stops: list[str]) -> None:
    filter_, seen, out = StopFilter(stops), "", ""
    for piece in pieces:
        seen += piece
        out += filter_.push(piece)
        if filter_.stopped:
            return
        held = seen[len(out) :]
        assert not held or any(stop.startswith(held) for stop in stops)


# ---- stop strings through the engine ---------------------------------------------------------------------------------

SAID = "river stone. letter forest candle"


@pytest.mark.parametrize(
    ("stop", "expected"),
    [
        ((), SAID),
        (("forest",), "river stone. letter "),
        (("ter for",), "river stone. let"),  # over token borders
        ((". ", "candle"), "river stone"),
        (("candle", "stone"), "river "),
        (("r s", "river"), ""),  # overlapping; the first to be complete
        (("river",), ""),
        (("candle!", "forest."), SAID),  # begun, never finished
        (("candle",), "river stone. letter forest "),
        (("stone. letter forest candle.",), SAID),
    ],
)
@pytest.mark.parametrize("split", [tokenizer_of().encode, byte_ids], ids=["words", "bytes"])
def test_stop_strings_end_the_answer_before_they_begin(
    engine: Engine, split: Callable[[str], list[int]], stop: tuple[str, ...], expected: str
) -> None:
    ids = split(SAID)
    whole = engine.generate(PROMPT, sampling=saying(ids, stop=stop))
    assert whole.text == expected
    assert whole.finish_reason == ("length" if expected == SAID else "stop")
    deltas, last = _streamed(engine, saying(ids, stop=stop))
    assert "".join(delta.text for delta in deltas) == expected
    assert (last.text, last.token_ids, last.finish_reason) == (whole.text, whole.token_ids, whole.finish_reason)


def test_generation_ends_with_the_token_that_completes_a_stop(engine: Engine) -> None:
    ids = byte_ids("ab stop cd")
    sampling = saying(ids, stop=("stop",))
    answer = engine.generate(PROMPT, sampling=sampling)
    assert list(answer.token_ids) == byte_ids("ab stop")
    assert answer.usage.completion_tokens == 7
    assert sampling.logits_processors[0].steps == 7  # type: ignore[attr-defined]


def test_the_end_of_sequence_ends_the_answer_and_is_no_text(engine: Engine) -> None:
    ids = [*byte_ids("ab"), tokenizer_of().eos_token_id, *byte_ids("cd")]
    answer = engine.generate(PROMPT, sampling=saying(ids))
    assert (answer.text, answer.finish_reason) == ("ab", "stop")


def test_what_could_begin_a_stop_comes_out_at_the_end_of_sequence(engine: Engine) -> None:
    ids = [*byte_ids("ab st"), tokenizer_of().eos_token_id]
    deltas, answer = _streamed(engine, saying(ids, stop=("stop",)))
    assert answer.text == "ab st" == "".join(delta.text for delta in deltas)


def test_markers_that_the_model_says_are_no_text(engine: Engine) -> None:
    start = tokenizer_of().convert_tokens_to_ids("<|im_start|>")
    answer = engine.generate(PROMPT, sampling=saying([*byte_ids("ab"), start, *byte_ids("cd")]))
    assert answer.text == "abcd"


# ---- streaming -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_a_stream_is_the_answer_in_pieces(seed: int) -> None:
    engine = engine_of("qwen3")
    prompt = f"{text(seed, 30)}\n\nWhich?"
    sampling = SamplingParams(max_tokens=30, temperature=1.0, seed=seed, stop=("e",))
    engine.generate(prompt, sampling=sampling)
    whole = engine.generate(prompt, sampling=sampling)
    deltas = list(engine.stream(prompt, sampling=sampling))
    last = deltas[-1].generation
    assert last is not None
    assert "".join(delta.text for delta in deltas) == last.text == whole.text
    assert last.token_ids == whole.token_ids
    assert (last.usage, last.finish_reason) == (whole.usage, whole.finish_reason)
    told = [token for delta in deltas for token in delta.token_ids]
    assert told == list(last.token_ids[: len(told)])


def test_half_characters_never_show_in_a_stream(engine: Engine) -> None:
    said = "naïve 日本 🚀 fin"
    deltas, last = _streamed(engine, saying(byte_ids(said)))
    assert last.text == said
    assert not any("\ufffd" in delta.text for delta in deltas)


def test_the_first_delta_comes_before_the_answer_is_finished(engine: Engine) -> None:
    given_out = threading.Event()
    stream = engine.stream(PROMPT, sampling=saying("river stone", each=lambda step: step < 3 or given_out.wait(20)))
    first = next(stream)
    given_out.set()
    assert first.text
    rest = list(stream)
    answer = rest[-1].generation
    assert answer is not None
    assert first.text + "".join(delta.text for delta in rest) == answer.text == "river stone"


def test_closing_a_stream_stops_the_computation(engine: Engine) -> None:
    script = Script(byte_ids("a"), each=lambda _: time.sleep(0.002))
    with Forwards(engine.model) as forwards:
        stream = engine.stream(PROMPT, sampling=SamplingParams(max_tokens=400, logits_processors=(script,)))
        next(stream)
        stream.close()  # type: ignore[attr-defined]
        ran = len(forwards.rows)
        assert ran < 300
        time.sleep(0.05)
        assert len(forwards.rows) == ran
    assert engine.generate(PROMPT, sampling=SHORT).finish_reason == "length"


def test_a_stream_that_is_dropped_unclosed_stops_and_waits_for_nobody(engine: Engine) -> None:
    here, go, stopped = threading.Event(), threading.Event(), threading.Event()

    def each(step: int) -> None:
        here.set()
        assert go.wait(20)

    deltas = engine.stream(PROMPT, sampling=saying(PROMPT[:1], each, max_tokens=300))
    threading.Thread(target=lambda: (next(deltas, None), stopped.set()), daemon=True).start()
    assert here.wait(20)
    reader = engine.stream(PROMPT, sampling=SHORT)
    waiting = threading.Thread(target=lambda: next(reader, None), daemon=True)
    waiting.start()
    time.sleep(0.05)
    started = time.perf_counter()
    reader.__del__()  # as the garbage collector does, in a thread that the model may wait for
    assert time.perf_counter() - started < 1
    waiting.join(5)
    assert not waiting.is_alive()
    go.set()
    assert stopped.wait(20)


def test_a_stream_reports_bad_input_at_once_and_errors_where_they_are_read(engine: Engine) -> None:
    with pytest.raises(PromptError, match="empty"):
        engine.stream("")

    def fail(step: int) -> None:
        if step == 2:
            raise ZeroDivisionError("in a logits processor")

    stream = engine.stream(PROMPT, sampling=saying("river stone paper", each=fail))
    with pytest.raises(ZeroDivisionError):
        list(stream)
    assert engine.generate(PROMPT, sampling=SHORT).finish_reason == "length"


# ---- sampling --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [1, 2, 300])
def test_max_tokens_limits_the_answer(engine: Engine, tokens: int) -> None:
    answer = engine.generate(PROMPT, sampling=saying(byte_ids("ab"), max_tokens=tokens))
    assert len(answer.token_ids) == tokens == answer.usage.completion_tokens
    assert answer.finish_reason == "length"


def test_an_answer_longer_than_the_spare_room_is_that_of_plain_generate() -> None:
    engine = engine_of("llama", reuse="exact", tokenizer=None)
    answer = engine.generate(PROMPT, sampling=SamplingParams(max_tokens=440))
    assert list(answer.token_ids) == plain_answer(engine.model, PROMPT, 440, eos_token_id=None)


def test_the_answer_ends_where_the_window_does() -> None:
    engine = engine_of("llama", reuse="exact", tokenizer=None)
    answer = engine.generate(random_ids(1, 500), sampling=SamplingParams(max_tokens=100))
    assert answer.finish_reason == "length"
    assert len(answer.token_ids) == 512 - 500 + 1


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.7},
        {"temperature": 1.5, "top_k": 7},
        {"temperature": 1.5, "top_p": 0.5},
        {"temperature": 1.5, "min_p": 0.2},
        {"temperature": 1.0, "repetition_penalty": 1.4},
        {"repetition_penalty": 1.4},
        {},
    ],
    ids=str,
)
@pytest.mark.parametrize("seed", [0, 1])
def test_sampling_is_that_of_plain_generate(engine: Engine, options: dict[str, Any], seed: int) -> None:
    answer = engine.generate(PROMPT, sampling=SamplingParams(max_tokens=16, seed=seed, **options))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        plain = plain_answer(engine.model, PROMPT, 16, do_sample="temperature" in options, **options)
    assert list(answer.token_ids) == plain


def test_temperature_zero_is_greedy_and_repeatable(engine: Engine) -> None:
    answers = [engine.generate(PROMPT, sampling=SamplingParams(max_tokens=16, temperature=0.0)) for _ in range(3)]
    assert len({answer.token_ids for answer in answers}) == 1
    assert list(answers[0].token_ids) == plain_answer(engine.model, PROMPT, 16)


def test_a_seed_repeats_an_answer_and_another_seed_does_not(engine: Engine) -> None:
    def answer(seed: int) -> tuple[int, ...]:
        hot = SamplingParams(max_tokens=12, temperature=5.0, seed=seed)
        return engine.generate(PROMPT, sampling=hot).token_ids

    assert answer(3) == answer(3)
    assert len({answer(seed) for seed in range(5)}) == 5


def test_without_a_seed_answers_vary(engine: Engine) -> None:
    hot = SamplingParams(max_tokens=12, temperature=5.0)
    assert len({engine.generate(PROMPT, sampling=hot).token_ids for _ in range(4)}) > 1


def test_a_seed_leaves_the_global_generator_as_it_was(engine: Engine) -> None:
    before = torch.get_rng_state()
    engine.generate(PROMPT, sampling=SamplingParams(max_tokens=4, temperature=1.0, seed=9))
    assert torch.equal(torch.get_rng_state(), before)


def test_logits_processors_take_effect(engine: Engine) -> None:
    assert engine.generate(PROMPT, sampling=saying("river stone")).text == "river stone"


def test_the_models_own_generation_config_is_the_default_and_stays_as_it_is() -> None:
    engine = engine_of("llama", reuse="exact")
    config = engine.model.generation_config
    before = config.to_dict()
    try:
        config.repetition_penalty = 1.4
        answer = engine.generate(PROMPT, sampling=SamplingParams(max_tokens=16))
        assert list(answer.token_ids) == plain_answer(engine.model, PROMPT, 16, repetition_penalty=1.4)
        assert config.to_dict() == before | {"repetition_penalty": 1.4}
    finally:
        config.repetition_penalty = before["repetition_penalty"]


@pytest.mark.parametrize(
    "own", [{"cache_implementation": "static"}, {"cache_implementation": "dynamic"}, {"token_healing": True}], ids=str
)
def test_what_a_generation_config_says_of_caches_and_prompts_does_not_break_an_answer(own: dict[str, Any]) -> None:
    model = new_model("llama")
    plain = plain_answer(model, PROMPT, 8)
    for name, value in own.items():
        setattr(model.generation_config, name, value)
    engine = engine_of(model, reuse="exact")
    assert list(engine.generate(PROMPT, sampling=SHORT).token_ids) == plain


def test_the_models_own_stop_strings_end_an_answer_too() -> None:
    model = new_model("llama")
    model.generation_config.stop_strings = ["market"]
    engine = engine_of(model, reuse="exact")
    answer = engine.generate(PROMPT, sampling=saying("river stone market valley"))
    assert (answer.text, answer.finish_reason) == ("river stone ", "stop")
    answer = engine.generate(PROMPT, sampling=saying("river stone market valley", stop=("stone",)))
    assert answer.text == "river "
    assert model.generation_config.stop_strings == ["market"]


def test_stop_strings_need_a_tokenizer() -> None:
    engine = engine_of(tokenizer=None)
    with pytest.raises(ConfigError, match="tokenizer"):
        engine.generate(PROMPT, sampling=SamplingParams(max_tokens=3, stop=("a",)))
    assert engine.stats().chunks == 0


def test_a_model_of_several_ends_stops_at_each_of_them(engine: Engine) -> None:
    config = engine.model.generation_config
    config.eos_token_id = byte_ids("xy")
    try:
        for end in "xy":
            answer = engine.generate(PROMPT, sampling=saying(byte_ids(f"ab{end}cd")))
            assert (answer.text, answer.finish_reason) == ("ab", "stop")
    finally:
        config.eos_token_id = None


# ---- async and cancelling --------------------------------------------------------------------------------------------


async def _with_heartbeat(work: Any) -> tuple[Any, int]:
    beats = 0

    async def beat() -> None:
        nonlocal beats
        while True:
            await asyncio.sleep(0.005)
            beats += 1

    pulse = asyncio.create_task(beat())
    result = await work
    pulse.cancel()
    return result, beats


def _slowly(_: int) -> None:
    time.sleep(0.02)


def test_agenerate_leaves_the_loop_free(engine: Engine) -> None:
    answer, beats = asyncio.run(
        _with_heartbeat(engine.agenerate(PROMPT, sampling=saying(byte_ids("0123456789"), each=_slowly)))
    )
    assert answer.text == "0123456789"
    assert beats >= 10


def test_astream_leaves_the_loop_free_and_joins_to_the_answer(engine: Engine) -> None:
    async def collect() -> list[Delta]:
        return [delta async for delta in engine.astream(PROMPT, sampling=saying(byte_ids("0123456789"), each=_slowly))]

    deltas, beats = asyncio.run(_with_heartbeat(collect()))
    assert beats >= 10
    assert "".join(delta.text for delta in deltas) == "0123456789" == deltas[-1].generation.text


def test_the_async_forms_answer_as_the_plain_ones(engine: Engine) -> None:
    async def both() -> tuple[Generation, Generation | None]:
        deltas = [delta async for delta in engine.astream(PROMPT, sampling=SHORT)]
        return await engine.agenerate(PROMPT, sampling=SHORT), deltas[-1].generation

    plain = engine.generate(PROMPT, sampling=SHORT)
    for answer in asyncio.run(both()):
        assert answer is not None
        assert (answer.text, answer.token_ids, answer.usage) == (plain.text, plain.token_ids, plain.usage)


def test_bad_input_raises_from_the_async_forms(engine: Engine) -> None:
    async def read() -> None:
        async for _ in engine.astream(""):
            pass

    for work in (engine.agenerate(""), read()):
        with pytest.raises(PromptError, match="empty"):
            asyncio.run(work)


def test_leaving_an_async_stream_stops_the_computation(engine: Engine) -> None:
    script = Script(byte_ids("a"), each=lambda _: time.sleep(0.002))

    async def read_one() -> None:
        sampling = SamplingParams(max_tokens=400, logits_processors=(script,))
        async with aclosing(engine.astream(PROMPT, sampling=sampling)) as stream:  # type: ignore[type-var]
            async for _ in stream:
                return

    asyncio.run(read_one())
    assert script.steps < 300


def test_leaving_an_async_stream_waits_for_its_thread_also_when_cancelled(engine: Engine) -> None:
    here, go = threading.Event(), threading.Event()

    def each(step: int) -> None:
        if step == 3:
            here.set()
            assert go.wait(20)

    async def scenario() -> None:
        stream = engine.astream(PROMPT, sampling=saying(byte_ids("a" * 300), each))
        await anext(stream)
        assert await asyncio.to_thread(here.wait, 20)
        closing = asyncio.create_task(stream.aclose())
        await asyncio.sleep(0.05)
        closing.cancel()
        await asyncio.sleep(0.05)
        assert not closing.done()  # the model is still inside a step
        go.set()
        with pytest.raises(asyncio.CancelledError):
            await closing

    with Forwards(engine.model) as forwards:
        asyncio.run(scenario())
        ran = len(forwards.rows)
        time.sleep(0.1)
        assert len(forwards.rows) == ran < 20


def test_a_loop_that_is_gone_stops_the_computation(engine: Engine) -> None:
    """A loop that is closed by hand finalises no generator: nobody reads, and nobody says so."""
    script = Script(byte_ids("a"), each=lambda _: time.sleep(0.005))
    stream = engine.astream(PROMPT, sampling=SamplingParams(max_tokens=400, logits_processors=(script,)))
    loop = asyncio.new_event_loop()
    loop.run_until_complete(anext(stream))
    loop.close()
    with engine._scheduler.alone():  # the answer has ended
        assert script.steps < 300


@contextmanager
def _pausing(engine: Engine, layer: int, pass_: int) -> Iterator[tuple[threading.Event, threading.Event, list[int]]]:
    """Hold the model in front of a layer of the given pass: (is there, may go on, layers run from then on)."""
    there, go, after = threading.Event(), threading.Event(), []
    count = [0]

    def pause(module: Any, args: Any, kwargs: Any) -> None:
        count[0] += 1
        if count[0] == pass_:
            there.set()
            assert go.wait(20)

    def note(index: int) -> Callable[..., None]:
        return lambda module, args, kwargs: after.append(index) if go.is_set() else None

    layers = engine.model.get_decoder().layers
    handles = [layers[layer].register_forward_pre_hook(pause, with_kwargs=True)]
    handles += [layers[i].register_forward_pre_hook(note(i), with_kwargs=True) for i in range(layer + 1, len(layers))]
    try:
        yield there, go, after
    finally:
        for handle in handles:
            handle.remove()


async def _cancel_when(there: threading.Event, go: threading.Event, work: Any) -> None:
    task = asyncio.create_task(work)
    assert await asyncio.to_thread(there.wait, 20)
    task.cancel()
    await asyncio.sleep(0.05)  # the task gets to know before the model goes on
    go.set()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_cancelling_during_the_prefill_stops_it_at_the_next_layer(engine: Engine) -> None:
    with _pausing(engine, layer=0, pass_=1) as (there, go, after):
        asyncio.run(_cancel_when(there, go, engine.agenerate(random_ids(77, 60), sampling=SHORT)))
        assert after == []
    assert engine.generate(PROMPT, sampling=SHORT).finish_reason == "length"


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_cancelling_between_two_layers_leaves_nothing_wrong_behind(layer: int) -> None:
    engine = engine_of("llama", reuse="exact")
    answer = engine.generate(PROMPT, reuse="off", sampling=SamplingParams(max_tokens=12)).token_ids
    with _pausing(engine, layer=layer, pass_=6) as (there, go, after):
        asyncio.run(_cancel_when(there, go, engine.agenerate(PROMPT, sampling=SamplingParams(max_tokens=12))))
        assert after == []
    for kept in range(4, 9):
        turn = [*PROMPT, *answer[:kept], *random_ids(3, 5)]
        assert off_by(engine, engine.prefill(turn)) < LIMIT


def test_a_prompt_cancelled_while_it_waits_for_another_never_runs(engine: Engine) -> None:
    async def scenario() -> None:
        with _pausing(engine, layer=0, pass_=1) as (there, go, _):
            first = asyncio.create_task(engine.agenerate(random_ids(78, 60), sampling=SHORT))
            assert await asyncio.to_thread(there.wait, 20)
            second = asyncio.create_task(engine.agenerate(random_ids(79, 33), sampling=SHORT))
            await asyncio.sleep(0.05)
            second.cancel()
            await asyncio.sleep(0.05)
            go.set()
            assert (await first).finish_reason == "length"
            with pytest.raises(asyncio.CancelledError):
                await second

    with Forwards(engine.model) as forwards:
        asyncio.run(scenario())
    assert forwards.rows == [60, *[1] * 7]


def test_a_prompt_cancelled_while_it_waits_does_not_wait_for_its_turn(engine: Engine) -> None:
    async def scenario() -> float:
        with engine._scheduler.alone():  # another request runs for a long time
            task = asyncio.create_task(engine.agenerate(random_ids(78, 60), sampling=SHORT))
            await asyncio.sleep(0.1)
            started = time.perf_counter()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asyncio.wait_for(task, 5)
            return time.perf_counter() - started

    assert asyncio.run(scenario()) < 3


def test_a_cancelled_answer_says_so() -> None:
    engine = engine_of("llama", reuse="exact")
    answers: list[Generation] = []
    stream = engine.stream(PROMPT, sampling=SamplingParams(max_tokens=400))
    inner = engine._serving.answer

    def answer(*args: Any, **kwargs: Any) -> Any:
        result = inner(*args, **kwargs)
        answers.append(result[0])
        return result

    engine._serving.answer = answer  # type: ignore[method-assign]
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert answers[0].finish_reason == "cancelled"
    assert 1 <= len(answers[0].token_ids) < 400
