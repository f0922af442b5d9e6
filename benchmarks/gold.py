"""Accuracy and time to the first token on questions with known answers.

    python benchmarks/gold.py split-records --items 100 --jsonl results/split.jsonl
    python benchmarks/gold.py --report --jsonl results/split.jsonl --markdown results/split.md

Workloads: `split-records`, five Debian packages, each in two passages of which only the first names the package, so
that passages must have seen each other; `records`, the same facts in one passage; `bugs`, four to six functions of the
standard library, one with a misspelt variable, in four buckets of prompt sizes; `conversations`, records asked about
turn by turn. Questions over the same documents make a set: other questions, documents in another order, behind another
preamble.

Arms run interleaved, prompt by prompt, in random order, in CPU seconds of one thread (see `goldset/arms.py`). Results
go to the file set by set; the same command goes on where a run stopped, and with more `--items` adds to it. A file
holds one kind of settings only.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import time
from pathlib import Path
from typing import Any

import goldset
import torch
import transformers
from common import default_model, machine, write
from goldset import log
from goldset.arms import ANEW, BUDGETS, KINDS, SEEN, USUAL, Lab
from goldset.bugs import Bugs
from goldset.questions import BUCKETS, Question, Workload, bucket_of, documents_of
from goldset.records import Conversations, Records, split_passages
from goldset.report import tables

import kvboost_rag

WORKLOADS = ("split-records", "records", "bugs", "conversations")
PER_SET = {"conversations": 4}  # turns; of the others two questions make a set


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    if args.report:
        items = log.read(args.jsonl)
        if not items:
            raise SystemExit(f"{args.jsonl} holds no results; run a workload first")
        report(args, items)
        return
    lab = Lab(
        args.model, args.dtype, kinds=args.arms, budgets=args.ratios, chat=args.workload == "conversations",
        answer_tokens=args.answer_tokens, seed=args.seed, shuffled=not args.in_order,
    )  # fmt: skip
    report(args, run(args, lab))


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", nargs="?", choices=WORKLOADS, help="not with --report")
    parser.add_argument("--model", default=default_model(), help="hub id or folder")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--items", type=int, default=100, help="questions; whole sets are asked")
    parser.add_argument("--per-set", type=int, help="questions over the same documents (2; of conversations 4 turns)")
    parser.add_argument("--block", type=int, default=10, help="sets whose documents are ingested together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--arms", nargs="+", default=list(USUAL), choices=KINDS)
    parser.add_argument(
        "--ratios", nargs="+", default=list(BUDGETS), metavar="BUDGET",
        help="budgets of 'ours': 'default' is the engine's own recipe, '0.3' sets the share of moved tokens to "
        "recompute, '0.1:4' also the least tokens of each short run, '0:0:0' the first tokens of each run, too; what "
        "it comes to is the report's computed share",
    )  # fmt: skip
    parser.add_argument("--answer-tokens", type=int, default=40, help="of a greedy answer; 0: likelihood only")
    parser.add_argument("--buckets", nargs="+", default=list(BUCKETS), choices=BUCKETS, help="prompt sizes of 'bugs'")
    parser.add_argument(
        "--in-order", action="store_true", help="ingest passages in the order of their texts, not in random order"
    )
    parser.add_argument("--jsonl", type=Path, required=True, help="results, one item a line; continued if it exists")
    parser.add_argument("--report", action="store_true", help="only make the tables from --jsonl")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    args = parser.parse_args(argv)
    if args.report == bool(args.workload):
        parser.error("give a workload to measure, or --report, and not both")
    if args.per_set is None:
        args.per_set = PER_SET.get(args.workload, 2)
    if min(args.items, args.per_set, args.block) < 1:
        parser.error("--items, --per-set and --block must be at least 1")
    if ANEW in args.arms and args.workload not in ("conversations", None):
        parser.error(f"{ANEW!r} is an arm of conversations; {args.workload} has questions that stand alone")
    return args


def run(args: argparse.Namespace, lab: Lab) -> list[dict[str, Any]]:
    """Measure what the file lacks; returns all of its items."""
    workload = make_workload(args, lab)
    settings = settings_of(args, lab, workload)
    items = log.read(args.jsonl)
    log.same(args.jsonl, items, settings)
    items, done = log.complete(items, args.per_set)
    wanted = range(-(-args.items // args.per_set))
    todo = [number for number in wanted if number not in done]
    print(f"{len(done)} sets are there, {len(todo)} to do", file=sys.stderr)
    commit, block, spent, started = machine()["commit"], -1, 0, time.process_time()
    for count, number in enumerate(todo):
        questions = workload.questions(number)
        if number // args.block != block:
            block = number // args.block
            sets = [workload.questions(other) for other in range(block * args.block, (block + 1) * args.block)]
            if count == 0:
                print(estimate(lab, sets, len(todo), args), file=sys.stderr)
            lab.begin_block(sets)
        lab.begin_set(questions)
        made = []
        for position, question in enumerate(questions):
            arms = lab.measure(question, position, f"{number} {position}")
            made.append(
                {
                    "set": number,
                    "position": position,
                    "bucket": group_of(args, lab, question, position),
                    "question": question.question,
                    "options": list(question.options),
                    "gold": question.gold,
                    "arms": arms,
                    "commit": commit,
                    "settings": settings,
                }
            )
        log.append(args.jsonl, made)
        items += made
        spent = time.process_time() - started
        left = spent / (count + 1) * (len(todo) - count - 1)
        print(f"set {number}: {count + 1}/{len(todo)}, {spent:.0f} CPU s, about {left:.0f} to go", file=sys.stderr)
    return log.complete(items, args.per_set)[0]


def group_of(args: argparse.Namespace, lab: Lab, question: Question, position: int) -> str:
    """What a prompt's time is reported with: the turns of a chat, or prompts of about its size."""
    if args.workload == "conversations":
        return f"turn {position + 1}"
    return bucket_of(len(lab.main.tokenize(question.messages())))


def make_workload(args: argparse.Namespace, lab: Lab) -> Workload:
    """The questions that were asked for."""
    options = {"per_set": args.per_set, "seed": args.seed}
    if args.workload == "bugs":
        count, count_prompt = (lambda text: len(lab.tokenize(text))), (lambda prompt: len(lab.main.tokenize(prompt)))
        return Bugs(count, count_prompt, buckets=args.buckets, **options)
    if args.workload == "conversations":
        return Conversations(**options)
    return Records(**options, **({"passages": split_passages} if args.workload == "split-records" else {}))


def settings_of(args: argparse.Namespace, lab: Lab, workload: Workload) -> dict[str, Any]:
    """Everything that figures depend on; `--items` is not among it, for more can be added."""
    names = ("workload", "dtype", "per_set", "block", "seed", "arms", "ratios", "buckets", "answer_tokens", "in_order")
    return {
        **{name: getattr(args, name) for name in names},
        "model": Path(args.model).name,
        "fingerprint": lab.main.fingerprint,
        "recipe": repr(lab.main.recipe),
        "texts": workload.source,
        "code": code_digest(),
        "cpu": machine()["cpu"],
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def code_digest() -> str:
    """Identity of the engine's code and of this benchmark's."""
    found = hashlib.sha256()
    for folder in (Path(kvboost_rag.__file__).parent, Path(goldset.__file__).parent):
        for file in sorted(folder.rglob("*.py")):
            found.update(file.relative_to(folder).as_posix().encode() + b"\0" + file.read_bytes())
    return found.hexdigest()[:16]


def estimate(lab: Lab, sets: list[Any], count: int, args: argparse.Namespace) -> str:
    """How long the run will take, from one timed pass of this model on this machine."""
    questions = [question for one in sets for question in one]
    lengths = [len(lab.main.tokenize(question.messages())) for question in questions]
    tokens = sum(lengths) / len(lengths)
    started = time.process_time()
    lab.main.prefill(questions[0].messages(), reuse="off", store=False)
    token_s = (time.process_time() - started) / lengths[0]
    whole = sum((arm.reuse == "off" and arm.documents) or arm.exact for arm in lab.arms)
    halves = sum(arm.name == SEEN for arm in lab.arms)
    small = len(lab.arms) - whole - halves
    prefill = token_s * tokens * (whole + 0.6 * halves + 0.2 * small)
    ingesting = sum(arm.learns == "collection" for arm in lab.arms) if args.workload == "conversations" else 1
    collection = sum(len(lab.tokenize(text)) for text in documents_of(sets)) / len(questions)
    # A pass over a few tokens costs about 25 tokens of a prefill, for it reads all weights.
    behind = 25 * token_s * (6 * len(lab.arms) + 0.5 * args.answer_tokens * sum(not arm.exact for arm in lab.arms))
    seconds = count * args.per_set * (prefill + token_s * collection * ingesting + behind)
    return f"about {seconds / 3600:.2f} CPU hours ({tokens:.0f} tokens a prompt, {1 / token_s:.0f} tokens a second)"


def report(args: argparse.Namespace, items: list[dict[str, Any]]) -> None:
    """Tables to the screen and to files."""
    settings = items[0]["settings"]
    items, _ = log.complete(items, settings["per_set"])
    if not items:
        raise SystemExit(f"{args.jsonl} holds no complete set yet")
    text, rows = tables(items)
    commits = sorted({item["commit"] for item in items})
    about = ", ".join(f"{name} {value}" for name, value in settings.items() if name not in ("arms", "recipe"))
    text = f"`{settings['workload']}`, {len(items)} questions. {about}; commit {' '.join(commits)}.\n\n{text}"
    print(text)
    if args.markdown:
        args.markdown.parent.mkdir(parents=True, exist_ok=True)
        args.markdown.write_text(text + "\n", encoding="utf-8")
    write(args.json, settings, commits=commits, **rows)


if __name__ == "__main__":
    main()
