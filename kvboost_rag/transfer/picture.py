"""The picture of a map: what the target makes of mapped KV, layer by layer and in whole. Needs the extra `plots`."""

from __future__ import annotations

from pathlib import Path

from ..plots import new_figure, save
from .gate import MAPPED, NATIVE, NOTHING, WRONG
from .mapping import TransferMap

_CONTROLS = {WRONG: ("#b45309", ":"), NOTHING: ("#6b7280", "--")}


def draw(mapping: TransferMap, path: Path | str) -> None:
    """Draw fidelity of every arm, cosines of attention by layer, and how much of the KV was explained.

    Args:
        mapping: with figures of its gate.
        path: picture to write; its suffix says in which format.

    Raises:
        ConfigError: matplotlib is missing, or cannot write such a file.
    """
    figure = new_figure(13, 4.4)
    bars, cosines, explained = figure.subplots(1, 3)
    arms = {name: row for name, row in mapping.figures.items() if name != NATIVE}
    colours = ["#be123c" if name in _CONTROLS else "#1d4ed8" for name in arms]
    bars.barh(list(arms), [row["fidelity"] for row in arms.values()], color=colours)
    bars.invert_yaxis()
    bars.axvline(1, color="#111827", linewidth=1)
    bars.set_xlabel("fidelity: 1 − KL / KL without context")
    for name, row in arms.items():
        if row["cosines"]:
            colour, line = _CONTROLS.get(name, ("#1d4ed8" if name == MAPPED else "#047857", "-"))
            cosines.plot(row["cosines"], line, color=colour, label=name, alpha=1.0 if name != MAPPED else 0.9)
    cosines.set_xlabel("layer of the target")
    cosines.set_ylabel("cosine of attention outputs with the target's own")
    cosines.legend(fontsize=7, frameon=False)
    for kind, colour in (("keys", "#1d4ed8"), ("values", "#b45309")):
        explained.plot(mapping.about["explained"][kind], color=colour, label=kind)
    explained.set_ylim(0, 1)
    explained.set_xlabel("layer of the target")
    explained.set_ylabel("variance explained on held-out text")
    explained.legend(frameon=False)
    for axes in (bars, cosines, explained):
        axes.grid(alpha=0.25)
    state = "accepted" if mapping.accepted else "refused"
    figure.suptitle(f"{Path(mapping.source.name).name} → {Path(mapping.target.name).name}: {state}")
    save(figure, path)
