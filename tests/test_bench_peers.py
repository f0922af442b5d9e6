"""The peers' benchmark: what it asks, what it counts, its converter, and a run of arms that need no other package."""

from __future__ import annotations

import importlib
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.peers import (
    PEERS,
    REFERENCE,
    SCENARIOS,
    ArmError,
    Child,
    ConversionError,
    Run,
    Timed,
    measure,
    other_tokens,
    plan,
    prefill_speeds,
    renderer,
    report,
    rows,
    text,
)
from tests.tiny import new_model, tokenizer_of
from tests.tiny import text as words

REORDERED, SAME, QUESTION, PREAMBLE, UNSEEN = SCENARIOS
PREFIX = "Hugging Face, prefix reuse"
OURS = "ours"
Passage = importlib.import_module("workload").Passage  # importable since `benchmarks.peers` is
float32_file = importlib.import_module("peers_gguf").float32_file
ARMS = Path(__file__).resolve().parents[1] / "benchmarks" / "peers_arms"


def pool(count: int, length: int = 12) -> list[Any]:
    return [Passage(f"module{n}.thing", f"{n}: {words(n, length)}") for n in range(count)]


def documents(messages: list[dict[str, str]]) -> list[str]:
    context = messages[1]["content"].removeprefix("Context:\n\n").partition("\n\nQuestion: ")[0]
    return [line for line in context.split("\n\n") if line[0].isdigit()]


# What is asked.


@pytest.fixture(scope="module")
def schedule() -> Any:
    return plan(pool(40), prompts=3, docs=4, collection=20, seed=7)


def test_steps_go_through_the_scenarios_prompt_by_prompt(schedule: Any) -> None:
    assert [(s.number, s.scenario) for s in schedule.steps] == [(n, s) for n in range(3) for s in SCENARIOS]
    assert len(schedule.collection) == 20


def test_reordered_documents_were_seen_in_another_order_and_only_by_peers_that_learn_from_prompts(
    schedule: Any,
) -> None:
    for step in schedule.steps:
        if step.scenario in (REORDERED, PREAMBLE):
            before, now = documents(step.before), documents(step.messages)
            assert sorted(before) == sorted(now)
            assert before != now
            assert not step.everyone
            same_preamble = step.before[0] == step.messages[0]
            assert same_preamble == (step.scenario == REORDERED)


def test_a_repeated_prompt_is_the_same_and_a_new_question_changes_nothing_before_it(schedule: Any) -> None:
    for step in schedule.steps:
        if step.scenario == SAME:
            assert step.before == step.messages
            assert step.everyone
        if step.scenario == QUESTION:
            assert step.everyone
            assert step.before != step.messages
            assert documents(step.before) == documents(step.messages)
            assert step.before[0] == step.messages[0]


def test_what_is_never_seen_is_in_no_other_prompt_and_not_warmed(schedule: Any) -> None:
    known = {p.text for p in schedule.collection}
    unseen = [d for s in schedule.steps if s.scenario == UNSEEN for d in documents(s.messages)]
    assert len(unseen) == len(set(unseen)) == 3 * 4
    others = [d for s in schedule.steps if s.scenario != UNSEEN for d in documents(s.messages)]
    assert not set(unseen) & (known | set(others))
    assert set(others) <= known


def test_preambles_of_other_preamble_are_all_new(schedule: Any) -> None:
    preambles = [s.messages[0]["content"] for s in schedule.steps if s.scenario == PREAMBLE]
    assert len(set(preambles)) == 3
    assert not set(preambles) & {s.messages[0]["content"] for s in schedule.steps if s.scenario != PREAMBLE}


def test_the_plan_depends_on_the_seed_only() -> None:
    one, same, other = (plan(pool(40), prompts=2, docs=4, collection=20, seed=seed) for seed in (1, 1, 2))
    assert one == same
    assert one != other


def test_too_few_passages_are_refused_with_the_counts() -> None:
    with pytest.raises(ValueError, match=r"20 passages are there; 16 to warm and 8 never seen"):
        plan(pool(20), prompts=2, docs=4, collection=16, seed=0)
    assert plan(pool(20), prompts=2, docs=4, collection=16, seed=0, scenarios=[SAME]).steps


def test_one_document_cannot_be_reordered() -> None:
    with pytest.raises(ValueError, match="at least 2"):
        plan(pool(20), prompts=1, docs=1, collection=8, seed=0)


# What is counted.


def timed(scenario: str, number: int, arm: str, cpu_s: float, *, token: int = 1, reused: int = 0) -> Timed:
    return Timed(scenario, number, arm, cpu_s, cpu_s * 2, token, 100, reused, cpu_s / 4 if arm == OURS else None)


RESULTS = [
    timed(REORDERED, 0, REFERENCE, 8.0, token=5),
    timed(REORDERED, 0, PREFIX, 6.0, token=5, reused=10),
    timed(REORDERED, 0, OURS, 1.0, token=5, reused=90),
    timed(REORDERED, 1, REFERENCE, 9.0, token=6),
    timed(REORDERED, 1, OURS, 3.0, token=7, reused=90),
    timed(UNSEEN, 0, REFERENCE, 10.0),
    timed(UNSEEN, 0, PREFIX, 9.0, reused=10),
    timed(UNSEEN, 0, OURS, 10.0),
]


def test_rows_are_means_medians_and_ratios_over_prompts_that_both_answered() -> None:
    table = rows(RESULTS, [REFERENCE, PREFIX, OURS])
    assert [(row["scenario"], row["arm"]) for row in table] == [
        (scenario, arm) for scenario in (REORDERED, UNSEEN) for arm in (REFERENCE, PREFIX, OURS)
    ]
    full, prefix, ours = table[:3]
    assert full["prompts"] == 2
    assert full["mean CPU s"] == 8.5
    assert full["median wall s"] == 17.0
    assert full["÷ ours"] == (8.0 + 3.0) / 2
    assert prefix["÷ ours"] == 6.0
    assert ours["÷ ours"] == 1.0
    assert ours["tokens reused"] == pytest.approx(0.9)
    assert ours["first token as full recompute"] == "1 of 2"
    assert prefix["first token as full recompute"] == "1 of 1"


def test_an_arm_is_also_compared_with_its_own_speed() -> None:
    assert prefill_speeds(RESULTS) == {REFERENCE: 10.0, PREFIX: 10.0, OURS: 10.0}
    ours = rows(RESULTS, [OURS])[0]
    assert ours["÷ its own full prefill"] == pytest.approx((0.1 + 0.3) / 2)


def test_without_never_seen_prompts_or_ours_there_is_no_ratio() -> None:
    row = rows([timed(REORDERED, 0, REFERENCE, 8.0)], [REFERENCE])[0]
    assert not {"÷ ours", "÷ its own full prefill"} & set(row)


def test_another_number_of_tokens_is_noticed() -> None:
    assert other_tokens(RESULTS) == {}
    longer = Timed(UNSEEN, 0, PREFIX, 1.0, 1.0, 1, 101, 0)
    assert other_tokens([*RESULTS, longer]) == {PREFIX: 1}


def test_the_report_names_what_is_missing() -> None:
    whole = text(rows(RESULTS, [OURS]), [{"arm": OURS}], {"a | b": "not installed: no wheel"})
    assert "- **a | b**: not installed: no wheel" in whole
    assert "| documents reordered | ours | 2 | 2 | 2 | 4 | 0.5 | 1 | 0.2 | 1 of 2 | 0.9 |" in whole


# Arms, their processes and their files.


def test_a_peer_without_a_wheel_is_reported_not_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    run = Run.start(["kvboost, no repair"], tmp_path, tmp_path)
    assert run.children == {}
    assert list(tmp_path.glob("kvboost-0.9.0-*"))
    assert not list(tmp_path.glob("*/.installed"))
    whole = report(run, ["kvboost, no repair"])[1]
    assert "- **kvboost, no repair**: not installed: pip found no usable wheel of kvboost==0.9.0 (ERROR: No m" in whole


def test_an_arm_that_ends_says_what_it_wrote(tmp_path: Path) -> None:
    script = tmp_path / "arm.py"
    script.write_text("import sys; sys.exit('no such weights')")
    with pytest.raises(ArmError, match="broken ended with status 1; it said: no such weights"):
        Child("broken", [sys.executable, str(script)])


def test_an_arm_that_fails_is_missing_from_then_on(tmp_path: Path) -> None:
    script = tmp_path / "arm.py"
    script.write_text(
        f"import sys; sys.path.insert(0, {str(ARMS)!r})\n"
        "from serve import First, private_stdout, serve\n"
        "class Arm:\n"
        "    def describe(self): return {}\n"
        "    def ask(self, prompt, clock):\n"
        "        print('this is no reply')\n"
        "        if prompt['ids'] == [0]: raise MemoryError('too long')\n"
        "        return First(prompt['ids'][-1], len(prompt['ids']), 0)\n"
        "replies = private_stdout()\n"
        "serve(Arm(), replies)\n"
    )
    run = Run({"arm": Child("arm", [sys.executable, str(script)])}, {}, [])
    try:
        reply = run.ask({"ids": [1, 2]}, ["arm"])["arm"]
        assert (reply["token"], reply["prompt_tokens"]) == (2, 2)
        assert 0 <= reply["cpu_s"] <= reply["wall_s"] + 0.1
        assert run.ask({"ids": [0]}, ["arm"]) == {}
        assert run.missing == {"arm": "stopped after 0 timed prompts: arm: MemoryError: too long"}
        assert run.ask({"ids": [1, 2]}, ["arm"]) == {}
    finally:
        run.close()


@pytest.fixture
def hugging_face(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(ARMS))
    yield importlib.import_module("hugging_face")
    for name in ("hugging_face", "serve"):
        sys.modules.pop(name, None)


def save(folder: Path, family: str) -> Path:
    new_model(family).save_pretrained(folder)
    tokenizer_of().save_pretrained(folder)
    return folder


def test_prefix_reuse_is_exact_and_keeps_the_best_earlier_prompt(tmp_path: Path, hugging_face: Any) -> None:
    folder = str(save(tmp_path, "llama"))
    plain = hugging_face.HuggingFace(folder, prefix=False, budget_bytes=0)
    prefix = hugging_face.HuggingFace(folder, prefix=True, budget_bytes=1 << 30)
    draw = random.Random(0)
    one, two = ([draw.randrange(3, 300) for _ in range(60)] for _ in range(2))
    asked = [one, two, one[:40] + two[:20], two, one[:50], [*one, 9, 8]]
    for ids, reused in zip(asked, (0, 0, 40, 59, 49, 60), strict=True):
        clock = importlib.import_module("serve").Clock()
        found = prefix.ask({"ids": ids}, clock)
        assert found.token == plain.ask({"ids": ids}, clock).token
        assert (found.prompt_tokens, found.reused_tokens) == (len(ids), reused)


def test_prefix_reuse_keeps_to_its_budget(tmp_path: Path, hugging_face: Any) -> None:
    arm = hugging_face.HuggingFace(str(save(tmp_path, "llama")), prefix=True, budget_bytes=1)
    clock = importlib.import_module("serve").Clock()
    for ids in ([5, 6, 7, 8], [9, 10, 11, 12], [5, 6, 7, 8]):
        assert arm.ask({"ids": ids}, clock).reused_tokens == 0  # one fits at a time


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_the_gguf_file_has_the_same_weights(tmp_path: Path, family: str) -> None:
    folder = save(tmp_path / family, family)
    made = float32_file(folder, tmp_path / "cache")
    assert float32_file(folder, tmp_path / "cache") == made
    assert list((tmp_path / "cache").iterdir()) == [made]
    back = AutoModelForCausalLM.from_pretrained(made.parent, gguf_file=made.name, dtype=torch.float32)
    expected = new_model(family).state_dict()
    found = back.state_dict()
    assert set(found) == set(expected)
    for name, values in expected.items():
        assert torch.equal(found[name], values), name


def test_a_model_that_the_converter_does_not_know_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConversionError, match="'llama' with 'yarn' positions"):
        float32_file(save(tmp_path / "model", "llama-yarn"), tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


@pytest.mark.slow
def test_arms_that_need_no_other_package_run_end_to_end(tmp_path: Path) -> None:
    folder = save(tmp_path, "llama")
    arms = [REFERENCE, PREFIX, OURS]
    schedule = plan(pool(12, length=20), prompts=1, docs=3, collection=8, seed=0)
    run = Run.start(arms, folder, tmp_path)
    try:
        measure(run, schedule, renderer(tokenizer_of()), seed=0)
        assert run.missing == {}
        table, whole = report(run, arms)
    finally:
        run.close()
    assert [(row["scenario"], row["arm"]) for row in table] == [(s, a) for s in SCENARIOS for a in arms]
    found = {(row["scenario"], row["arm"]): row for row in table}
    assert all(row["mean CPU s"] > 0 for row in table)
    assert all(found[s, PREFIX]["first token as full recompute"] == "1 of 1" for s in SCENARIOS)
    assert all(found[s, REFERENCE]["tokens reused"] == 0 for s in SCENARIOS)
    assert found[SAME, PREFIX]["tokens reused"] > 0.9 > found[REORDERED, PREFIX]["tokens reused"] > 0
    assert other_tokens(run.results) == {}
    assert "kvboost-rag of this checkout" in whole
    assert set(PEERS) > set(arms)
