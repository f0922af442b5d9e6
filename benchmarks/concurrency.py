"""Eight requests at once against one after the other, and a short request beside a long one.

All arms run in one process on one model, in a random order in every round; one torch thread. `serial` is an engine with
`max_num_seqs=1`, so that requests take turns as a whole. Answers are greedy and compared token for token.

- together: tokens per second of eight questions over moved documents, answered one after the other, by eight threads,
  and by `ChatKVBoost.batch` of eight chains; wall seconds and CPU seconds of the process;
- beside: wall seconds of a short request alone, while a long prompt is read, and while a long answer is given;
- lone: CPU seconds per token of a lone answer against plain Hugging Face `generate`.

    python benchmarks/concurrency.py --rounds 3 --json results/concurrency.json
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from common import count_tokens, cpu_seconds, default_model, ingest, load_engine, machine, markdown, write
from langchain_core.runnables import RunnableLambda
from workload import PREAMBLES, Item, items, passages, sample

from kvboost_rag import Engine, EngineConfig, SamplingParams
from langchain_kvboost import ChatKVBoost

COLUMNS = ("figure", "arm", "tokens", "wall_s", "cpu_s", "tokens_per_s", "against")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=default_model(), help="hub id or folder")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64, help="of an answer")
    parser.add_argument("--docs", type=int, default=4)
    parser.add_argument("--collection", type=int, default=40, help="passages to ingest and to ask about")
    parser.add_argument("--long", type=int, default=16, help="documents of the long prompt")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    engine = load_engine(args.model, args.dtype, store_prompts=False, served_share=0.0, max_num_seqs=args.requests)
    serial = Engine(engine.model, engine.tokenizer, EngineConfig(store_prompts=False, reuse="off", max_num_seqs=1))
    pool = sample(passages(count_tokens(engine)), args.collection, args.seed)
    ingest(engine, pool, args.seed)
    rng = random.Random(args.seed)
    found: list[dict[str, Any]] = []
    for seed in range(args.seed, args.seed + args.rounds):
        for part in (
            lambda seed=seed: together(engine, pool, args, seed, rng),
            lambda seed=seed: beside(engine, serial, pool, args, seed, rng),
            lambda seed=seed: [lone(engine, pool, args, seed)],
        ):
            found += part()
            print(markdown(COLUMNS, summary(found)), file=sys.stderr)
    rows = summary(found)
    print(markdown(COLUMNS, rows))
    print(f"\n`{' '.join(sys.argv)}` on {machine()}")
    write(args.json, vars(args), summary=rows, rounds=found)


def together(
    engine: Engine, pool: Any, args: argparse.Namespace, seed: int, rng: random.Random
) -> list[dict[str, Any]]:
    """Eight questions: one after the other, in eight threads, and as a batch of chains."""
    asked = [i.messages() for i in items(pool, args.requests, docs=args.docs, seed=seed, preamble=PREAMBLES[0])]
    sampling = SamplingParams(max_tokens=args.tokens)
    chain = RunnableLambda(lambda messages: [(m["role"], m["content"]) for m in messages]) | ChatKVBoost(
        engine=engine, max_tokens=args.tokens, temperature=0.0
    )
    texts: dict[str, list[str]] = {}
    tokens = {}

    def one_by_one() -> None:
        answers = [engine.generate(messages, sampling=sampling) for messages in asked]
        texts["one by one"], tokens["one by one"] = [a.text for a in answers], count(answers)

    def threads() -> None:
        with ThreadPoolExecutor(args.requests) as pool_:
            answers = list(pool_.map(lambda messages: engine.generate(messages, sampling=sampling), asked))
        texts["threads"], tokens["threads"] = [a.text for a in answers], count(answers)

    def batch() -> None:
        answers = chain.batch(asked)
        texts["ChatKVBoost.batch"] = [str(a.content) for a in answers]
        tokens["ChatKVBoost.batch"] = sum(a.usage_metadata["output_tokens"] for a in answers)

    arms = {"one by one": one_by_one, "threads": threads, "ChatKVBoost.batch": batch}
    rows = []
    for arm in rng.sample(list(arms), len(arms)):
        wall, cpu = timed(arms[arm])
        rows.append({"figure": "together", "arm": arm, "tokens": tokens[arm], "wall_s": wall, "cpu_s": cpu})
    for row in rows:
        row["tokens_per_s"] = row["tokens"] / row["wall_s"]
        row["same"] = texts[row["arm"]] == texts["one by one"]
    return rows


def beside(
    engine: Engine, serial: Engine, pool: Any, args: argparse.Namespace, seed: int, rng: random.Random
) -> list[dict[str, Any]]:
    """A short request alone, behind a long prompt, and behind a long answer; ours and one at a time."""
    short = [{"role": "user", "content": f"What is {seed} plus two?"}]
    long = Item(PREAMBLES[0], tuple(pool[: args.long]), "What do these passages have in common?").messages()
    few, many = SamplingParams(max_tokens=4), SamplingParams(max_tokens=120)
    rows = []
    for name, chosen in rng.sample([("ours", engine), ("serial", serial)], 2):
        for figure in ("short, alone", "short, while a long prompt is read", "short, while a long answer is given"):
            wall, cpu, tokens = behind(chosen, short, few, figure, long, many)
            rows.append({"figure": figure, "arm": name, "tokens": tokens, "wall_s": wall, "cpu_s": cpu})
    return rows


def behind(
    engine: Engine, short: Any, few: SamplingParams, figure: str, long: Any, many: SamplingParams
) -> tuple[float, float, int]:
    """Seconds of the short request from its call on."""
    cancel: Callable[[], None] = lambda: None  # noqa: E731
    if "prompt" in figure:
        thread = threading.Thread(target=lambda: engine.prefill(long, reuse="off", store=False))
        thread.start()
        cancel = thread.join
        time.sleep(1.0)
    elif "answer" in figure:
        stream = engine.stream(short, sampling=many, reuse="off", store=False)
        next(stream)
        cancel = stream.close
    try:
        done: list[Any] = []
        wall, cpu = timed(lambda: done.append(engine.generate(short, sampling=few, reuse="off", store=False)))
    finally:
        cancel()
    return wall, cpu, done[0].usage.completion_tokens


def lone(engine: Engine, pool: Any, args: argparse.Namespace, seed: int) -> dict[str, Any]:
    """CPU seconds per token of a lone answer behind a prompt of documents, against plain generate."""
    messages = items(pool, 1, docs=args.docs, seed=seed)[0].messages()
    ids = torch.tensor([engine.tokenize(messages)])

    def ours(count: int) -> float:
        sampling = SamplingParams(max_tokens=count)
        return cpu_seconds(lambda: engine.generate(ids[0].tolist(), sampling=sampling, reuse="off", store=False))[0]

    def plain(count: int) -> float:
        settings = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False, "pad_token_id": 0}
        return cpu_seconds(lambda: engine.model.generate(ids, **settings))[0]

    tokens = engine.generate(messages, sampling=SamplingParams(max_tokens=48), reuse="off").usage.completion_tokens
    theirs = (plain(tokens) - plain(1)) / (tokens - 1)
    mine = (ours(tokens) - ours(1)) / (tokens - 1)
    return {"figure": "lone answer, per token", "arm": "ours", "tokens": tokens, "cpu_s": mine, "ratio": theirs / mine}


def timed(work: Callable[[], object]) -> tuple[float, float]:
    """Wall and CPU seconds."""
    wall = time.perf_counter()
    cpu, _ = cpu_seconds(work)
    return time.perf_counter() - wall, cpu


def count(answers: Sequence[Any]) -> int:
    """Tokens of all answers."""
    return sum(answer.usage.completion_tokens for answer in answers)


def summary(found: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Medians over the rounds, and the median ratio to what each figure is compared with."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for row in found:
        groups[row["figure"], row["arm"]].append(row)
    rows = []
    for (figure, arm), results in groups.items():
        row: dict[str, Any] = {"figure": figure, "arm": arm}
        for name in ("tokens", "wall_s", "cpu_s", "tokens_per_s"):
            if name in results[0]:
                row[name] = statistics.median(r[name] for r in results)
        if figure == "together" and arm != "one by one":
            base = groups[figure, "one by one"]
            ratios = [r["tokens_per_s"] / b["tokens_per_s"] for r, b in zip(results, base, strict=True)]
            same = all(r["same"] for r in results)
            row["against"] = f"{statistics.median(ratios):.2f} × one by one, {'same' if same else 'other'} answers"
        elif figure.startswith("short") and arm == "ours":
            base = groups[figure, "serial"]
            ratios = [r["wall_s"] / b["wall_s"] for r, b in zip(results, base, strict=True)]
            row["against"] = f"{statistics.median(ratios):.2f} × serial"
        elif "ratio" in results[0]:
            row["against"] = f"{statistics.median(r['ratio'] for r in results):.3f} × plain generate's speed"
        rows.append(row)
    return rows


if __name__ == "__main__":
    main()
