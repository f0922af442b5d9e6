"""`kvboost-rag trace analyze`: what is counted, predicted, decided, written and drawn."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvboost_rag import EngineConfig, SamplingParams, cli
from kvboost_rag.analyze.analysis import Analysis, Log, analyze
from kvboost_rag.analyze.command import assumed_costs
from kvboost_rag.analyze.encoding import EstimatedEncoding, ModelEncoding
from kvboost_rag.analyze.formats import Logged
from kvboost_rag.analyze.replay import PREFIX_BLOCK, Replay, Rules
from kvboost_rag.analyze.tally import Row, Tally
from kvboost_rag.analyze.verdict import LEAST_REQUESTS, judge
from kvboost_rag.calibration import recipe_of
from kvboost_rag.chunking import BreakFinder
from kvboost_rag.chunks import Scope, as_ids
from kvboost_rag.errors import PromptError, TraceError
from tests.tiny import engine_of, model_of, prompt_of, text, tokenizer_of

CONFIG = EngineConfig(ram_budget_bytes=1 << 34)
RULES = Rules(CONFIG, assumed_costs(300), recipe_of(CONFIG), 1 << 15, 1 << 20)
DOCUMENTS = [text(seed, 150) for seed in range(700, 706)]


def write(path: Path, records: Sequence[Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def reordered(count: int, documents: Sequence[str] = DOCUMENTS, **more: Any) -> list[dict[str, Any]]:
    draw = random.Random(1)
    return [
        {"prompt": prompt_of(draw.sample(documents, len(documents)), question=f"Question {i}?"), **more}
        for i in range(count)
    ]


def analysis_of(path: Path, rules: Rules = RULES, **log: Any) -> Analysis:
    return analyze(Log(path=path, **log), EstimatedEncoding(), rules)


def shares(analysis: Analysis) -> tuple[float, float]:
    tally = analysis.tally
    return tally.share(tally.leading_tokens), tally.share(tally.moved_tokens)


# Counts


def test_reordered_documents_are_moved_text(tmp_path: Path) -> None:
    analysis = analysis_of(write(tmp_path / "log", reordered(40)))
    leading, moved = shares(analysis)
    assert leading < 0.3
    assert moved > 0.65
    assert 0.93 < leading + moved < 39 / 40  # all but the first, and the questions
    assert analysis.verdict.go
    assert analysis.verdict.mode == "approximate"
    assert analysis.tally.saved("approximate") > 2 * analysis.tally.saved("exact")


def test_a_common_beginning_is_a_leading_prefix(tmp_path: Path) -> None:
    same = "\n\n".join(DOCUMENTS)
    analysis = analysis_of(write(tmp_path / "log", [f"{same}\n\n{text(i, 20)}" for i in range(40)]))
    leading, moved = shares(analysis)
    assert leading > 0.9
    assert moved < 0.02
    assert (analysis.verdict.go, analysis.verdict.mode) == (True, "exact")
    assert "any prefix cache" in analysis.verdict.reason


def test_prompts_that_share_nothing_are_no_go(tmp_path: Path) -> None:
    analysis = analysis_of(write(tmp_path / "log", [text(seed, 300) for seed in range(60)]))
    assert sum(shares(analysis)) < 0.05
    assert not analysis.verdict.go
    assert "0% as moved text" in analysis.verdict.reason
    assert analysis.tally.seconds["approximate"] == pytest.approx(analysis.tally.seconds["plain"], rel=0.05)


def test_tenants_never_meet(tmp_path: Path) -> None:
    records = [{**record, "user": f"u{i}"} for i, record in enumerate(reordered(40))]
    path = write(tmp_path / "log", records)
    apart = analysis_of(path, namespace_field="user")
    assert shares(apart) == (0, 0)
    assert (apart.namespaces, apart.verdict.go) == (40, False)
    assert shares(analysis_of(path))[1] > 0.65


def test_a_conversation_repeats_as_prefix(tmp_path: Path) -> None:
    messages: list[dict[str, str]] = []
    records = []
    for turn in range(12):
        messages.append({"role": "user", "content": text(900 + turn, 60)})
        records.append({"messages": list(messages), "response": text(950 + turn, 30)})
        messages.append({"role": "assistant", "content": text(950 + turn, 30)})
    leading, moved = shares(analysis_of(write(tmp_path / "log", records)))
    # Of a turn only the last question is new; the answer before it is stored, too.
    assert leading + moved > 0.75
    assert moved < 0.1


def test_the_order_of_the_log_or_of_time(tmp_path: Path) -> None:
    growing = [{"prompt": " ".join(DOCUMENTS[: i + 1]), "created": i} for i in range(6)]
    forwards, backwards = write(tmp_path / "a", growing), write(tmp_path / "b", growing[::-1])
    columns = [analysis.tally.leading_tokens for analysis in
               (analysis_of(forwards), analysis_of(backwards), analysis_of(backwards, by_time=True))]  # fmt: skip
    assert columns[0] != columns[1]
    assert columns[0] == columns[2]
    assert analysis_of(backwards).newest_first
    assert not analysis_of(forwards).newest_first
    assert not analysis_of(backwards, by_time=True).newest_first


def test_without_times_there_is_no_order_of_time(tmp_path: Path) -> None:
    path = write(tmp_path / "log", ["x" * 100, {"prompt": "y", "created": 1}])
    analysis = analysis_of(path, by_time=True)
    assert len(analysis.tally) == 1
    assert "--by-time" in analysis.skipped.bad[0].reason


def test_a_store_that_is_too_small_saves_less(tmp_path: Path) -> None:
    path = write(tmp_path / "log", reordered(40, [text(seed, 100) for seed in range(750, 758)]))
    small = replace(RULES, config=EngineConfig(ram_budget_bytes=800 * RULES.token_bytes))
    roomy, tight = analysis_of(path), analysis_of(path, small)
    assert not any(roomy.evictions.values())
    assert all(tight.evictions.values())
    assert sum(shares(tight)) < sum(shares(roomy)) - 0.1


def test_prompts_beyond_the_window_are_counted_apart(tmp_path: Path) -> None:
    path = write(tmp_path / "log", ["short prompt", text(1, 500)])
    analysis = analysis_of(path, replace(RULES, window_tokens=100))
    assert (len(analysis.tally), analysis.skipped.too_long) == (1, 1)


def test_passages_too_short_to_be_worth_it_fall_back(tmp_path: Path) -> None:
    analysis = analysis_of(write(tmp_path / "log", reordered(40, [text(seed, 18) for seed in range(800, 808)])))
    assert analysis.tally.fell_back > 20
    assert analysis.tally.saved("approximate") < 0.3


# The engine itself is the measure


@pytest.mark.parametrize("mode", ["exact", "approximate"])
@pytest.mark.parametrize("chunking", ["document", "semantic"])
def test_a_replay_reuses_what_a_real_engine_reuses(mode: Any, chunking: Any) -> None:
    draw, documents = random.Random(3), [text(seed, 30) for seed in range(60, 66)]
    messages: list[dict[str, str]] = []
    prompts: list[Any] = []
    for i in range(12):
        prompts.append(prompt_of(draw.sample(documents, 3), question=f"Question {i}?"))
        if i < 4:  # and a conversation among them
            messages = [*messages, {"role": "user", "content": prompts[-1] if i == 0 else text(70 + i, 9)}]
            prompts.append(messages)
            messages = [*messages, {"role": "assistant", "content": text(80 + i, 5)}]
    prompts += prompts[3:5]
    engine = engine_of(reuse=mode, chunking=chunking, chunk_tokens=32)
    rules = Rules(engine.config, RULES.costs, engine.recipe, 1 << 10, engine.window_tokens)
    encoding = ModelEncoding(tokenizer_of(), "tiny")
    replay = Replay(mode, rules, BreakFinder(encoding.piece), encoding.tokens)
    seen, reused = [], 0
    for prompt in prompts:
        ids = encoding.prompt(Logged(prompt=prompt))
        assert ids.tolist() == engine.tokenize(prompt)
        answer = engine.generate(prompt, sampling=SamplingParams(max_tokens=5))
        step = replay.step(Scope("log", "t"), ids, as_ids(answer.token_ids))
        seen.append((step.plan.tokens("exact"), step.plan.tokens("approximate")))
        assert seen[-1] == (answer.usage.exact_tokens, answer.usage.approximate_tokens)
        reused += sum(seen[-1])
    assert reused > 100
    engine.close()


def test_predictions_are_those_of_the_cost_model(tmp_path: Path) -> None:
    same = " ".join(DOCUMENTS[:2])
    analysis = analysis_of(write(tmp_path / "log", [same, same]))
    tally, costs = analysis.tally, RULES.costs
    n = tally.prompt_tokens[0]
    assert list(tally.seconds["plain"]) == [costs.pass_cost(n, n / 2)] * 2
    blocks = (n - 1) // PREFIX_BLOCK * PREFIX_BLOCK
    assert tally.seconds["prefix"][1] == costs.move_s * blocks + costs.pass_cost(n - blocks, (n + blocks) / 2)
    assert tally.seconds["exact"][1] == costs.move_s * (n - 1) + costs.pass_cost(1, n - 0.5)


def test_ids_without_a_tokenizer_are_no_text() -> None:
    with pytest.raises(PromptError, match="--tokenizer"):
        EstimatedEncoding().prompt(Logged(prompt=[1, 2, 3]))
    assert ModelEncoding(tokenizer_of(), "tiny").prompt(Logged(prompt=[1, 2, 3])).tolist() == [1, 2, 3]


def test_tools_are_rendered_as_the_integrations_do() -> None:
    tool = {"type": "function", "function": {"name": "find", "description": "Finds.", "parameters": {"type": "object"}}}
    call = {"id": "1", "type": "function", "function": {"name": "find", "arguments": {"what": "river"}}}
    told = [{"role": "user", "content": "Which?"}, {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": "the Oder", "tool_call_id": "1"}]  # fmt: skip
    for encoding in (ModelEncoding(tokenizer_of(), "tiny"), EstimatedEncoding()):
        ids = encoding.prompt(Logged(prompt=told, tools=(tool,)))
        written = "".join(map(encoding.piece, ids.tolist()))
        assert '"name": "find"' in written
        assert "the Oder" in written
        assert '"what": "river"' in written


# Go or no-go


def tally_of(
    count: int = 50, *, plain: float, exact: float, approximate: float, answer_s: float | None = None
) -> Tally:
    tally = Tally()
    for _ in range(count):
        tally.add(
            Row(
                prompt_tokens=1000,
                leading_tokens=100,
                moved_tokens=700,
                reused_tokens=(0, 96, 100, 800),
                seconds=(plain, exact, exact, approximate),
                answer_tokens=None if answer_s is None else 400,
                answer_s=answer_s or 0.0,
            )
        )
    return tally


@pytest.mark.parametrize(
    ("tally", "go", "mode", "reason"),
    [
        (tally_of(plain=5, exact=4.5, approximate=1), True, "approximate", "5.0×"),
        (tally_of(plain=5, exact=1, approximate=0.9), True, "exact", "only 10% more"),
        (tally_of(plain=5, exact=4.9, approximate=4.5), False, None, "more than 10%"),
        (tally_of(LEAST_REQUESTS - 1, plain=5, exact=1, approximate=1), False, None, "too few"),
        (tally_of(plain=1, exact=0.9, approximate=0.2, answer_s=30), False, None, "decoding dominates"),
        (tally_of(plain=1, exact=0.9, approximate=0.2, answer_s=1), True, "approximate", "5.0×"),
    ],
)
def test_verdicts(tally: Tally, go: bool, mode: str | None, reason: str) -> None:
    verdict = judge(tally)
    assert (verdict.go, verdict.mode) == (go, mode)
    assert reason in verdict.reason


def test_long_answers_in_a_log_are_no_go(tmp_path: Path) -> None:
    records = reordered(30, DOCUMENTS[:2])
    assert analysis_of(write(tmp_path / "a", records)).verdict.go
    long = analysis_of(write(tmp_path / "b", [{**record, "usage": {"completion_tokens": 8000}} for record in records]))
    assert not long.verdict.go
    assert "decoding" in long.verdict.reason


def test_the_course_of_a_log() -> None:
    tally = tally_of(7, plain=1, exact=1, approximate=1)
    for parts in (1, 3, 40):
        leading, moved, new = tally.course(parts)
        assert len(leading) == min(parts, 7)
        assert np.allclose(leading + moved + new, 1)
        assert np.allclose(moved, 0.7)


# The command


def run(capsys: Any, *arguments: object) -> tuple[int, str, str]:
    status = cli.main(["trace", "analyze", *map(str, arguments)])
    out, err = capsys.readouterr()
    return status, out, err


def test_a_report_for_people(tmp_path: Path, capsys: Any) -> None:
    path = write(tmp_path / "log.jsonl", [*reordered(30, response="short"), "", {"question": "x"}])
    status, out, err = run(capsys, path)
    assert (status, err) == (0, "")
    assert "**GO with reuse='approximate'**" in out
    assert "line 31: the prompt is empty" in out
    assert "line 32: it holds 'question'" in out
    assert "estimated tokens" in out
    assert "300 tokens/s" in out
    assert not any(word in out for word in ("river", "velvet"))  # nothing of the prompts


def test_a_report_for_programs(tmp_path: Path, capsys: Any) -> None:
    path = write(tmp_path / "log.jsonl", [*reordered(30), {"question": "x"}])
    status, out, _ = run(capsys, path, "--json", "--prefill-tokens-per-second", 3000)
    found = json.loads(out)
    assert status == 0
    assert found["verdict"]["go"] is True
    assert sum(found["shares"].values()) == pytest.approx(1)
    assert found["skipped"]["bad"] == 1
    assert found["kept_bytes"] is None
    slower = json.loads(run(capsys, path, "--json", "--prefill-tokens-per-second", 300)[1])
    for mode, figures in found["modes"].items():
        assert slower["modes"][mode]["ttft_p50_s"] == pytest.approx(10 * figures["ttft_p50_s"])
        assert slower["modes"][mode]["saved"] == pytest.approx(figures["saved"])


def test_nothing_usable_is_an_error_with_a_remedy(tmp_path: Path, capsys: Any) -> None:
    for content, why in (("", "empty"), ('{"a": 1}\n', "line 1"), ("no json at all\n", "line 1"), ('""', "empty")):
        path = tmp_path / "log"
        path.write_text(content)
        status, out, err = run(capsys, path)
        assert (status, out) == (2, "")
        assert why in err
        assert "--format" in err
    write(path, [{"run_type": "chain", "inputs": {"input": "x"}}])
    assert "type 'llm'" in run(capsys, path)[2]
    assert run(capsys, tmp_path / "none")[0] == 2


def test_a_bad_run_does_not_hide_the_next(tmp_path: Path, capsys: Any) -> None:
    page = {"runs": [{"run_type": "chain", "inputs": {}}, {"inputs": {}}, {"inputs": {"prompts": ["Which river?"]}}]}
    status, out, _ = run(capsys, write(tmp_path / "log", [page]))
    assert status == 0
    assert "1 request," in out
    assert "line 1, run 2: its inputs hold nothing" in out
    assert "1 run of something else" in out


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--prefill-tokens-per-second", "0"], "above 0"),
        (["--prefill-tokens-per-second", "nan"], "above 0"),
        (["--budget", "2G"], "--tokenizer"),
        (["--time-field", "t"], "--by-time"),
        (["--model", "/no/such/folder"], "no folder"),
        (["--tokenizer", "/no/such/folder"], "no folder"),
        (["--namespace-field", "user"], "tenant"),
    ],
)
def test_what_cannot_take_effect_is_refused(tmp_path: Path, capsys: Any, arguments: list[str], why: str) -> None:
    path = write(tmp_path / "log", reordered(3))
    status, out, err = run(capsys, path, *arguments)
    assert (status, out) == (2, "")
    assert why in err


def test_a_tokenizer_alone_gives_ids_and_bytes(tmp_path: Path, capsys: Any) -> None:
    tokenizer_of().save_pretrained(tmp_path / "tokenizer")
    path = write(tmp_path / "log", reordered(30, DOCUMENTS[:2]))
    assert "token ids of" in run(capsys, path, "--tokenizer", tmp_path / "tokenizer")[1]
    config = deepcopy(model_of("llama").config)
    config.dtype = None  # whoever used this model before may have set it
    config.save_pretrained(tmp_path / "tokenizer")
    found = json.loads(run(capsys, path, "--tokenizer", tmp_path / "tokenizer", "--json", "--budget", "100K")[1])
    # 3 layers, 2 heads of 16 numbers, keys and values, in 16 bits as the configuration names no dtype
    assert found["kept_bytes"]["exact"] == found["kept_tokens"]["exact"] * 3 * 2 * 16 * 2 * 2
    assert found["evictions"]["exact"] > 0
    assert found["skipped"]["too_long"] == 0


def test_a_model_is_measured(tmp_path: Path, capsys: Any) -> None:
    tokenizer_of().save_pretrained(tmp_path / "model")
    model_of("llama").save_pretrained(tmp_path / "model")
    path = write(tmp_path / "log", [{"messages": [{"role": "user", "content": text(1, 20)}]}] * 2)
    status, out, _ = run(capsys, path, "--model", tmp_path / "model")
    assert status == 0
    assert "measured on this machine" in out
    out = run(capsys, path, "--model", tmp_path / "model", "--prefill-tokens-per-second", 7)[1]
    assert "assume 7 tokens/s" in out


def test_a_picture(tmp_path: Path, capsys: Any) -> None:
    pytest.importorskip("matplotlib")
    path = write(tmp_path / "log", reordered(30))
    status, _, err = run(capsys, path, "--plot", tmp_path / "p.png")
    assert status == 0
    assert "p.png" in err
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    assert run(capsys, path, "--plot", tmp_path / "no" / "p.png")[0] == 2


def test_a_log_of_one_request_is_drawn(tmp_path: Path, capsys: Any) -> None:
    pytest.importorskip("matplotlib")
    assert run(capsys, write(tmp_path / "log", ["one prompt"]), "--plot", tmp_path / "p.png")[0] == 0


def test_errors_of_a_log_name_it(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="none"):
        analysis_of(tmp_path / "none")
