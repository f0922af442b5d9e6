"""Traces: what is recorded, made up, replayed and drawn."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvboost_rag import ConfigError, EngineConfig, SamplingParams, cli
from kvboost_rag.errors import TraceError
from kvboost_rag.simulate import (
    BOUND,
    CANDIDATES,
    footprint_bytes,
    replay,
    simulate,
    upper_bound,
    uses_of,
)
from kvboost_rag.store.eviction import LRU
from kvboost_rag.synthetic import WORKLOADS, Shape, document
from kvboost_rag.tracing import Asked, Event, read_trace, write_trace
from tests.tiny import engine_of, prompt_of, text

DOCUMENTS = [text(seed, 25) for seed in range(500, 504)]
SMALL = Shape(requests=200, documents=120, per_request=4)


def asked(name: str, tokens: int = 10, nbytes: int = 100, **more: Any) -> Asked:
    return Asked(name, tokens, nbytes, more.pop("wanted", tokens), more.pop("saved_s", 1.0), **more)


def request(*chunks: Asked | str, dropped: tuple[str, ...] = ()) -> Event:
    parts = tuple(asked(chunk) if isinstance(chunk, str) else chunk for chunk in chunks)
    return Event("request", 0.0, "n", parts, dropped, prompt_tokens=10 * len(chunks))


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# Recording


def test_an_engine_records_what_was_stored_used_and_dropped(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    engine = engine_of(trace_path=path)
    engine.warm(DOCUMENTS, namespace="tenant")
    prefill = engine.prefill(prompt_of(DOCUMENTS[::-1]), namespace="tenant")
    engine.prefill(prompt_of(DOCUMENTS[::-1]), namespace="tenant", store=False)
    engine.forget(DOCUMENTS[0], namespace="tenant")
    engine.generate(text(9, 30), sampling=SamplingParams(max_tokens=2))
    warm, first, again, other = read_trace(path)
    assert [event.op for event in (warm, first, again, other)] == ["warm", "request", "request", "request"]
    assert [chunk.origin for chunk in warm.asked] == ["warm"] * 4
    assert not any(chunk.hit or chunk.wanted for chunk in warm.asked)
    hits = {chunk.name: chunk for chunk in first.asked if chunk.hit}
    approximate = prefill.usage.approximate_tokens
    assert sum(chunk.wanted for chunk in hits.values()) == approximate + prefill.usage.exact_tokens > 0
    assert set(hits) <= {chunk.name for chunk in warm.asked}
    stored = {chunk.name: chunk for chunk in warm.asked}
    for name, chunk in hits.items():
        assert (chunk.tokens, chunk.nbytes) == (stored[name].tokens, stored[name].nbytes)
    assert {chunk.origin for chunk in first.asked if not chunk.hit} == {"served", "prompt"}
    assert first.prompt_tokens == prefill.usage.prompt_tokens
    assert first.computed_tokens == prefill.usage.computed_tokens
    assert any(chunk.hit and chunk.origin == "served" for chunk in again.asked)
    assert all(chunk.hit for chunk in again.asked)  # nothing was stored
    assert set(other.dropped) >= {warm.asked[0].name}
    assert first.namespace == warm.namespace != other.namespace
    assert 0 <= warm.t <= first.t <= other.t
    assert all(chunk.key_norm > 0 for chunk in warm.asked)
    engine.close()


def test_a_trace_tells_no_text_and_no_key_that_could_be_guessed(tmp_path: Path) -> None:
    texts = []
    for name in ("a", "b"):
        engine = engine_of(trace_path=tmp_path / name)
        engine.warm(DOCUMENTS, namespace="acme corp")
        engine.prefill(prompt_of(DOCUMENTS[::-1]), namespace="acme corp")
        keys = [header.key for header in engine._library.headers(engine._scope("acme corp"))]
        texts.append((tmp_path / name).read_text())
        assert not any(key in texts[-1] for key in keys)
        assert "acme" not in texts[-1]
        assert not any(word in texts[-1] for word in DOCUMENTS[0].split()[:3] if len(word) > 4)
    names = [{chunk.name for event in read_trace(tmp_path / name) for chunk in event.asked} for name in ("a", "b")]
    assert not names[0] & names[1]  # the same documents: nobody can look them up in another trace


def test_a_second_session_is_appended_and_shares_no_names(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    for _ in range(2):
        engine = engine_of(trace_path=str(path))
        engine.warm(DOCUMENTS[:2])
    assert [line.get("kvboost_trace") for line in lines(path)] == [1, None, 1, None]
    first, second = read_trace(path)
    assert not {chunk.name for chunk in first.asked} & {chunk.name for chunk in second.asked}
    assert second.t >= first.t


def test_nothing_is_recorded_unless_asked(tmp_path: Path) -> None:
    assert EngineConfig().trace_path is None
    assert engine_of()._library.recorder is None


def test_a_folder_that_is_not_there_is_refused_at_load(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"trace_path .*missing.* cannot be written"):
        engine_of(trace_path=tmp_path / "missing" / "trace.jsonl")


def test_a_trace_that_can_no_longer_be_written_fails_no_request(tmp_path: Path, caplog: Any) -> None:
    folder = tmp_path / "there"
    folder.mkdir()
    path = folder / "trace.jsonl"
    engine = engine_of(trace_path=path)
    path.unlink()
    folder.rmdir()
    assert engine.warm(DOCUMENTS).computed == 4
    engine.prefill(prompt_of(DOCUMENTS))
    assert caplog.text.count("ends here") == 1


def test_traces_survive_writing_and_reading(tmp_path: Path) -> None:
    events = list(WORKLOADS["tenants"](SMALL))
    write_trace(tmp_path / "t", events, {"workload": "tenants"})
    read = read_trace(tmp_path / "t")
    assert len(read) == len(events)
    for a, b in zip(events, read, strict=True):
        assert [c.name for c in b.asked] == [f"1:{c.name}" for c in a.asked]
        assert (b.t, b.prompt_tokens) == (a.t, a.prompt_tokens)
        for x, y in zip(a.asked, b.asked, strict=True):
            assert (y.tokens, y.nbytes, y.wanted, y.origin) == (x.tokens, x.nbytes, x.wanted, x.origin)
            assert y.saved_s == pytest.approx(x.saved_s, rel=1e-5)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", None),
        ('{"kvboost_trace": 2}', "version 2; this release reads version 1"),
        ('{"op": "request"}\n', "line 1 of"),
        ('{"kvboost_trace": 1}\n{"op": "nothing", "t": 0, "namespace": "", "chunks": []}\n{}', "line 2 of"),
        ('{"kvboost_trace": 1}\nnot json\n\n{}', "line 2 of"),
        ('{"op": "warm", "t": 0, "namespace": "", "chunks": []}\n', "does not begin with"),
        ('{"kvboost_trace": 1}\n{"op": "warm", "t": 0, "namesp', None),  # killed while writing
    ],
)
def test_what_is_no_trace_is_refused(tmp_path: Path, content: str, says: str | None) -> None:
    path = tmp_path / "t"
    path.write_text(content)
    if says is None:
        assert read_trace(path) == []
    else:
        with pytest.raises(TraceError, match=says):
            read_trace(path)


def test_a_chunk_of_impossible_size_is_refused(tmp_path: Path) -> None:
    write_trace(tmp_path / "t", [request(asked("a", tokens=0, wanted=0)), request("b")], {})
    with pytest.raises(TraceError, match="line 2"):
        read_trace(tmp_path / "t")


# Replaying


def test_replay_counts_hits_and_seconds() -> None:
    events = [request("a", "b"), request("b", "c"), request(asked("b", wanted=5), "a")]
    done = replay(events, 200, LRU())
    assert (done.hit_tokens, done.saved_s, done.prompt_tokens) == (15, 1.5, 60)
    assert done.evictions == 2  # a for c, and c for a: b was pinned
    assert replay(events, 10_000, LRU()).hit_tokens == 25
    assert replay(events, 0, LRU()).hit_tokens == 0


def test_warmed_chunks_are_there_and_dropped_ones_are_not() -> None:
    warm = Event("warm", 0.0, "n", (asked("a", wanted=0, origin="warm"), asked("b", wanted=0, origin="warm")))
    done = replay([warm, request("a"), request("a", "b", dropped=("a",))], 1000, LRU())
    assert done.hit_tokens == 20
    assert upper_bound([warm, request("a"), request("a", "b")], 1000).hit_tokens == 30


def test_a_served_prompt_that_is_gone_does_not_come_back() -> None:
    served = asked("s", wanted=0, origin="served")
    again = request(asked("s", wanted=10, origin="served", hit=True))
    assert replay([request(served), again], 1000, LRU()).hit_tokens == 10
    assert replay([request(served), request("x"), again, again], 100, LRU()).hit_tokens == 0


def best_possible(events: list[Event], budget: int) -> float:
    """Most seconds that any sequence of stores could save, by trying all of them."""
    sizes = {chunk.name: chunk.nbytes for event in events for chunk in event.asked}
    states: dict[frozenset[str], float] = {frozenset(): 0.0}
    for event in events:
        after: dict[frozenset[str], float] = {}
        for held, saved in states.items():
            gained = saved + sum(chunk.saved_s for chunk in event.asked if chunk.name in held)
            could = held | {chunk.name for chunk in event.asked}
            for count in range(len(could) + 1):
                for keep in map(frozenset, itertools.combinations(sorted(could), count)):
                    if sum(sizes[name] for name in keep) <= budget:
                        after[keep] = max(after.get(keep, 0.0), gained)
        states = after
    return max(states.values())


@pytest.mark.parametrize("seed", range(6))
def test_no_policy_beats_the_bound_and_beladys_rule_is_best_for_equal_chunks(seed: int) -> None:
    import random

    rng = random.Random(seed)
    equal = [request(rng.choice("abcdef")) for _ in range(30)]
    best = best_possible(equal, 300)
    assert replay(equal, 300, CANDIDATES["belady"](300, equal)).saved_s == best
    assert best <= upper_bound(equal, 300).saved_s + 1e-9
    kinds = {name: asked(name, nbytes=rng.choice([50, 100, 200]), saved_s=rng.choice([0.5, 1, 4])) for name in "abcdef"}
    mixed = [request(*(kinds[name] for name in rng.sample("abcdef", 2))) for _ in range(20)]
    best = best_possible(mixed, 400)
    bound = upper_bound(mixed, 400)
    assert best <= bound.saved_s + 1e-9
    for name in CANDIDATES:
        done = replay(mixed, 400, CANDIDATES[name](400, mixed))
        assert done.saved_s <= best + 1e-9
        assert done.hit_tokens <= bound.hit_tokens


def test_uses_and_footprint() -> None:
    events = [request("a", "b"), request("a", asked("c", nbytes=5))]
    assert uses_of(events) == {"a": [0, 1], "b": [0], "c": [1]}
    assert footprint_bytes(events) == 205


@pytest.mark.parametrize("workload", list(WORKLOADS))
def test_made_up_traces_are_the_same_for_a_seed(workload: str) -> None:
    make = WORKLOADS[workload]
    assert list(make(SMALL)) == list(make(SMALL))
    assert list(make(SMALL)) != list(make(replace(SMALL, seed=1)))
    events = list(make(SMALL))
    assert len(events) == SMALL.requests
    assert all(len({chunk.name for chunk in event.asked}) == len(event.asked) for event in events)


def test_made_up_documents_are_popular_by_zipf_and_of_mixed_length() -> None:
    events = list(WORKLOADS["shuffled-rag"](Shape(requests=1000)))
    uses = sorted(map(len, uses_of(events).values()), reverse=True)
    assert uses[0] > 5 * uses[50] > 10 * uses[400]
    lengths = {chunk.tokens for event in events for chunk in event.asked}
    assert min(lengths) < 60 < 1500 < max(lengths)
    first = [event.asked[0].name for event in events]
    assert len(set(first)) > 200  # shuffled
    assert document("a", 400).saved_s / 400 > document("a", 30).saved_s / 30  # repair weighs more on short ones


@pytest.mark.parametrize("workload", list(WORKLOADS))
def test_gdsf_is_as_good_as_lru(workload: str) -> None:
    shape = Shape(requests=1500, documents=600)
    events = list(WORKLOADS[workload](shape))
    budget = footprint_bytes(events) // 10
    lru, gdsf = simulate(events, [budget], ["lru", "gdsf"])
    # Learning that the other one is better takes a while: half a percent at worst.
    assert gdsf.saved_s >= 0.995 * lru.saved_s
    if workload == "shuffled-rag":
        assert gdsf.saved_s >= 1.1 * lru.saved_s


# Command line


def run(capsys: Any, *arguments: object) -> tuple[int, str, str]:
    status = cli.main(["trace", *map(str, arguments)])
    out, err = capsys.readouterr()
    return status, out, err


@pytest.fixture
def small(tmp_path: Path, capsys: Any) -> Path:
    path = tmp_path / "small.jsonl"
    status, out, _ = run(capsys, "make", "scans", path, "--requests", 80, "--documents", 60, "--per-request", 3)
    assert status == 0
    assert "80 requests" in out
    return path


def test_simulate_prints_a_row_for_each_policy_and_budget(small: Path, capsys: Any) -> None:
    status, out, _ = run(capsys, "simulate", small, "--budget", "10%", "--budget", "64M")
    assert status == 0
    rows = [line.split("|")[1:-1] for line in out.splitlines() if line.startswith("| ") and "MiB" in line]
    assert [row[1].strip() for row in rows] == [*CANDIDATES, BOUND] * 2
    assert len({row[0] for row in rows}) == 2
    assert "64 MiB" in out
    assert rows[0][4].strip() == "+0.0%"


def test_simulate_prints_json_of_chosen_policies(small: Path, capsys: Any) -> None:
    status, out, _ = run(capsys, "simulate", small, "--json", "--policy", "gdsf", "--budget", "0.5G")
    assert status == 0
    found = json.loads(out)
    assert [(row["policy"], row["budget_bytes"]) for row in found["outcomes"]] == [("gdsf", 1 << 29)]
    assert found["footprint_bytes"] > 0


def test_simulate_draws(small: Path, capsys: Any, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    status, _, _ = run(capsys, "simulate", small, "--plot", tmp_path / "out.png")
    assert status == 0
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
    status, _, err = run(capsys, "simulate", small, "--plot", tmp_path / "out.nothing")
    assert status == 2
    assert "cannot be written" in err


def test_plots_without_matplotlib_name_the_extra(small: Path, capsys: Any, monkeypatch: Any, tmp_path: Path) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    status, _, err = run(capsys, "simulate", small, "--plot", tmp_path / "out.png")
    assert status == 2
    assert "pip install 'kvboost-rag[plots]'" in err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["simulate", "missing.jsonl"], "cannot be read"),
        (["simulate", "FILE", "--budget", "lots"], "--budget is 'lots'"),
        (["make", "scans", "missing/folder/x", "--requests", "5"], "cannot be written"),
        (["make", "scans", "x", "--documents", "5"], "documents is 5"),
    ],
)
def test_bad_use_is_explained(small: Path, capsys: Any, arguments: list[str], says: str) -> None:
    status, _, err = run(capsys, *(str(small) if each == "FILE" else each for each in arguments))
    assert status == 2
    assert err.startswith("error: ")
    assert says in err


def test_a_made_up_workload_needs_documents() -> None:
    with pytest.raises(ConfigError, match="requests is 0"):
        Shape(requests=0)


def test_a_recorded_trace_can_be_simulated(tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "t.jsonl"
    engine = engine_of(trace_path=path)
    engine.warm(DOCUMENTS)
    for i in range(4):
        engine.prefill(prompt_of(DOCUMENTS[i:] + DOCUMENTS[:i]))
    status, out, _ = run(capsys, "simulate", path, "--budget", "100%", "--json")
    assert status == 0
    outcomes = {row["policy"]: row for row in json.loads(out)["outcomes"]}
    # With room for everything, what was a hit while recording is one in every replay.
    recorded = sum(chunk.wanted for event in read_trace(path) for chunk in event.asked if chunk.hit)
    assert {row["hit_tokens"] for name, row in outcomes.items() if name != BOUND} == {recorded}
    assert outcomes[BOUND]["hit_tokens"] >= recorded > 0


def test_a_session_behind_one_that_was_killed_in_a_line(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    engine_of(trace_path=path).prefill(prompt_of(DOCUMENTS))
    whole = path.read_text()
    path.write_text(whole + whole.splitlines()[1][:40])
    engine_of(trace_path=path).prefill(prompt_of(DOCUMENTS))
    assert [event.op for event in read_trace(path)] == ["request", "request"]
    path.write_text(whole + "{\n" + whole.splitlines()[1])
    with pytest.raises(TraceError, match="line"):  # in the middle of a session it is damage
        read_trace(path)


@pytest.mark.parametrize(
    "change",
    [
        {"saved_s": float("nan")},
        {"saved_s": float("inf")},
        {"key_norm": float("nan")},
        {"tokens": float("inf")},
        {"bytes": float("nan")},
    ],
)
def test_impossible_numbers_of_a_chunk_are_refused(tmp_path: Path, change: dict[str, float]) -> None:
    path = tmp_path / "t.jsonl"
    write_trace(path, [request("a"), request("b")], {})
    first, line, last = lines(path)
    line["chunks"][0].update(change)
    path.write_text("\n".join(map(json.dumps, (first, line, last))))
    with pytest.raises(TraceError, match="line 2"):
        read_trace(path)


@pytest.mark.parametrize("change", [{"t": float("nan")}, {"t": -1.0}, {"seconds": float("inf")}, {"prompt_tokens": -1}])
def test_impossible_numbers_of_an_event_are_refused(tmp_path: Path, change: dict[str, float]) -> None:
    path = tmp_path / "t.jsonl"
    write_trace(path, [request("a"), request("b")], {})
    first, line, last = lines(path)
    path.write_text("\n".join(map(json.dumps, (first, {**line, **change}, last))))
    with pytest.raises(TraceError, match="line 2"):
        read_trace(path)


def test_a_line_nested_without_end_is_no_trace(tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('{"kvboost_trace":1}\n' + "[" * 100_000 + "\n{}\n")
    assert cli.main(["trace", "simulate", str(path)]) == 2
    assert "line 2" in capsys.readouterr().err


def test_a_plot_that_cannot_be_written_is_named(small: Path, capsys: Any, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert cli.main(["trace", "simulate", str(small), "--budget", "5%", "--plot", str(tmp_path / "no" / "p.png")]) == 2
    assert "p.png" in capsys.readouterr().err
