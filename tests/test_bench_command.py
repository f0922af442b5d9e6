"""`kvboost-rag bench`: what is measured on a real small model, and what it refuses."""

from __future__ import annotations

import copy
import json
import random
from pathlib import Path

import pytest
import torch

from kvboost_rag import Engine, SamplingParams, cli
from kvboost_rag.bench_command import (
    FULL,
    NOTHING,
    OURS,
    PREFIX,
    Row,
    _parser,
    along,
    greedy,
    measure,
    passages,
    prompt_of,
    summarise,
    table,
)
from tests.tiny import engine_of, model_of, text, tokenizer_of

TEXT = "\n".join(text(seed, 24).replace("\n", " ") for seed in range(40))
SMALL = ["--prompts", "3", "--passages", "3", "--passage-tokens", "60", "--answer-tokens", "4"]


@pytest.fixture
def engine() -> Engine:
    return engine_of(store_prompts=False, pack_tokens=400)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("texts")
    (made / "manual.txt").write_text(TEXT, encoding="utf-8")
    (made / "image.png").write_bytes(b"\x89PNG")
    return made


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    made = tmp_path_factory.mktemp("model")
    model_of("llama").save_pretrained(made)
    tokenizer_of().save_pretrained(made)
    return str(made)


def test_every_arm_is_measured_on_every_prompt(engine: Engine) -> None:
    options = _parser().parse_args(["folder", "--model", "tiny", *SMALL])
    pool = passages(engine, [TEXT], 60, 12, random.Random(0))
    engine.warm(pool)
    rows = list(measure(engine, pool, options))
    assert [sum(row.arm == arm for row in rows) for arm in (FULL, PREFIX, OURS, NOTHING)] == [3] * 4
    for row in rows:
        if row.arm in (FULL, PREFIX):  # a prefix hit is exact
            assert row.kl == pytest.approx(0.0, abs=1e-4)
            assert row.first
        assert 0 < row.computed_tokens <= row.prompt_tokens
        assert row.fallback is None
    whole, prefix, ours, nothing = summarise(rows)
    assert whole["computed"] == 1.0
    assert ours["computed"] < prefix["computed"] <= 1.0
    assert nothing["fidelity"] == pytest.approx(0.0)
    assert 0 < ours["kl"] < nothing["kl"]


def test_an_answer_is_compared_token_by_token(engine: Engine) -> None:
    prompt = text(0, 60)
    answer, reference = greedy(engine, engine.prefill(prompt, reuse="off"), 5)
    assert answer == list(engine.generate(prompt, reuse="off", sampling=SamplingParams(max_tokens=5)).token_ids)
    forced = along(engine, engine.prefill(prompt, reuse="off"), answer)
    assert torch.allclose(forced, reference, atol=1e-4)


def test_the_command_loads_measures_and_reports(
    folder: Path, model: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "found.json"
    arguments = ["bench", str(folder), "--model", model, *SMALL, "--repair-ratio", "0.2", "--json", str(out)]
    assert cli.main(arguments) == 0
    shown = capsys.readouterr().out
    found = json.loads(out.read_text(encoding="utf-8"))
    assert found["settings"]["repair_ratio"] == 0.2
    assert len(found["prompts"]) == 12
    assert f"| {OURS} | " in shown
    # Reuse does not pay on a model that small, and the report says so.
    reasons = [row["fallback"] for row in found["prompts"] if row["arm"] == OURS and row["fallback"]]
    assert (f"not reused in {len(reasons)} of 3 prompts; of the first: reuse is not worth" in shown) == bool(reasons)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompts", "0"], "--prompts is 0; it must be 1 or more"),
        (["--passages", "500"], "different passages, a prompt needs 500"),
        (["--glob", "*.pdf"], "holds no file like *.pdf"),
        (["--dtype", "int4"], "--dtype is 'int4'"),
        (["--repair-ratio", "7"], "repair_ratio"),
        (["--json", "no/such/folder/x.json"], "there is no folder no/such/folder"),
        (["--passages", "30", "--passage-tokens", "60"], "lower --passages or --passage-tokens"),
    ],
)
def test_what_cannot_be_measured_is_said(
    folder: Path, model: str, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert cli.main(["bench", str(folder), "--model", model, *arguments]) == 2
    assert message in capsys.readouterr().err


def test_passages_are_different_whole_lines_of_bounded_size(engine: Engine) -> None:
    rng = random.Random(0)
    found = passages(engine, [TEXT, TEXT, "too short"], 60, 100, rng)
    assert len(found) == len(set(found)) > 5
    lines = set(TEXT.splitlines())
    for passage in found:
        assert set(passage.splitlines()) <= lines
        assert len(engine.tokenize(passage)) <= 60 + 2
    assert len(passages(engine, [TEXT], 60, 3, rng)) == 3
    assert passages(engine, ["", "\n\n"], 60, 3, rng) == []
    one_line = " ".join(TEXT.split())
    by_sentence = passages(engine, [one_line], 60, 100, rng)
    assert len(by_sentence) > 5
    for passage in by_sentence:
        assert passage in one_line
        assert passage.endswith(".")
    assert passages(engine, ["word " * 400], 60, 3, rng) == []


def test_a_model_without_a_chat_template_gets_a_string() -> None:
    tokenizer = copy.deepcopy(tokenizer_of())
    tokenizer.chat_template = None
    prompt = prompt_of(engine_of(tokenizer=tokenizer), "Be brief.", ["One passage.", "Another."], "Another.")
    assert isinstance(prompt, str)
    assert prompt.index("Be brief.") < prompt.index("One passage.") < prompt.index("begins with")


def test_a_summary_divides_means() -> None:
    def row(arm: str, seconds: float, computed: float, kl: float) -> Row:
        return Row(arm, seconds, 100, computed, kl, kl < 0.5, 1 - kl, None)

    rows = [row(FULL, 4.0, 100, 0.0), row(FULL, 2.0, 100, 0.0), row(PREFIX, 3.0, 90, 0.0), row(OURS, 0.5, 10, 0.1),
            row(OURS, 0.1, 20, 0.3), row(NOTHING, 0.1, 10, 1.0)]  # fmt: skip
    whole, _, ours, nothing = summarise(rows)
    assert ours["sooner"] == pytest.approx(10.0)
    assert ours["computed"] == pytest.approx(0.15)
    assert ours["fidelity"] == pytest.approx(0.8)
    assert (whole["fidelity"], nothing["fidelity"]) == (1.0, 0.0)
    assert "| kvboost-rag | 0.300 | 0.300 | 10.0 | 15% | 0.800 | 100% | 80% |" in table(summarise(rows))
    silent = [row(arm, 1.0, 10, 0.0) for arm in (FULL, PREFIX, OURS, NOTHING)]  # documents change nothing
    assert summarise(silent)[2]["fidelity"] is None
