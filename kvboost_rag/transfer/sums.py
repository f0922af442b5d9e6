"""Ridge regression of one model's KV from another's out of sums that grow with neither text nor passes.

Sums of products of inputs and outputs (Gram matrices) are all that a least-squares fit needs, for any choice of source
layers: choosing some is taking their rows and columns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from .mapping import Affine

Kind = Literal["keys", "values"]
KINDS: tuple[Kind, ...] = ("keys", "values")


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of both models' KV.

    Attributes:
        layers: of the source.
        inputs: numbers of one source layer in one row of `mapping.inputs`.
        groups: such rows: KV heads of the source, or 1 with all heads side by side.
        target_layers, target_heads, key_dim, value_dim: of the target.
        group_of: for each head of the target, its row.
    """

    layers: int
    inputs: int
    groups: int
    target_layers: int
    target_heads: int
    key_dim: int
    value_dim: int
    group_of: tuple[int, ...]

    @property
    def outputs(self) -> int:
        """Numbers of one head of the target in all of its layers."""
        return self.target_layers * (self.key_dim + self.value_dim)

    def columns(self, kind: Kind, layer: int) -> slice:
        """Where keys or values of a target layer stand among `outputs`."""
        width = self.key_dim + self.value_dim
        start = layer * width + (0 if kind == "keys" else self.key_dim)
        return slice(start, start + (self.key_dim if kind == "keys" else self.value_dim))


class Sums:
    """Weighted sums over tokens of inputs, outputs and their products, about a fixed point near the mean.

    Float32 would lose the small differences of large numbers, such as keys with a bias; about the first tokens' mean
    there are none.
    """

    def __init__(self, shape: Shape, device: torch.device | None = None) -> None:
        self.shape = shape
        d, t = shape.layers * shape.inputs, shape.outputs
        sizes = {
            "weight": (1,),
            "x0": (shape.groups, d),
            "y0": (shape.target_heads, t),
            "x": (shape.groups, d),
            "y": (shape.target_heads, t),
            "xx": (shape.groups, d, d),
            "xy": (shape.target_heads, d, t),
            "yy": (shape.target_heads, t),
        }
        self.tensors = {name: torch.zeros(size, device=device) for name, size in sizes.items()}

    def add(self, inputs: torch.Tensor, outputs: torch.Tensor, weights: torch.Tensor) -> None:
        """Add tokens.

        Args:
            inputs: float32 ``(groups, seq, layers · inputs)``.
            outputs: float32 ``(target_heads, seq, outputs)``.
            weights: float32 ``(seq,)``, not negative.
        """
        s = self.tensors
        if not bool(s["weight"]):
            s["x0"], s["y0"] = inputs.mean(1), outputs.mean(1)
        x, y = inputs - s["x0"][:, None], outputs - s["y0"][:, None]
        wx = x * weights[:, None]
        s["weight"] += weights.sum()
        s["x"] += wx.sum(1)
        s["y"] += (y * weights[:, None]).sum(1)
        s["xx"].baddbmm_(wx.transpose(1, 2), x)
        s["xy"].baddbmm_(wx[list(self.shape.group_of)].transpose(1, 2), y)
        s["yy"] += (y * y * weights[:, None]).sum(1)

    def centred(self) -> Centred:
        """The same about the mean."""
        s, n = self.tensors, float(self.tensors["weight"])
        mx, my = s["x"].double() / n, s["y"].double() / n
        of = list(self.shape.group_of)
        xx = s["xx"].double() - n * mx[:, :, None] * mx[:, None]
        xy = s["xy"].double() - n * mx[of][:, :, None] * my[:, None]
        yy = s["yy"].double() - n * my * my
        return Centred(self.shape, mx + s["x0"].double(), my + s["y0"].double(), xx, xy, yy)


@dataclass(frozen=True, slots=True, eq=False)
class Centred:
    """Means, and sums of products of what differs from them; float64."""

    shape: Shape
    x_mean: torch.Tensor
    y_mean: torch.Tensor
    xx: torch.Tensor
    xy: torch.Tensor
    yy: torch.Tensor

    def part(self, kind: Kind, layer: int, head: int, sources: Sequence[int]) -> tuple[torch.Tensor, ...]:
        """Products for one head of one layer from some source layers: ``(xx, xy, yy)``."""
        rows, columns = self._rows(sources), self.shape.columns(kind, layer)
        xx = self.xx[self.shape.group_of[head]][rows][:, rows]
        return xx, self.xy[head][rows, columns], self.yy[head, columns]

    def means(self, kind: Kind, layer: int, head: int, sources: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Means of the inputs and outputs."""
        group = self.shape.group_of[head]
        return self.x_mean[group][self._rows(sources)], self.y_mean[head, self.shape.columns(kind, layer)]

    def _rows(self, sources: Sequence[int]) -> torch.Tensor:
        width = self.shape.inputs
        return torch.cat([torch.arange(s * width, (s + 1) * width) for s in sources])


def ridge(xx: torch.Tensor, xy: torch.Tensor, strength: float) -> torch.Tensor:
    """Weights ``(inputs, outputs)`` of the least squares with a penalty of ``strength`` mean variances on each."""
    penalty = strength * float(xx.diagonal().mean()) + 1e-12
    weights: torch.Tensor = torch.linalg.solve(xx + penalty * torch.eye(len(xx), dtype=xx.dtype), xy)
    return weights


def explained(weights: torch.Tensor, xx: torch.Tensor, xy: torch.Tensor, yy: torch.Tensor) -> tuple[float, float]:
    """Squared error that is left of other tokens than those of the fit, and their variance."""
    left = yy.sum() - 2 * (weights * xy).sum() + (weights * (xx @ weights)).sum()
    return float(left), float(yy.sum())


def choose_layers(
    fitted: Centred, held: Centred, kind: Kind, layer: int, *, count: int, reach: int, strength: float
) -> tuple[list[int], float]:
    """Source layers for a target layer, one added after the other, each the one that explains held-out text best.

    Args:
        fitted: sums of the text that maps are fitted on.
        held: of other text.
        kind: what is mapped.
        layer: of the target.
        count: layers to choose.
        reach: how far they may be from the layer at the same share of the depth.
        strength: of the ridge.

    Returns:
        The layers, ascending, and the share of the variance of held-out text that they explain.
    """
    shape = fitted.shape
    same = layer * (shape.layers - 1) / max(shape.target_layers - 1, 1)
    near = sorted(range(shape.layers), key=lambda other: abs(other - same))[: max(2 * reach + 1, count)]
    chosen: list[int] = []
    best = 0.0
    while len(chosen) < min(count, len(near)):
        tried: Mapping[int, float] = {
            other: _share(fitted, held, kind, layer, sorted([*chosen, other]), strength)
            for other in near
            if other not in chosen
        }
        chosen.append(max(tried, key=tried.__getitem__))
        best = tried[chosen[-1]]
    return sorted(chosen), best


def _share(fitted: Centred, held: Centred, kind: Kind, layer: int, sources: list[int], strength: float) -> float:
    left = total = 0.0
    for head in range(fitted.shape.target_heads):
        xx, xy, _ = fitted.part(kind, layer, head, sources)
        error, variance = explained(ridge(xx, xy, strength), *held.part(kind, layer, head, sources))
        left, total = left + error, total + variance
    return 1 - left / max(total, 1e-30)


def solve(fitted: Centred, kind: Kind, layers: Sequence[Sequence[int]], *, strength: float) -> Affine:
    """The maps of all layers and heads, from the chosen source layers."""
    shape = fitted.shape
    weights, biases = [], []
    for layer, sources in enumerate(layers):
        for head in range(shape.target_heads):
            xx, xy, _ = fitted.part(kind, layer, head, sources)
            weight = ridge(xx, xy, strength)
            x_mean, y_mean = fitted.means(kind, layer, head, sources)
            weights.append(weight)
            biases.append(y_mean - x_mean @ weight)
    lead = (shape.target_layers, shape.target_heads)
    weight, bias = torch.stack(weights), torch.stack(biases)
    return Affine(
        torch.tensor([list(sources) for sources in layers]),
        weight.view(*lead, *weight.shape[1:]).float(),
        bias.view(*lead, -1).float(),
    )
