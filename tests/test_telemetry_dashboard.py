"""The example dashboard asks Prometheus for nothing that a scrape does not have, and leaves nothing of it out."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from kvboost_rag.telemetry.prometheus import EngineCollector
from tests.tiny import engine_of

DASHBOARD = json.loads((Path(__file__).parents[1] / "examples" / "grafana" / "kvboost.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
QUERIES = [(panel["title"], target["expr"]) for panel in PANELS for target in panel["targets"]]
Labels = dict[str, set[str]]


@pytest.fixture(scope="module")
def series(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Labels]:
    """Every series of an engine that has everything: names, their labels, and these labels' values."""
    registry = CollectorRegistry()
    with engine_of(disk_path=tmp_path_factory.mktemp("store"), audit_share=0.5) as engine:
        EngineCollector(engine, registry=registry)
        page = generate_latest(registry).decode()
    found: dict[str, Labels] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            labels = found.setdefault(sample.name, {})
            for label, value in sample.labels.items():
                labels.setdefault(label, set()).add(value)
    return found


def _selectors(node: Any) -> Iterator[Any]:
    """Vector selectors anywhere in an expression."""
    if isinstance(node, promql_parser.VectorSelector):
        yield node
    if isinstance(node, promql_parser.MatrixSelector):
        yield node.vector_selector
    for part in ("expr", "lhs", "rhs", "param"):
        if (child := getattr(node, part, None)) is not None:
            yield from _selectors(child)
    for child in getattr(node, "args", None) or ():
        yield from _selectors(child)


def _aggregations(node: Any) -> Iterator[Any]:
    if isinstance(node, promql_parser.AggregateExpr):
        yield node
    for part in ("expr", "lhs", "rhs"):
        if (child := getattr(node, part, None)) is not None:
            yield from _aggregations(child)
    for child in getattr(node, "args", None) or ():
        yield from _aggregations(child)


def _parsed(expression: str) -> Any:
    return promql_parser.parse(expression.replace("$__rate_interval", "5m").replace("$engine", ".*"))


@pytest.mark.parametrize(("title", "expression"), QUERIES)
def test_a_query_names_only_what_a_scrape_has(series: dict[str, Labels], title: str, expression: str) -> None:
    tree = _parsed(expression)
    selectors = list(_selectors(tree))
    assert selectors, title
    grouped = {label for one in _aggregations(tree) if one.modifier for label in one.modifier.labels}
    for selector in selectors:
        assert selector.name in series, f"{title}: there is no {selector.name}"
        labels = series[selector.name]
        assert grouped <= labels.keys(), f"{title}: {selector.name} has no label {grouped - labels.keys()}"
        for matcher in selector.matchers.matchers:
            assert matcher.name in labels, f"{title}: {selector.name} has no label {matcher.name}"
            if matcher.name == "engine":
                continue
            wanted = set(matcher.value.split("|"))
            assert wanted <= labels[matcher.name], f"{title}: {matcher.name} is never {wanted - labels[matcher.name]}"
        assert any(matcher.name == "engine" for matcher in selector.matchers.matchers), "the variable must choose"


@pytest.mark.parametrize(("title", "expression"), QUERIES)
def test_counters_are_rated_and_gauges_are_not(series: dict[str, Labels], title: str, expression: str) -> None:
    rated = {
        selector.name
        for name in re.findall(r"(?:rate|increase)\((kvboost_[a-z_]+)", expression)
        for selector in _selectors(_parsed(expression))
        if selector.name == name
    }
    named = {selector.name for selector in _selectors(_parsed(expression))}
    assert rated == {name for name in named if name.endswith(("_total", "_bucket", "_sum", "_count"))}, title


def test_every_metric_has_a_place(series: dict[str, Labels]) -> None:
    shown = {selector.name for _, expression in QUERIES for selector in _selectors(_parsed(expression))}
    left = {name for name in series if not name.endswith("_created")} - shown
    assert left == {"kvboost_stored_chunks", "kvboost_request_duration_seconds_sum",
                    "kvboost_request_duration_seconds_count"}  # fmt: skip


def test_the_dashboard_can_be_imported_anywhere() -> None:
    assert DASHBOARD["id"] is None
    assert DASHBOARD["uid"] == "kvboost-rag"
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    variables = {variable["name"] for variable in DASHBOARD["templating"]["list"]}
    assert variables == {"datasource", "engine"}
    for panel in PANELS:
        assert panel["datasource"]["uid"] == "${datasource}"
        assert all(target["datasource"]["uid"] == "${datasource}" for target in panel["targets"])
        used = set(re.findall(r"\{\{(\w+)\}\}", json.dumps(panel["targets"])))
        assert used <= {"engine", "outcome", "hit", "stage", "kind", "reason", "tier", "tokens"}


def test_panels_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not cells & taken, panel["title"]
        assert all(x < 24 for x, _ in cells)
        taken |= cells
