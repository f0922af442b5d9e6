"""The report as a picture. Needs the extra `plots`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from ..plots import new_figure, save
from .analysis import Analysis
from .tally import MODES, Mode, Tally

PARTS = 40  # points along the log
_SHARES = (("leading prefix", "#1d4ed8"), ("moved text", "#047857"), ("new", "#d1d5db"))
_MODES: dict[Mode, tuple[str, str]] = {
    "plain": ("now:\nfull prefill", "#6b7280"),
    "prefix": ("prefix\ncache", "#93c5fd"),
    "exact": ("exact", "#1d4ed8"),
    "approximate": ("approximate", "#047857"),
}


def draw(analysis: Analysis, path: Path | str, *, title: str) -> None:
    """Draw what repeats in the course of the log, and predicted times to the first token.

    Raises:
        ConfigError: matplotlib is missing, or cannot write such a file.
    """
    figure = new_figure(11, 4.6)
    left, right = figure.subplots(1, 2, width_ratios=(1.25, 1))
    _draw_shares(left, analysis.tally)
    _draw_times(right, analysis.tally)
    figure.suptitle(title)
    save(figure, path)


def _draw_shares(axes: Any, tally: Tally) -> None:
    course = tally.course(PARTS)
    parts = len(course[0])
    edges = np.linspace(0, len(tally), parts + 1)
    # Steps: each part of the log has its own mean.
    x = np.repeat(edges, 2)[1:-1]
    shares = [100 * np.repeat(share, 2) for share in course]
    whole = (tally.share(tally.leading_tokens), tally.share(tally.moved_tokens))
    means = (*whole, 1 - sum(whole))
    labels = [f"{name}, {mean:.0%} of all" for (name, _), mean in zip(_SHARES, means, strict=True)]
    axes.stackplot(x, shares, labels=labels, colors=[colour for _, colour in _SHARES], linewidth=0)
    axes.set_xlim(0, len(tally))
    axes.set_ylim(0, 100)
    axes.set_xlabel("requests, in the order of the log")
    axes.set_ylabel("prompt tokens, %")
    axes.set_title("what repeats", fontsize=11)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=3, frameon=False, fontsize=9)


def _draw_times(axes: Any, tally: Tally) -> None:
    height = max(tally.quantile_s("plain", 0.95), tally.mean_s("plain"))
    for at, mode in enumerate(MODES):
        _, colour = _MODES[mode]
        median, high = tally.quantile_s(mode, 0.5), tally.quantile_s(mode, 0.95)
        axes.bar(at - 0.2, median, 0.38, color=colour)
        axes.bar(at + 0.2, high, 0.38, color=colour, alpha=0.45)
        for x, seconds in ((at - 0.2, median), (at + 0.2, high)):
            axes.text(x, seconds + 0.01 * height, f"{seconds:.2g}", ha="center", va="bottom", fontsize=8)
    axes.set_xticks(range(len(MODES)), [_MODES[mode][0] for mode in MODES])
    axes.set_ylim(0, 1.12 * height)
    axes.set_ylabel("seconds")
    axes.set_title("predicted time to the first token: median, and p95 (pale)", fontsize=11)
    axes.grid(axis="y", alpha=0.25)
    axes.set_axisbelow(True)
