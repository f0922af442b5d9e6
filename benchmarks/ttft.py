"""Time to first token: full recompute, exact prefix only, and ours, on the prompts a RAG user sends.

Full recompute is plain Hugging Face `generate` of one token with its default cache. All times are CPU seconds of one
thread; the arms of a prompt run one after the other, so a busy machine slows all of them alike. A whole collection is
ingested once, in random order; scenarios that follow a served prompt start from that prompt alone. What a measured
call would add is not kept, so that every arm starts from the same stored state.

    python benchmarks/ttft.py --prompts 20 --json results/ttft.json --markdown results/ttft.md

`ideal` is one plain forward over as many tokens as ours ran, with the same cache length; `overhead` is ours / ideal;
`outside` is the share of ours that is not spent inside the model's forward.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from common import (
    bar,
    count_tokens,
    cpu_seconds,
    default_model,
    ingest,
    load_engine,
    machine,
    markdown,
    percentile,
    write,
)  # fmt: skip
from workload import PREAMBLES, QUESTIONS, Item, Passage, items, passages, sample

from kvboost_rag import Engine, SamplingParams

ONE = SamplingParams(max_tokens=1)
SEEN = "seen"  # namespace of prompts that were served before; "default" holds the ingested collection
COLUMNS = (
    "scenario", "arm", "prompt_tokens", "exact", "approximate", "computed", "mean", "p50", "p95", "p99", "speedup",
    "overhead", "outside",
)  # fmt: skip
STAGES = ("tokenize_s", "lookup_s", "load_s", "model_s", "prefill_s", "ttft_s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=default_model(), help="hub id or folder")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--prompts", type=int, default=20, help="of 'reordered' and 'first question'")
    parser.add_argument("--others", type=int, default=8, help="prompts of every other scenario")
    parser.add_argument("--docs", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--collection", type=int, default=10_000, help="most passages to ingest and to ask about")
    parser.add_argument("--scenarios", nargs="+", default=list(SCENARIOS), choices=list(SCENARIOS))
    parser.add_argument("--decode-tokens", type=int, default=48, help="0 skips the decode comparison")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    args = parser.parse_args()
    engine = load_engine(args.model, args.dtype, store_prompts=False)
    pool = sample(passages(count_tokens(engine)), args.collection, args.seed)
    ingest(engine, pool, args.seed)
    # The chain has been asked before, so its preamble is known; "first question" uses a new one.
    engine.prefill(items(pool, 1, seed=args.seed + 1, preamble=PREAMBLES[0])[0].messages(), store=True)
    found: dict[tuple[str, str], list[dict[str, float]]] = defaultdict(list)
    for scenario in args.scenarios:
        docs = int(scenario.split()[0]) if scenario[0].isdigit() else args.docs
        count = args.prompts if scenario in ("reordered", "first question") else args.others
        made = items(pool, count, docs=docs, seed=args.seed, preamble=PREAMBLES[0])
        for item in bar(made, scenario):
            for arm, row in measure(engine, scenario, item, args):
                found[scenario, arm].append(row)
    rows = summarise(found)
    text = markdown(COLUMNS, rows)
    if args.decode_tokens:
        rows.append(decode(engine, items(pool, 3, docs=args.docs, seed=args.seed), args.decode_tokens))
        text += f"\n\nDecode, tokens per CPU second against plain generate: {rows[-1]['speedup']:.3f}"
    stages = markdown(("scenario", *STAGES), [r for r in rows if r["arm"] == "ours"])
    text += f"\n\nMean wall seconds of each stage, ours:\n\n{stages}"
    print(text)
    if args.markdown:
        args.markdown.parent.mkdir(parents=True, exist_ok=True)
        args.markdown.write_text(f"`{' '.join(sys.argv)}` on {machine()}\n\n{text}\n")
    write(args.json, vars(args), summary=rows, prompts={" / ".join(k): v for k, v in found.items()})


def _shuffled(documents: tuple[Passage, ...], rng: random.Random) -> tuple[Passage, ...]:
    order = list(documents)
    while tuple(order) == documents:
        rng.shuffle(order)
    return tuple(order)


def _same(engine: Engine, item: Item, rng: random.Random) -> Item:
    engine.prefill(item.messages(), store=True, namespace=SEEN)
    return item


def _question(engine: Engine, item: Item, rng: random.Random) -> Item:
    engine.prefill(item.messages(), store=True, namespace=SEEN)
    return replace(item, question=QUESTIONS[-1].format(name=rng.choice(item.passages).name))


def _reordered(engine: Engine, item: Item, rng: random.Random) -> Item:
    return replace(item, passages=_shuffled(item.passages, rng))


def _first(engine: Engine, item: Item, rng: random.Random) -> Item:
    return replace(item, preamble=PREAMBLES[1], passages=_shuffled(item.passages, rng))


def _preamble(engine: Engine, item: Item, rng: random.Random) -> Item:
    engine.prefill(item.messages(), store=True, namespace=SEEN)
    return replace(item, preamble=PREAMBLES[-1])


def _splitter(engine: Engine, item: Item, rng: random.Random) -> Item:
    """Pieces of a text splitter that overlap by a third with what was warmed."""
    pieces = []
    for one, two in zip(item.passages, item.passages[1:] + item.passages[:1], strict=True):
        text = one.text[len(one.text) // 3 :] + "\n" + two.text[: len(two.text) // 3]
        pieces.append(Passage(one.name, text))
    return replace(item, passages=tuple(pieces))


def _served(engine: Engine, item: Item, rng: random.Random) -> Item:
    """Moved documents that were served before, behind the same preamble and in this very order."""
    moved = replace(item, passages=_shuffled(item.passages, rng))
    engine.prefill(moved.messages(), store=True)
    return replace(moved, question=QUESTIONS[-1].format(name=rng.choice(item.passages).name))


def _cold(engine: Engine, item: Item, rng: random.Random) -> Item:
    return item


SCENARIOS = {
    "cold": _cold,
    "same prompt": _same,
    "new question": _question,
    "reordered": _reordered,
    "moved before": _served,
    "first question": _first,
    "other preamble": _preamble,
    "overlapping pieces": _splitter,
    "4 documents": _reordered,
    "8 documents": _reordered,
    "16 documents": _reordered,
}


def measure(
    engine: Engine, scenario: str, item: Item, args: argparse.Namespace
) -> Iterator[tuple[str, dict[str, float]]]:
    """All arms of one prompt, in a random order."""
    rng = random.Random(f"{args.seed} {item.question} {scenario}")
    engine.clear(SEEN)
    engine.recipe = engine.recipe  # forgets prompts as they were served
    namespace = "default" if SCENARIOS[scenario] in (_reordered, _served, _first, _splitter) else SEEN
    messages = SCENARIOS[scenario](engine, item, rng).messages()
    ids = torch.tensor([engine.tokenize(messages)])
    arms = ["full recompute", "exact prefix", "ours"]
    rng.shuffle(arms)
    rows: dict[str, dict[str, float]] = {}
    for arm in arms:
        if arm == "full recompute":
            rows[arm] = _row(plain(engine, ids), prompt_tokens=ids.shape[1], computed=ids.shape[1])
            continue
        mode = "exact" if arm == "exact prefix" else "approximate"
        seconds, done = cpu_seconds(
            lambda mode=mode: engine.generate(messages, sampling=ONE, reuse=mode, namespace=namespace)
        )
        usage, timing = done.usage, done.timing
        rows[arm] = _row(
            seconds,
            prompt_tokens=usage.prompt_tokens,
            exact=usage.exact_tokens,
            approximate=usage.approximate_tokens,
            computed=usage.computed_tokens,
            **({"ideal": ideal(engine, ids, usage.computed_tokens)} if arm == "ours" else {}),
            outside=1 - timing.model_s / timing.ttft_s,
            **{stage: getattr(timing, stage) for stage in STAGES},
        )
    for arm, row in rows.items():
        row["speedup"] = rows["full recompute"]["seconds"] / row["seconds"]
        yield arm, row


def plain(engine: Engine, ids: torch.Tensor) -> float:
    """CPU seconds of Hugging Face's own first token."""
    return cpu_seconds(lambda: engine.model.generate(ids, max_new_tokens=1, do_sample=False, pad_token_id=0))[0]


@torch.inference_mode()
def ideal(engine: Engine, ids: torch.Tensor, computed: int) -> float:
    """CPU seconds of one plain forward over ``computed`` tokens behind a cache that fills up to the same length."""
    before = max(ids.shape[1] - computed, 0)
    cache = _filled(engine, before)
    inputs = {"input_ids": ids[:, before:], "use_cache": True, "logits_to_keep": 1}
    if before:
        inputs |= {"cache": cache, "position_ids": torch.arange(before, ids.shape[1])[None]}
    return cpu_seconds(lambda: engine.model(**inputs))[0]


def _filled(engine: Engine, length: int) -> Any:
    """Hugging Face's own cache with arbitrary content."""
    from transformers.cache_utils import DynamicCache

    cache = DynamicCache()
    engine.model(input_ids=torch.zeros((1, 1), dtype=torch.long), cache=cache, use_cache=True)
    for layer in cache.layers:
        layer.keys = layer.keys.expand(-1, -1, length, -1).contiguous()
        layer.values = layer.values.expand(-1, -1, length, -1).contiguous()
    return cache


def decode(engine: Engine, made: list[Item], tokens: int) -> dict[str, Any]:
    """Tokens per CPU second behind a full cache: ours against plain generate. Prefill is subtracted from both."""
    ratios = []
    for item in made:
        messages = item.messages()
        ids = torch.tensor([engine.tokenize(messages)])
        long = SamplingParams(max_tokens=tokens)

        def hf(count: int, ids: torch.Tensor = ids) -> float:
            settings = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False, "pad_token_id": 0}
            return cpu_seconds(lambda: engine.model.generate(ids, **settings))[0]

        def ours(sampling: SamplingParams, messages: Any = messages) -> tuple[float, int]:
            seconds, done = cpu_seconds(lambda: engine.generate(messages, sampling=sampling, reuse="off"))
            return seconds, done.usage.completion_tokens

        (start, _), (end, count) = ours(ONE), ours(long)
        theirs = (hf(count) - hf(1)) / (count - 1)
        ratios.append(theirs / ((end - start) / (count - 1)))
    return {"scenario": "decode", "arm": "ours", "speedup": statistics.median(ratios)}


def summarise(found: dict[tuple[str, str], list[dict[str, float]]]) -> list[dict[str, Any]]:
    """Means, percentiles and medians of ratios, per scenario and arm."""
    rows = []
    for (scenario, arm), results in found.items():
        seconds = [r["seconds"] for r in results]
        row: dict[str, Any] = {"scenario": scenario, "arm": arm}
        row |= {name: statistics.fmean(r[name] for r in results) for name in results[0]}
        row["speedup"] = statistics.median(r["speedup"] for r in results)
        if "ideal" in results[0]:
            row["overhead"] = statistics.median(r["seconds"] / r["ideal"] for r in results)
        row |= {"mean": statistics.fmean(seconds), **{f"p{p}": percentile(seconds, p / 100) for p in (50, 95, 99)}}
        rows.append(row)
    return rows


def _row(seconds: float, **rest: float) -> dict[str, float]:
    return {"seconds": seconds, "exact": 0, "approximate": 0, **rest}


if __name__ == "__main__":
    started = time.time()
    main()
    print(f"{time.time() - started:.0f} s", file=sys.stderr)
