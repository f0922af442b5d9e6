"""A report for people, and one for programs. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..store_command import text_of
from .analysis import Analysis
from .tally import MODES, Mode
from .verdict import LEAST_OVER_EXACT, LEAST_REQUESTS, LEAST_SAVED, LEAST_SAVED_OF_ALL

NAMES: dict[Mode, str] = {
    "plain": "now: full prefill",
    "prefix": "a prefix cache (blocks of 16)",
    "exact": 'reuse="exact"',
    "approximate": 'reuse="approximate"',
}


@dataclass(frozen=True, slots=True)
class About:
    """Where the figures come from.

    Attributes:
        log: name of the file.
        tokens: how tokens were counted.
        seconds: how seconds were predicted.
        token_bytes: KV of one token; None if the model's shape is not known.
        budget_bytes: of the store that was replayed.
    """

    log: str
    tokens: str
    seconds: str
    token_bytes: int | None
    budget_bytes: int | None


def as_text(analysis: Analysis, about: About) -> str:
    """The report as Markdown."""
    tally = analysis.tally
    verdict = analysis.verdict
    head = f"GO with reuse={verdict.mode!r}" if verdict.go else "NO-GO"
    lines = [
        f"{about.log}: {_many(len(tally), 'request')}, {tally.total_tokens:,} prompt tokens "
        f"({tally.total_tokens / len(tally):,.0f} each), {_many(analysis.namespaces, 'tenant')}",
        f"{about.tokens}; {about.seconds}",
        *_left_out(analysis),
        "",
        f"**{head}**: {verdict.reason}.",
        "",
        "| what repeats | share of the prompt tokens |",
        "|---|---|",
        f"| leading prefix of an earlier prompt | {tally.share(tally.leading_tokens):.1%} |",
        f"| moved text: seen before, at another place or behind other text | {tally.share(tally.moved_tokens):.1%} |",
        f"| new | {_new(analysis):.1%} |",
        "",
        "| mode | tokens reused | TTFT p50, s | p95, s | mean, s | sooner by | saved |",
        "|---|---|---|---|---|---|---|",
    ]
    plain = tally.mean_s("plain")
    for mode in MODES:
        times = (tally.quantile_s(mode, 0.5), tally.quantile_s(mode, 0.95), tally.mean_s(mode))
        figures = " | ".join(f"{seconds:.3g}" for seconds in times)
        lines.append(
            f"| {NAMES[mode]} | {tally.reused_share(mode):.1%} | {figures} | {plain / tally.mean_s(mode):.1f}× | "
            f"{tally.saved(mode):.0%} |"
        )
    return "\n".join([*lines, "", *_notes(analysis, about)])


def as_json(analysis: Analysis, about: About) -> dict[str, Any]:
    """The report as plain values."""
    tally, skipped, verdict = analysis.tally, analysis.skipped, analysis.verdict
    return {
        "log": about.log,
        "tokens_from": about.tokens,
        "seconds_from": about.seconds,
        "verdict": {"go": verdict.go, "mode": verdict.mode, "reason": verdict.reason},
        "thresholds": {
            "least_requests": LEAST_REQUESTS,
            "least_saved": LEAST_SAVED,
            "least_saved_of_all": LEAST_SAVED_OF_ALL,
            "least_over_exact": LEAST_OVER_EXACT,
        },
        "requests": len(tally),
        "namespaces": analysis.namespaces,
        "prompt_tokens": tally.total_tokens,
        "shares": {
            "leading": tally.share(tally.leading_tokens),
            "moved": tally.share(tally.moved_tokens),
            "new": _new(analysis),
        },
        "modes": {
            mode: {
                "reused": tally.reused_share(mode),
                "ttft_mean_s": tally.mean_s(mode),
                "ttft_p50_s": tally.quantile_s(mode, 0.5),
                "ttft_p95_s": tally.quantile_s(mode, 0.95),
                "saved": tally.saved(mode),
                "saved_of_all": tally.saved_of_all(mode),
            }
            for mode in MODES
        },
        "answers": {"known": tally.answers, "tokens": tally.answer_tokens, "seconds": tally.answer_s},
        "fell_back": tally.fell_back,
        "kept_tokens": analysis.kept_tokens,
        "kept_bytes": None if about.token_bytes is None else _bytes(analysis, about.token_bytes),
        "evictions": analysis.evictions,
        "budget_bytes": about.budget_bytes,
        "skipped": {
            "bad": skipped.bad_count,
            "first_bad": [{"where": bad.where, "reason": bad.reason} for bad in skipped.bad],
            "too_long": skipped.too_long,
            "not_models": skipped.not_models,
            "parts_without_text": skipped.parts,
        },
    }


def _new(analysis: Analysis) -> float:
    tally = analysis.tally
    return 1 - tally.share(tally.leading_tokens) - tally.share(tally.moved_tokens)


def _bytes(analysis: Analysis, token_bytes: int) -> dict[str, int]:
    return {mode: tokens * token_bytes for mode, tokens in analysis.kept_tokens.items()}


def _left_out(analysis: Analysis) -> list[str]:
    skipped, lines = analysis.skipped, list[str]()
    if skipped.bad_count:
        lines.append(f"left out: {_many(skipped.bad_count, 'place')} that could not be used:")
        lines += [f"  {bad.where}: {bad.reason}" for bad in skipped.bad]
        if skipped.bad_count > len(skipped.bad):
            lines.append(f"  … and {skipped.bad_count - len(skipped.bad)} more")
    if skipped.too_long:
        lines.append(f"left out: {_many(skipped.too_long, 'prompt')} beyond the context window")
    if skipped.not_models:
        lines.append(f"left out: {_many(skipped.not_models, 'run')} of something else than a model")
    if skipped.parts:
        lines.append(f"left out of messages: {_many(skipped.parts, 'part')} that are no text")
    return lines


def _notes(analysis: Analysis, about: About) -> list[str]:
    tally, notes = analysis.tally, list[str]()
    if tally.answers:
        shares = [f"{tally.saved_of_all(mode) or 0.0:.0%} with {mode}" for mode in ("exact", "approximate")]
        notes.append(
            f"With their answers ({tally.answer_tokens / tally.answers:,.0f} tokens each, in {tally.answers:,} "
            f"requests) the whole time gets shorter by {' and '.join(shares)}."
        )
    if tally.fell_back:
        notes.append(
            f"In {tally.fell_back:,} of {len(tally):,} requests moved text was found, but would save too little; they "
            "are computed."
        )
    if about.token_bytes is not None:
        sizes = _bytes(analysis, about.token_bytes)
        notes.append(
            f"KV to hold it all ({text_of(about.token_bytes)} a token): {text_of(sizes['approximate'])} in approximate "
            f"mode, {text_of(sizes['exact'])} in exact mode, which keeps the same text behind every history."
        )
    if any(analysis.evictions.values()):
        notes.append(
            f"The store was full: {analysis.evictions['exact']:,} chunks left it in exact mode, "
            f"{analysis.evictions['approximate']:,} in approximate mode."
        )
    if analysis.newest_first:
        notes.append("The log stands newest first; --by-time replays it in the order in which it happened.")
    notes.append(
        "Text counts as seen once it stood in an earlier prompt; documents that are warmed when they are ingested are "
        "found the first time, too."
    )
    return notes


def _many(count: int, name: str) -> str:
    return f"{count:,} {name}" + ("" if count == 1 else "s")
