"""What KV mapped from another model is worth: fidelity, right answers, time to the first token.

    kvboost-rag transfer fit --source SMALL --target LARGE --text FOLDER --out MAP --tokens 25000
    python benchmarks/transfer.py MAP --source SMALL --target LARGE --json results/transfer.json

The source ingests a collection; the target has read nothing of it, and answers from mapped KV: alone, and with 5, 10
and 20 % of it recomputed. Against it: the target's own full prefill (native), the same prompt without documents, and
with wrong ones. Two workloads: `passages` of the standard library's documentation, six in a prompt, compared along the
target's own answer; `records` of Debian packages, five in a prompt, right by the likelihood of five options. Arms run
interleaved, prompt by prompt, in CPU seconds of one thread.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from common import bar, count_tokens, cpu_seconds, ingest, load_engine, machine, markdown, write
from fidelity import comparison
from goldset.records import Records
from goldset.scoring import option_ids, score
from workload import Passage, items, passages, sample

from kvboost_rag import Engine, TransferMap
from kvboost_rag.repair import Recipe
from kvboost_rag.transfer.gate import BUDGETS, MAPPED, repaired

COLUMNS = ["workload", "arm", "prompts", "tokens", "charged", "fidelity", "kl", "agree", "right", "ttft_s", "sooner"]
NATIVE, NOTHING, WRONG = "native (full prefill)", "no context", "wrong documents"


def main() -> None:
    args = parse()
    source = load_engine(args.source, args.dtype, store_prompts=False)
    mapping = TransferMap.load(args.map)
    refused, mapping = mapping.refused, replace(mapping, refused=None)  # measured all the same
    plain = load_engine(args.target, args.dtype, store_prompts=False)
    target = Engine(plain.model, plain.tokenizer, plain.config, transfer=mapping, source=source)
    found: dict[tuple[str, str], list[dict[str, float]]] = defaultdict(list)
    for workload, work in (("passages", passages_of), ("records", records_of)):
        if workload in args.workloads:
            for arm, figures in work(args, source, target):
                found[workload, arm].append(figures)
    rows = summarise(found)
    table = markdown(COLUMNS, rows)
    verdict = f"refused by its gate: {refused}" if refused else "accepted by its gate"
    text = f"`{' '.join(sys.argv)}` on {machine()}\n\nThe map is {verdict}.\n\n{table}\n"
    print(text)
    if args.markdown:
        args.markdown.parent.mkdir(parents=True, exist_ok=True)
        args.markdown.write_text(text)
    write(args.json, vars(args), refused=refused, summary=rows)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("map", type=Path)
    parser.add_argument("--source", required=True)
    parser.add_argument("--target", required=True)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--prompts", type=int, default=8, help="of passages")
    parser.add_argument("--questions", type=int, default=40, help="about records")
    parser.add_argument("--docs", type=int, default=6, help="passages in a prompt")
    parser.add_argument("--collection", type=int, default=30, help="passages that the source has read")
    parser.add_argument("--answer-tokens", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workloads", nargs="+", default=["passages", "records"], choices=["passages", "records"])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    return parser.parse_args()


def arms_of(engine: Engine) -> dict[str, Recipe]:
    """How mapped KV is repaired, by name."""
    base = engine.recipe
    budgets = {repaired(budget): replace(base, mapped_ratio=budget) for budget in BUDGETS}
    return {MAPPED: replace(base, strategy="none"), **budgets}


def passages_of(args: argparse.Namespace, source: Engine, target: Engine) -> Iterator[tuple[str, dict[str, float]]]:
    """Distance from the target's own answers."""
    pool = sample(passages(count_tokens(target)), args.collection, args.seed)
    ingest(source, pool, args.seed)
    for number, item in enumerate(bar(items(pool, args.prompts, docs=args.docs, seed=args.seed), "passages")):
        others = tuple(p for p in pool if p not in item.passages)[: args.docs]
        messages = {
            NATIVE: item.messages(),
            NOTHING: item.messages(passages=()),
            WRONG: item.messages(passages=others),
        }
        compare = comparison(target, item, args.answer_tokens)
        for arm, prefill, seconds in run(target, messages, f"{args.seed} {number}"):
            yield arm, {**compare(prefill), "ttft_s": seconds, "tokens": len(prefill.token_ids)}
    source.clear()


def records_of(args: argparse.Namespace, source: Engine, target: Engine) -> Iterator[tuple[str, dict[str, float]]]:
    """Right answers about packages, and distance of the first token."""
    workload = Records(per_set=2, seed=args.seed)
    sets = [workload.questions(number) for number in range(-(-args.questions // 2))]
    texts = list(dict.fromkeys(text for one in sets for question in one for text in question.documents))
    ingest(source, [Passage("", text) for text in texts], args.seed)

    def tokenize(text: str) -> list[int]:
        return target.tokenizer(text, add_special_tokens=False).input_ids  # type: ignore[no-any-return]

    asked = [question for one in sets for question in one][: args.questions]
    for number, question in enumerate(bar(asked, "records")):
        shared, rests = option_ids(tokenize, question)
        others = [text for text in texts if text not in question.documents][: len(question.documents)]
        messages = {
            NATIVE: question.messages(),
            NOTHING: question.messages(documents=False),
            WRONG: replace(question, documents=tuple(others)).messages(),
        }
        reference: torch.Tensor | None = None
        rows = {}
        for arm, prefill, seconds in run(target, messages, f"records {args.seed} {number}"):
            scores = score(target.model, prefill, shared, rests)
            rows[arm] = (prefill, seconds, max(range(len(scores)), key=scores.__getitem__) == question.gold)
            reference = prefill.logits.log_softmax(-1) if arm == NATIVE else reference
        assert reference is not None
        for arm, (prefill, seconds, right) in rows.items():
            other = prefill.logits.log_softmax(-1)
            yield (
                arm,
                {
                    "kl": float((reference.exp() * (reference - other)).sum()),
                    "agree": float(reference.argmax() == other.argmax()),
                    "charged": prefill.usage.computed_tokens / prefill.usage.prompt_tokens,
                    "right": float(right),
                    "ttft_s": seconds,
                    "tokens": len(prefill.token_ids),
                },
            )
    source.clear()


def run(target: Engine, messages: dict[str, Any], key: str) -> Iterator[tuple[str, Any, float]]:
    """All arms on one prompt, in a random order: name, prefill, CPU seconds."""
    base = target.recipe
    arms: list[tuple[str, Any, Recipe | None]] = [(name, prompt, None) for name, prompt in messages.items()]
    arms += [(name, messages[NATIVE], recipe) for name, recipe in arms_of(target).items()]
    random.Random(key).shuffle(arms)
    for name, prompt, recipe in arms:
        if recipe is not None:
            target.recipe = recipe
        mode = "off" if recipe is None else "approximate"
        seconds, prefill = cpu_seconds(lambda: target.prefill(prompt, reuse=mode, store=False))  # noqa: B023 - at once
        target.recipe = base
        if recipe is not None and not prefill.usage.transferred_tokens:
            raise SystemExit(f"{name}: nothing was mapped ({prefill.fallback_reason})")
        yield name, prefill, seconds


def summarise(found: dict[tuple[str, str], list[dict[str, float]]]) -> list[dict[str, Any]]:
    """Means over prompts; fidelity against the prompt without documents, and how much sooner than the full prefill."""
    rows = []
    for (workload, arm), results in found.items():
        row: dict[str, Any] = {"workload": workload, "arm": arm, "prompts": len(results)}
        row |= {name: sum(one[name] for one in results) / len(results) for name in results[0]}
        rows.append(row)
    by = {(row["workload"], row["arm"]): row for row in rows}
    for row in rows:
        row["fidelity"] = 1 - row["kl"] / by[row["workload"], NOTHING]["kl"]
        row["sooner"] = by[row["workload"], NATIVE]["ttft_s"] / row["ttft_s"]
    order = [NATIVE, MAPPED, *map(repaired, BUDGETS), NOTHING, WRONG]
    return sorted(rows, key=lambda row: (row["workload"], order.index(row["arm"])))


if __name__ == "__main__":
    main()
