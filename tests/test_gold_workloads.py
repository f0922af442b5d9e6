"""Questions with gold answers (benchmarks/gold.py): the generators, the scores, the statistics, the log."""

from __future__ import annotations

import ast
import itertools
import json
import random
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

# Behind everything else: the scripts there have names that other modules have, too.
sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))

import gold
from goldset import log
from goldset.arms import FULL, NOTHING, OURS, PREFIX, SEEN, UNREPAIRED, Lab, with_budget
from goldset.bugs import Bugs, Function, functions, mutate
from goldset.debian import STEM, WORDS, choose, load
from goldset.questions import BUCKETS, Question, Workload, bucket_of, check, documents_of
from goldset.records import FIELDS, Conversations, Records, split_passages
from goldset.report import tables
from goldset.scoring import first_named, greedy, option_ids, score
from goldset.significance import bootstrap, chance_of, mcnemar, wilson

from kvboost_rag.repair import Recipe
from tests.tiny import engine_of, new_model, plain_answer, tokenizer_of

ENDLESS: frozenset[int] = frozenset()


def count(text: str) -> int:
    """About as many tokens as a real tokenizer makes of code."""
    return len(re.findall(r"\w+|[^\w\s]|\n +", text))


def count_prompt(messages: list[dict[str, str]]) -> int:
    return sum(count(message["content"]) + 5 for message in messages)


def bugs(**options: Any) -> Bugs:
    return Bugs(count, count_prompt, **options)


def split(**options: Any) -> Records:
    return Records(passages=split_passages, **options)


MAKERS: dict[str, Callable[..., Workload]] = {
    "split-records": split,
    "records": Records,
    "bugs": bugs,
    "conversations": Conversations,
}
every_workload = pytest.mark.parametrize("make", list(MAKERS.values()), ids=list(MAKERS))


@every_workload
def test_a_set_depends_on_its_number_and_the_seed_alone(make: Callable[..., Workload]) -> None:
    first, again, other = make(seed=1), make(seed=1), make(seed=2)
    later = [again.questions(number) for number in (3, 2, 1, 0)][::-1]
    assert [first.questions(number) for number in range(4)] == later
    assert len({first.questions(number) for number in range(4)}) == 4
    assert all(first.questions(number) != other.questions(number) for number in range(4))


@every_workload
def test_options_are_distinct_and_the_right_one_stands_in_the_documents(make: Callable[..., Workload]) -> None:
    workload = make()
    golds = set()
    for number in range(20):
        for question in workload.questions(number):
            assert check(question) is question
            assert 4 <= len(set(question.options)) == len(question.options) <= 6
            assert all(any(option in text for text in question.all_documents) for option in question.options)
            golds.add(question.gold)
    assert len(golds) >= 4  # the right option has no place of its own


@pytest.mark.parametrize("make", [split, Records, bugs])
def test_prompts_of_a_set_hold_the_same_documents_in_other_orders(make: Callable[..., Workload]) -> None:
    workload = make(per_set=3)
    for number in range(12):
        made = workload.questions(number)
        assert len({question.documents for question in made}) == 3
        assert len({tuple(sorted(question.documents)) for question in made}) == 1
        assert len({question.preamble for question in made}) == 3
        assert len({question.question for question in made}) == 3


def test_split_records_need_both_passages() -> None:
    for number in range(20):
        for question in split().questions(number):
            name = question.prefix.split("package ")[1].split()[0]
            at = next(i for i, text in enumerate(question.documents) if text.startswith(f"{name}: "))
            value = question.options[question.gold]
            assert value in question.documents[at + 1]
            assert question.documents[at + 1].startswith("More about the package above.")
            assert name not in question.documents[at + 1]
            assert value not in question.documents[at]


def test_records_are_fit_for_questions() -> None:
    records = load()
    assert len(records) >= 100
    assert len({record.name[:STEM] for record in records}) == len(records)
    assert all(WORDS[0] <= len(record.description.split()) <= WORDS[1] for record in records)
    assert not any("@" in record.maintainer for record in records)


def test_a_name_that_tells_its_values_is_left_out() -> None:
    text = "word " * 25
    block = (
        "Package: {}\nStatus: install ok installed\nVersion: {}\nMaintainer: {} <a@b>\nInstalled-Size: 7\n"
        "Description: short\n " + text + "\n .\n not this\n"
    )
    status = "\n".join(
        [
            block.format("plainname", "1.2", "Some Body"),
            block.format("libfoo12", "12.1", "Some Body"),
            block.format("painter", "3", "The Painter Team"),
            block.format("libcolours", "3", "Colours Team"),
            block.format("libxthing", "3", "Debian X Strike Force"),
            block.format("plainname-dev", "1.2", "Some Body"),
        ]
    )
    (record,) = choose(status)
    assert (record.name, record.version, record.maintainer, record.size_kb) == ("plainname", "1.2", "Some Body", 7)
    assert record.description == text.strip()


def test_the_typo_stands_nowhere_but_in_the_failing_line() -> None:
    known = {function.source for function in functions()}
    for number in range(24):
        for question in bugs().questions(number):
            typo = re.search(r"'(\w+)'", question.question)
            assert typo is not None
            everything = "\n".join(question.documents)
            assert everything.count(typo[1]) == 1
            (line,) = [line for line in everything.split("\n") if typo[1] in line]
            assert line.strip() in question.question
            name = question.options[question.gold]
            (failing,) = [text for text in question.documents if typo[1] in text]
            assert isinstance(ast.parse(failing).body[0], ast.FunctionDef)
            assert failing.startswith((f"def {name}(",))
            assert not any(option in question.question for option in question.options)
            assert [text in known for text in question.documents].count(False) == 1
            assert not any(option in (question.preamble + line) for option in question.options)


def test_no_path_or_module_name_stands_in_a_prompt_of_code() -> None:
    for number in range(24):
        for question in bugs().questions(number):
            assert all("/" not in message["content"] for message in question.messages())
            assert sys.prefix not in "".join(question.documents)


def test_a_function_without_a_line_that_is_fit_is_not_mutated() -> None:
    only = Function("m", "compute", "def compute(value):\n    return compute_value(value)\n")
    assert mutate(only, [only], random.Random(0)) is None
    good = Function("m", "summing", "def summing(value):\n    result = [1]\n    return result + [2, 3]\n")
    found = mutate(good, [good], random.Random(0))
    assert found is not None
    assert found.line == f"return {found.typo} + [2, 3]"


def test_bugs_have_the_size_of_their_bucket() -> None:
    workload = bugs()
    for number in range(16):
        for question in workload.questions(number):
            assert bucket_of(count_prompt(question.messages())) == BUCKETS[number % 4]
    assert [bucket_of(n) for n in (500, 501, 1000, 1001, 2000, 2001)] == [
        BUCKETS[0], BUCKETS[1], BUCKETS[1], BUCKETS[2], BUCKETS[2], BUCKETS[3],
    ]  # fmt: skip


def test_a_chat_repeats_its_turns_and_brings_a_document_later() -> None:
    for number in range(6):
        turns = Conversations(per_set=4).questions(number)
        assert [len(turn.documents) for turn in turns] == [4, 0, 1, 0]
        for before, after in itertools.pairwise(turns):
            said = before.messages()
            assert after.messages()[: len(said)] == said
            assert after.messages()[len(said)] == {"role": "assistant", "content": before.answer}
        assert turns[2].documents[0].startswith(f"{turns[2].prefix.split('package ')[1].split()[0]}: ") or all(
            value in "\n".join(turns[2].all_documents) for value in turns[2].options
        )
        assert "Context" not in str(turns[3].messages(documents=False))


def test_options_that_begin_another_are_refused() -> None:
    question = Question("", ("a",), "?", "It is ", ("1.2", "1.2-3"), 0)
    with pytest.raises(ValueError, match="beginning of another"):
        check(question)


def test_intervals_and_tests_match_known_values() -> None:
    assert wilson(8, 10) == pytest.approx((0.49016, 0.94331), abs=1e-4)
    assert wilson(0, 10) == pytest.approx((0, 0.27753), abs=1e-4)
    assert wilson(95, 100) == pytest.approx((0.88825, 0.97846), abs=1e-4)
    assert mcnemar(1, 8) == pytest.approx(20 / 512)
    assert mcnemar(8, 1) == mcnemar(1, 8)
    assert mcnemar(0, 0) == mcnemar(3, 3) == 1
    assert chance_of(3, [0.2] * 4) == pytest.approx(0.0272)
    assert chance_of(1, [0.5, 0.25]) == pytest.approx(1 - 0.5 * 0.75)
    assert chance_of(0, [0.2] * 3) == pytest.approx(1)
    assert bootstrap([[1.0, 1.0]] * 5) == (1, 1)
    low, high = bootstrap([[0.0, 0.0], [1.0, 1.0]] * 10)
    assert 0.2 < low < 0.4 < 0.6 < high < 0.8


@pytest.mark.parametrize(
    ("text", "finished", "named"),
    [
        ("The version is 1.2-3.", True, 1),
        ("The version is 1.2-3", False, None),  # may go on: 1.2-31
        ("The version is 1.2-3.", False, None),  # may go on: 1.2-3.4
        ("The version is 1.2-3. It", False, 1),
        ("The version is 1.2-34 or 9.1", True, 2),
        ("It is 4:9.1 today", True, None),
        ("It takes 20,899 KB", True, 0),
        ("First 9.1, then 1.2-3", True, 2),
        ("`_run` it is", True, 3),
        ("`_runner` it is", True, None),
    ],
)
def test_an_answer_names_the_option_it_names_first(text: str, finished: bool, named: int | None) -> None:
    assert first_named(text, ("20899 KB", "1.2-3", "9.1", "_run"), finished=finished) == named


def test_options_are_scored_as_a_plain_forward_scores_them_and_the_cache_is_put_back() -> None:
    engine = engine_of()
    tokenizer = tokenizer_of()

    def tokenize(text: str) -> list[int]:
        ids: list[int] = tokenizer(text, add_special_tokens=False).input_ids
        return ids

    question = Question("Read.", ("river stone paper",), "Which?", "It is the river ", ("stone", "paper mill", "x"), 0)
    shared, rests = option_ids(tokenize, question)
    assert [shared + rest for rest in rests] == [tokenize(f"It is the river {option}") for option in question.options]
    prefill = engine.prefill(question.messages(), reuse="off")
    found = score(engine.model, prefill, shared, rests)
    assert prefill.cache.get_seq_length() == len(prefill.token_ids)
    assert score(engine.model, prefill, shared, rests) == pytest.approx(found, abs=1e-6)
    for rest, value in zip(rests, found, strict=True):
        ids = torch.tensor([[*prefill.token_ids, *shared, *rest]])
        with torch.inference_mode():
            plain = torch.log_softmax(engine.model(input_ids=ids, use_cache=False).logits[0].float(), -1)
        wanted = [plain[ids.shape[1] - len(rest) - 1 + i, token] for i, token in enumerate(rest)]
        assert value == pytest.approx(float(sum(wanted) / len(wanted)), abs=1e-4)
    text, _ = greedy(engine.model, prefill, tokenizer.decode, question.options, ends=ENDLESS, max_tokens=4)
    expected = tokenizer.decode(plain_answer(engine.model, prefill.token_ids, 4))
    assert expected.startswith(text.split("\n")[0])


def test_a_budget_is_a_recipe_of_another_ratio() -> None:
    base = Recipe()
    assert with_budget(base, "default") is base
    assert with_budget(base, "0.3").ratio == 0.3
    changed = with_budget(base, "0.1:4")
    assert (changed.ratio, changed.least_tokens, changed.floor_tokens) == (0.1, 4, base.floor_tokens)
    changed = with_budget(base, "0.1:0:2")
    assert (changed.ratio, changed.least_tokens, changed.floor_tokens) == (0.1, 0, 2)
    for wrong in ("much", "0.1:", "0.1:2:3:4"):
        with pytest.raises(ValueError, match=f"budget is '{wrong}'"):
            with_budget(base, wrong)


ALL = (FULL, PREFIX, "exact", OURS, SEEN, UNREPAIRED, NOTHING)


def tiny_lab(**options: Any) -> Lab:
    """All arms on a random model whose window takes prompts of single letters."""
    model = new_model("llama", max_position_embeddings=8192)
    return Lab("", "", engine=engine_of(model, selector="query"), **{"answer_tokens": 3, **options})


def arguments(tmp_path: Path, workload: str, *more: str) -> Any:
    common = ["--items", "2", "--per-set", "2", "--block", "1", "--answer-tokens", "3", "--buckets", "over 2k"]
    return gold.parse([workload, *common, "--jsonl", str(tmp_path / "results.jsonl"), *more])


@pytest.mark.parametrize("workload", gold.WORKLOADS)
def test_every_workload_runs_through_every_arm(workload: str, tmp_path: Path) -> None:
    args = arguments(tmp_path, workload)
    lab = tiny_lab(chat=workload == "conversations")
    first, second = gold.run(args, lab)
    for item in (first, second):
        arms = item["arms"]
        assert list(arms) == [arm.name for arm in lab.arms]
        assert {FULL, PREFIX, "exact", "ours default", "ours 0.3", SEEN, UNREPAIRED, NOTHING} == set(arms)
        assert all(len(row["scores"]) == len(item["options"]) for row in arms.values())
        assert all(row["ttft_s"] > 0 for row in arms.values())
        assert arms[FULL]["hit"] == arms[NOTHING]["hit"] == "miss"
        for name in (PREFIX, "exact"):
            assert arms[name]["approximate_tokens"] == 0
            assert arms[name]["kl_first"] < 1e-5
            assert arms[name]["scores"] == pytest.approx(arms[FULL]["scores"], abs=1e-3)
        assert arms["exact"]["exact_tokens"] > arms[PREFIX]["exact_tokens"] or workload == "conversations"
        assert arms["ours default"]["hit"] == "mixed"
        if (
            workload != "conversations" or item is first
        ):  # a later turn continues what was served, which needs no repair
            assert arms[UNREPAIRED]["computed_tokens"] < arms["ours default"]["computed_tokens"]
        assert arms["ours default"]["computed_tokens"] < arms[FULL]["computed_tokens"] == arms[FULL]["prompt_tokens"]
    assert first["arms"][SEEN]["state"] == first["arms"][PREFIX]["state"] == "cold"
    assert first["arms"][SEEN]["approximate_tokens"] == 0
    assert second["arms"][SEEN]["state"] == second["arms"][PREFIX]["state"] == "warm"
    if workload != "conversations":
        assert second["arms"][SEEN]["hit"] == "mixed"
    text, rows = tables([first, second])
    assert "Full recompute" in text
    assert {row["arm"] for row in rows["times"]} == set(first["arms"])
    json.dumps(rows)


def test_no_arm_is_helped_by_what_another_one_or_it_itself_was_asked() -> None:
    lab = tiny_lab()
    questions = split().questions(0)
    lab.begin_block([questions])
    lab.begin_set(questions)
    kept = lab.main.stats().chunks
    first = lab.measure(questions[1], 0, "a")
    assert lab.main.stats().chunks == kept
    again = lab.measure(questions[1], 0, "b")
    for arm in lab.arms:
        if arm.learns in ("nothing", "collection", "first document"):
            for name in ("exact_tokens", "approximate_tokens", "computed_tokens"):
                assert first[arm.name][name] == again[arm.name][name], arm.name
    lab.begin_set(questions)  # forgets what `prefix` and `seen` met
    fresh = lab.measure(questions[1], 0, "c")
    for name in (PREFIX, SEEN):
        assert again[name]["exact_tokens"] > first[name]["exact_tokens"] == fresh[name]["exact_tokens"]


def test_a_run_goes_on_where_it_stopped(tmp_path: Path) -> None:
    lab = tiny_lab(kinds=(FULL, NOTHING), answer_tokens=0)
    few = ["--arms", FULL, NOTHING, "--answer-tokens", "0"]
    args = arguments(tmp_path, "records", *few)
    before = gold.run(args, lab)
    content = args.jsonl.read_bytes()
    assert gold.run(args, lab) == before
    assert args.jsonl.read_bytes() == content

    args.jsonl.write_bytes(content + content.split(b"\n")[0] + b'\n{"set": 1, "pos')  # died while it wrote
    more = arguments(tmp_path, "records", *few, "--items", "4")
    after = gold.run(more, lab)
    assert [(item["set"], item["position"]) for item in after] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert after[:2] == before
    assert b'"pos\n' not in args.jsonl.read_bytes()
    assert gold.run(more, lab) == after


def test_results_of_other_settings_are_never_mixed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lab = tiny_lab(kinds=(FULL, NOTHING), answer_tokens=0)
    few = ["--arms", FULL, NOTHING, "--answer-tokens", "0"]
    args = arguments(tmp_path, "records", *few)
    items = gold.run(args, lab)
    with pytest.raises(log.SettingsError, match="seed 0, not 7"):
        gold.run(arguments(tmp_path, "records", *few, "--seed", "7"), lab)

    gold.main(["--report", "--jsonl", str(args.jsonl), "--json", str(tmp_path / "report.json")])
    assert "says nothing" in capsys.readouterr().out
    report = json.loads((tmp_path / "report.json").read_text())
    assert {row["arm"] for row in report["accuracy"]} == {FULL, NOTHING}

    log.append(args.jsonl, [{**items[0], "settings": {**items[0]["settings"], "seed": 7}}])
    with pytest.raises(log.SettingsError, match="seed 7, not 0"):
        gold.main(["--report", "--jsonl", str(args.jsonl)])


def test_accuracy_is_compared_with_full_recompute_on_the_same_questions() -> None:
    def item(number: int, full: bool, ours: bool) -> dict[str, Any]:
        row = {"state": "-", "ttft_s": 2.0, "prompt_tokens": 10, "computed_tokens": 10, "hit": "miss"}
        moved = {**row, "state": "warm", "ttft_s": 0.5, "computed_tokens": 2, "hit": "mixed"}
        arms = {FULL: {**row, "right": full}, "ours 0.1": {**moved, "right": ours}}
        return {"set": number, "position": 0, "bucket": BUCKETS[0], "options": list("abcde"), "arms": arms}

    items = [item(i, full=i < 9, ours=i < 6 or i == 9) for i in range(10)]
    _, rows = tables(items)
    (full, ours) = rows["accuracy"]
    assert (full["accuracy"], ours["accuracy"]) == (0.9, 0.7)
    assert ours["lost / won"] == "3 / 1"
    assert ours["difference to full"] == pytest.approx(-0.2)
    assert ours["p"] == pytest.approx(mcnemar(3, 1))
    assert ours["computed share"] == pytest.approx(0.2)
    (time,) = [row for row in rows["times"] if row["arm"] == "ours 0.1"]
    assert time["full / arm"] == pytest.approx(4)
    assert rows["verdict"]["says"] is True
    nothing = tables([item(i, full=i < 2, ours=True) for i in range(10)])[1]["verdict"]
    assert nothing["says"] is False


def test_a_block_ingests_each_document_once() -> None:
    sets = [split().questions(number) for number in range(3)]
    documents = documents_of(sets)
    assert len(set(documents)) == len(documents)
    assert {text for one in sets for question in one for text in question.documents} == set(documents)
    assert len(FIELDS) == 3
