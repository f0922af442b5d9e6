"""Draws `flow.svg`, the figure of docs/concepts.md.

    python docs/images/draw_flow.py

It carries its own background and follows the reader's colour scheme, so it is legible wherever it is shown.
"""

from __future__ import annotations

from html import escape
from pathlib import Path

LEFT, WIDTH, BAR = 20, 480, 28
STYLE = """
  text { font-family: system-ui, 'Segoe UI', Helvetica, Arial, sans-serif; fill: #111827; }
  .title { font-size: 16px; font-weight: 600; }
  .what { font-size: 13px; fill: #4b5563; }
  .in { font-size: 13px; text-anchor: middle; }
  .on { fill: #ffffff; }
  .page { fill: #ffffff; stroke: #d1d5db; }
  .line { stroke: #6b7280; fill: none; stroke-width: 1.5; }
  .tip { fill: #6b7280; }
  .text { fill: #f3f4f6; stroke: #6b7280; }
  .exact { fill: #1d4ed8; stroke: #1d4ed8; }
  .moved { fill: #a7f3d0; stroke: #047857; }
  .fresh { fill: #92400e; stroke: #92400e; }
  .new { fill: #fde68a; stroke: #92400e; }
  .gap { fill: none; stroke: #6b7280; stroke-dasharray: 4 3; }
  .dark { fill: #111827; }
  @media (prefers-color-scheme: dark) {
    text { fill: #f3f4f6; }
    .what { fill: #cbd5e1; }
    .on { fill: #ffffff; }
    .dark { fill: #111827; }
    .page { fill: #131416; stroke: #4b5563; }
    .line { stroke: #cbd5e1; }
    .tip { fill: #cbd5e1; }
    .text { fill: #374151; stroke: #9ca3af; }
    .gap { stroke: #9ca3af; }
  }
"""
PARTS = (("system", 74), ("document C", 118), ("document A", 126), ("new text", 76), ("question", 86))


class Drawing:
    """SVG elements, one below the other."""

    def __init__(self) -> None:
        self.parts: list[str] = []

    def step(self, y: int, title: str, *lines: str) -> None:
        """A title and what happens."""
        self.parts.append(f'<text class="title" x="{LEFT}" y="{y}">{escape(title)}</text>')
        for number, line in enumerate(lines):
            self.parts.append(f'<text class="what" x="{LEFT}" y="{y + 19 + 17 * number}">{escape(line)}</text>')

    def box(self, x: float, y: int, width: float, kind: str, label: str = "", ink: str = "") -> None:
        """A part of a bar."""
        self.parts.append(f'<rect class="{kind}" x="{x}" y="{y}" width="{width}" height="{BAR}" rx="3"/>')
        if label:
            self.parts.append(f'<text class="in {ink}" x="{x + width / 2}" y="{y + 19}">{escape(label)}</text>')

    def row(self, y: int, kinds: list[tuple[str, str, str]]) -> None:
        """The bar of a prompt."""
        x = LEFT
        for (_, width), (kind, label, ink) in zip(PARTS, kinds, strict=True):
            self.box(x, y, width, kind, label, ink)
            x += width

    def down(self, y: int, x: int = 260) -> None:
        """An arrow to the next step."""
        self.parts.append(f'<path class="line" d="M{x} {y} v14"/><path class="tip" d="M{x - 4} {y + 12} h8 l-4 7 z"/>')

    def svg(self, height: int) -> str:
        """The whole figure."""
        page = f'<rect class="page" x="0.5" y="0.5" width="{WIDTH + 39}" height="{height - 1}" rx="8"/>'
        label = "How a prompt flows: look up, plan, place, run, answer, keep"
        head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH + 40} {height}" role="img"'
        return "\n".join([f'{head} aria-label="{label}">', f"<style>{STYLE}</style>", page, *self.parts, "</svg>", ""])


def draw() -> str:
    """The figure."""
    out = Drawing()
    out.step(34, "Store", "documents that warm() read, text of earlier prompts")
    for number, name in enumerate(("A", "B", "C", "D")):
        out.box(LEFT + 96 * number, 62, 88, "moved", f"document {name}", "dark")
    out.box(LEFT + 384, 62, 96, "exact", "system", "on")
    out.step(124, "1  Prompt", "prompts: rendered and tokenised as plain Hugging Face would")
    out.row(152, [("text", name, "") for name, _ in PARTS])
    out.down(186)
    out.step(226, "2  Look up", "index: the exact chain from the start, then stored runs at any place")
    found = [("exact", "exact", "on"), ("moved", "approximate", "dark"), ("moved", "approximate", "dark")]
    out.row(254, [*found, ("new", "new", "dark"), ("new", "new", "dark")])
    out.down(288)
    out.step(
        328,
        "3  Plan",
        "planner: parts that tile the prompt; costs: is that cheaper than",
        "computing all of it? If not: a full prefill, and fallback_reason",
    )
    out.down(368)
    out.step(408, "4  Place", "store, rope: KV into one cache, keys turned to their new positions")
    out.row(436, [found[0], ("moved", "moved", "dark"), ("moved", "moved", "dark"), ("gap", "", ""), ("gap", "", "")])
    out.down(470)
    out.step(
        510,
        "5  Run",
        "prefill, repair: only the brown tokens run; the first of each moved",
        "run are recomputed, since a new neighbour changes them most",
    )
    kept = [found[0], ("moved", "", "dark"), ("moved", "", "dark")]
    out.row(555, [*kept, ("fresh", "run", "on"), ("fresh", "run", "on")])
    x = LEFT
    for name, width in PARTS:
        if name.startswith("document"):
            out.box(x, 555, 14, "fresh")
        x += width
    out.down(589)
    out.step(629, "6  Answer", "decode: model.generate from the finished cache")
    out.down(655)
    out.step(695, "7  Keep", "new text goes to the store, from the pass that computed it")
    out.parts.append('<path class="line" d="M440 690 H508 V76"/><path class="tip" d="M509 72 l-9 4 l9 4 z"/>')
    return out.svg(730)


if __name__ == "__main__":
    Path(__file__).with_name("flow.svg").write_text(draw(), encoding="utf-8")
