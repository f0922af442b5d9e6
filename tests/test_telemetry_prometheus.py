"""A scrape of the real client over HTTP says what the engines did."""

from __future__ import annotations

import gc
import re
import threading
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import prometheus_client
import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from kvboost_rag import ConfigError, SamplingParams
from kvboost_rag.telemetry.prometheus import EngineCollector
from tests.tiny import engine_of, prompt_of, random_ids, text

SHORT = SamplingParams(max_tokens=4)
DOCUMENTS = [text(seed, 40) for seed in (900, 901, 902)]
Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


class Server:
    """A real HTTP server of a registry on this machine's own address."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._server, self._thread = prometheus_client.start_http_server(0, addr="127.0.0.1", registry=registry)

    def scrape(self) -> Samples:
        address = f"http://127.0.0.1:{self._server.server_port}/metrics"
        with urllib.request.urlopen(address, timeout=10) as response:
            page = response.read().decode()
        families = list(text_string_to_metric_families(page))
        return {(s.name, frozenset(s.labels.items())): s.value for family in families for s in family.samples}

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def server(registry: CollectorRegistry) -> Iterator[Server]:
    made = Server(registry)
    yield made
    made.close()


def value(samples: Samples, name: str, engine: str = "default", **labels: str) -> float:
    return samples[f"kvboost_{name}", frozenset({"engine": engine, **labels}.items())]


def test_a_scrape_says_what_requests_did(registry: CollectorRegistry, server: Server) -> None:
    with engine_of() as engine:
        EngineCollector(engine, registry=registry)
        report = engine.warm(DOCUMENTS)
        prompts = [prompt_of(DOCUMENTS[::-1]), prompt_of(DOCUMENTS[::-1]), "river stone paper"]
        answers = [engine.generate(prompt, sampling=SHORT) for prompt in prompts]
        prefill = engine.prefill(random_ids(1, 50))
        with pytest.raises(ConfigError):
            engine.generate("text", namespace="")
        found, stats = server.scrape(), engine.stats()
    usages = [answer.usage for answer in answers] + [prefill.usage]
    assert value(found, "requests_total", outcome="length") == 3
    assert value(found, "requests_total", outcome="prefilled") == 1
    assert value(found, "requests_total", outcome="failed") == 1
    assert value(found, "requests_total", outcome="stop") == 0
    for name in ("repaired", "computed", "completion", "stored"):
        assert value(found, f"{name}_tokens_total") == sum(getattr(usage, f"{name}_tokens") for usage in usages) > 0
    by_kind = {kind: value(found, "prompt_tokens_total", kind=kind) for kind in ("exact", "approximate", "new")}
    assert by_kind["exact"] == sum(usage.exact_tokens for usage in usages)
    assert by_kind["approximate"] == sum(usage.approximate_tokens for usage in usages) > 0
    assert sum(by_kind.values()) == sum(usage.prompt_tokens for usage in usages)
    assert value(found, "hits_total", kind="approximate") >= 4  # three documents, then the prompt as it was served
    assert value(found, "hits_total", kind="miss") > 0
    assert value(found, "warmed_tokens_total") == report.tokens
    assert value(found, "warmed_documents_total") == 3
    assert value(found, "stored_bytes", tier="ram") == stats.stored_bytes > 0
    assert value(found, "budget_bytes", tier="ram") == stats.budget_bytes


def test_the_time_to_the_first_token_is_a_histogram_by_what_was_found(
    registry: CollectorRegistry, server: Server
) -> None:
    with engine_of() as engine:
        EngineCollector(engine, registry=registry)
        prompt = random_ids(2, 60)
        cold, warm = (engine.generate(prompt, sampling=SHORT) for _ in range(2))
        found = server.scrape()
    for hit, ttft_s in (("none", cold.timing.ttft_s), ("exact", warm.timing.ttft_s)):
        assert value(found, "time_to_first_token_seconds_count", hit=hit) == 1
        assert value(found, "time_to_first_token_seconds_sum", hit=hit) == pytest.approx(ttft_s)
        assert value(found, "time_to_first_token_seconds_bucket", hit=hit, le="+Inf") == 1
        assert value(found, "time_to_first_token_seconds_bucket", hit=hit, le="100.0") == 1
        assert value(found, "time_to_first_token_seconds_bucket", hit=hit, le="0.01") == (ttft_s <= 0.01)
    assert value(found, "time_to_first_token_seconds_count", hit="approximate") == 0
    assert value(found, "request_duration_seconds_count") == 2


def test_fallbacks_evictions_audits_and_the_disk(registry: CollectorRegistry, server: Server, tmp_path: Path) -> None:
    config: dict[str, Any] = {"audit_share": 1.0, "disk_path": tmp_path, "ram_budget_bytes": 300_000}
    with engine_of(**config) as engine, engine_of("phi3-longrope", reuse="exact") as exact:
        collector = EngineCollector(engine, registry=registry)
        collector.add(exact, "exact")
        exact.generate(random_ids(3, 100), sampling=SHORT)
        engine.warm([text(seed, 60) for seed in range(20)])
        engine.generate(prompt_of([text(1, 60), text(0, 60)]), sampling=SHORT)
        for _ in range(200):
            audits = engine.stats().audits
            assert audits is not None
            if audits.audits == 1:
                break
            threading.Event().wait(0.05)
        stats = engine.stats()
        found = server.scrape()
    assert stats.audits is not None
    assert stats.disk is not None
    assert value(found, "fallbacks_total", "exact", reason="rotary") == 1
    assert value(found, "fallbacks_total", "exact", reason="drift") == 0
    assert value(found, "evictions_total", tier="ram") == stats.evictions > 0
    assert value(found, "stored_bytes", tier="disk") == stats.disk.stored_bytes > 0
    assert value(found, "disk_written_bytes_total") == stats.disk.written_bytes > 0
    assert value(found, "disk_failures_total", kind="bad") == 0
    assert value(found, "audits_total", outcome="finished") == 1
    assert value(found, "audit_deviation_nats_total") == pytest.approx(stats.audits.mean_kl)
    assert value(found, "audit_agreement_ratio", tokens="first") in (0, 1)
    assert value(found, "exact_only_namespaces") == 0
    assert not [labels for name, labels in found if ("engine", "exact") in labels and ("tier", "disk") in labels]
    assert not [name for name, labels in found if "audit" in name and ("engine", "exact") in labels]


def test_tenants_texts_and_paths_are_no_labels(registry: CollectorRegistry, server: Server) -> None:
    with engine_of() as engine:
        EngineCollector(engine, registry=registry)
        before = set(server.scrape())
        for number in range(5):
            engine.generate(f"river {number}", sampling=SHORT, namespace=f"tenant-{number}")
        assert set(server.scrape()) == before


def test_engines_of_one_process_stand_side_by_side(registry: CollectorRegistry, server: Server) -> None:
    with engine_of() as one, engine_of() as other:
        collector = EngineCollector(one, "one", registry=registry)
        collector.add(other, "other")
        one.generate("river", sampling=SHORT)
        for _ in range(2):
            other.generate("stone", sampling=SHORT)
        found = server.scrape()
        assert value(found, "requests_total", "one", outcome="length") == 1
        assert value(found, "requests_total", "other", outcome="length") == 2
        collector.remove("one")
        one.generate("river", sampling=SHORT)
        found = server.scrape()
        assert {dict(labels)["engine"] for _, labels in found} == {"other"}
        collector.add(one, "one")  # begins anew
        assert value(server.scrape(), "requests_total", "one", outcome="length") == 0


def test_what_is_registered_twice_says_what_to_do(registry: CollectorRegistry) -> None:
    with engine_of() as one, engine_of() as other:
        collector = EngineCollector(one, registry=registry)
        with pytest.raises(ConfigError, match=r"this registry has .* collector\.add\(engine, name=…\)"):
            EngineCollector(other, registry=registry)
        with pytest.raises(ConfigError, match="registered as 'default' already, and this is another: give name="):
            collector.add(other, "default")
        with pytest.raises(ConfigError, match="registered as 'default' already, and it is this one"):
            collector.add(one, "again")
        with pytest.raises(ConfigError, match="engine is a str"):
            collector.add("engine", "x")  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="name is ''"):
            collector.add(other, "")
        with pytest.raises(ConfigError, match=r"no engine is registered as 'x'; there are \['default'\]"):
            collector.remove("x")
        collector.close()
        EngineCollector(other, registry=registry).close()


def test_the_client_s_own_registry_is_the_default() -> None:
    with engine_of() as engine:
        collector = EngineCollector(engine)
        try:
            labels = {"engine": "default", "outcome": "stop"}
            assert prometheus_client.REGISTRY.get_sample_value("kvboost_requests_total", labels) == 0
            with pytest.raises(ConfigError, match="EngineCollector already"):
                EngineCollector(engine)
        finally:
            collector.close()
        assert prometheus_client.REGISTRY.get_sample_value("kvboost_requests_total", labels) is None


def test_an_engine_that_is_closed_or_dropped_leaves_the_metrics(registry: CollectorRegistry, server: Server) -> None:
    closed, dropped, kept = engine_of(), engine_of(), engine_of()
    collector = EngineCollector(closed, "closed", registry=registry)
    collector.add(dropped, "dropped")
    collector.add(kept, "kept")
    closed.close()
    del dropped
    gc.collect()
    assert {dict(labels)["engine"] for _, labels in server.scrape()} == {"kept"}
    collector.add(closed_again := engine_of(), "closed")  # the name is free
    assert value(server.scrape(), "requests_total", "closed", outcome="stop") == 0
    closed_again.close()
    kept.close()


def test_scrapes_at_once_agree_that_an_engine_is_gone(registry: CollectorRegistry) -> None:
    engines = [engine_of() for _ in range(12)]
    collector = EngineCollector(engines[0], "0", registry=registry)
    for number, engine in enumerate(engines[1:], 1):
        collector.add(engine, str(number))
    for engine in engines:
        engine.close()
    together = threading.Barrier(4)

    def scrape(_: int) -> None:
        together.wait()
        collector.collect()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(scrape, range(4)))


def test_names_follow_the_conventions(registry: CollectorRegistry) -> None:
    with engine_of() as engine:
        EngineCollector(engine, registry=registry)
        families = list(registry.collect())
    assert len({family.name for family in families}) == len(families) > 25
    for family in families:
        assert re.fullmatch(r"kvboost_[a-z_]+", family.name)
        assert family.documentation.endswith(".")
        assert not re.search(r"_(ms|milliseconds|kb|mb|percent)$", family.name)
        assert not family.name.endswith("_total")  # the format adds it to counters
        if family.type == "gauge":
            assert re.search(r"_(bytes|chunks|nats|ratio|namespaces)$", family.name)


def test_scrapes_beside_requests_never_go_back(registry: CollectorRegistry, server: Server) -> None:
    with engine_of() as engine:
        EngineCollector(engine, registry=registry)
        threads = [
            threading.Thread(target=engine.generate, args=(random_ids(i, 30),), kwargs={"sampling": SHORT})
            for i in range(8)
        ]
        for thread in threads:
            thread.start()
        before: Samples = {}
        while any(thread.is_alive() for thread in threads):
            found = server.scrape()
            for key, number in before.items():
                if key[0].endswith(("_total", "_count", "_bucket", "_sum")):
                    assert found[key] >= number, key
            before = found
        for thread in threads:
            thread.join()
        assert value(server.scrape(), "requests_total", outcome="length") == 8
