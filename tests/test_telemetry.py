"""Every request that ends is told of once, however it ended, without its text; who is told cannot break an answer."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import prometheus_client
import pytest

from kvboost_rag import (
    ConfigError,
    ContextOverflowError,
    Engine,
    EngineClosedError,
    RequestRecord,
    RequestTimeoutError,
    SamplingParams,
)
from kvboost_rag.costs import CostModel
from kvboost_rag.stats import FallbackKind
from kvboost_rag.telemetry.figures import has_ttft, hit_of, served, stages_of
from kvboost_rag.telemetry.prometheus import EngineCollector
from tests.test_readme import run_blocks
from tests.tiny import WINDOW, engine_of, model_of, prompt_of, random_ids, text, tokenizer_of

SHORT = SamplingParams(max_tokens=4)
DOCUMENTS = [text(seed, 40) for seed in (900, 901, 902)]
CALLER: contextvars.ContextVar[str] = contextvars.ContextVar("caller", default="nobody")


@pytest.fixture
def engine() -> Iterator[Engine]:
    with engine_of() as made:
        yield made


@pytest.fixture
def told(engine: Engine) -> list[RequestRecord]:
    records: list[RequestRecord] = []
    engine.observers.add(records.append)
    return records


async def _astreamed(engine: Engine, prompt: Any) -> Any:
    return [delta async for delta in engine.astream(prompt, sampling=SHORT)][-1].generation


WAYS: dict[str, tuple[str, Callable[[Engine, Any], Any]]] = {
    "generate": ("generate", lambda engine, prompt: engine.generate(prompt, sampling=SHORT)),
    "stream": ("stream", lambda engine, prompt: list(engine.stream(prompt, sampling=SHORT))[-1].generation),
    "agenerate": ("generate", lambda engine, prompt: asyncio.run(engine.agenerate(prompt, sampling=SHORT))),
    "astream": ("stream", lambda engine, prompt: asyncio.run(_astreamed(engine, prompt))),
    "prefill": ("prefill", lambda engine, prompt: engine.prefill(prompt)),
}


@pytest.mark.parametrize("way", WAYS)
def test_each_way_to_ask_is_told_once_with_what_the_caller_gets(
    engine: Engine, told: list[RequestRecord], way: str
) -> None:
    method, ask = WAYS[way]
    engine.warm(DOCUMENTS)
    result = ask(engine, prompt_of(DOCUMENTS[::-1]))
    (record,) = told
    assert (record.method, record.chat, record.namespace, record.reuse) == (method, False, "default", "approximate")
    assert (record.usage, record.timing) == (result.usage, result.timing)
    assert record.outcome == ("prefilled" if way == "prefill" else "length")
    assert record.error is None
    assert (record.exact_hits, record.approximate_hits) == (0, 3)
    assert record.misses == 4  # the preamble, two separators, the question
    assert hit_of(record) == "approximate"


def test_hits_are_runs_and_the_last_token_is_no_miss(engine: Engine, told: list[RequestRecord]) -> None:
    prompt = prompt_of(DOCUMENTS)
    for _ in range(2):
        engine.generate(prompt, sampling=SHORT, namespace="tenant")
    cold, warm = told
    assert (cold.exact_hits, cold.approximate_hits, cold.misses, hit_of(cold)) == (0, 0, 1, "none")
    assert (warm.approximate_hits, warm.misses, hit_of(warm)) == (0, 0, "exact")
    assert warm.exact_hits >= 1
    assert warm.namespace == "tenant"


def test_messages_are_told_from_text(engine: Engine, told: list[RequestRecord]) -> None:
    engine.generate([{"role": "user", "content": "river"}], sampling=SHORT)
    engine.generate(random_ids(1, 20), sampling=SHORT)
    assert [record.chat for record in told] == [True, False]


@pytest.mark.parametrize(
    ("prompt", "options", "error"),
    [
        (random_ids(2, WINDOW + 1), {}, ContextOverflowError),
        ("text", {"reuse": "sometimes"}, ConfigError),
        ("text", {"namespace": ""}, ConfigError),
        (None, {}, Exception),
    ],
)
def test_a_refused_call_is_told_too(
    engine: Engine, told: list[RequestRecord], prompt: Any, options: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error) as caught:
        engine.generate(prompt, **options)
    (record,) = told
    assert (record.outcome, record.error) == ("failed", type(caught.value).__name__)
    assert (record.namespace, record.usage.prompt_tokens, record.misses) == (None, 0, 0)
    assert record.timing.total_s > 0
    assert not served(record)


def test_a_closed_engine_refuses_and_tells(engine: Engine, told: list[RequestRecord]) -> None:
    engine.close()
    with pytest.raises(EngineClosedError):
        engine.generate("text")
    assert [record.error for record in told] == ["EngineClosedError"]


def test_a_request_that_fails_on_its_way_is_told_with_what_is_known(engine: Engine, told: list[RequestRecord]) -> None:
    def broken(ids: Any, scores: Any) -> Any:
        raise ZeroDivisionError("in the caller's own processor")

    ids = random_ids(3, 30)
    with pytest.raises(ZeroDivisionError):
        engine.generate(ids, sampling=SamplingParams(logits_processors=(broken,)), namespace="tenant")
    (record,) = told
    assert (record.outcome, record.error, record.namespace) == ("failed", "ZeroDivisionError", "tenant")
    assert (record.usage.prompt_tokens, record.usage.completion_tokens) == (30, 0)
    assert not has_ttft(record)


def test_a_timeout_is_a_failure(engine: Engine, told: list[RequestRecord]) -> None:
    with pytest.raises(RequestTimeoutError):
        engine.generate(random_ids(4, 400), sampling=SamplingParams(max_tokens=100), timeout_s=1e-4)
    assert [(record.outcome, record.error) for record in told] == [("failed", "RequestTimeoutError")]


def test_a_stream_that_is_left_is_told_as_cancelled(engine: Engine, told: list[RequestRecord]) -> None:
    deltas = engine.stream(random_ids(5, 30), sampling=SamplingParams(max_tokens=200))
    next(deltas)
    deltas.close()
    (record,) = told
    assert (record.outcome, record.error) == ("cancelled", None)
    assert 0 < record.usage.completion_tokens < 200


def test_a_task_that_is_cancelled_before_its_turn_has_no_figures_of_reuse() -> None:
    engine = engine_of(max_num_seqs=1)
    records: list[RequestRecord] = []
    engine.observers.add(records.append)
    inside, leave = threading.Event(), threading.Event()

    def holding(ids: Any, scores: Any) -> Any:
        inside.set()
        leave.wait(10)
        return scores

    async def cancel_the_second() -> None:
        sampling = SamplingParams(max_tokens=1, logits_processors=(holding,))
        first = asyncio.create_task(engine.agenerate(random_ids(6, 20), sampling=sampling))
        await asyncio.to_thread(inside.wait, 10)
        second = asyncio.create_task(engine.agenerate(random_ids(7, 25), sampling=SHORT))
        await asyncio.sleep(0.2)
        second.cancel()
        with pytest.raises(asyncio.CancelledError):
            await second
        leave.set()
        await first

    asyncio.run(cancel_the_second())
    waited = next(record for record in records if record.outcome == "cancelled")
    assert (waited.usage.prompt_tokens, waited.usage.computed_tokens, waited.misses) == (25, 0, 0)
    assert not served(waited)
    assert not has_ttft(waited)
    assert waited.timing.total_s > 0.1


def test_a_fallback_is_told_with_its_kind() -> None:
    engine = engine_of(fallback=True)
    records: list[RequestRecord] = []
    engine.observers.add(records.append)
    engine.warm(DOCUMENTS)
    engine._serving.planning.costs = CostModel(pass_s=0.0, token_s=1e-9, pair_s=0.0, move_s=1.0)  # computing is cheap
    answer = engine.generate(prompt_of(DOCUMENTS[::-1]), sampling=SHORT)
    (record,) = records
    assert record.fallback is not None
    assert (record.fallback.kind, record.fallback.text) == ("cost", answer.fallback_reason)
    assert engine.stats().fallbacks == {"cost": 1}
    assert record.approximate_hits == 0
    assert record.misses == 1


def test_rotary_fallbacks_of_many_lengths_are_one_kind() -> None:
    engine = engine_of("phi3-longrope", reuse="exact")
    for length in (80, 90, 100):
        engine.generate(random_ids(length, length), sampling=SHORT)
    assert engine.stats().fallbacks == {"rotary": 3}


def test_nothing_of_the_text_is_told(engine: Engine, told: list[RequestRecord]) -> None:
    engine.generate(prompt_of(DOCUMENTS, question="Which velvet?"), sampling=SHORT)
    with pytest.raises(Exception, match="lone surrogate"):
        engine.generate("velvet \ud800")
    assert len(told) == 2
    for record in told:
        assert "velvet" not in repr(record)
        assert "river" not in repr(record)


def test_the_caller_s_context_is_told_from_every_thread(engine: Engine, told: list[RequestRecord]) -> None:
    def ask(name: str, way: str) -> None:
        CALLER.set(name)
        WAYS[way][1](engine, random_ids(len(name), 20))

    for number, way in enumerate(WAYS):
        contextvars.copy_context().run(ask, f"caller-{number}", way)
    threads = [
        threading.Thread(target=contextvars.Context().run, args=(ask, f"thread-{i}", "stream")) for i in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    names = {record.context.run(CALLER.get) for record in told}
    assert names == {f"caller-{number}" for number in range(len(WAYS))} | {f"thread-{i}" for i in range(4)}
    assert len(told) == len(WAYS) + 4


def test_an_observer_that_raises_breaks_nothing_and_is_logged_once(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[RequestRecord] = []

    def broken(record: RequestRecord) -> None:
        seen.append(record)
        raise RuntimeError("no disk left")

    after: list[RequestRecord] = []
    engine.observers.add(broken)
    engine.observers.add(after.append)
    expected = engine_of().generate("river stone", sampling=SHORT).token_ids
    with caplog.at_level(logging.WARNING, "kvboost_rag"):
        for _ in range(3):
            assert engine.generate("river stone", sampling=SHORT).token_ids == expected
    assert (len(seen), len(after)) == (3, 3)
    (line,) = [entry for entry in caplog.records if "observer" in entry.message]
    assert "RuntimeError" in line.message
    assert line.exc_info is not None


def test_an_observer_is_told_until_it_is_ended(engine: Engine) -> None:
    seen: list[RequestRecord] = []
    once, twice = engine.observers.add(seen.append), engine.observers.add(seen.append)
    engine.generate("river", sampling=SHORT)
    once()
    once()  # ending twice ends no other
    engine.generate("river", sampling=SHORT)
    twice()
    engine.generate("river", sampling=SHORT)
    assert len(seen) == 3


def test_requests_of_many_threads_are_each_told_once(engine: Engine, told: list[RequestRecord]) -> None:
    threads = [
        threading.Thread(target=engine.generate, args=(random_ids(i, 20 + i),), kwargs={"sampling": SHORT})
        for i in range(12)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(record.usage.prompt_tokens for record in told) == [20 + i for i in range(12)]


def test_stages_add_up_to_the_request(engine: Engine, told: list[RequestRecord]) -> None:
    engine.warm(DOCUMENTS)
    engine.generate(prompt_of(DOCUMENTS[::-1]), sampling=SamplingParams(max_tokens=24))
    (record,) = told
    stages = stages_of(record)
    assert all(seconds >= 0 for seconds in stages.values())
    assert stages["decode"] > 0
    assert stages["prefill"] > 0
    # Between the stages lie a few microseconds of bookkeeping each, and the choice of the first token.
    assert 0.5 * record.timing.total_s < sum(stages.values()) <= record.timing.total_s * 1.001


def test_warming_is_counted(engine: Engine) -> None:
    report = engine.warm(DOCUMENTS)
    engine.warm(DOCUMENTS)
    stats = engine.stats()
    assert (stats.warmed_documents, stats.warmed_tokens) == (3, report.tokens)
    assert stats.warm_s >= report.seconds


def test_the_observability_page_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model_of("llama").save_pretrained(tmp_path)
    tokenizer_of().save_pretrained(tmp_path)
    names: dict[str, Any] = {"__name__": "page"}
    run_blocks(Path(__file__).parents[1] / "docs" / "observability.md", tmp_path, names)
    names["engine"].generate("river", sampling=SHORT)
    assert len(names["records"]) == 1
    labels = {"engine": "smollm2", "outcome": "length"}
    assert prometheus_client.REGISTRY.get_sample_value("kvboost_requests_total", labels) == 1
    names["server"].shutdown()
    names["server"].server_close()
    names["collector"].close()
    names["engine"].close()
    assert capsys.readouterr().out.strip()


def test_the_page_names_every_metric_and_every_reason() -> None:
    page = (Path(__file__).parents[1] / "docs" / "observability.md").read_text(encoding="utf-8")
    registry = prometheus_client.CollectorRegistry()
    with engine_of() as engine:
        EngineCollector(engine, registry=registry)
        for family in registry.collect():
            assert f"`{family.name}{'_total' if family.type == 'counter' else ''}`" in page
    for kind in get_args(FallbackKind):
        assert f"| `{kind}` |" in page
