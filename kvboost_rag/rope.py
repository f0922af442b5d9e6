"""Moving keys: rotate stored keys by the difference of positions.

Rotary embeddings turn the key of position p by the angle p·w in each frequency plane, so a key computed at p becomes
the key of p+d by a further turn of d·w. Values carry no position. Any attention scaling factor of the model's own
cos/sin is already inside the key and must not be applied again, so plain cosines are used here.

Source: RoFormer (arXiv 2104.09864) §3.2. Exact up to rounding: a move is the same as encoding at the new position.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

Layout = Literal["half", "interleaved", "none"]


@dataclass(frozen=True, slots=True, eq=False)
class RopeGroup:
    """Layers that share one rotation.

    Attributes:
        layers: layer indices, ascending.
        inv_freq: the model's own inverse frequencies, float32 ``(m,)``; the rotary part is 2·m wide.
        layout: how the pairs lie in the head: "half" pairs i with i+m, "interleaved" pairs 2i with 2i+1;
            "none" for layers whose keys carry no position.
    """

    layers: tuple[int, ...]
    inv_freq: torch.Tensor
    layout: Layout


class Rope:
    """The rotations of all layers of a model.

    Args:
        groups: layers by rotation.
        num_layers: of the model.
        bias_from: reads `key_bias` from the model.
    """

    def __init__(
        self, groups: Sequence[RopeGroup], num_layers: int, bias_from: Callable[[], torch.Tensor | None] | None = None
    ) -> None:
        self.groups = tuple(groups)
        self.bias_from = bias_from
        self.group_of: dict[int, RopeGroup] = {layer: g for g in self.groups for layer in g.layers}
        if sorted(layer for g in self.groups for layer in g.layers) != list(range(num_layers)):
            raise ValueError("every layer must belong to exactly one rotary group")

    @property
    def key_bias(self) -> torch.Tensor | None:
        """What the model adds to every key before it turns it, float32 ``(layers, kv_heads, 1, head_dim)``, or None.

        Read anew each time: adapters may change it. Moving does not need it; codecs store keys without it.
        """
        return None if self.bias_from is None else self.bias_from()

    def to(self, device: torch.device) -> Rope:
        """The same rotations on another device, with the bias of keys as it is now."""
        groups = [replace(group, inv_freq=group.inv_freq.to(device)) for group in self.groups]
        bias = self.key_bias
        moved = None if bias is None else bias.to(device)
        return Rope(groups, len(self.group_of), None if moved is None else lambda: moved)

    def move(self, keys: torch.Tensor, delta: int, out: torch.Tensor) -> None:
        """Write keys moved by ``delta`` positions into ``out``.

        Args:
            keys: ``(layers, kv_heads, seq, head_dim)``, rotated for their old positions.
            delta: new position minus old position; may be negative.
            out: same shape, dtype and device; must not overlap ``keys``.
        """
        if delta == 0:
            out.copy_(keys)
            return
        for group in self.groups:
            source, target = _layers_of(keys, group.layers), _layers_of(out, group.layers)
            moved = target if _is_view(group.layers) else torch.empty_like(source, dtype=out.dtype)
            cos, sin = _angles(group.inv_freq, torch.tensor([delta], dtype=torch.float64))
            _turn(source, cos, sin, group.layout, moved)
            if moved is not target:
                out[list(group.layers)] = moved

    def angles(self, positions: torch.Tensor) -> Angles:
        """What turns the keys of all layers to ``positions`` ``(seq,)``, and back."""
        wide = positions.to(torch.float64)
        return Angles([(group, *_angles(group.inv_freq, wide)) for group in self.groups])

    def tables(self, layer: int, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """``cos`` and ``sin`` of a layer at ``positions`` ``(seq,)``; each float32 ``(seq, m)``."""
        return _angles(self.group_of[layer].inv_freq, positions.to(torch.float64))

    def turn(self, layer: int, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """``x`` ``(…, seq, head_dim)`` turned by tables of `tables`; pass ``-sin`` to turn back."""
        out = torch.empty_like(x)
        _turn(x, cos, sin, self.group_of[layer].layout, out)
        return out


class Angles:
    """Cosines and sines of all layers at given positions."""

    def __init__(self, tables: Sequence[tuple[RopeGroup, torch.Tensor, torch.Tensor]]) -> None:
        self._tables = tables

    def rotate(self, keys: torch.Tensor, out: torch.Tensor, part: slice = slice(None)) -> None:
        """Write keys without a position, turned to the positions, into ``out``.

        Args:
            keys: float32 ``(layers, kv_heads, seq, head_dim)``.
            out: same shape, any floating dtype; must not overlap ``keys``.
            part: which of the positions; as many as ``seq``.
        """
        for group, cos, sin in self._tables:
            source, target = _layers_of(keys, group.layers), _layers_of(out, group.layers)
            _turn(source, cos[part], sin[part], group.layout, target)
            if not _is_view(group.layers):
                out[list(group.layers)] = target

    def unrotate(self, keys: torch.Tensor) -> torch.Tensor:
        """Keys ``(layers, kv_heads, seq, head_dim)`` of the positions without them, float32."""
        source = keys.to(torch.float32)
        out = torch.empty_like(source)
        Angles([(group, cos, -sin) for group, cos, sin in self._tables]).rotate(source, out)
        return out


def _angles(inv_freq: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    # float64 angles: position · frequency loses 3 digits in float32 at long contexts.
    device = inv_freq.device
    angle = positions.cpu()[:, None] * inv_freq.detach().cpu().to(torch.float64)[None, :]
    return angle.cos().to(device, torch.float32), angle.sin().to(device, torch.float32)


def _turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, layout: Layout, out: torch.Tensor) -> None:
    """Turn ``x`` ``(…, seq, head_dim)`` in float32 by ``cos``/``sin`` ``(seq or 1, m)`` into ``out``."""
    if layout == "none":
        out.copy_(x)
        return
    rotary = 2 * cos.shape[-1]
    if layout == "half":
        first, second = slice(0, rotary // 2), slice(rotary // 2, rotary)
    else:
        first, second = slice(0, rotary, 2), slice(1, rotary, 2)
    if x.shape[-1] > rotary:
        out[..., rotary:] = x[..., rotary:]
    a, b = x[..., first], x[..., second]
    if x.dtype == out.dtype == torch.float32:
        # Written in place: this runs over every reused token of every layer.
        torch.mul(a, cos, out=out[..., first]).addcmul_(b, sin, value=-1)
        torch.mul(b, cos, out=out[..., second]).addcmul_(a, sin)
        return
    a32, b32 = a.float(), b.float()
    out[..., first] = (a32 * cos - b32 * sin).to(out.dtype)
    out[..., second] = (b32 * cos + a32 * sin).to(out.dtype)


def _is_view(layers: tuple[int, ...]) -> bool:
    return layers == tuple(range(layers[0], layers[0] + len(layers)))


def _layers_of(tensor: torch.Tensor, layers: tuple[int, ...]) -> torch.Tensor:
    if _is_view(layers):
        return tensor[layers[0] : layers[0] + len(layers)]
    return tensor[list(layers)]
