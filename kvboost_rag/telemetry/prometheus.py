"""Prometheus metrics of engines (extra `prometheus`).

    from kvboost_rag.telemetry.prometheus import EngineCollector

    EngineCollector(engine)                # into prometheus_client's own registry
    prometheus_client.start_http_server(9090)

Every series has the label `engine`. All other labels have a fixed set of values: no tenant, no text, no model path.
Figures of requests count from the moment an engine is added; those of the store are the engine's own.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import get_args

from ..engine import Engine
from ..errors import ConfigError, MissingExtraError
from ..observing import Outcome, RequestRecord
from ..stats import AuditStats, EngineStats, FallbackKind
from .figures import HITS, STAGES, has_ttft, hit_of, served, stages_of

try:
    from prometheus_client import REGISTRY, CollectorRegistry, Counter, Histogram
    from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
    from prometheus_client.registry import Collector
except ModuleNotFoundError as error:
    raise MissingExtraError("kvboost_rag.telemetry.prometheus", error, extra="prometheus") from error

# From a warm prompt on a GPU to a cold one of thousands of tokens on a laptop.
BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0)
HIT_KINDS = ("exact", "approximate", "transferred", "miss")
TOKEN_KINDS = ("exact", "approximate", "transferred", "new")


class EngineCollector(Collector):
    """Metrics of one or several engines in one registry.

    An engine that is closed or no longer used leaves the metrics at the next scrape. Prometheus' multiprocess mode
    knows no collectors like this one: give each process a port of its own.

    Args:
        engine: the first one.
        name: value of its label `engine`.
        registry: where it is registered; prometheus_client's own by default.

    Raises:
        ConfigError: the registry has such a collector already.
    """

    def __init__(self, engine: Engine, name: str = "default", *, registry: CollectorRegistry = REGISTRY) -> None:
        self._requests = _Requests()
        self._engines: dict[str, tuple[weakref.ref[Engine], Callable[[], None]]] = {}
        self._lock = threading.Lock()
        try:
            registry.register(self)
        except ValueError as error:
            raise ConfigError(
                "this registry has the metrics of an EngineCollector already; add the engine to that one: "
                "collector.add(engine, name=…), or give registry=CollectorRegistry()"
            ) from error
        self._registry = registry
        self.add(engine, name)

    def add(self, engine: Engine, name: str) -> None:
        """Show another engine.

        Raises:
            ConfigError: there is one of that name, or the engine is shown already.
        """
        if not isinstance(engine, Engine):
            raise ConfigError(f"engine is a {type(engine).__name__}; give an Engine, or a model's get_engine()")
        if not isinstance(name, str) or not name:
            raise ConfigError(f"name is {name!r}; it must be a non-empty string, the value of the label `engine`")
        self._drop_gone()
        with self._lock:
            for other, (reference, _) in self._engines.items():
                if other == name or reference() is engine:
                    which = "it is this one" if reference() is engine else "this is another: give name=…"
                    raise ConfigError(f"an engine is registered as {other!r} already, and {which}")
            self._requests.begin(name)
            end = engine.observers.add(lambda record: self._note(name, record))
            self._engines[name] = (weakref.ref(engine), end)

    def remove(self, name: str) -> None:
        """Show an engine no more."""
        if not self._removed(name):
            raise ConfigError(f"no engine is registered as {name!r}; there are {sorted(self._engines)}")

    def close(self) -> None:
        """Show nothing more, and leave the registry."""
        self._registry.unregister(self)
        for name in list(self._engines):
            self._removed(name)

    def describe(self) -> Iterable[Metric]:
        """The metrics without their values; what a registry compares, whether it describes by itself or not."""
        return [*self._requests.collect(), *(state.family() for state in _STATE)]

    def collect(self) -> Iterable[Metric]:
        """All metrics as they are now."""
        self._drop_gone()
        with self._lock:
            engines = {name: reference() for name, (reference, _) in self._engines.items()}
            found = [*self._requests.collect()]
        stats = {name: engine.stats() for name, engine in engines.items() if engine is not None}
        for state in _STATE:
            family = state.family()
            for name, figures in stats.items():
                state.fill(family, name, figures)
            found.append(family)
        return found

    def _note(self, name: str, record: RequestRecord) -> None:
        with self._lock:
            if name in self._engines:  # a request may end when its engine is shown no more
                self._requests.add(name, record)

    def _drop_gone(self) -> None:
        gone = []
        for name, (reference, _) in list(self._engines.items()):
            engine = reference()
            if engine is None or engine.closed:
                gone.append((name, reference))
        for name, reference in gone:
            self._removed(name, reference)  # another scrape may have done so by now

    def _removed(self, name: str, only: weakref.ref[Engine] | None = None) -> bool:
        with self._lock:
            if name not in self._engines or (only is not None and self._engines[name][0] is not only):
                return False
            _, end = self._engines.pop(name)
            end()
            self._requests.end(name)
            return True


class _Requests:
    """Figures of requests, summed as they end."""

    def __init__(self) -> None:
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"kvboost_{name}", text, ("engine", *labels), registry=None)

        self.requests = counter("requests", "Requests that ended, by how they ended.", "outcome")
        self.hits = counter("hits", "Runs of tokens in prompts: found stored and used, or computed.", "kind")
        self.prompt = counter("prompt_tokens", "Prompt tokens by where their KV came from; the kinds add up.", "kind")
        self.repaired = counter("repaired_tokens", "Approximate tokens that were computed again in their new context.")
        self.computed = counter("computed_tokens", "Tokens that ran before the first answer token, by share of layers.")
        self.completion = counter("completion_tokens", "Tokens generated.")
        self.stored = counter("stored_tokens", "Tokens of prompts and answers whose KV was added to the store.")
        self.fallbacks = counter("fallbacks", "Requests that reused less than was asked for or found.", "reason")
        self.stages = counter("stage_seconds", "Seconds of requests by stage.", "stage")
        self.ttft = Histogram(
            "kvboost_time_to_first_token_seconds",
            "Call entry to first token, by what the prompt found.",
            ("engine", "hit"),
            buckets=BUCKETS_S,
            registry=None,
        )
        self.duration = Histogram(
            "kvboost_request_duration_seconds",
            "Call entry to the end of the request, however it ended.",
            ("engine",),
            buckets=BUCKETS_S,
            registry=None,
        )
        self._values: tuple[tuple[Counter | Histogram, tuple[str, ...]], ...] = (
            (self.requests, get_args(Outcome)),
            (self.hits, HIT_KINDS),
            (self.prompt, TOKEN_KINDS),
            (self.fallbacks, get_args(FallbackKind)),
            (self.stages, STAGES),
            (self.ttft, HITS),
            *((one, ()) for one in (self.repaired, self.computed, self.completion, self.stored, self.duration)),
        )

    def begin(self, name: str) -> None:
        """Show zeros, so that the first request of a kind is an increase and not a new series."""
        for metric, values in self._values:
            for value in values:
                metric.labels(name, value)
            if not values:
                metric.labels(name)

    def end(self, name: str) -> None:
        """Forget an engine."""
        for metric, _ in self._values:
            metric.remove_by_labels({"engine": name})

    def add(self, name: str, record: RequestRecord) -> None:
        """Count a request."""
        self.requests.labels(name, record.outcome).inc()
        self.duration.labels(name).observe(record.timing.total_s)
        if record.fallback is not None:
            self.fallbacks.labels(name, record.fallback.kind).inc()
        for stage, seconds in stages_of(record).items():
            self.stages.labels(name, stage).inc(seconds)
        if has_ttft(record):
            self.ttft.labels(name, hit_of(record)).observe(record.timing.ttft_s)
        if served(record):
            self._add_tokens(name, record)

    def _add_tokens(self, name: str, record: RequestRecord) -> None:
        usage = record.usage
        hits = (record.exact_hits, record.approximate_hits, record.transferred_hits, record.misses)
        for kind, count in zip(HIT_KINDS, hits, strict=True):
            self.hits.labels(name, kind).inc(count)
        tokens = (usage.exact_tokens, usage.approximate_tokens, usage.transferred_tokens, usage.new_tokens)
        for kind, count in zip(TOKEN_KINDS, tokens, strict=True):
            self.prompt.labels(name, kind).inc(count)
        self.repaired.labels(name).inc(usage.repaired_tokens)
        self.computed.labels(name).inc(usage.computed_tokens)
        self.completion.labels(name).inc(usage.completion_tokens)
        self.stored.labels(name).inc(usage.stored_tokens)

    def collect(self) -> Iterable[Metric]:
        """The metrics as they are now."""
        for metric, _ in self._values:
            yield from metric.collect()


@dataclass(frozen=True, slots=True)
class _State:
    """A metric that is read from the engine's statistics.

    Attributes:
        kind: class of the family.
        name: without the prefix.
        text: its help.
        label: name of its label beside `engine`; None without.
        read: value by value of the label; under "" without one. Empty where the engine has no such part.
    """

    kind: type[CounterMetricFamily] | type[GaugeMetricFamily]
    name: str
    text: str
    label: str | None
    read: Callable[[EngineStats], Mapping[str, float]]

    def family(self) -> CounterMetricFamily | GaugeMetricFamily:
        """Without values."""
        labels = ("engine",) if self.label is None else ("engine", self.label)
        return self.kind(f"kvboost_{self.name}", self.text, labels=labels)

    def fill(self, family: CounterMetricFamily | GaugeMetricFamily, engine: str, stats: EngineStats) -> None:
        """Add an engine's values."""
        for value, number in self.read(stats).items():
            family.add_metric((engine,) if self.label is None else (engine, value), number)


def _tiers(ram: Callable[[EngineStats], float], disk: str) -> Callable[[EngineStats], Mapping[str, float]]:
    """One figure of the store in RAM, and of the one on disk, if there is one."""

    def read(stats: EngineStats) -> Mapping[str, float]:
        return {"ram": ram(stats)} | ({} if stats.disk is None else {"disk": getattr(stats.disk, disk)})

    return read


def _disk(*names: str) -> Callable[[EngineStats], Mapping[str, float]]:
    """Figures of the store on disk, by name; one alone has no name."""

    def read(stats: EngineStats) -> Mapping[str, float]:
        if stats.disk is None:
            return {}
        return {name if len(names) > 1 else "": getattr(stats.disk, name) for name in names}

    return read


def _audits(**figures: Callable[[AuditStats], float]) -> Callable[[EngineStats], Mapping[str, float]]:
    """Figures of audits, by name; one alone has no name."""

    def read(stats: EngineStats) -> Mapping[str, float]:
        audits = stats.audits
        if audits is None:
            return {}
        return {name if len(figures) > 1 else "": figure(audits) for name, figure in figures.items()}

    return read


def _exact_only(audits: AuditStats) -> int:
    return sum(one.exact_because is not None for one in audits.namespaces.values())


_COUNTER, _GAUGE = CounterMetricFamily, GaugeMetricFamily
_LOST = ("bad", "vanished", "unreadable", "newer", "unwritten", "write_errors")
_STATE = (
    _State(_GAUGE, "stored_bytes", "Bytes of stored KV.", "tier", _tiers(lambda s: s.stored_bytes, "stored_bytes")),
    _State(_GAUGE, "budget_bytes", "Their limit.", "tier", _tiers(lambda s: s.budget_bytes, "budget_bytes")),
    _State(_GAUGE, "stored_chunks", "Chunks of stored KV.", "tier", _tiers(lambda s: s.chunks, "chunks")),
    _State(_GAUGE, "pinned_bytes", "Bytes of KV in RAM that requests read now.", None, lambda s: {"": s.pinned_bytes}),
    _State(
        _COUNTER, "evictions", "Chunks pushed out to make room.", "tier", _tiers(lambda s: s.evictions, "evictions")
    ),
    _State(
        _COUNTER,
        "rejections",
        "Chunks that do not fit the budget.",
        "tier",
        _tiers(lambda s: s.rejections, "rejections"),
    ),
    _State(_COUNTER, "disk_loads", "Chunks read from disk.", None, _disk("loads")),
    _State(_COUNTER, "disk_loaded_bytes", "Their bytes.", None, _disk("loaded_bytes")),
    _State(_COUNTER, "disk_load_seconds", "Seconds until they were ready to be read.", None, _disk("load_s")),
    _State(_COUNTER, "disk_written_bytes", "Bytes of chunks written.", None, _disk("written_bytes")),
    _State(_GAUGE, "disk_waiting_bytes", "Bytes that wait to be written.", None, _disk("waiting_bytes")),
    _State(
        _COUNTER, "disk_failures", "Chunks that could not be read or written, see DiskStats.", "kind", _disk(*_LOST)
    ),
    _State(
        _COUNTER,
        "audits",
        "Requests that were computed in full once more.",
        "outcome",
        _audits(finished=lambda a: a.audits, dropped=lambda a: a.dropped, failed=lambda a: a.failed),
    ),
    _State(
        _COUNTER,
        "audit_deviation_nats",
        "Sum of the KL of first tokens from full recompute's, over finished audits.",
        None,
        _audits(sum=lambda a: a.mean_kl * a.audits),
    ),
    _State(_GAUGE, "audit_deviation_max_nats", "Largest of them.", None, _audits(most=lambda a: a.max_kl)),
    _State(
        _GAUGE,
        "audit_agreement_ratio",
        "Share of audited tokens that full recompute would choose, too.",
        "tokens",
        _audits(first=lambda a: a.first_token_agreement, answer=lambda a: a.answer_agreement),
    ),
    _State(
        _GAUGE,
        "exact_only_namespaces",
        "Namespaces that audits switched to exact reuse.",
        None,
        _audits(namespaces=_exact_only),
    ),
    _State(_COUNTER, "warmed_tokens", "Tokens stored by warming.", None, lambda s: {"": s.warmed_tokens}),
    _State(_COUNTER, "warmed_documents", "Documents computed by warming.", None, lambda s: {"": s.warmed_documents}),
    _State(_COUNTER, "warm_seconds", "Seconds of warming.", None, lambda s: {"": s.warm_s}),
)
