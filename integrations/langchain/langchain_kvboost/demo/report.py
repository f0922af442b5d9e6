"""The demo's output: an answer at a time, then a table, and JSON for machines."""

from __future__ import annotations

import json
import textwrap
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .compare import Answer, Row, Summary

WIDTH = 100


def print_row(number: int, row: Row) -> None:
    """Print both answers to a question and what they cost."""
    print(f"\n{number}. {row.question}")
    print(f"   documents: {', '.join(row.sources)}")
    _print_answer("reused", row.reused)
    if row.same:
        print(f"   full    the same answer, TTFT {row.full.ttft_s:.2f} s")
    else:
        _print_answer("full", row.full)


def print_table(rows: list[Row], summary: Summary) -> None:
    """Print all questions against full recomputation."""
    print("\n| # | prompt | exact | approximate | repaired | computed | TTFT | full prefill | ratio | answer |")
    print("|--:|--:|--:|--:|--:|--:|--:|--:|--:|:--|")
    for number, row in enumerate(rows, 1):
        reused = row.reused
        verdict = "same" if row.same else f"same for {row.agreed_tokens} of {row.shorter_tokens} tokens"
        print(
            f"| {number} | {reused.prompt_tokens} | {reused.exact_tokens} | {reused.approximate_tokens} "
            f"| {reused.repaired_tokens} | {reused.computed_tokens} | {reused.ttft_s:.2f} s "
            f"| {row.full.ttft_s:.2f} s | {row.ratio:.1f} | {verdict} |"
        )
    print(
        f"\nTTFT, median of {summary.questions} questions: {summary.median_ttft_s:.2f} s with reuse, "
        f"{summary.median_full_ttft_s:.2f} s with a full prefill: {summary.median_ratio:.1f} times sooner.\n"
        f"Answers: {summary.same_answers:.0%} identical; {summary.agreed_share:.0%} of all answer tokens come "
        "before the first difference."
    )


def write_json(path: Path, rows: list[Row], summary: Summary, setting: dict[str, Any]) -> None:
    """Write everything that was printed, and the setting, as JSON."""
    content = {
        "setting": setting,
        "summary": asdict(summary),
        "questions": [{**asdict(row), "ratio": row.ratio, "same": row.same} for row in rows],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _print_answer(label: str, answer: Answer) -> None:
    head = f"   {label:<7} "
    print(textwrap.fill(answer.text.strip() or "(empty)", WIDTH, initial_indent=head, subsequent_indent=" " * 11))
    print(
        f"           TTFT {answer.ttft_s:.2f} s; {answer.prompt_tokens} prompt tokens: {answer.exact_tokens} exact, "
        f"{answer.approximate_tokens} approximate ({answer.repaired_tokens} repaired); "
        f"{answer.computed_tokens} computed"
    )
    if answer.fallback_reason:
        print(f"           no reuse: {answer.fallback_reason}")
