"""Many threads, one engine: the answers of one thread, and nothing breaks."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from kvboost_rag import Engine, EngineClosedError, SamplingParams
from tests.tiny import LIMIT, engine_of, kl, new_model, off_by, plain_answer, plain_logits, prompt_of, text

DOCUMENTS = [text(seed, 22) for seed in range(300, 306)]
SHORT = SamplingParams(max_tokens=6)


def _orders(count: int, size: int = 3) -> list[str]:
    draw = random.Random(0)
    return [prompt_of(draw.sample(DOCUMENTS, size), question=f"Question {i}?") for i in range(count)]


def _at_once(threads: int, work: list[Callable[[], Any]]) -> list[Any]:
    """Run all, as many at a time; raises what any of them raised."""
    with ThreadPoolExecutor(threads) as pool:
        return [future.result(60) for future in [pool.submit(one) for one in work]]


@pytest.mark.parametrize("threads", [2, 4])
@pytest.mark.parametrize("config", [{"selector": "query"}, {"selector": "deviation"}, {"repair_ratio": 1.0}], ids=str)
def test_threads_get_the_answers_of_one_thread(threads: int, config: dict[str, Any]) -> None:
    prompts = _orders(12)
    engine = engine_of(store_prompts=False, **config)
    engine.warm(DOCUMENTS)
    alone = [engine.generate(prompt, sampling=SHORT) for prompt in prompts]
    together = _at_once(threads, [lambda p=prompt: engine.generate(p, sampling=SHORT) for prompt in prompts])  # type: ignore[misc]
    for one, other in zip(alone, together, strict=True):
        assert one.token_ids == other.token_ids
        assert one.usage == other.usage


def test_exact_answers_do_not_depend_on_what_other_threads_store() -> None:
    engine = engine_of(reuse="exact")
    prompts = [prompt_of(DOCUMENTS[:2], question=f"Question {i}?") for i in range(12)]
    expected = [plain_answer(engine.model, engine.tokenize(prompt), 6) for prompt in prompts]
    answers = _at_once(4, [lambda p=prompt: engine.generate(p, sampling=SHORT) for prompt in prompts])  # type: ignore[misc]
    assert [list(answer.token_ids) for answer in answers] == expected
    assert sum(answer.usage.exact_tokens > 0 for answer in answers) >= len(prompts) - 4


def test_sampling_with_a_seed_is_not_disturbed_by_other_threads() -> None:
    engine = engine_of(reuse="exact")
    prompts = _orders(8)

    def answer(i: int) -> tuple[int, ...]:
        hot = SamplingParams(max_tokens=10, temperature=2.0, seed=i)
        return engine.generate(prompts[i], sampling=hot).token_ids

    alone = [answer(i) for i in range(len(prompts))]
    assert _at_once(4, [lambda i=i: answer(i) for i in range(len(prompts))]) == alone  # type: ignore[misc]


def test_two_streams_at_once_are_the_answers_one_after_the_other() -> None:
    engine = engine_of(store_prompts=False)
    engine.warm(DOCUMENTS)
    first, second = _orders(2)
    expected = [engine.generate(prompt, sampling=SHORT).text for prompt in (first, second)]
    streams = [engine.stream(prompt, sampling=SHORT) for prompt in (first, second)]
    texts = ["", ""]
    while streams[0] is not None or streams[1] is not None:
        for i in (0, 1):
            delta = next(streams[i], None) if streams[i] is not None else None  # type: ignore[call-overload]
            if delta is None:
                streams[i] = None  # type: ignore[call-overload]
            else:
                texts[i] += delta.text
    assert texts == expected


def test_a_seed_repeats_an_answer_whatever_other_models_draw_meanwhile() -> None:
    engines = [engine_of(new_model("llama", seed=seed), reuse="off") for seed in (0, 1)]
    prompt, seeded = list(range(3, 33)), SamplingParams(max_tokens=24, temperature=1.0, seed=5)
    expected = [engine.generate(prompt, sampling=seeded).token_ids for engine in engines]

    def draw(number: int, sampling: SamplingParams) -> tuple[int, ...]:
        return engines[number].generate(prompt, sampling=sampling).token_ids

    for other in (seeded, SamplingParams(max_tokens=24, temperature=1.0)):
        work = [lambda n=n, s=s: draw(n, s) for _ in range(5) for n, s in enumerate((seeded, other))]  # type: ignore[misc]
        found = _at_once(2, work)
        assert set(found[::2]) == {expected[0]}
        if other is seeded:
            assert set(found[1::2]) == {expected[1]}


def test_forgetting_never_trips_over_requests_that_arrive() -> None:
    engine = engine_of(reuse="exact", store_prompts=False)
    stop, ids = threading.Event(), list(range(3, 11))

    def arrive() -> None:
        while not stop.is_set():
            _ = [engine._request("prefill", ids) for _ in range(200)]

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(2) as pool:
            arriving = [pool.submit(arrive) for _ in range(2)]
            try:
                for _ in range(300):
                    assert engine.forget("hello") == 0
            finally:
                stop.set()
            for future in arriving:
                future.result(60)
    finally:
        sys.setswitchinterval(before)


def test_an_open_stream_does_not_block_other_requests() -> None:
    engine = engine_of(store_prompts=False)
    stream = engine.stream(_orders(1)[0], sampling=SamplingParams(max_tokens=20))
    next(stream)
    assert _at_once(1, [lambda: engine.generate("Why?", sampling=SHORT)])[0].finish_reason in ("length", "stop")
    assert list(stream)[-1].generation is not None


CHURN: list[Callable[[Engine, str], Any]] = [
    lambda engine, document: engine.warm(document),
    lambda engine, document: engine.warm(document, context="Read this.\n\n"),
    lambda engine, document: engine.forget(document),
    lambda engine, document: engine.clear(),
    lambda engine, document: engine.stats(),
]


@pytest.mark.parametrize("budget", [1 << 30, 300_000], ids=["roomy", "tight"])
def test_warming_asking_forgetting_and_clearing_at_once_give_no_wrong_answer(budget: int) -> None:
    engine = engine_of(reuse="approximate", repair_ratio=1.0, ram_budget_bytes=budget)
    prompts = _orders(10)
    expected = [plain_answer(engine.model, engine.tokenize(prompt), 6) for prompt in prompts]
    stop = threading.Event()

    def churn(seed: int) -> None:
        draw = random.Random(seed)
        while not stop.is_set():
            draw.choice(CHURN)(engine, draw.choice(DOCUMENTS))
            assert engine.stats().stored_bytes <= budget

    def ask(i: int) -> list[int]:
        return list(engine.generate(prompts[i], sampling=SHORT).token_ids)

    with ThreadPoolExecutor(2) as pool:
        churning = [pool.submit(churn, seed) for seed in range(2)]
        try:
            for _ in range(3):
                assert _at_once(2, [lambda i=i: ask(i) for i in range(len(prompts))]) == expected  # type: ignore[misc]
        finally:
            stop.set()
        for future in churning:
            future.result(60)
    stats = engine.stats()
    assert stats.requests == 30
    assert stats.pinned_bytes == 0
    engine.clear()
    assert engine.stats().stored_bytes == 0


def test_namespaces_stay_apart_between_threads() -> None:
    engine = engine_of()

    def tenant(name: str) -> None:
        own = [text(seed, 22) for seed in range(len(name) * 1000, len(name) * 1000 + 2)]
        for _ in range(3):
            assert engine.prefill(prompt_of(own), namespace=name, store=False).usage.approximate_tokens == 0
            engine.warm(own, namespace=name)
            assert engine.prefill(prompt_of(own), namespace=name, store=False).usage.approximate_tokens > 0
            assert engine.clear(name) == 2

    _at_once(4, [lambda name="t" * i: tenant(name) for i in range(1, 5)])  # type: ignore[misc]


def test_closing_while_others_ask_gives_answers_or_says_so() -> None:
    engine = engine_of()
    prompts = _orders(8)
    outcomes: list[str] = []

    def ask(prompt: str) -> None:
        try:
            engine.generate(prompt, sampling=SHORT)
            outcomes.append("answer")
        except EngineClosedError:
            outcomes.append("closed")

    work = [lambda p=prompt: ask(p) for prompt in prompts]
    _at_once(3, [*work[:4], engine.close, *work[4:]])  # type: ignore[list-item]
    assert len(outcomes) == 8
    assert "closed" in outcomes
    assert engine.stats().stored_bytes == 0


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_two_engines_may_share_a_model(name: str) -> None:
    model = new_model(name)
    implementation = model.config._attn_implementation
    engines: list[Engine] = [engine_of(model, store_prompts=False, selector=s) for s in ("query", "deviation")]
    for engine in engines:
        engine.warm(DOCUMENTS)
    prompts = _orders(6)
    expected = [[e.generate(p, sampling=SHORT).token_ids for p in prompts] for e in engines]

    def ask_all(engine: Engine) -> list[tuple[int, ...]]:
        return [engine.generate(prompt, sampling=SHORT).token_ids for prompt in prompts]

    for _ in range(3):
        assert _at_once(2, [lambda e=engine: ask_all(e) for engine in engines]) == expected  # type: ignore[misc]
    assert model.config._attn_implementation == implementation
    cold = engines[0].prefill(prompts[0], reuse="off")
    assert off_by(engines[0], cold) < LIMIT


def test_an_engine_may_be_built_while_another_answers() -> None:
    model = new_model("llama")
    first = engine_of(model, store_prompts=False)
    prompts = _orders(6)
    expected = [plain_answer(model, first.tokenize(prompt), 6) for prompt in prompts]
    work: list[Callable[[], Any]] = [lambda p=prompt: first.generate(p, sampling=SHORT) for prompt in prompts]  # type: ignore[misc]
    answers = _at_once(2, [*work[:3], lambda: engine_of(model), *work[3:], lambda: engine_of(model)])
    assert [list(a.token_ids) for a in answers if not isinstance(a, Engine)] == expected


def test_approximate_answers_stay_close_under_load() -> None:
    engine = engine_of("qwen3", selector="deviation", repair_ratio=0.3, store_prompts=False)
    engine.warm(DOCUMENTS)
    prompts = _orders(8)
    found = _at_once(4, [lambda p=prompt: engine.prefill(p) for prompt in prompts])  # type: ignore[misc]
    for prefill in found:
        assert prefill.usage.approximate_tokens > 50
        assert kl(plain_logits(engine.model, prefill.token_ids), prefill.logits) < 0.2
