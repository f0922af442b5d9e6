"""Eviction policies on made-up traces: seconds of prefill saved, against LRU and against knowing the future.

python benchmarks/eviction.py                        # the table of docs/store.md; minutes on one core
python benchmarks/eviction.py --plots results        # and a picture of each workload
python benchmarks/eviction.py --norms MODEL          # do key norms tell documents apart, and what is popular?
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

from kvboost_rag.plots import plot
from kvboost_rag.simulate import BOUND, CANDIDATES, Outcome, as_row, footprint_bytes, simulate
from kvboost_rag.synthetic import WORKLOADS, Shape

SHARES = (0.05, 0.1, 0.2, 0.4)
POLICIES = (*CANDIDATES, BOUND)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=3000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--plots", type=Path, metavar="FOLDER")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--norms", metavar="MODEL", help="measure key norms of documents instead")
    args = parser.parse_args()
    if args.norms:
        print(json.dumps(norms(args.norms), indent=1))
        return
    print(f"Seconds saved against LRU, mean of {args.seeds} seeds; the last column is the worst of GDSF in any seed.\n")
    print("| workload | budget | LRU hit rate | " + " | ".join(POLICIES[1:]) + " | worst |")
    print("|---" * (len(POLICIES) + 3) + "|")
    rows, worst = [], []
    for workload in WORKLOADS:
        saved: list[list[list[float]]] = []
        rates: list[list[float]] = []
        for seed in range(args.seeds):
            outcomes, footprint = run(workload, Shape(requests=args.requests, seed=seed))
            rows += [{"workload": workload, "seed": seed, **as_row(outcome)} for outcome in outcomes]
            grid = np.reshape([o.saved_s for o in outcomes], (len(SHARES), len(POLICIES)))
            saved.append(grid.tolist())
            rates.append([o.hit_rate for o in outcomes if o.policy == "lru"])
            if args.plots and seed == 0:
                args.plots.mkdir(parents=True, exist_ok=True)
                title = f"{workload}: {args.requests:,} requests, {footprint / (1 << 20):,.0f} MiB of chunks"
                plot(outcomes, args.plots / f"eviction_{workload}.png", title=title, footprint_bytes=footprint)
        ratio = np.asarray(saved) / np.asarray(saved)[:, :, :1]
        for at, share in enumerate(SHARES):
            cells = " | ".join(f"{value - 1:+.1%}" for value in ratio[:, at, 1:].mean(0))
            least = ratio[:, at, POLICIES.index("gdsf")].min()
            worst.append(float(least))
            rate = np.mean([each[at] for each in rates])
            print(f"| {workload} | {share:.0%} | {rate:.1%} | {cells} | {least - 1:+.2%} |", flush=True)
        total = np.asarray(saved).sum((0, 1))
        print(
            f"| {workload} | all | | " + " | ".join(f"{v / total[0] - 1:+.1%}" for v in total[1:]) + " | |", flush=True
        )
    print(f"\nGDSF against LRU, worst of all: {min(worst) - 1:+.2%}")
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))


def run(workload: str, shape: Shape) -> tuple[list[Outcome], int]:
    events = list(WORKLOADS[workload](shape))
    footprint = footprint_bytes(events)
    return simulate(events, [int(footprint * share) for share in SHARES], POLICIES), footprint


def norms(model: str) -> dict[str, Any]:
    """Mean key norm of passages, and of what nobody would keep: its spread, and whether filler stands out."""
    from common import count_tokens, load_engine
    from workload import passages

    engine = load_engine(model, "float32", eviction="importance", selector="query")
    kinds = {
        "passages": [passage.text for passage in passages(count_tokens(engine))[:40]],
        "one line repeated": ["This page is left blank on purpose. " * 25],
        "numbers": [" ".join(str(i * 7919 % 10007) for i in range(80))],
    }
    found: dict[str, Any] = {}
    for kind, texts in kinds.items():
        engine.clear()
        engine.warm(texts)
        slots = engine._library._store._ram._slots.values()
        values = [slot.worth.importance for slot in slots if slot.chunk.header.origin == "warm"]
        found[kind] = {"documents": len(values), "mean": float(np.mean(values)), "deviation": float(np.std(values))}
    return found


if __name__ == "__main__":
    main()
