"""Ridge regression of one model's KV from another's out of sums that grow with neither text nor passes.

Sums of products of inputs and outputs (Gram matrices) are all that a least-squares fit needs, for any choice of source
layers: choosing some is taking their rows and columns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
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

    @property
    def device(self) -> torch.device:
        """Where the sums lie."""
        return self.tensors["weight"].device

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
    """Means of inputs ``(groups, layers · inputs)`` and outputs, and sums of products of what differs; float64."""

    shape: Shape
    x_mean: torch.Tensor
    y_mean: torch.Tensor
    xx: torch.Tensor
    xy: torch.Tensor
    yy: torch.Tensor
    _factors: dict[tuple[int, tuple[int, ...], float], torch.Tensor] = field(default_factory=dict)

    def part(self, kind: Kind, layer: int, head: int, sources: Sequence[int]) -> tuple[torch.Tensor, ...]:
        """Products for one head of one layer from some source layers: ``(xx, xy, yy)``."""
        rows, columns = self._rows(sources), self.shape.columns(kind, layer)
        xx = self.xx[self.shape.group_of[head]][rows][:, rows]
        return xx, self.xy[head][rows, columns], self.yy[head, columns]

    def ridge(self, kind: Kind, layer: int, head: int, sources: Sequence[int], strength: float) -> torch.Tensor:
        """Weights ``(inputs, outputs)`` of the least squares with a penalty of ``strength`` mean variances on each."""
        rows, columns = self._rows(sources), self.shape.columns(kind, layer)
        factor = self._factor(self.shape.group_of[head], tuple(sources), strength)
        return torch.cholesky_solve(self.xy[head][rows, columns], factor)

    def _factor(self, group: int, sources: tuple[int, ...], strength: float) -> torch.Tensor:
        """Cholesky factor of the inputs' products with the penalty; the last are kept, for many outputs share one."""
        key = (group, sources, strength)
        if key not in self._factors:
            if len(self._factors) >= max(2, self.shape.groups):
                del self._factors[next(iter(self._factors))]
            rows = self._rows(sources)
            xx = self.xx[group][rows][:, rows]
            penalty = strength * float(xx.diagonal().mean()) + 1e-12
            ridged = xx.clone()
            ridged.diagonal().add_(penalty)
            self._factors[key] = torch.linalg.cholesky(ridged)
        return self._factors[key]

    def _rows(self, sources: Sequence[int]) -> torch.Tensor | slice:
        width = self.shape.inputs
        if len(sources) == self.shape.layers:
            return slice(None)  # all of them need no copy, which may be gigabytes
        return torch.cat([torch.arange(s * width, (s + 1) * width) for s in sources])


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
    if len(near) <= count:
        return sorted(near), _share(fitted, held, kind, layer, sorted(near), strength)
    chosen: list[int] = []
    best = 0.0
    while len(chosen) < count:
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
        weights = fitted.ridge(kind, layer, head, sources, strength)
        error, variance = explained(weights, *held.part(kind, layer, head, sources))
        left, total = left + error, total + variance
    return 1 - left / max(total, 1e-30)


def solve(
    fitted: Centred, kind: Kind, layers: Sequence[Sequence[int]], *, strength: float, dtype: torch.dtype
) -> Affine:
    """The maps of all layers and heads, from the chosen source layers, with weights of a dtype."""
    shape = fitted.shape
    weights, biases = [], []
    for layer, sources in enumerate(layers):
        for head in range(shape.target_heads):
            weights.append(fitted.ridge(kind, layer, head, sources, strength).to(dtype))
            biases.append(fitted.y_mean[head, shape.columns(kind, layer)].float())
    lead = (shape.target_layers, shape.target_heads)
    weight, bias = torch.stack(weights), torch.stack(biases)
    chosen = torch.tensor([list(sources) for sources in layers])
    return Affine(chosen, weight.view(*lead, *weight.shape[1:]), bias.view(*lead, -1))
