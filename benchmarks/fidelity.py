"""Fidelity: how far answers move when KV is reused, for every strategy, selector, budget and encoding.

Each prompt is answered greedily with everything recomputed; every arm is then run along that same answer (teacher
forced). Arms are interleaved prompt by prompt. Controls: the prompt without documents, and with wrong documents.

    python benchmarks/fidelity.py --prompts 20 --json results/fidelity.json --markdown results/fidelity.md

Columns: `kl_first` KL at the first token and `kl` mean KL along the answer (nats, against full recompute), `fidelity`
1 − kl / kl of the no-document control, `agree` share of answer tokens with the same argmax, `first` share of prompts
with the same first token, `same` mean length of the equal greedy answer in tokens, `charged` tokens run as a share of
the prompt, each pass charged by its share of layers.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from common import (
    bar,
    count_tokens,
    default_model,
    divergence,
    ingest,
    load_engine,
    log_probs_along,
    machine,
    markdown,
    write,
)  # fmt: skip
from workload import Item, Passage, items, passages, sample

from kvboost_rag import Engine, SamplingParams
from kvboost_rag.repair import Recipe

FEW = ("default", "none", "floor only", "query 10% + offset")  # arms of every encoding but the first
COLUMNS = ("encoding", "arm", "charged", "kl_first", "kl", "fidelity", "agree", "first", "same")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=default_model(), help="hub id or folder")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--docs", type=int, default=6)
    parser.add_argument("--answer-tokens", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--collection", type=int, default=10_000, help="most passages to ingest and to ask about")
    parser.add_argument("--budgets", type=float, nargs="+", default=[0.05, 0.10, 0.15, 0.30])
    parser.add_argument(
        "--encodings", nargs="+", default=["default"], choices=["default", "alone", "context", "seen"],
        help="default: the whole collection warmed in one call; alone: each document in a call of its own; context: "
        "behind the prompt's preamble; seen: first met inside another prompt, in another order",
    )  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="only the default recipe and the controls")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    args = parser.parse_args()
    engine = load_engine(args.model, args.dtype, store_prompts=False)
    pool = sample(passages(count_tokens(engine)), args.collection, args.seed)
    if "default" in args.encodings:
        ingest(engine, pool, args.seed)
    arms = dict(recipes(engine, args.budgets, quick=args.quick))
    found: dict[tuple[str, str], list[dict[str, float]]] = defaultdict(list)
    for item in bar(items(pool, args.prompts, docs=args.docs, seed=args.seed), "fidelity"):
        for key, row in measure(engine, item, pool, arms, args):
            found[key].append(row)
    rows = summarise(found)
    table = markdown(COLUMNS, rows)
    print(table)
    if args.markdown:
        args.markdown.parent.mkdir(parents=True, exist_ok=True)
        args.markdown.write_text(f"`{' '.join(sys.argv)}` on {machine()}\n\n{table}\n")
    write(args.json, vars(args), summary=rows, prompts={" / ".join(k): v for k, v in found.items()})


def recipes(engine: Engine, budgets: list[float], *, quick: bool) -> Iterator[tuple[str, Recipe]]:
    """Every arm by name."""
    base = engine.recipe
    yield "default", base
    if quick:
        return
    yield "none", replace(base, strategy="none")
    yield "selective", replace(base, strategy="selective")
    yield "floor only", base.with_ratio(0.0)
    for selector in ("deviation", "query"):
        for offset in (0.0, base.offset or 0.5):
            for ratio in budgets:
                name = f"{selector} {ratio:.0%}" + (" + offset" if offset else "")
                yield name, replace(base.with_ratio(ratio), selector=selector, offset=offset)
    yield "everything", replace(base, ratio=1.0)


def comparison(engine: Engine, item: Item, answer_tokens: int) -> Callable[[Any], dict[str, float]]:
    """Measures prefills of an item against the answer that full recompute gives."""
    messages = item.messages()
    answer = engine.generate(messages, sampling=SamplingParams(max_tokens=answer_tokens), reuse="off").token_ids
    reference = log_probs_along(engine, engine.prefill(messages, reuse="off"), answer)

    def compare(prefill: Any) -> dict[str, float]:
        other = log_probs_along(engine, prefill, answer)
        kl, same = divergence(reference, other), reference.argmax(-1) == other.argmax(-1)
        first_miss = same.tolist().index(False) if not bool(same.all()) else len(same)
        return {
            "charged": prefill.usage.computed_tokens / prefill.usage.prompt_tokens,
            "kl_first": float(kl[0]),
            "kl": float(kl.mean()),
            "agree": float(same.float().mean()),
            "first": float(same[0]),
            "same": float(first_miss),
        }

    return compare


def controls(
    engine: Engine, item: Item, pool: list[Passage], compare: Callable[[Any], dict[str, float]], docs: int
) -> Iterator[tuple[str, dict[str, float]]]:
    """The prompt without documents, and with wrong ones."""
    others = tuple(p for p in pool if p not in item.passages)[:docs]
    yield "no documents", compare(engine.prefill(item.messages(passages=()), reuse="off"))
    yield "wrong documents", compare(engine.prefill(item.messages(passages=others), reuse="off"))


def measure(
    engine: Engine, item: Item, pool: list[Passage], arms: dict[str, Recipe], args: argparse.Namespace
) -> Iterator[tuple[tuple[str, str], dict[str, float]]]:
    """All arms of one prompt."""
    compare = comparison(engine, item, args.answer_tokens)
    for name, figures in controls(engine, item, pool, compare, args.docs):
        yield ("control", name), figures
    for encoding in args.encodings:
        if encoding != "default":
            engine.clear(encoding)
            store(engine, item, encoding)
        for name, recipe in arms.items():
            if encoding != args.encodings[0] and name not in FEW:
                continue
            engine.recipe = recipe
            yield (encoding, name), compare(engine.prefill(item.messages(), namespace=encoding))
        engine.recipe = arms["default"]


def store(engine: Engine, item: Item, encoding: str) -> None:
    """Make the item's documents known, by one of the other ways a user has."""
    texts = [p.text for p in item.passages]
    if encoding == "alone":
        for text in texts:
            engine.warm(text, namespace=encoding)
        return
    if encoding == "seen":
        order = list(item.passages)
        random.Random(len(texts[0])).shuffle(order)
        engine.prefill(item.messages(passages=tuple(order)), store=True, namespace=encoding)
        return
    rendered = engine.tokenizer.apply_chat_template(item.messages(), tokenize=False, add_generation_prompt=True)
    engine.warm(texts, context=rendered[: rendered.index(texts[0])], namespace=encoding)


def summarise(found: dict[tuple[str, str], list[dict[str, float]]]) -> list[dict[str, Any]]:
    """Means over prompts, and fidelity against the no-document control."""
    nothing = _mean(found["control", "no documents"], "kl")
    rows = []
    for (encoding, arm), results in found.items():
        row: dict[str, Any] = {"encoding": encoding, "arm": arm}
        row |= {name: _mean(results, name) for name in results[0]}
        row["fidelity"] = 1 - row["kl"] / nothing
        rows.append(row)
    return rows


def _mean(rows: list[dict[str, float]], name: str) -> float:
    return sum(row[name] for row in rows) / len(rows)


if __name__ == "__main__":
    main()
