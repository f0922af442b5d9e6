"""Tables from logged items: accuracy against full recompute, and the time to the first token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any

from common import markdown, percentile

from .arms import EXACT, FULL, NOTHING, OURS, PREFIX, SEEN, UNREPAIRED
from .questions import BUCKETS
from .significance import bootstrap, chance_of, mcnemar, wilson

Item = dict[str, Any]
ORDER = (FULL, PREFIX, EXACT, OURS, SEEN, UNREPAIRED, NOTHING)
LEVEL = 0.05  # above which an accuracy may be chance
ACCURACY = (
    "arm", "state", "n", "accuracy", "95 % interval", "difference to full", "its interval", "lost / won", "p",
    "answers", "answers' interval", "first token KL", "same first token", "computed share",
)  # fmt: skip
TIMES = (
    "bucket", "arm", "state", "hit", "n", "tokens", "computed share", "mean s", "p50", "p95", "p99", "full / arm",
    "prefix / arm",
)  # fmt: skip
LEGEND = """\
`accuracy`: the right option has the highest mean log-likelihood behind the answer's fixed beginning. `answers`: the \
first option that the greedy answer names is the right one. `state`: cold, the arm meets the documents for the first \
time; warm, it has ingested them (`ours`, `unrepaired`) or met them in an earlier prompt of the set (`prefix`, \
`seen`), in another order. `lost / won`: answers that only full recompute, only the arm has right; `p`: exact McNemar \
test. Intervals of accuracies are Wilson's; those of differences are bootstrapped over sets, whose questions share \
their documents. `computed share`: tokens that ran, each pass charged by its share of layers, of the prompt's tokens. \
Times are CPU seconds of one thread to the first logits; `full / arm` and `prefix / arm` are ratios of mean times over \
the same prompts (of `prefix`: where it is warm)."""


def tables(items: Sequence[Item]) -> tuple[str, dict[str, Any]]:
    """The report as Markdown and as rows."""
    accuracy, times, verdict = accuracy_rows(items), time_rows(items), verdict_of(items)
    text = "\n\n".join([verdict["text"], markdown(ACCURACY, accuracy), markdown(TIMES, times), LEGEND])
    return text, {"verdict": verdict, "accuracy": accuracy, "times": times}


def verdict_of(items: Sequence[Item]) -> dict[str, Any]:
    """Whether full recompute answers better than chance; if not, the workload says nothing about accuracy."""
    rows = [item["arms"][FULL] for item in items if FULL in item["arms"]]
    if not rows:
        return {"text": "Full recompute was not measured, so that accuracies have nothing to be compared with."}
    chances = [1 / len(item["options"]) for item in items]
    right = sum(row["right"] for row in rows)
    p = chance_of(right, chances)
    says = "is above chance" if p < LEVEL else "is not above chance: **this workload says nothing** about accuracy"
    text = f"Full recompute {says}: {right} of {len(rows)} right, chance {fmean(chances):.3f}, p = {p:.2g}."
    return {"text": text, "right": right, "n": len(rows), "chance": fmean(chances), "p": p, "says": p < LEVEL}


def accuracy_rows(items: Sequence[Item]) -> list[dict[str, Any]]:
    """One row per arm and state."""
    rows = []
    for arm, state in _groups(items):
        mine = [item for item in items if item["arms"].get(arm, {}).get("state") == state]
        here = [item["arms"][arm] for item in mine]
        row: dict[str, Any] = {"arm": arm, "state": state, "n": len(mine)}
        row |= {"accuracy": _share(here, "right"), "95 % interval": _interval(here, "right")}
        if any("said" in one for one in here):
            row |= {"answers": _share(here, "said"), "answers' interval": _interval(here, "said")}
        if all("kl_first" in one for one in here):
            row |= {"first token KL": fmean(one["kl_first"] for one in here), "same first token": _share(here, "agree")}
        row["computed share"] = _computed(here)
        if arm != FULL:
            row |= _against_full(mine, arm)
        rows.append(row)
    return rows


def time_rows(items: Sequence[Item]) -> list[dict[str, Any]]:
    """One row per arm and state: of all prompts, per bucket or turn, and per kind of hit where there are several."""
    rows = []
    turns = sorted({item["bucket"] for item in items} - set(BUCKETS))
    buckets = [name for name in (*BUCKETS, *turns) if any(item["bucket"] == name for item in items)]
    for arm, state in _groups(items):
        mine = [item for item in items if item["arms"].get(arm, {}).get("state") == state]
        rows.append(_times(mine, arm, state, "all", "all"))
        hits = sorted({item["arms"][arm]["hit"] for item in mine})
        rows += [
            _times([item for item in mine if item["arms"][arm]["hit"] == hit], arm, state, "all", hit)
            for hit in hits
            if len(hits) > 1
        ]
        for bucket in buckets if len(buckets) > 1 else ():
            if inside := [item for item in mine if item["bucket"] == bucket]:
                rows.append(_times(inside, arm, state, bucket, "all"))
    order = ("all", *buckets)
    return sorted(rows, key=lambda row: order.index(row["bucket"]))


def _groups(items: Sequence[Item]) -> list[tuple[str, str]]:
    """Arms with their states, full recompute first."""
    found = {(name, row["state"]) for item in items for name, row in item["arms"].items()}
    return sorted(found, key=lambda group: (ORDER.index(OURS if group[0].startswith(OURS) else group[0]), group))


def _against_full(items: Sequence[Item], arm: str) -> dict[str, Any]:
    pairs = [(item, item["arms"][FULL]["right"], item["arms"][arm]["right"]) for item in items if FULL in item["arms"]]
    if not pairs:
        return {}
    lost, won = sum(f and not a for _, f, a in pairs), sum(a and not f for _, f, a in pairs)
    sets: dict[int, list[float]] = {}
    for item, full, own in pairs:
        sets.setdefault(item["set"], []).append(float(own) - float(full))
    low, high = bootstrap(list(sets.values()))
    return {
        "difference to full": (won - lost) / len(pairs),
        "its interval": f"{low:+.3f} … {high:+.3f}",
        "lost / won": f"{lost} / {won}",
        "p": mcnemar(lost, won),
    }


def _times(items: Sequence[Item], arm: str, state: str, bucket: str, hit: str) -> dict[str, Any]:
    here = [item["arms"][arm] for item in items]
    seconds = [row["ttft_s"] for row in here]
    row: dict[str, Any] = {"bucket": bucket, "arm": arm, "state": state, "hit": hit, "n": len(here)}
    row |= {"tokens": fmean(one["prompt_tokens"] for one in here), "computed share": _computed(here)}
    row |= {"mean s": fmean(seconds), **{f"p{p}": percentile(seconds, p / 100) for p in (50, 95, 99)}}
    row["full / arm"] = _ratio(items, arm, FULL, lambda other: True)
    row["prefix / arm"] = _ratio(items, arm, PREFIX, lambda other: other["state"] == "warm")
    return row


def _ratio(items: Sequence[Item], arm: str, other: str, fit: Callable[[dict[str, Any]], bool]) -> float | str:
    pairs = [
        (item["arms"][other]["ttft_s"], item["arms"][arm]["ttft_s"])
        for item in items
        if other in item["arms"] and fit(item["arms"][other])
    ]
    return sum(theirs for theirs, _ in pairs) / sum(ours for _, ours in pairs) if pairs else ""


def _computed(rows: Sequence[dict[str, Any]]) -> float:
    return sum(row["computed_tokens"] for row in rows) / sum(row["prompt_tokens"] for row in rows)


def _share(rows: Sequence[dict[str, Any]], name: str) -> float:
    return fmean(float(row[name]) for row in rows)


def _interval(rows: Sequence[dict[str, Any]], name: str) -> str:
    low, high = wilson(sum(row[name] for row in rows), len(rows))
    return f"{low:.3f} … {high:.3f}"
