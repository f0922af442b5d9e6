"""Shadow audits: what is chosen, compared, counted and decided, and that nobody waits for them."""

from __future__ import annotations

import gc
import logging
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from kvboost_rag import ConfigError, Engine, EngineConfig, SamplingParams
from kvboost_rag.audit import MOST_PENDING, divergence
from kvboost_rag.stats import AuditStats
from tests.tiny import Forwards, engine_of, kl, new_model, plain_logits, prompt_of, text

DOCUMENTS = [text(seed, 30) for seed in range(820, 826)]
GREEDY = SamplingParams(max_tokens=6)


@pytest.fixture
def make() -> Iterator[Callable[..., Engine]]:
    engines: list[Engine] = []

    def made(*args: Any, **config: Any) -> Engine:
        engines.append(engine_of(*args, **{"audit_share": 1.0, **config}))
        return engines[-1]

    yield made
    for engine in engines:
        engine.close()


def audits(engine: Engine) -> AuditStats:
    """What the audits found, once none is left to do."""
    limit = time.monotonic() + 60
    while (found := engine.stats().audits) is not None and found.pending:
        assert time.monotonic() < limit, "audits do not end"
        time.sleep(0.005)
    assert found is not None
    return found


def prompts(count: int) -> list[str]:
    return [prompt_of([*DOCUMENTS[i % 6 :], *DOCUMENTS[: i % 6]][:3], question=f"Question {i}?") for i in range(count)]


def test_exact_reuse_is_what_full_recompute_gives(make: Any) -> None:
    engine = make(reuse="exact")
    first = engine.generate(prompts(1)[0], sampling=GREEDY)
    assert first.usage.exact_tokens == 0
    assert audits(engine).audits == 0  # nothing was reused, so there is nothing to audit
    engine.generate(prompts(1)[0], sampling=GREEDY)
    found = audits(engine)
    assert found.audits == 1
    assert found.max_kl < 1e-6
    assert (found.first_token_agreement, found.answer_agreement, found.repair_ratio) == (1, 1, 0)
    assert found.namespaces == {}  # only what is approximate can drift


def test_moved_documents_deviate_by_what_plain_hugging_face_says(make: Any) -> None:
    engine = make(repair="none")
    engine.warm(DOCUMENTS)
    engine.generate(prompts(2)[1], sampling=GREEDY)
    prefill = engine.prefill(prompts(1)[0])
    found = audits(engine)  # whoever uses the model himself must wait for them
    expected = kl(plain_logits(engine.model, prefill.token_ids), prefill.logits)
    assert found.audits == 2
    assert expected > 1e-3
    assert found.max_kl >= expected * 0.999
    assert found.namespaces["default"].audits == 2
    assert found.namespaces["default"].mean_kl == pytest.approx(found.mean_kl)


def test_the_first_token_of_one_request(make: Any) -> None:
    engine = make(repair="none")
    engine.warm(DOCUMENTS)
    prefill = engine.prefill(prompts(1)[0])
    found = audits(engine)
    full = plain_logits(engine.model, prefill.token_ids)
    assert found.mean_kl == pytest.approx(kl(full, prefill.logits), rel=1e-3)
    assert found.first_token_agreement == float(full.argmax() == prefill.logits.argmax())


def test_the_answer_is_compared_behind_the_same_text(make: Any) -> None:
    engine = make(repair="none")
    engine.warm(DOCUMENTS)
    answer = engine.generate(prompts(1)[0], sampling=SamplingParams(max_tokens=9))
    found = audits(engine)
    ids = engine.tokenize(prompts(1)[0])
    likeliest = [
        int(plain_logits(engine.model, [*ids, *answer.token_ids[:at]]).argmax()) for at in range(len(answer.token_ids))
    ]
    same = sum(a == b for a, b in zip(answer.token_ids, likeliest, strict=True)) / len(likeliest)
    assert same < 1
    assert found.answer_agreement == pytest.approx(same)


def test_sampled_answers_are_audited_by_their_first_distribution_only(make: Any) -> None:
    engine = make(repair="none")
    engine.warm(DOCUMENTS)
    engine.generate(prompts(1)[0], sampling=SamplingParams(max_tokens=9, temperature=1.0, seed=1))
    engine.generate(prompts(2)[1], sampling=SamplingParams(max_tokens=9, repetition_penalty=1.5))
    found = audits(engine)
    assert (found.audits, found.answer_agreement) == (2, 1.0)
    assert found.mean_kl > 0


def test_repair_is_counted(make: Any) -> None:
    engine = make(repair="cacheblend", repair_ratio=0.3, selector="query")
    engine.warm(DOCUMENTS)
    usage = engine.prefill(prompts(1)[0]).usage
    assert audits(engine).repair_ratio == pytest.approx(usage.repaired_tokens / usage.approximate_tokens)


@pytest.mark.parametrize(("share", "count", "expected"), [(0.25, 12, 3), (1.0, 4, 4), (0.1, 9, 0), (0.4, 10, 4)])
def test_every_so_many_requests_of_a_namespace_are_audited(make: Any, share: float, count: int, expected: int) -> None:
    engine = make(repair="none", audit_share=share)
    for tenant in ("a", "b"):
        engine.warm(DOCUMENTS, namespace=tenant)
    for prompt in prompts(count):
        for tenant in ("a", "b"):
            engine.prefill(prompt, namespace=tenant)
            audits(engine)  # none must be dropped
    assert audits(engine).audits == 2 * expected


def test_without_a_share_nothing_happens() -> None:
    engine = engine_of(repair="none")
    engine.warm(DOCUMENTS)
    before = threading.active_count()
    with Forwards(engine.model) as forwards:
        engine.generate(prompts(1)[0], sampling=GREEDY)
        ran = len(forwards.rows)
        time.sleep(0.1)
        assert len(forwards.rows) == ran
    assert threading.active_count() == before
    assert engine.stats().audits is None
    engine.close()


def test_audits_store_nothing(make: Any) -> None:
    engine = make(repair="none")
    engine.warm(DOCUMENTS)
    engine.generate(prompts(1)[0], sampling=GREEDY, store=False)
    before = engine.stats()
    assert audits(engine).audits == 1
    after = engine.stats()
    assert (after.chunks, after.stored_bytes, after.requests) == (before.chunks, before.stored_bytes, before.requests)
    assert after.computed_tokens == before.computed_tokens


# Drift


def drifting(make: Any, **config: Any) -> Engine:
    engine: Engine = make(**{"repair": "none", "audit_bound": 1e-4, "audit_window": 4, **config})
    for tenant in ("a", "b"):
        engine.warm(DOCUMENTS, namespace=tenant)
    return engine


def test_drift_switches_its_namespace_and_no_other(make: Any, caplog: pytest.LogCaptureFixture) -> None:
    engine = drifting(make)
    with caplog.at_level(logging.WARNING, "kvboost_rag"):
        for prompt in prompts(6):
            engine.prefill(prompt, namespace="a")
            audits(engine)
    last = engine.prefill(prompts(7)[6], namespace="a")
    assert last.usage.approximate_tokens == 0
    assert last.fallback_reason is not None
    for figure in ("audit_bound=0.0001", "of 4", "nats", "engine.resume"):
        assert figure in last.fallback_reason
    assert [record.getMessage() for record in caplog.records if "'a'" in record.getMessage()] == [
        f"namespace 'a' uses exact reuse only from now on: {last.fallback_reason}"
    ]
    assert engine.stats().audits.namespaces["a"].exact_because == last.fallback_reason  # type: ignore[union-attr]
    other = engine.prefill(prompts(1)[0], namespace="b")
    assert other.usage.approximate_tokens > 0
    assert other.fallback_reason is None


def test_what_is_switched_is_exact_whatever_is_asked_for(make: Any) -> None:
    engine = drifting(make, audit_window=1)
    engine.prefill(prompts(1)[0], namespace="a")
    audits(engine)
    for reuse in (None, "approximate", "exact"):
        prefill = engine.prefill(prompts(3)[2], namespace="a", reuse=reuse, store=False)
        assert prefill.usage.approximate_tokens == 0
        audits(engine)
        assert kl(plain_logits(engine.model, prefill.token_ids), prefill.logits) < 1e-6
        assert (prefill.fallback_reason is None) == (reuse == "exact")
    answer = engine.generate(prompts(3)[2], namespace="a", sampling=GREEDY)
    assert "drift" in str(answer.fallback_reason)
    *_, last = engine.stream(prompts(3)[1], namespace="a", sampling=GREEDY)
    assert last.generation is not None
    assert "drift" in str(last.generation.fallback_reason)
    assert engine.stats().fallbacks["drift"] == 4


def test_the_way_back(make: Any) -> None:
    engine = drifting(make, audit_window=2)
    assert not engine.resume("a")
    for prompt in prompts(3):
        engine.prefill(prompt, namespace="a")
        audits(engine)
    assert engine.prefill(prompts(4)[3], namespace="a").usage.approximate_tokens == 0
    assert engine.resume("a")
    assert "a" not in audits(engine).namespaces
    assert engine.prefill(prompts(5)[4], namespace="a").usage.approximate_tokens > 0


def test_a_cleared_namespace_begins_anew_and_leaves_no_name(make: Any) -> None:
    engine = drifting(make, audit_window=1)
    engine.prefill(prompts(1)[0], namespace="a")
    assert list(audits(engine).namespaces) == ["a"]
    engine.clear("a")
    assert audits(engine).namespaces == {}
    assert not engine._auditor._seen
    engine.warm(DOCUMENTS, namespace="a")
    assert engine.prefill(prompts(1)[0], namespace="a").usage.approximate_tokens > 0


def test_a_window_within_the_bound_stays_approximate(make: Any) -> None:
    engine = drifting(make, audit_bound=1e9)
    for prompt in prompts(8):
        engine.prefill(prompt, namespace="a")
        audits(engine)
    found = audits(engine).namespaces["a"]
    assert (found.audits, found.exact_because) == (4, None)


def test_lossy_chunks_are_audited_too(make: Any) -> None:
    engine = make("qwen3", kv_bits=8, repair="none")
    engine.warm(DOCUMENTS)
    engine.prefill(prompts(1)[0])
    assert audits(engine).audits == 1


# Nobody waits


def test_requests_that_wait_come_before_audits_that_wait(make: Any) -> None:
    engine = make(repair="none")
    engine.warm(DOCUMENTS)
    order: list[str] = []
    with Forwards(engine.model, each=lambda _: order.append(threading.current_thread().name)):
        with engine._scheduler.alone():
            requests = [
                threading.Thread(target=engine.prefill, args=(prompt,), name=f"request {i}")
                for i, prompt in enumerate(prompts(3))
            ]
            for request in requests:
                request.start()
            while len(engine._scheduler._passes) < 3:
                time.sleep(0.001)
        for request in requests:
            request.join(60)
        assert audits(engine).audits == 3
    # An audit may begin as soon as the first request is answered, but only while nobody else wants the model.
    assert all(name.startswith("request") for name in order[:3])


def test_a_request_overtakes_an_audit_that_runs(make: Any) -> None:
    engine = make(new_model("llama"), repair="none")
    engine.warm(DOCUMENTS)
    inside, go, unfinished = threading.Event(), threading.Event(), list[int]()

    def note(number: int) -> None:
        if threading.current_thread().name == "kvboost-audit" and not inside.is_set():
            inside.set()
            go.wait(60)  # in the first layer of the audit
        elif go.is_set():
            unfinished.append(engine.stats().audits.pending)  # type: ignore[union-attr]

    with Forwards(engine.model, each=note):
        engine.prefill(prompts(1)[0])
        assert inside.wait(60)
        request = threading.Thread(target=lambda: engine.prefill(prompts(2)[1]))
        request.start()
        while not engine._scheduler._passes:  # until the request wants the model
            time.sleep(0.001)
        go.set()
        request.join(60)
        found = audits(engine)
    assert unfinished[0] == 1  # the request ran in the middle of the audit, which gave way between two layers
    assert found.audits == 2


def test_the_oldest_of_too_many_is_dropped(make: Any) -> None:
    engine = make(repair="none")
    engine.warm(DOCUMENTS)
    inside, go = threading.Event(), threading.Event()
    engine._auditor._fingerprint = lambda: (inside.set(), go.wait(60), engine.fingerprint)[2]
    engine.prefill(prompts(1)[0])
    assert inside.wait(60)
    for prompt in prompts(MOST_PENDING + 3)[1:]:
        engine.prefill(prompt)
    found = engine.stats().audits
    assert found is not None
    assert (found.pending, found.dropped) == (MOST_PENDING + 1, 2)
    go.set()
    assert audits(engine).audits == MOST_PENDING + 1


def test_forgotten_text_is_audited_no_more(make: Any) -> None:
    engine = make(repair="none")
    for tenant in ("a", "b"):
        engine.warm(DOCUMENTS, namespace=tenant)
    inside, go = threading.Event(), threading.Event()
    engine._auditor._fingerprint = lambda: (inside.set(), go.wait(60), engine.fingerprint)[2]
    for tenant in ("a", "b", "a"):
        engine.prefill(prompts(1)[0], namespace=tenant)
        assert inside.wait(60)
    engine.forget(DOCUMENTS[0], namespace="a")
    go.set()
    found = audits(engine)
    assert (found.audits, found.dropped) == (1, 2)  # one of them was being audited
    assert list(found.namespaces) == ["b"]


def test_text_that_is_forgotten_while_its_request_runs_is_not_audited(make: Any) -> None:
    engine = make(new_model("llama"), repair="none")
    engine.warm(DOCUMENTS)
    forgotten = False

    def note(number: int) -> None:
        nonlocal forgotten
        if not forgotten and number > 1:
            forgotten = True
            engine.clear()

    with Forwards(engine.model, each=note):
        engine.generate(prompts(1)[0], sampling=GREEDY)
    assert forgotten
    found = audits(engine)
    assert (found.audits, found.dropped) == (0, 0)


def test_closing_drops_what_waits_and_leaves_no_thread(make: Any) -> None:
    engine = make(repair="none")
    engine.warm(DOCUMENTS)
    go, inside, real = threading.Event(), threading.Event(), engine._auditor._fingerprint
    engine._auditor._fingerprint = lambda: (go.wait(60), real())[1]

    def note(number: int) -> None:
        if threading.current_thread().name == "kvboost-audit":
            inside.set()
            engine._auditor._at_work[0].cancel.wait(60)

    with Forwards(engine.model, each=note):
        for prompt in prompts(4):
            engine.prefill(prompt)
        go.set()
        assert inside.wait(60)
        engine.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "kvboost-audit"]
    found = engine.stats().audits
    assert found is not None
    assert (found.audits, found.pending, found.dropped) == (0, 0, 4)


def test_another_model_state_is_not_compared(make: Any) -> None:
    engine = make(new_model("llama"), repair="none")
    engine.warm(DOCUMENTS)
    inside, go = threading.Event(), threading.Event()
    real = engine._auditor._fingerprint
    engine._auditor._fingerprint = lambda: (inside.set(), go.wait(60), real())[2]
    engine.prefill(prompts(1)[0])
    assert inside.wait(60)
    with torch.no_grad():
        next(engine.model.parameters()).mul_(1.5)
    go.set()
    found = audits(engine)
    assert (found.audits, found.dropped) == (0, 1)


def test_cancelled_answers_are_not_audited(make: Any) -> None:
    engine = make(repair="none")
    engine.warm(DOCUMENTS)
    deltas = engine.stream(prompts(1)[0], sampling=SamplingParams(max_tokens=60, model_stops=False))
    next(deltas)
    deltas.close()
    assert audits(engine).audits == 0


def test_an_audit_that_fails_is_counted_and_the_next_one_runs(make: Any, caplog: pytest.LogCaptureFixture) -> None:
    engine = make(repair="none")
    engine.warm(DOCUMENTS)
    real, calls = engine._auditor._fingerprint, []

    def once() -> str:
        calls.append(1)
        if len(calls) == 1:
            raise RuntimeError("out of memory")
        return real()

    engine._auditor._fingerprint = once
    engine.prefill(prompts(1)[0])
    audits(engine)
    engine.prefill(prompts(2)[1])
    found = audits(engine)
    assert (found.failed, found.audits) == (1, 1)
    assert "out of memory" in caplog.text


def test_an_engine_that_nobody_closed_can_be_collected() -> None:
    engine = engine_of(repair="none", audit_share=1.0)
    engine.warm(DOCUMENTS)
    engine.prefill(prompts(1)[0])
    audits(engine)
    watch = weakref.ref(engine)
    while [thread for thread in threading.enumerate() if thread.name == "kvboost-audit"]:
        time.sleep(0.005)
    del engine
    gc.collect()
    assert watch() is None


@pytest.mark.slow
def test_a_process_ends_in_the_middle_of_audits() -> None:
    code = (
        "from tests.tiny import engine_of, prompt_of, text\n"
        "documents = [text(seed, 60) for seed in range(6)]\n"
        "engine = engine_of(repair='none', audit_share=1.0)\n"
        "engine.warm(documents)\n"
        "for i in range(6): engine.prefill(prompt_of(documents[i:] + documents[:i], question=str(i)))\n"
        "print(engine.stats().audits.pending)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    assert int(done.stdout) > 0
    assert "Error" not in done.stderr


# Values


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"audit_share": -0.1}, "audit_share"),
        ({"audit_share": 1.1}, "audit_share"),
        ({"audit_share": True}, "audit_share"),
        ({"audit_share": 0.5, "reuse": "off"}, "'off'"),
        ({"audit_bound": 0.1}, "audit_share above 0"),
        ({"audit_bound": 0.1, "audit_share": 0.5, "reuse": "exact"}, "'exact'"),
        ({"audit_bound": -1.0, "audit_share": 0.5}, "audit_bound"),
        ({"audit_bound": float("nan"), "audit_share": 0.5}, "audit_bound"),
        ({"audit_window": 0, "audit_share": 0.5}, "audit_window"),
        ({"audit_window": 2.0, "audit_share": 0.5}, "audit_window"),
        ({"audit_window": 5}, "audit_share is 0"),
    ],
)
def test_bad_values_are_refused(config: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        EngineConfig(**config)


def test_divergence() -> None:
    full = torch.tensor([1.0, 2.0, -torch.inf, 0.5])
    assert divergence(full, full) == 0
    assert divergence(full, torch.tensor([1.0, 1.0, 3.0, 0.5])) > 0
    assert divergence(full, torch.tensor([float("nan"), 2.0, 0.0, 0.5])) == float("inf")
    assert divergence(full, torch.tensor([-torch.inf, 2.0, 0.0, 0.5])) == float("inf")
    a, b = torch.randn(50), torch.randn(50)
    assert divergence(a, b) == pytest.approx(kl(a, b))


def test_frameworks_take_the_options() -> None:
    from langchain_kvboost import ChatKVBoost

    config = EngineConfig(audit_share=0.5, audit_bound=0.1)
    assert ChatKVBoost(model="m", engine_config=config).engine_config == config
