"""The frontier: fidelity against compute, for our repair and for selectors of the literature.

Each arm is run at several budgets on the same prompts, interleaved prompt by prompt, each along the answer that full
recompute gives (`fidelity.py`). An arm's value at a share of the compute is read off the straight line between its two
nearest budgets; differences are bootstrapped over prompts, in pairs.

    python benchmarks/frontier.py --prompts 24 --json results/frontier.json --plot results/frontier.png

Arms on the KV of our own warming: `ours` (the first tokens of each document, most of them in the one that stands
first, and beyond three percent what the question attends to, near those; below two percent, all in the first document),
`first tokens` alone, `attention` alone, and the selectors `CacheBlend-K`, `CacheBlend-V` (change of keys or values in
the second layer, no quota), `EPIC` (first tokens of each chunk), `ProphetKV` (attention of the question, all layers),
`AgentKVShift` (the same tokens, and their whole mean change added to the rest of a chunk). The same selectors `as
published` work on documents that were encoded alone. All are re-implemented from their papers. `charged` counts
every token that ran, each pass by its share of the layers, probes included.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from common import bar, count_tokens, default_model, ingest, load_engine, machine, markdown, write
from fidelity import comparison, controls
from workload import Item, items, passages, sample

from kvboost_rag import Engine
from kvboost_rag.repair import Recipe

TARGETS = (0.05, 0.10, 0.20)  # shares of the prompt that run
LEAST = (0.004, 0.012)  # budgets of `ours` at which all goes to the document that stands first
FLOORS = (4, 12, 32)  # tokens of each chunk, for arms that take a chunk's first ones
OURS = ("ours", "first tokens", "attention")
ISOLATED = "isolated"  # namespace of documents that were encoded alone
AS_PUBLISHED = " as published"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=default_model(), help="hub id or folder")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--docs", type=int, default=6)
    parser.add_argument("--answer-tokens", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--collection", type=int, default=10_000, help="most passages to ingest and to ask about")
    parser.add_argument("--orders", type=int, default=None, help="EngineConfig.pack_orders; the default if left out")
    parser.add_argument("--budgets", type=float, nargs="+", default=[0.02, 0.05, 0.10, 0.20])
    parser.add_argument("--arms", nargs="+", help="only these (default: all)")
    parser.add_argument("--report", type=Path, metavar="JSON", help="draw and tabulate an earlier run")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    if args.report:
        found = json.loads(args.report.read_text())
        rows, settings = found["rows"], found
    else:
        rows, settings = measured(args), {"machine": machine()}
    text = "\n\n".join([markdown(("arm", "budget", *COLUMNS), points(rows)), markdown(AT, at_targets(rows))])
    print(text)
    if args.markdown:
        args.markdown.parent.mkdir(parents=True, exist_ok=True)
        args.markdown.write_text(f"`{' '.join(sys.argv)}` on {settings['machine']}\n\n{text}\n")
    if args.plot:
        draw(rows, args.plot)


def measured(args: argparse.Namespace) -> list[dict[str, Any]]:
    """One row for each prompt, arm and budget."""
    orders = {} if args.orders is None else {"pack_orders": args.orders}
    engine = load_engine(args.model, args.dtype, store_prompts=False, served_share=0.0, **orders)
    pool = sample(passages(count_tokens(engine)), args.collection, args.seed)
    ingest(engine, pool, args.seed)
    base = engine.recipe
    rows: list[dict[str, Any]] = []
    for number, item in enumerate(bar(items(pool, args.prompts, docs=args.docs, seed=args.seed), "frontier")):
        compare = comparison(engine, item, args.answer_tokens)
        for arm, figures in controls(engine, item, pool, compare, args.docs):
            rows.append({"prompt": number, "arm": arm, "budget": "", **figures})
        isolate(engine, item)
        for arm, budget, recipe in arms(base, args.budgets):
            if args.arms and arm not in args.arms:
                continue
            engine.recipe = recipe
            namespace = ISOLATED if arm.endswith(AS_PUBLISHED) else "default"
            figures = compare(engine.prefill(item.messages(), namespace=namespace))
            rows.append({"prompt": number, "arm": arm, "budget": budget, **figures})
        write(args.json, vars(args), rows=rows)  # after each prompt: a run that is cut short is not lost
    return rows


def arms(base: Recipe, budgets: Sequence[float]) -> Iterator[tuple[str, str, Recipe]]:
    """Every arm at every budget: name, budget, recipe."""
    ours = replace(base, selector="query")
    leading = replace(ours, floor_tokens=0, lead_share=1.0, spot_tokens=0)
    yield "ours", "moved", replace(ours, strategy="none")
    for ratio in LEAST:
        yield "ours", f"first document {ratio:.1%}", leading.with_ratio(ratio)
    for ratio in budgets:
        recipe = ours.with_ratio(ratio)
        yield "ours", f"{ratio:.0%}", recipe
        if ratio > ours.first_ratio:
            yield "first tokens", f"{ratio:.0%}", replace(recipe, first_ratio=1.0)
        yield "attention", f"{ratio:.0%}", replace(recipe, first_ratio=0.0, near_tokens=0)
    plain = replace(
        base.with_ratio(0.0), first_ratio=0.0, near_tokens=0, floor_tokens=0, least_tokens=0, whole_asked=0,
        spot_tokens=0, offset=0.0, rerun=True,
    )  # fmt: skip
    for ending in ("", AS_PUBLISHED):
        for ratio in budgets:
            yield f"CacheBlend-K{ending}", f"{ratio:.0%}", replace(plain, selector="cacheblend-k", ratio=ratio)
            yield f"CacheBlend-V{ending}", f"{ratio:.0%}", replace(plain, selector="cacheblend-v", ratio=ratio)
            prophet = replace(plain, selector="query", ratio=ratio, probe_from=0.0, probe_to=1.0)
            yield f"ProphetKV{ending}", f"{ratio:.0%}", prophet
            yield f"AgentKVShift{ending}", f"{ratio:.0%}", replace(prophet, offset=1.0)
        for floor in FLOORS:
            yield f"EPIC{ending}", f"first {floor}", replace(plain, ratio=0.0, floor_tokens=floor)


def isolate(engine: Engine, item: Item) -> None:
    """Encode each of an item's documents behind nothing but a line break."""
    engine.clear(ISOLATED)
    engine.warm([passage.text for passage in item.passages], context="\n", namespace=ISOLATED)


COLUMNS = ("charged", "kl_first", "kl", "fidelity", "agree", "first")
AT = ("arm", *(f"at {target:.0%}" for target in TARGETS), *(f"ours less it, {target:.0%}" for target in TARGETS))


def points(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Means over prompts for each arm and budget."""
    nothing = _mean([row["kl"] for row in rows if row["arm"] == "no documents"])
    grouped: dict[tuple[str, str], list[Mapping[str, Any]]] = defaultdict(list)
    for row in rows:
        grouped[row["arm"], row["budget"]].append(row)
    made = []
    for (arm, budget), group in grouped.items():
        means = {name: _mean([row[name] for row in group]) for name in COLUMNS if name != "fidelity"}
        made.append({"arm": arm, "budget": budget, **means, "fidelity": 1 - means["kl"] / nothing})
    return made


def at_targets(rows: Sequence[Mapping[str, Any]], *, draws: int = 2000) -> list[dict[str, Any]]:
    """Fidelity of each arm at the target shares, and by how much ours is above it, with a 95 % interval."""
    nothing = _by_prompt([row for row in rows if row["arm"] == "no documents"])
    nothing_kl = np.array([group[0]["kl"] for group in nothing])
    names = list(dict.fromkeys(row["arm"] for row in rows if row["budget"]))
    curves = {name: _by_prompt([row for row in rows if row["arm"] == name]) for name in names}
    values = {name: {target: kl_at(curve, target) for target in TARGETS} for name, curve in curves.items()}
    best = {target: _best(values, target, nothing_kl) for target in TARGETS}
    rng = np.random.default_rng(0)
    samples = rng.integers(0, len(nothing_kl), (draws, len(nothing_kl)))
    made = []
    for name in names:
        row: dict[str, Any] = {"arm": name}
        for target in TARGETS:
            kl = values[name][target]
            shown, less = "–", "–"
            if not np.isnan(kl).any():
                shown = f"{1 - kl.mean() / nothing_kl.mean():.4f}"
                if best[target] is not None and name not in OURS:
                    gain = (kl - values[best[target]][target])[samples].mean(1) / nothing_kl[samples].mean(1)
                    low, high = np.percentile(gain, [2.5, 97.5])
                    less = f"{gain.mean():+.4f} ({low:+.4f} to {high:+.4f})"
            row[f"at {target:.0%}"], row[f"ours less it, {target:.0%}"] = shown, less
        made.append(row)
    return made


def kl_at(curve: Sequence[Sequence[Mapping[str, Any]]], target: float) -> npt.NDArray[np.float64]:
    """KL of each prompt at a share of the compute, NaN below the least.

    The share is that of all prompts together: each prompt's KL is taken on the line between the budgets that run more
    and less than it on average. A spare budget need not be spent: beyond the largest, it is the value there.

    Args:
        curve: rows of an arm for each prompt, its budgets in the same order.
        target: share of the prompts' tokens that run.
    """
    charged = np.array([[row["charged"] for row in group] for group in curve]).mean(0)
    kl = np.array([[row["kl"] for row in group] for group in curve])
    order = np.argsort(charged)
    if target < charged[order[0]]:
        return np.full(len(curve), np.nan)
    return np.array([np.interp(target, charged[order], one[order]) for one in kl])


def _best(values: Mapping[str, Mapping[float, Any]], target: float, nothing_kl: Any) -> str | None:
    able = {name: values[name][target].mean() for name in OURS if name in values}
    able = {name: kl for name, kl in able.items() if not np.isnan(kl)}
    return min(able, key=able.__getitem__) if able else None


def _by_prompt(rows: Sequence[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    grouped: dict[int, list[Mapping[str, Any]]] = defaultdict(list)
    for row in rows:
        grouped[row["prompt"]].append(row)
    return [grouped[number] for number in sorted(grouped)]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


STYLES = {
    "ours": ("#1d4ed8", "o", 2.4),
    "first tokens": ("#60a5fa", "s", 1.8),
    "attention": ("#93c5fd", "p", 1.8),
    "CacheBlend-K": ("#b45309", "v", 1.2),
    "CacheBlend-V": ("#d97706", "^", 1.2),
    "EPIC": ("#047857", "D", 1.2),
    "ProphetKV": ("#be123c", "x", 1.2),
    "AgentKVShift": ("#6b7280", "P", 1.2),
}
LABELS = {
    "ours": "ours: first tokens, then attention near them",
    "first tokens": "ours, first tokens alone",
    "attention": "ours, attention alone",
}


def draw(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Distance to full recompute against compute: on our KV left, the selectors as published right."""
    from kvboost_rag.plots import new_figure, save

    figure = new_figure(11, 4.8)
    left, right = figure.subplots(1, 2, sharey=True)
    made = points(rows)
    for axes, ending, title in (
        (left, "", "every selector on our stored KV"),
        (right, AS_PUBLISHED, "selectors on documents encoded alone, as published"),
    ):
        for name, (colour, mark, width) in STYLES.items():
            shown = name if name in OURS else name + ending
            line = sorted((p["charged"], 1 - p["fidelity"]) for p in made if p["arm"] == shown and p["budget"])
            if line:
                x, y = zip(*line, strict=True)
                axes.plot(
                    [100 * v for v in x], y, color=colour, marker=mark, linewidth=width, label=LABELS.get(name, name)
                )
        axes.set_yscale("log")
        axes.set_xlim(0, 45)
        axes.set_xlabel("tokens run, % of the prompt, probes included")
        axes.set_title(title, fontsize=10)
        axes.grid(alpha=0.25, which="both")
    left.set_ylabel("1 − fidelity (lower is nearer to full recompute)")
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center", frameon=False)
    save(figure, path)


if __name__ == "__main__":
    main()
