"""OpenTelemetry spans and metrics of an engine (extra `otel`).

    from kvboost_rag.telemetry.otel import instrument

    instrument(engine)     # with the tracer and meter provider that the application has set

A request is a span, a child of the span that was current where it was called, and its stages are children of it. Names
are those of the semantic conventions for generative AI; what they have no name for is under `kvboost.`. No span holds
text, token ids or a tenant.

Spans are made when a request has ended. Its begin, its end and the length of each stage are measured; where a stage
begins is not, and stages are drawn one behind another, in the order in which they come.

Source: https://github.com/open-telemetry/semantic-conventions-genai, docs/gen-ai (status: development).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import PurePath

from ..engine import Engine
from ..errors import ConfigError, MissingExtraError
from ..observing import RequestRecord
from .figures import has_ttft, served, stages_of

try:
    from opentelemetry.context import get_current
    from opentelemetry.metrics import Meter, MeterProvider, get_meter
    from opentelemetry.trace import Span, SpanKind, StatusCode, Tracer, TracerProvider, get_tracer, set_span_in_context
    from opentelemetry.util.types import AttributeValue
except ModuleNotFoundError as error:
    raise MissingExtraError("kvboost_rag.telemetry.otel", error, extra="otel") from error

PROVIDER = "kvboost"
_NS = 1_000_000_000
# What the conventions advise for these two metrics.
TTFT_BUCKETS_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
DURATION_BUCKETS_S = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)


def instrument(
    engine: Engine,
    *,
    model_name: str | None = None,
    tracer_provider: TracerProvider | None = None,
    meter_provider: MeterProvider | None = None,
) -> Callable[[], None]:
    """Make a span of every request of an engine that ends from now on, and add it to two histograms.

    Args:
        engine: which one.
        model_name: for `gen_ai.request.model`; the hub id or, of a model that lies in a folder, that folder's name.
        tracer_provider: whose spans they are; the application's own by default, also one that is set later.
        meter_provider: the same of the metrics.

    Returns:
        What ends it.
    """
    if not isinstance(engine, Engine):
        raise ConfigError(f"engine is a {type(engine).__name__}; give an Engine, or a model's get_engine()")
    tracer = get_tracer("kvboost_rag", tracer_provider=tracer_provider)
    meter = get_meter("kvboost_rag", meter_provider=meter_provider)
    return engine.observers.add(_Telemetry(model_name or _name_of(engine), tracer, meter))


def _name_of(engine: Engine) -> str:
    """The hub id; of a folder its last part, for whole paths say more of a machine than a trace should."""
    name = str(getattr(engine.model, "name_or_path", ""))
    path = PurePath(name)
    is_id = name and not path.is_absolute() and len(path.parts) <= 2
    return name if is_id else path.name or type(engine.model).__name__


class _Telemetry:
    """Makes a span of each request. An observer."""

    def __init__(self, model: str, tracer: Tracer, meter: Meter) -> None:
        self._model, self._tracer = model, tracer
        self._ttft = meter.create_histogram(
            "gen_ai.server.time_to_first_token",
            unit="s",
            description="Time to generate first token for successful responses.",
            explicit_bucket_boundaries_advisory=TTFT_BUCKETS_S,
        )
        self._duration = meter.create_histogram(
            "gen_ai.server.request.duration",
            unit="s",
            description="Generative AI server request duration such as time-to-last byte or last output token.",
            explicit_bucket_boundaries_advisory=DURATION_BUCKETS_S,
        )

    def __call__(self, record: RequestRecord) -> None:
        operation = _operation(record)
        about: dict[str, AttributeValue] = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": PROVIDER,
            "gen_ai.request.model": self._model,
        }
        context = record.context.run(get_current)
        began_ns = int(record.began_s * _NS)
        span = self._tracer.start_span(
            f"{operation} {self._model}",
            context,
            SpanKind.INTERNAL,  # the model runs in the same process
            {**about, **_asked(record)},
            start_time=began_ns,
        )
        if span.is_recording():
            span.set_attributes(_got(record))
            if record.error is not None:
                span.set_attribute("error.type", record.error)
                span.set_status(StatusCode.ERROR)
            self._add_stages(span, record, began_ns)
        span.end(began_ns + int(record.timing.total_s * _NS))
        failed: dict[str, AttributeValue] = {} if record.error is None else {"error.type": record.error}
        self._duration.record(record.timing.total_s, {**about, **failed}, context)
        if has_ttft(record):
            self._ttft.record(record.timing.ttft_s, about, context)

    def _add_stages(self, span: Span, record: RequestRecord, at_ns: int) -> None:
        context = set_span_in_context(span)
        for stage, seconds in stages_of(record).items():
            if seconds <= 0:
                continue
            child = self._tracer.start_span(f"kvboost.{stage}", context, start_time=at_ns)
            at_ns += int(seconds * _NS)
            child.end(at_ns)


def _operation(record: RequestRecord) -> str:
    if record.method == "prefill":
        return "prefill"  # the conventions have no word for it
    return "chat" if record.chat else "text_completion"


def _asked(record: RequestRecord) -> dict[str, AttributeValue]:
    """What the caller asked for; here and at the beginning, so that samplers can choose by it."""
    asked: dict[str, AttributeValue | None] = {"gen_ai.request.stream": record.method == "stream" or None}
    sampling = record.sampling
    if sampling is not None and record.method != "prefill":
        asked |= {
            "gen_ai.request.max_tokens": sampling.max_tokens,
            "gen_ai.request.temperature": float(sampling.temperature),
            "gen_ai.request.top_p": sampling.top_p,
            "gen_ai.request.top_k": sampling.top_k,
            "gen_ai.request.seed": None if sampling.seed is None or sampling.seed >= 1 << 63 else sampling.seed,
        }
    return {name: value for name, value in asked.items() if value is not None}


def _got(record: RequestRecord) -> dict[str, AttributeValue]:
    """What the request gave and took."""
    usage, timing = record.usage, record.timing
    got: dict[str, AttributeValue] = {"gen_ai.usage.input_tokens": usage.prompt_tokens}
    if record.finish_reason is not None:
        got["gen_ai.response.finish_reasons"] = [record.finish_reason]
        got["gen_ai.usage.output_tokens"] = usage.completion_tokens
    if has_ttft(record):
        got["kvboost.time_to_first_token"] = timing.ttft_s
        if record.method == "stream":
            got["gen_ai.response.time_to_first_chunk"] = timing.ttft_s
    if record.reuse is not None:
        got["kvboost.reuse"] = record.reuse
    if record.fallback is not None:
        got["kvboost.fallback.reason"] = record.fallback.kind
    if not served(record):
        return got
    return got | {
        "gen_ai.usage.cache_read.input_tokens": usage.read_tokens,
        "gen_ai.usage.cache_write.input_tokens": usage.written_tokens,
        "gen_ai.usage.cache_creation.input_tokens": usage.written_tokens,  # its name up to conventions 1.42
        "kvboost.exact_tokens": usage.exact_tokens,
        "kvboost.approximate_tokens": usage.approximate_tokens,
        "kvboost.transferred_tokens": usage.transferred_tokens,
        "kvboost.repaired_tokens": usage.repaired_tokens,
        "kvboost.computed_tokens": usage.computed_tokens,
        "kvboost.exact_hits": record.exact_hits,
        "kvboost.approximate_hits": record.approximate_hits,
        "kvboost.transferred_hits": record.transferred_hits,
        "kvboost.misses": record.misses,
    }
