"""Pictures of a simulation, and what every picture needs. Needs the extra `plots`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .errors import ConfigError
from .simulate import BOUND, Outcome

# One colour and mark for each policy, told apart also without colour.
STYLES = {
    "lru": ("#6b7280", "o", "-"),
    "lfu": ("#b45309", "v", "-"),
    "gdsf": ("#1d4ed8", "s", "-"),
    "gdsf-alone": ("#60a5fa", "s", ":"),
    "s3fifo": ("#047857", "^", "-"),
    "importance": ("#be123c", "x", "-"),
    "belady": ("#111827", "D", "--"),
    BOUND: ("#9ca3af", None, ":"),
}
LABELS = {
    "gdsf": "GDSF (default)",
    "gdsf-alone": "GDSF without the duel",
    "lru": "LRU",
    "lfu": "LFU",
    "s3fifo": "S3-FIFO",
    "importance": "importance (KVBoost)",
    "belady": "Belady's rule (knows the future)",
    BOUND: "offline upper bound",
}


def plot(outcomes: Sequence[Outcome], path: Path | str, *, title: str, footprint_bytes: int) -> None:
    """Draw hit rate and seconds saved over the budget, one line for each policy.

    Args:
        outcomes: of one trace.
        path: picture to write; its suffix says in which format.
        title: of the picture.
        footprint_bytes: bytes of all chunks of the trace.

    Raises:
        ConfigError: matplotlib is missing, or cannot write such a file.
    """
    figure = new_figure(11, 4.6)
    left, right = figure.subplots(1, 2)
    _lines(left, outcomes, footprint_bytes, lambda outcome: 100 * outcome.hit_rate)
    _lines(right, outcomes, footprint_bytes, lambda outcome: outcome.saved_s)
    left.set_ylabel("prompt tokens that were stored, %")
    right.set_ylabel("seconds of prefill saved")
    for axes in (left, right):
        axes.set_xlabel("budget, % of all chunks")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.25)
    figure.suptitle(title)
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center", frameon=False)
    save(figure, path)


def new_figure(width: float, height: float) -> Any:
    """An empty figure of so many inches that belongs to no window.

    Raises:
        ConfigError: matplotlib is missing.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ConfigError("plots need matplotlib; install it with: pip install 'kvboost-rag[plots]'") from error
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save(figure: Any, path: Path | str) -> None:
    """Write a picture; the suffix says in which format.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        figure.savefig(path, dpi=130)
    except (OSError, ValueError) as error:
        raise ConfigError(f"the plot {str(path)!r} cannot be written: {error}; name a .png file in a folder") from error


def _lines(axes: Any, outcomes: Sequence[Outcome], footprint_bytes: int, value: Any) -> None:
    for policy in dict.fromkeys(outcome.policy for outcome in outcomes):
        mine = sorted((o for o in outcomes if o.policy == policy), key=lambda o: o.budget_bytes)
        colour, marker, line = STYLES[policy]
        shares = [100 * outcome.budget_bytes / max(footprint_bytes, 1) for outcome in mine]
        values = [value(outcome) for outcome in mine]
        style = {"color": colour, "marker": marker, "linestyle": line, "markersize": 5}
        if policy == "lru":  # the measure of the others, which may lie upon it
            style |= {"linewidth": 4, "markersize": 8}
        axes.plot(shares, values, label=LABELS[policy], **style)
