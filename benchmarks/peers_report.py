"""Statistics and tables of `peers.py`: pure, no model and no process."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from peers_schedule import UNSEEN

REFERENCE = "plain Hugging Face"
OURS = "ours"
COLUMNS = (
    "scenario", "arm", "prompts", "mean CPU s", "median CPU s", "median wall s", "wall s by its own report", "÷ ours",
    "÷ its own full prefill", "first token as full recompute", "tokens reused",
)  # fmt: skip
ARM_COLUMNS = ("arm", "version", "prefill tokens per CPU s", "what differs", "what it promises")

NOTES = (
    "Ratios are medians over prompts. `÷ its own full prefill` compares an arm with its own speed on prompts never "
    "seen: it shows reuse apart from the engine's kernels; `prefill tokens per CPU s` shows the kernels.",
    "`tokens reused` is the share of prompt tokens as each peer counts it; kvboost's own count says nothing about what "
    "its repair runs again.",
    "Ours gets messages and kvboost text, so rendering and tokenising are in their seconds; the others get ids.",
    "Before each reordered prompt, peers that learn from prompts were asked the same documents in another order; ours "
    "was not, its documents were warmed once with all others. Before the same prompt or a new question every arm was.",
)


@dataclass(frozen=True)
class Timed:
    """One arm's answer to one step."""

    scenario: str
    number: int
    arm: str
    cpu_s: float
    wall_s: float
    token: int
    prompt_tokens: int
    reused_tokens: int
    reported_s: float | None = None


def rows(results: Sequence[Timed], arms: Sequence[str]) -> list[dict[str, Any]]:
    """One row per scenario and arm, in the order of ``arms``; ratios are medians over the prompts both answered."""
    speeds = prefill_speeds(results)
    made = []
    for scenario in dict.fromkeys(result.scenario for result in results):
        ours = _by_number(results, scenario, OURS)
        full = _by_number(results, scenario, REFERENCE)
        for arm in arms:
            own = _by_number(results, scenario, arm)
            if own:
                made.append(_row(scenario, arm, own, ours, full, speeds.get(arm)))
    return made


def prefill_speeds(results: Sequence[Timed]) -> dict[str, float]:
    """Tokens per CPU second of each arm's plain prefill: prompts never seen, what little was reused left out."""
    found: dict[str, list[float]] = {}
    for result in results:
        if result.scenario == UNSEEN:
            found.setdefault(result.arm, []).append((result.prompt_tokens - result.reused_tokens) / result.cpu_s)
    return {arm: statistics.median(speeds) for arm, speeds in found.items()}


def other_tokens(results: Sequence[Timed]) -> dict[str, int]:
    """Per arm, how many prompts it ran with another number of tokens than plain Hugging Face."""
    full = {(r.scenario, r.number): r.prompt_tokens for r in results if r.arm == REFERENCE}
    differs: dict[str, int] = {}
    for result in results:
        expected = full.get((result.scenario, result.number), result.prompt_tokens)
        differs[result.arm] = differs.get(result.arm, 0) + (result.prompt_tokens != expected)
    return {arm: count for arm, count in differs.items() if count}


def text(
    table: Sequence[Mapping[str, Any]],
    arms: Sequence[Mapping[str, Any]],
    missing: Mapping[str, str],
) -> str:
    """The whole report as Markdown: scenarios, arms, what is not there and why, notes."""
    parts = [_table(COLUMNS, table), _table(ARM_COLUMNS, arms)]
    if missing:
        parts.append("\n".join(f"- **{arm}**: {reason}" for arm, reason in missing.items()))
    parts.append("\n".join(f"- {note}" for note in NOTES))
    return "\n\n".join(parts)


def _by_number(results: Sequence[Timed], scenario: str, arm: str) -> dict[int, Timed]:
    return {r.number: r for r in results if r.scenario == scenario and r.arm == arm}


def _row(
    scenario: str,
    arm: str,
    own: Mapping[int, Timed],
    ours: Mapping[int, Timed],
    full: Mapping[int, Timed],
    speed: float | None,
) -> dict[str, Any]:
    seconds = [result.cpu_s for result in own.values()]
    ratios = [result.cpu_s / ours[number].cpu_s for number, result in own.items() if number in ours]
    compared = [result.token == full[number].token for number, result in own.items() if number in full]
    row: dict[str, Any] = {
        "scenario": scenario,
        "arm": arm,
        "prompts": len(own),
        "mean CPU s": statistics.fmean(seconds),
        "median CPU s": statistics.median(seconds),
        "median wall s": statistics.median(result.wall_s for result in own.values()),
        "tokens reused": statistics.fmean(r.reused_tokens / r.prompt_tokens for r in own.values()),
    }
    reported = [result.reported_s for result in own.values() if result.reported_s is not None]
    if reported:
        row["wall s by its own report"] = statistics.median(reported)
    if ratios:
        row["÷ ours"] = statistics.median(ratios)
    if speed:
        row["÷ its own full prefill"] = statistics.median(r.cpu_s * speed / r.prompt_tokens for r in own.values())
    if compared:
        row["first token as full recompute"] = f"{sum(compared)} of {len(compared)}"
    return row


def _table(columns: Sequence[str], table: Sequence[Mapping[str, Any]]) -> str:
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(_cell(row.get(column, "–")) for column in columns) + " |" for row in table]
    return "\n".join(lines)


def _cell(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value).replace("|", "/")
