"""Cost of finding stored runs: look up prompts made of stored documents in a large index.

Needs no model. CPU time of one thread; every prompt is looked up once, so nothing is warm that would not be.

    python benchmarks/lookup.py
    python benchmarks/lookup.py --chunks 100000 --prompt-tokens 32768 --json lookup.json
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import numpy as np

from kvboost_rag.chunks import ChunkHeader, IntArray, Scope, as_ids
from kvboost_rag.index import ChunkIndex

SCOPE = Scope("benchmark", "default")
T = TypeVar("T")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chunks", type=int, default=50_000, help="stored documents")
    parser.add_argument("--chunk-tokens", type=int, default=200, help="mean tokens of a document")
    parser.add_argument("--head-tokens", type=int, default=12, help="boilerplate that all documents begin with")
    parser.add_argument("--prompt-tokens", type=int, default=8192)
    parser.add_argument("--prompts", type=int, default=100)
    parser.add_argument("--vocabulary", type=int, default=50_000)
    parser.add_argument("--seed", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    args = parser.parse_args()
    rows = [measure(args, seed) for seed in args.seed]
    print(table(rows))
    if args.json:
        args.json.write_text(json.dumps({"settings": {**vars(args), "json": None}, "rows": rows}, indent=2))


def measure(args: argparse.Namespace, seed: int) -> dict[str, float]:
    """Fill an index, look prompts up, empty half of it. Times in CPU seconds."""
    rng = np.random.default_rng(seed)
    documents = make_documents(args, rng)
    nothing = as_ids([])
    headers = [ChunkHeader.of(SCOPE, ids, base=0, history=nothing, origin="warm") for ids in documents]
    index = ChunkIndex()
    adds = [timed(lambda header=header: index.add(header))[0] for header in headers]
    nbytes = index.nbytes
    exact, runs, covered = [], [], []
    for _ in range(args.prompts):
        prompt = make_prompt(documents, args.prompt_tokens, rng)
        exact_s, chain = timed(lambda prompt=prompt: index.match_exact(SCOPE, prompt))
        start = chain[-1].end if chain else 0
        runs_s, hits = timed(lambda prompt=prompt, start=start: index.match_runs(SCOPE, prompt, start))
        exact.append(exact_s)
        runs.append(runs_s)
        covered.append((start + sum(hit.length for hit in hits)) / len(prompt))
    discards = [timed(lambda header=header: index.discard(header.key))[0] for header in headers[::2]]
    lookup = np.add(exact, runs)
    return {
        "seed": seed,
        "lookup_median_s": float(np.median(lookup)),
        "lookup_p95_s": float(np.quantile(lookup, 0.95)),
        "exact_median_s": float(np.median(exact)),
        "runs_median_s": float(np.median(runs)),
        "covered": float(np.mean(covered)),
        "add_mean_s": float(np.mean(adds)),
        "add_last_tenth_mean_s": float(np.mean(adds[-max(1, len(adds) // 10) :])),
        "add_max_s": float(np.max(adds)),
        "discard_mean_s": float(np.mean(discards)),
        "anchor_bytes_per_chunk": nbytes / len(headers),
    }


def make_documents(args: argparse.Namespace, rng: np.random.Generator) -> list[IntArray]:
    head = rng.integers(0, args.vocabulary, size=args.head_tokens)
    low, high = args.chunk_tokens * 3 // 4, args.chunk_tokens * 5 // 4
    return [
        as_ids(np.concatenate((head, rng.integers(0, args.vocabulary, size=rng.integers(low, high) - len(head)))))
        for _ in range(args.chunks)
    ]


def make_prompt(documents: list[IntArray], tokens: int, rng: np.random.Generator) -> IntArray:
    """An instruction, documents in random order with short new text between them, and a question."""
    parts, size = [rng.integers(0, 1000, size=30)], 30
    while size < tokens:
        between = rng.integers(0, 1000, size=rng.integers(0, 8))
        parts += [documents[rng.integers(len(documents))], between]
        size += len(parts[-1]) + len(parts[-2])
    return as_ids(np.concatenate((*parts,))[: tokens - 20].tolist() + rng.integers(0, 1000, size=20).tolist())


def timed(call: Callable[[], T]) -> tuple[float, T]:
    begin = time.process_time()
    result = call()
    return time.process_time() - begin, result


def table(rows: list[dict[str, float]]) -> str:
    """The figures as Markdown, times in milliseconds."""
    names = list(rows[0])
    lines = ["| " + " | ".join(name.replace("_s", "_ms") if name.endswith("_s") else name for name in names) + " |"]
    lines.append("|" + "---|" * len(names))
    for row in rows:
        cells = (f"{row[name] * 1e3:.3f}" if name.endswith("_s") else f"{row[name]:.4g}" for name in names)
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
