"""Requests of several threads at once: decoded in one batch, each as if it were alone."""

from __future__ import annotations

import asyncio
import inspect
import math
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kvboost_rag import ConfigError, Engine, EngineClosedError, EngineConfig, RequestTimeoutError, SamplingParams
from kvboost_rag.chunks import Scope, as_ids
from kvboost_rag.planner import make_plan
from kvboost_rag.repair import Recipe
from kvboost_rag.scheduler import Turn
from kvboost_rag.sharing import Sharing
from tests.tiny import LIMIT, SERVED, engine_of, new_model, off_by, plain_answer, prompt_of, random_ids, text

DOCUMENTS = [text(seed, 22) for seed in range(300, 306)]
PROMPTS = [random_ids(seed, 20 + 9 * seed) for seed in range(8)]  # some longer than a sliding window
LONG, SHORT = SamplingParams(max_tokens=24), SamplingParams(max_tokens=6)


def at_once(work: Sequence[Callable[[], Any]], threads: int | None = None) -> list[Any]:
    """Run all, as many at a time; raises what any of them raised."""
    with ThreadPoolExecutor(threads or len(work)) as pool:
        return [future.result(60) for future in [pool.submit(one) for one in work]]


def until(true: Callable[[], bool]) -> None:
    """Wait for what other threads are about to do."""
    end = time.perf_counter() + 30
    while not true():
        assert time.perf_counter() < end, "it never came true"
        time.sleep(0.001)


class Rows:
    """Counts the rows of every step that the model runs while the block is entered."""

    def __init__(self, model: Any) -> None:
        self._layer = model.get_decoder().layers[0]
        self.of_steps: list[int] = []

    def __enter__(self) -> Rows:
        self._handle = self._layer.register_forward_pre_hook(self._note, with_kwargs=True)
        return self

    def __exit__(self, *exc: object) -> None:
        self._handle.remove()

    def _note(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden = args[0] if args else kwargs["hidden_states"]
        if hidden.shape[1] == 1:
            self.of_steps.append(hidden.shape[0])


class Meeting:
    """A logits processor that lets answers go on only once so many of them have begun."""

    def __init__(self, count: int) -> None:
        self._barrier, self._begun = threading.Barrier(count), threading.local()

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if not getattr(self._begun, "done", False):
            self._begun.done = True
            self._barrier.wait(30)
        return scores


def answers(engine: Engine, prompts: Sequence[Any], sampling: SamplingParams) -> list[tuple[int, ...]]:
    """Answers given at once, all of which decode together for a while."""
    meeting = Meeting(len(prompts))
    options = {name: getattr(sampling, name) for name in SamplingParams.__dataclass_fields__}
    met = SamplingParams(**{**options, "logits_processors": (*sampling.logits_processors, meeting)})
    found = at_once([lambda p=prompt: engine.generate(p, sampling=met) for prompt in prompts])  # type: ignore[misc]
    return [answer.token_ids for answer in found]


# ---- the same answers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SERVED)
def test_every_family_decodes_in_one_batch_what_it_does_alone(name: str) -> None:
    engine = engine_of(name, reuse="exact", store_prompts=False)
    alone = [engine.generate(prompt, sampling=LONG) for prompt in PROMPTS]
    with Rows(engine.model) as rows:
        assert answers(engine, PROMPTS, LONG) == [answer.token_ids for answer in alone]
    assert max(rows.of_steps) > 4
    assert [list(answer.token_ids) for answer in alone[-2:]] == [
        plain_answer(engine.model, prompt, 24) for prompt in PROMPTS[-2:]
    ]


@pytest.mark.parametrize("config", [{"selector": "query"}, {"selector": "deviation"}, {"repair_ratio": 1.0}], ids=str)
def test_answers_over_moved_documents_and_their_usage_are_those_of_one_by_one(config: dict[str, Any]) -> None:
    engine = engine_of("gemma3", store_prompts=False, **config)
    engine.warm(DOCUMENTS)
    draw = random.Random(0)
    prompts = [prompt_of(draw.sample(DOCUMENTS, 3), question=f"Question {i}?") for i in range(8)]
    alone = [engine.generate(prompt, sampling=LONG) for prompt in prompts]
    work = [lambda p=prompt: engine.generate(p, sampling=LONG) for prompt in prompts]  # type: ignore[misc]
    for one, other in zip(alone, at_once(work), strict=True):
        assert (one.token_ids, one.text, one.usage, one.finish_reason) == (
            other.token_ids,
            other.text,
            other.usage,
            other.finish_reason,
        )


@pytest.mark.slow
@pytest.mark.model
def test_the_real_model_answers_eight_at_once_as_one_by_one(model_path: Path) -> None:
    engine = Engine.from_pretrained(str(model_path), dtype=torch.float32, config=EngineConfig(calibration_dir=None))
    about = ("the sea", "bread", "Paris", "a bicycle", "the moon", "chess", "rain", "a library")
    asked = [[{"role": "user", "content": f"Tell me something about {thing}."}] for thing in about]
    sampling = SamplingParams(max_tokens=48)
    alone = [engine.generate(messages, sampling=sampling, reuse="off") for messages in asked]
    with Rows(engine.model) as rows:
        work = [lambda m=messages: engine.generate(m, sampling=sampling, reuse="off") for messages in asked]  # type: ignore[misc]
        together = at_once(work)
    assert [answer.text for answer in together] == [answer.text for answer in alone]
    assert max(rows.of_steps) == 8


def test_a_model_that_cannot_be_batched_decodes_step_by_step() -> None:
    model = new_model("llama")
    engine = engine_of(model, reuse="exact", store_prompts=False)
    alone = [engine.generate(prompt, sampling=LONG).token_ids for prompt in PROMPTS]
    forward = model.forward

    def one_only(*args: Any, **inputs: Any) -> Any:
        if inputs["input_ids"].shape[0] > 1:
            raise ValueError("this model takes one sequence")
        return forward(*args, **inputs)

    one_only.__signature__ = inspect.signature(forward)  # type: ignore[attr-defined]
    model.forward = one_only
    with Rows(model) as rows:
        assert answers(engine, PROMPTS, LONG) == alone
    assert set(rows.of_steps) == {1}


def test_a_batch_that_fails_is_run_one_by_one() -> None:
    model = new_model("llama")
    engine = engine_of(model, reuse="exact", store_prompts=False)
    alone = [engine.generate(prompt, sampling=LONG).token_ids for prompt in PROMPTS]
    assert answers(engine, PROMPTS[:2], SHORT) == [tokens[:6] for tokens in alone[:2]]  # it can be batched
    failed = []

    def fail(module: Any, args: Any, kwargs: Any) -> None:
        if args[0].shape[0] > 2:
            failed.append(args[0].shape[0])
            raise RuntimeError("out of memory")

    handle = model.get_decoder().layers[1].register_forward_pre_hook(fail, with_kwargs=True)
    try:
        assert answers(engine, PROMPTS, LONG) == alone
    finally:
        handle.remove()
    assert failed


# ---- each its own ----------------------------------------------------------------------------------------------------


def test_a_seeded_answer_is_the_same_alone_and_among_others() -> None:
    engine = engine_of("qwen3", reuse="exact", store_prompts=False)
    kinds: list[dict[str, Any]] = [
        {"temperature": 1.0}, {"temperature": 1.5, "top_k": 7}, {"temperature": 2.0, "top_p": 0.8}, {}
    ]  # fmt: skip
    params = [SamplingParams(max_tokens=20, seed=seed, **kinds[seed % 4]) for seed in range(8)]
    alone = [engine.generate(p, sampling=s).token_ids for p, s in zip(PROMPTS, params, strict=True)]
    before = torch.get_rng_state()
    for _ in range(2):
        work = [
            lambda p=p, s=s: engine.generate(p, sampling=s).token_ids  # type: ignore[misc]
            for p, s in zip(PROMPTS, params, strict=True)
        ]
        assert at_once(work) == alone
    assert torch.equal(torch.get_rng_state(), before)


def test_answers_without_a_seed_do_not_disturb_those_with_one() -> None:
    engine = engine_of("llama", reuse="exact", store_prompts=False)
    seeded, hot = SamplingParams(max_tokens=20, temperature=1.0, seed=3), SamplingParams(max_tokens=20, temperature=1.0)
    alone = engine.generate(PROMPTS[0], sampling=seeded).token_ids
    work = [lambda s=s: engine.generate(PROMPTS[0], sampling=s).token_ids for s in (seeded, hot) * 4]  # type: ignore[misc]
    found = at_once(work)
    assert set(found[::2]) == {alone}
    assert len(set(found[1::2])) > 1


def test_each_answer_has_its_own_stops_limits_and_penalties() -> None:
    engine = engine_of("llama", reuse="exact", store_prompts=False)
    params = [
        SamplingParams(max_tokens=30),
        SamplingParams(max_tokens=3),
        SamplingParams(max_tokens=30, stop=("e",)),
        SamplingParams(max_tokens=30, repetition_penalty=1.5),
        SamplingParams(max_tokens=30, stop=("r", "st")),
        SamplingParams(max_tokens=12, temperature=1.0, seed=1),
    ]
    alone = [engine.generate(p, sampling=s) for p, s in zip(PROMPTS, params, strict=False)]
    work = [lambda p=p, s=s: engine.generate(p, sampling=s) for p, s in zip(PROMPTS, params, strict=False)]  # type: ignore[misc]
    for one, other in zip(alone, at_once(work), strict=True):
        assert (one.token_ids, one.text, one.finish_reason) == (other.token_ids, other.text, other.finish_reason)


class Stop:
    """A logits processor that does something at a step of its answer."""

    def __init__(self, step: int, do: Callable[[], object]) -> None:
        self._step, self._do, self._seen = step, do, 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self._seen += 1
        if self._seen == self._step:
            self._do()
        return scores


def _raise() -> None:
    raise ZeroDivisionError("in a logits processor")


def test_one_that_fails_times_out_or_is_cancelled_harms_no_other() -> None:
    engine = engine_of("llama", reuse="exact", store_prompts=False)
    alone = [engine.generate(prompt, sampling=LONG).token_ids for prompt in PROMPTS]
    streams: list[Any] = []

    def fails() -> str:
        with pytest.raises(ZeroDivisionError):
            engine.generate(PROMPTS[0], sampling=SamplingParams(max_tokens=24, logits_processors=(Stop(4, _raise),)))
        return "failed"

    def times_out() -> str:
        slow = Stop(3, lambda: time.sleep(0.6))
        with pytest.raises(RequestTimeoutError):
            engine.generate(
                PROMPTS[1], sampling=SamplingParams(max_tokens=400, logits_processors=(slow,)), timeout_s=0.5
            )
        return "timed out"

    def cancelled() -> str:
        streams.append(engine.stream(PROMPTS[2], sampling=SamplingParams(max_tokens=400)))
        next(streams[0])
        streams[0].close()
        return "cancelled"

    work = [lambda p=prompt: engine.generate(p, sampling=LONG).token_ids for prompt in PROMPTS[3:]]  # type: ignore[misc]
    found = at_once([fails, times_out, cancelled, *work])
    assert found == ["failed", "timed out", "cancelled", *alone[3:]]
    assert [engine.generate(prompt, sampling=LONG).token_ids for prompt in PROMPTS] == alone
    assert (engine._scheduler._steps, engine._scheduler._decoding) == ([], set())


def test_what_a_cancelled_answer_of_a_batch_leaves_in_the_store_is_right() -> None:
    engine = engine_of("llama", reuse="exact")
    expected = [plain_answer(engine.model, prompt, 24) for prompt in PROMPTS[:4]]

    def cancel(prompt: list[int]) -> None:
        stream = engine.stream(prompt, sampling=SamplingParams(max_tokens=300))
        next(stream)
        next(stream)
        stream.close()

    at_once([lambda p=prompt: cancel(p) for prompt in PROMPTS[:4]])  # type: ignore[misc]
    for prompt, answer in zip(PROMPTS, expected, strict=False):
        turn = [*prompt, *answer[:6], *random_ids(3, 5)]
        assert off_by(engine, engine.prefill(turn)) < LIMIT


# ---- fairness --------------------------------------------------------------------------------------------------------


@contextmanager
def at_layer(model: Any, layer: int, do: Callable[[int], None]) -> Iterator[None]:
    """Call with the number of tokens whenever a pass comes to a layer."""

    def note(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        do((args[0] if args else kwargs["hidden_states"]).shape[1])

    handle = model.get_decoder().layers[layer].register_forward_pre_hook(note, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def test_a_short_request_is_answered_while_a_long_prompt_is_read() -> None:
    engine = engine_of(new_model("llama", num_hidden_layers=6), reuse="exact", store_prompts=False)
    there, answered, events = threading.Event(), threading.Event(), list[str]()
    long, short = random_ids(1, 400), random_ids(2, 10)

    def wait_there(tokens: int) -> None:
        if tokens == 400 and not there.is_set():
            there.set()
            until(lambda: len(engine._scheduler._passes) == 1)

    def slowly(tokens: int) -> None:
        if tokens == 400:  # layers of a model that takes its time, until the short one is through
            answered.wait(0.2)

    with ExitStack() as stack, ThreadPoolExecutor(2) as pool:
        stack.enter_context(at_layer(engine.model, 1, wait_there))
        for layer in range(2, 6):
            stack.enter_context(at_layer(engine.model, layer, slowly))
        reading = pool.submit(lambda: (engine.generate(long, sampling=SHORT), events.append("long"))[0])
        assert there.wait(30)
        answer = engine.generate(short, sampling=SamplingParams(max_tokens=2))
        events.append("short")
        answered.set()
        assert list(reading.result(30).token_ids) == plain_answer(engine.model, long, 6)
    assert events == ["short", "long"]
    assert list(answer.token_ids) == plain_answer(engine.model, short, 2)


def test_an_answer_goes_on_while_a_long_prompt_is_read_and_a_short_one_joins_a_long_one() -> None:
    engine = engine_of(new_model("llama", num_hidden_layers=6), reuse="exact", store_prompts=False)
    stream = engine.stream(PROMPTS[0], sampling=SamplingParams(max_tokens=100))
    next(stream)
    during: list[int] = []
    with at_layer(engine.model, 1, lambda rows: during.append(rows)):
        engine.prefill(random_ids(1, 400))
        short = engine.generate(PROMPTS[1], sampling=SHORT)
    assert 1 in during[during.index(400) + 1 :]
    assert list(short.token_ids) == plain_answer(engine.model, PROMPTS[1], 6)
    answer = list(stream)[-1].generation
    assert answer is not None
    assert list(answer.token_ids) == plain_answer(engine.model, PROMPTS[0], 100)


def test_two_streams_read_by_one_thread_both_go_on() -> None:
    engine = engine_of("llama", reuse="exact", store_prompts=False)
    params = SamplingParams(max_tokens=200)
    streams = [engine.stream(prompt, sampling=params) for prompt in PROMPTS[:2]]
    with Rows(engine.model) as rows:
        texts = ["".join(delta.text for delta in pair) for pair in zip(*streams, strict=False)]
        for stream in streams:
            stream.close()
    assert texts
    assert 2 in rows.of_steps


# ---- how many at once ------------------------------------------------------------------------------------------------


def test_so_many_requests_hold_kv_at_once_and_the_others_come_in_order() -> None:
    engine = engine_of("llama", reuse="exact", store_prompts=False, max_num_seqs=3)
    inside, most, order = set[int](), [0], list[int]()
    gate = threading.Event()

    def ask(number: int) -> None:
        def enter() -> None:
            inside.add(number)
            order.append(number)
            most[0] = max(most[0], len(inside))
            assert gate.wait(30)

        processors = (Stop(1, enter), Stop(6, lambda: inside.discard(number)))
        engine.generate(PROMPTS[0], sampling=SamplingParams(max_tokens=6, logits_processors=processors))

    with ThreadPoolExecutor(12) as pool:
        futures = []
        for number in range(12):
            futures.append(pool.submit(ask, number))
            if number < 3:
                until(lambda: len(order) == len(futures))
            else:
                until(lambda: len(engine._doors._queue) == len(futures) - 3)
        assert order == [0, 1, 2]
        gate.set()
        for future in futures:
            future.result(30)
    assert most == [3]
    assert sorted(order) == list(range(12))
    assert all(abs(place - number) < 3 for place, number in enumerate(order))
    assert engine._doors._free == 3


def test_one_that_waits_for_its_place_can_be_cancelled() -> None:
    engine = engine_of("llama", reuse="exact", store_prompts=False, max_num_seqs=1)
    gate, here = threading.Event(), threading.Event()

    def hold() -> None:
        here.set()
        assert gate.wait(30)

    with ThreadPoolExecutor(2) as pool:
        held = SamplingParams(max_tokens=3, logits_processors=(Stop(1, hold),))
        first = pool.submit(engine.generate, PROMPTS[0], sampling=held)
        assert here.wait(30)
        with pytest.raises(RequestTimeoutError):
            engine.generate(PROMPTS[1], sampling=SHORT, timeout_s=0.1)
        gate.set()
        assert first.result(30).finish_reason == "length"
    assert engine.generate(PROMPTS[1], sampling=SHORT).timing.queue_s < 1.0


@pytest.mark.parametrize("limit", [0, -1, 1.5, True, None])
def test_a_limit_that_is_none_is_refused(limit: Any) -> None:
    with pytest.raises(ConfigError, match="max_num_seqs"):
        EngineConfig(max_num_seqs=limit)


# ---- the same text at the same time ----------------------------------------------------------------------------------


def test_eight_times_the_same_new_prompt_is_computed_once() -> None:
    engine = engine_of("llama")
    prompt = random_ids(5, 300)
    expected = plain_answer(engine.model, prompt, 24)
    found = at_once([lambda: engine.generate(prompt, sampling=LONG)] * 8)
    assert [list(answer.token_ids) for answer in found] == [expected] * 8
    assert sorted(answer.usage.computed_tokens for answer in found) == [1] * 7 + [300]


@pytest.mark.parametrize("reuse", ["exact", "approximate"])
def test_what_another_stores_between_looking_and_waiting_is_found(reuse: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, prompt = engine_of("llama", reuse=reuse), random_ids(5, 300)
    plan, seen = engine._serving._plan, []

    def planned(*args: Any) -> Any:
        how = plan(*args)
        seen.append(how.plan.exact_end)
        if len(seen) == 1:  # this one has looked, and found nothing; the other one comes and is done
            engine.generate(prompt, sampling=SHORT)
        return how

    monkeypatch.setattr(engine._serving, "_plan", planned)
    assert engine.generate(prompt, sampling=SHORT).usage.computed_tokens == 1
    assert seen == [0, 0, 299]
    seen.append(-1)  # nothing was stored since: it looks once
    assert engine.generate(prompt, sampling=SHORT).usage.computed_tokens == 1
    assert len(seen) == 5


def test_only_text_of_the_same_scope_is_looked_for_again() -> None:
    sharing, ids, cancel = Sharing(), as_ids(range(200)), threading.Event()
    scopes = [Scope("model", "a"), Scope("model", "b")]
    with sharing.enter(scopes[0], ids, moves=True, stores=True) as mine:
        for scope, stores, again in ((scopes[1], True, False), (scopes[0], False, False), (scopes[0], True, True)):
            with sharing.enter(scope, ids, moves=True, stores=stores):
                pass
            assert sharing.wait(mine, [(0, 200)], prefix=0, cancel=cancel) == again
            assert not sharing.wait(mine, [(0, 200)], prefix=0, cancel=cancel)


@pytest.mark.parametrize("reuse", ["exact", "approximate"])
def test_questions_about_the_same_new_documents_cost_what_they_cost_one_by_one(reuse: str) -> None:
    prompts = [[*random_ids(5, 300), *random_ids(100 + i, 20)] for i in range(6)]
    first, second = engine_of("llama", reuse=reuse), engine_of("llama", reuse=reuse)
    one_by_one = [first.generate(prompt, sampling=SHORT) for prompt in prompts]
    together = at_once([lambda p=prompt: second.generate(p, sampling=SHORT) for prompt in prompts])  # type: ignore[misc]
    assert [a.token_ids for a in together] == [a.token_ids for a in one_by_one]
    assert sorted(a.usage.computed_tokens for a in together) == sorted(a.usage.computed_tokens for a in one_by_one)
    assert sum(a.usage.stored_tokens for a in together) == sum(a.usage.stored_tokens for a in one_by_one)


def test_the_next_turn_goes_on_behind_a_prompt_that_was_stored_early() -> None:
    engine = engine_of("llama", reuse="exact")
    prompt = random_ids(5, 100)
    found = at_once([lambda: engine.generate(prompt, sampling=LONG)] * 3)
    turn = [*prompt, *found[0].token_ids, *random_ids(4, 12)]
    second = engine.generate(turn, sampling=SHORT)
    assert second.usage.exact_tokens == 100 + 24 - 1
    assert list(second.token_ids) == plain_answer(engine.model, turn, 6)


def test_nobody_waits_for_the_text_of_another_tenant_or_for_what_is_not_stored() -> None:
    engine = engine_of("llama")
    prompt, gate, here = random_ids(5, 200), threading.Event(), threading.Event()

    def hold() -> None:
        here.set()
        assert gate.wait(30)

    with ThreadPoolExecutor(2) as pool:
        held = SamplingParams(max_tokens=3, logits_processors=(Stop(1, hold),))
        for options in ({"namespace": "other"}, {"store": False}):
            gate.clear(), here.clear()
            first = pool.submit(engine.generate, prompt, sampling=held, **options)
            assert here.wait(30)
            assert engine.generate(prompt, sampling=SHORT, store=False).usage.computed_tokens == 200
            gate.set()
            first.result(30)
            held = SamplingParams(max_tokens=3, logits_processors=(Stop(1, hold),))


# ---- shared models, closing, forgetting ------------------------------------------------------------------------------


def test_engines_of_one_model_decode_in_one_batch() -> None:
    model = new_model("llama")
    engines = [engine_of(model, reuse="exact", store_prompts=False) for _ in range(4)]
    alone = [e.generate(p, sampling=LONG).token_ids for e, p in zip(engines, PROMPTS, strict=False)]
    meeting = Meeting(4)
    met = SamplingParams(max_tokens=24, logits_processors=(meeting,))
    with Rows(model) as rows:
        work = [lambda e=e, p=p: e.generate(p, sampling=met).token_ids for e, p in zip(engines, PROMPTS, strict=False)]  # type: ignore[misc]
        assert at_once(work) == alone
    assert max(rows.of_steps) > 2


def test_closing_in_the_middle_of_a_batch_lets_it_finish_and_keeps_nothing() -> None:
    engine = engine_of("llama", reuse="exact")
    threads = threading.active_count()
    expected = [plain_answer(engine.model, prompt, 24) for prompt in PROMPTS[:4]]
    meeting = threading.Barrier(5)
    with ThreadPoolExecutor(4) as pool:
        met = [SamplingParams(max_tokens=24, logits_processors=(Stop(5, lambda: meeting.wait(30)),)) for _ in range(4)]
        futures = [pool.submit(engine.generate, p, sampling=s) for p, s in zip(PROMPTS, met, strict=False)]
        meeting.wait(30)
        engine.close()
        assert [list(future.result(30).token_ids) for future in futures] == expected
    assert engine.stats().stored_bytes == 0
    assert threading.active_count() == threads
    with pytest.raises(EngineClosedError):
        engine.generate(PROMPTS[0])


def test_forgetting_in_the_middle_of_a_batch_keeps_nothing_of_that_tenant() -> None:
    engine = engine_of("llama", reuse="exact")
    meeting = threading.Barrier(5)
    with ThreadPoolExecutor(4) as pool:
        futures = [
            pool.submit(
                engine.generate,
                prompt,
                sampling=SamplingParams(max_tokens=24, logits_processors=(Stop(5, lambda: meeting.wait(30)),)),
                namespace=name,
            )
            for prompt, name in zip(PROMPTS, "abab", strict=False)
        ]
        meeting.wait(30)
        engine.clear("a")
        for future in futures:
            future.result(30)
    assert engine.clear("a") == 0
    assert engine.clear("b") == 2


@pytest.mark.parametrize(("name", "seed"), [("llama", 0), ("gemma3", 1)])
def test_any_mix_of_requests_gives_the_answers_of_one_by_one(name: str, seed: int) -> None:
    engine = engine_of(name, reuse="exact", max_num_seqs=5, ram_budget_bytes=400_000)
    draw = random.Random(seed)
    stems = [random_ids(900 + i, 40) for i in range(3)]
    asked = [
        (
            [*draw.choice(stems), *random_ids(i, draw.randrange(1, 120))],
            SamplingParams(
                max_tokens=draw.randrange(1, 30),
                temperature=draw.choice([0.0, 0.0, 1.0]),
                seed=draw.choice([None, 7]) if draw.random() < 0.5 else 7,
                stop=draw.choice([(), ("e",)]),
            ),
        )
        for i in range(20)
    ]
    asked = [(p, s) for p, s in asked if s.temperature == 0 or s.seed is not None]
    alone = [engine.generate(p, sampling=s, reuse="off").token_ids for p, s in asked]

    def ask(number: int) -> tuple[int, ...]:
        prompt, sampling = asked[number]
        if number % 7 == 6:
            stream = engine.stream(prompt, sampling=sampling)
            next(stream)
            stream.close()
        return engine.generate(prompt, sampling=sampling).token_ids

    assert at_once([lambda i=i: ask(i) for i in range(len(asked))], 10) == alone  # type: ignore[misc]
    assert (engine._scheduler._passes, engine._scheduler._steps, engine._scheduler._decoding) == ([], [], set())
    assert engine._doors._free == 5
    assert engine._serving._sharing._all == []


# ---- through LangChain -----------------------------------------------------------------------------------------------


def _meeting_llm(kind: Any, engine: Engine, count: int, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A LangChain model whose answers only go on once so many of them have begun."""
    meeting, plain = Meeting(count), kind.request_options

    def options(self: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        found: dict[str, Any] = plain(self, *args, **kwargs)
        found["sampling"] = replace(found["sampling"], logits_processors=(meeting,))
        return found

    monkeypatch.setattr(kind, "request_options", options)
    return kind(engine=engine, max_tokens=12)


@pytest.mark.parametrize("name", ["ChatKVBoost", "KVBoostLLM"])
@pytest.mark.parametrize("way", ["batch", "chain", "abatch"])
def test_a_batch_of_chains_is_decoded_at_once_in_the_order_of_its_inputs(
    name: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    langchain_kvboost = pytest.importorskip("langchain_kvboost")
    from langchain_core.output_parsers import StrOutputParser
    from langchain_core.prompts import PromptTemplate

    kind = getattr(langchain_kvboost, name)
    engine = engine_of("llama", reuse="exact", store_prompts=False)
    questions = [f"Which {word}?" for word in "river stone garden letter winter copper signal harbor".split()]
    alone = kind(engine=engine, max_tokens=12) | StrOutputParser()
    expected = [alone.invoke(question) for question in questions]
    assert len(set(expected)) > 1
    model = _meeting_llm(kind, engine, len(questions), monkeypatch)
    if way == "abatch":
        assert asyncio.run((model | StrOutputParser()).abatch(questions)) == expected
    elif way == "batch":
        assert [StrOutputParser().invoke(answer) for answer in model.batch(questions)] == expected
    else:
        chain = PromptTemplate.from_template("{question}") | model | StrOutputParser()
        assert chain.batch([{"question": question} for question in questions]) == expected


def test_a_limit_of_langchain_is_kept() -> None:
    langchain_kvboost = pytest.importorskip("langchain_kvboost")
    engine = engine_of("llama", reuse="exact", store_prompts=False)
    model = langchain_kvboost.ChatKVBoost(engine=engine, max_tokens=12)
    with Rows(engine.model) as rows:
        assert len(model.batch(["Which river?"] * 4, {"max_concurrency": 1})) == 4
    assert set(rows.of_steps) == {1}
    assert model.batch([]) == []


def test_work_at_once_ends_before_an_error_is_raised() -> None:
    from kvboost_rag.frameworks import all_of
    from kvboost_rag.frameworks import at_once as all_at_once

    ended: list[int] = []

    def work(number: int) -> int:
        if number == 1:
            raise ZeroDivisionError(number)
        time.sleep(0.05)
        ended.append(number)
        return number

    with pytest.raises(ZeroDivisionError):
        all_at_once([lambda n=n: work(n) for n in range(4)], 4)  # type: ignore[misc]
    assert sorted(ended) == [0, 2, 3]
    assert all_at_once([lambda n=n: n for n in range(5)], 2) == [0, 1, 2, 3, 4]  # type: ignore[misc]

    async def slow(number: int) -> int:
        return await asyncio.to_thread(work, number)

    ended.clear()
    with pytest.raises(ZeroDivisionError):
        asyncio.run(all_of([slow(number) for number in range(4)]))  # type: ignore[arg-type]
    assert sorted(ended) == [0, 2, 3]


def test_background_work_waits_while_anybody_is_answered() -> None:
    engine = engine_of(new_model("llama"), reuse="exact", store_prompts=False)
    executor, ids = engine._serving._executor, as_ids(random_ids(8, 77))
    events: list[int] = []

    def audit() -> None:
        with engine._scheduler.turn(Turn(math.inf, background=True)):
            executor.run(ids, make_plan(len(ids), ()), {}, Recipe())

    stream = engine.stream(PROMPTS[0], sampling=SamplingParams(max_tokens=40))
    next(stream)
    with at_layer(engine.model, 2, events.append), ThreadPoolExecutor(1) as pool:
        audited = pool.submit(audit)
        list(stream)
        audited.result(30)
    assert 77 in events
    assert 1 not in events[events.index(77) :]
