"""Spans and metrics as the real SDK exports them: names of the conventions, the caller's span as parent, no text."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ParentBased
from opentelemetry.semconv._incubating.attributes import error_attributes, gen_ai_attributes
from opentelemetry.trace import SpanKind, StatusCode

from kvboost_rag import ConfigError, Engine, SamplingParams
from kvboost_rag.frameworks import at_once
from kvboost_rag.telemetry.otel import instrument
from langchain_kvboost import ChatKVBoost
from llama_index.llms.kvboost import KVBoost
from tests.tiny import engine_of, prompt_of, random_ids, text

SHORT = SamplingParams(max_tokens=4)
DOCUMENTS = [text(seed, 40) for seed in (900, 901, 902)]
STAGES = ["tokenize", "queue", "lookup", "load", "prefill", "decode", "store"]


class Traced:
    """An engine and what the SDK exports of it."""

    def __init__(self, engine: Engine, **provider: Any) -> None:
        self.engine, self.exporter, self.reader = engine, InMemorySpanExporter(), InMemoryMetricReader()
        self.provider = TracerProvider(**provider)
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.meters = MeterProvider([self.reader])
        self.end = instrument(engine, model_name="tiny", tracer_provider=self.provider, meter_provider=self.meters)
        self.tracer = self.provider.get_tracer("caller")

    def spans(self, prefix: str = "") -> list[ReadableSpan]:
        return [span for span in self.exporter.get_finished_spans() if span.name.startswith(prefix)]

    def request(self) -> ReadableSpan:
        """The only request."""
        (span,) = [span for span in self.spans() if span.name.endswith(" tiny")]
        return span

    def close(self) -> None:
        self.engine.close()
        self.provider.shutdown()
        self.meters.shutdown()


@pytest.fixture
def traced() -> Iterator[Traced]:
    made = Traced(engine_of())
    yield made
    made.close()


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


def test_a_request_is_a_span_with_the_names_of_the_conventions(traced: Traced) -> None:
    traced.engine.warm(DOCUMENTS)
    sampling = SamplingParams(max_tokens=6, temperature=0.7, top_p=0.9, top_k=11, seed=5)
    answer = traced.engine.generate(prompt_of(DOCUMENTS[::-1]), sampling=sampling)
    span, found, usage = traced.request(), attributes(traced.request()), answer.usage
    assert (span.name, span.kind, span.status.status_code) == (
        "text_completion tiny",
        SpanKind.INTERNAL,
        StatusCode.UNSET,
    )
    names = gen_ai_attributes
    assert {
        names.GEN_AI_OPERATION_NAME: "text_completion",
        names.GEN_AI_PROVIDER_NAME: "kvboost",
        names.GEN_AI_REQUEST_MODEL: "tiny",
        names.GEN_AI_REQUEST_MAX_TOKENS: 6,
        names.GEN_AI_REQUEST_TEMPERATURE: 0.7,
        names.GEN_AI_REQUEST_TOP_P: 0.9,
        names.GEN_AI_REQUEST_TOP_K: 11,
        names.GEN_AI_REQUEST_SEED: 5,
        names.GEN_AI_RESPONSE_FINISH_REASONS: (answer.finish_reason,),
        names.GEN_AI_USAGE_INPUT_TOKENS: usage.prompt_tokens,
        names.GEN_AI_USAGE_OUTPUT_TOKENS: usage.completion_tokens,
        names.GEN_AI_USAGE_CACHE_READ_INPUT_TOKENS: usage.exact_tokens + usage.approximate_tokens,
        names.GEN_AI_USAGE_CACHE_CREATION_INPUT_TOKENS: min(usage.stored_tokens, usage.new_tokens),
    }.items() <= found.items()
    assert found["gen_ai.usage.cache_write.input_tokens"] == found["gen_ai.usage.cache_creation.input_tokens"]
    assert found["kvboost.approximate_tokens"] == usage.approximate_tokens > 0
    assert found["kvboost.repaired_tokens"] == usage.repaired_tokens > 0
    assert found["kvboost.computed_tokens"] == usage.computed_tokens
    assert (found["kvboost.approximate_hits"], found["kvboost.reuse"]) == (3, "approximate")
    assert found["kvboost.time_to_first_token"] == answer.timing.ttft_s
    known = {value for name, value in vars(names).items() if name.startswith("GEN_AI") and isinstance(value, str)}
    ours = {name for name in found if name.startswith("gen_ai.")}
    assert ours - known == {"gen_ai.usage.cache_write.input_tokens"}  # newer than the released package


def test_the_stages_are_children_one_behind_another_within_the_request(traced: Traced) -> None:
    traced.engine.warm(DOCUMENTS)
    answer = traced.engine.generate(prompt_of(DOCUMENTS[::-1]), sampling=SHORT)
    request, stages = traced.request(), traced.spans("kvboost.")
    assert [span.name for span in stages] == [
        f"kvboost.{name}" for name in STAGES if f"kvboost.{name}" in {span.name for span in stages}
    ]
    assert {"kvboost.tokenize", "kvboost.lookup", "kvboost.load", "kvboost.prefill", "kvboost.decode"} <= {
        span.name for span in stages
    }
    assert request.start_time is not None
    at = request.start_time
    for span in stages:
        assert span.parent is not None
        assert span.parent.span_id == request.context.span_id
        assert span.start_time == at
        assert span.end_time is not None
        at = span.end_time
    assert request.end_time is not None
    assert at <= request.end_time + 1000 * len(stages)
    assert (request.end_time - request.start_time) / 1e9 == pytest.approx(answer.timing.total_s, abs=1e-6)


def test_a_prefill_is_a_span_too(traced: Traced) -> None:
    traced.engine.prefill(random_ids(1, 30))
    found = attributes(traced.request())
    assert traced.request().name == "prefill tiny"
    assert found["gen_ai.usage.input_tokens"] == 30
    assert "gen_ai.response.finish_reasons" not in found
    assert "gen_ai.request.max_tokens" not in found
    assert found["kvboost.time_to_first_token"] > 0


@pytest.mark.parametrize(("prompt", "error"), [("river", "ConfigError"), (random_ids(1, 600), "ContextOverflowError")])
def test_a_failure_has_its_type_and_no_message(traced: Traced, prompt: Any, error: str) -> None:
    options: dict[str, Any] = {"namespace": ""} if prompt == "river" else {}
    with pytest.raises(Exception, match=r"namespace|context window"):
        traced.engine.generate(prompt, **options)
    span = traced.request()
    assert span.status.status_code is StatusCode.ERROR
    assert span.status.description is None
    assert attributes(span)[error_attributes.ERROR_TYPE] == error
    assert span.events == ()


def test_a_stream_says_when_its_first_piece_came_and_that_it_was_left(traced: Traced) -> None:
    deltas = traced.engine.stream(random_ids(2, 30), sampling=SamplingParams(max_tokens=200))
    next(deltas)
    deltas.close()
    found = attributes(traced.request())
    assert found["gen_ai.request.stream"] is True
    assert found["gen_ai.response.time_to_first_chunk"] > 0
    assert found["gen_ai.response.finish_reasons"] == ("cancelled",)


async def _astream(engine: Engine, prompt: Any) -> None:
    async for _ in engine.astream(prompt, sampling=SHORT):
        pass


def _on_a_loop(work: Callable[[Engine], Any]) -> Callable[[Engine], Any]:
    def run(engine: Engine) -> None:
        asyncio.run(work(engine))

    return run


CALLERS: dict[str, Callable[[Engine], Any]] = {
    "generate": lambda engine: engine.generate("river", sampling=SHORT),
    "prefill": lambda engine: engine.prefill("river"),
    "stream": lambda engine: list(engine.stream("river", sampling=SHORT)),
    "agenerate": _on_a_loop(lambda engine: engine.agenerate("river", sampling=SHORT)),
    "astream": _on_a_loop(lambda engine: _astream(engine, "river")),
    "batch": lambda engine: at_once([lambda: engine.generate("river", sampling=SHORT)] * 3, 2),
    "langchain": lambda engine: ChatKVBoost(engine=engine, max_tokens=4).invoke("river"),
    "langchain batch": lambda engine: ChatKVBoost(engine=engine, max_tokens=4).batch(["river", "stone"]),
    "langchain stream": lambda engine: list(ChatKVBoost(engine=engine, max_tokens=4).stream("river")),
    "langchain abatch": _on_a_loop(lambda engine: ChatKVBoost(engine=engine, max_tokens=4).abatch(["a", "b"])),
    "llama-index": lambda engine: KVBoost(engine=engine, max_tokens=4).complete("river"),
    "llama-index stream": lambda engine: list(KVBoost(engine=engine, max_tokens=4).stream_complete("river")),
    "llama-index async": _on_a_loop(lambda engine: KVBoost(engine=engine, max_tokens=4).acomplete("river")),
}


@pytest.mark.parametrize("name", CALLERS)
def test_the_span_is_a_child_of_the_caller_s(traced: Traced, name: str) -> None:
    with traced.tracer.start_as_current_span("caller") as caller:
        CALLERS[name](traced.engine)
    requests = [span for span in traced.spans() if span.name.endswith(" tiny")]
    assert requests
    for span in requests:
        assert span.parent is not None, name
        assert span.parent.span_id == caller.get_span_context().span_id
        assert span.context.trace_id == caller.get_span_context().trace_id


def test_callers_in_many_threads_each_get_their_own(traced: Traced) -> None:
    def call(number: int) -> tuple[int, int]:
        with traced.tracer.start_as_current_span(f"caller-{number}") as caller:
            deltas = traced.engine.stream(random_ids(number, 20 + number), sampling=SHORT)
        list(deltas)  # the caller's span is over when the model runs
        return 20 + number, caller.get_span_context().span_id

    with ThreadPoolExecutor(6) as pool:
        expected = dict(pool.map(call, range(6)))
    found = {
        attributes(span)["gen_ai.usage.input_tokens"]: span.parent.span_id
        for span in traced.spans("text_completion")
        if span.parent is not None
    }
    assert found == expected


def test_without_a_caller_s_span_it_is_a_root(traced: Traced) -> None:
    traced.engine.generate("river", sampling=SHORT)
    assert traced.request().parent is None


def test_a_trace_that_is_not_sampled_is_not_exported_but_measured() -> None:
    traced = Traced(engine_of(), sampler=ParentBased(ALWAYS_OFF))
    traced.engine.generate("river", sampling=SHORT)
    assert traced.spans() == []
    assert points(traced)["gen_ai.server.request.duration"][0].count == 1
    traced.close()


def points(traced: Traced) -> dict[str, list[Any]]:
    data = traced.reader.get_metrics_data()
    assert data is not None
    return {
        metric.name: list(metric.data.data_points)
        for resource in data.resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
    }


def test_histograms_of_the_conventions(traced: Traced) -> None:
    answer = traced.engine.generate("river", sampling=SHORT)
    with pytest.raises(ConfigError):
        traced.engine.generate("river", namespace="")
    found = points(traced)
    (ttft,) = found["gen_ai.server.time_to_first_token"]
    assert ttft.sum == pytest.approx(answer.timing.ttft_s)
    assert dict(ttft.attributes) == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "kvboost",
        "gen_ai.request.model": "tiny",
    }
    durations = {point.attributes.get("error.type"): point.count for point in found["gen_ai.server.request.duration"]}
    assert durations == {None: 1, "ConfigError": 1}


def test_no_text_tenant_or_path_is_exported(traced: Traced) -> None:
    messages = [{"role": "user", "content": "velvet walnut"}]
    traced.engine.generate(messages, sampling=SamplingParams(max_tokens=3, stop=("velvet",)), namespace="acme-corp")
    exported = "".join(span.to_json() for span in traced.spans())
    assert "chat tiny" in exported
    for secret in ("velvet", "walnut", "acme"):
        assert secret not in exported


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("organisation/name", "organisation/name"),
        ("name", "name"),
        ("/home/somebody/models/name", "name"),
        ("models/of/name", "name"),
        ("", "LlamaForCausalLM"),
    ],
)
def test_a_model_is_named_without_its_path(given: str, shown: str) -> None:
    traced = Traced(engine_of())
    traced.end()
    name, traced.engine.model.name_or_path = traced.engine.model.name_or_path, given
    try:
        instrument(traced.engine, tracer_provider=traced.provider)
    finally:
        traced.engine.model.name_or_path = name
    traced.engine.generate("river", sampling=SHORT)
    assert f"text_completion {shown}" in {span.name for span in traced.spans()}
    traced.close()


def test_it_ends_and_what_is_no_engine_is_refused(traced: Traced) -> None:
    traced.end()
    traced.engine.generate("river", sampling=SHORT)
    assert traced.spans() == []
    with pytest.raises(ConfigError, match="engine is a Thread"):
        instrument(threading.Thread())  # type: ignore[arg-type]
