"""Codecs of few bits: keys without their rotation, per channel; values per token. Approximate.

A key is turned back by its position and freed of the model's constant bias, so that a channel holds one kind of number
whatever the position; on the way out it is turned straight to its new position, once. The first tokens of a run keep
16 bits: where a run begins a prompt they are attention sinks, whose keys are unlike all others.

Sources: axes from KIVI (arXiv 2402.02750); keys before rotation from KVQuant (arXiv 2401.18079) §3.2.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from ..kv import KVRun, RequestKV, StoredRun
from ..rope import Rope
from .codec_base import KVShape, named
from .quantise import compact, dequantise, least_of, pack, packed_width, quantise, quantise_about_zero, unpack

FIRST_TOKENS = 4
_NAMES = (
    "first_keys", "first_values", "keys", "keys_least", "keys_span", "values", "values_zero", "values_span"
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class QuantisedCodec:
    """Keys and values in few bits.

    Attributes:
        name: see `Codec`.
        key_bits, value_bits: 4 or 8.
        key_group: tokens that share a channel's least value and span; a run has as many groups as fit, of equal size.
        value_group: most channels that share those of a token.
    """

    name: str
    key_bits: int
    value_bits: int
    key_group: int
    value_group: int = 64
    lossless: bool = False

    def encode(self, kv: RequestKV, start: int, end: int, rope: Rope | None) -> StoredRun:
        """Slots ``[start, end)`` in few bits.

        Raises:
            ValueError: there is no rotation to free the keys of.
        """
        if rope is None:
            raise ValueError(f"the codec {self.name!r} stores keys without their rotation and needs to know it")
        first = min(start + FIRST_TOKENS, end)
        positions = torch.arange(first, end)
        keys = rope.angles(positions).unrotate(kv.keys[:, :, first:end])
        if (bias := rope.key_bias) is not None:
            keys -= bias
        edges = _edges(end - first, self.key_group)
        parts = [quantise(keys[:, :, a:b], 2, self.key_bits) for a, b in edges]
        values = kv.values[:, :, first:end].to(torch.float32)
        width = _divisor(values.shape[-1], self.value_group)
        codes, zero, span = quantise_about_zero(
            values.view(*values.shape[:-1], values.shape[-1] // width, width), self.value_bits
        )
        none = keys.new_empty((*keys.shape[:2], 0, keys.shape[3]))
        return QuantisedRun(
            self,
            {
                "first_keys": _sixteen_bits(kv.keys[:, :, start:first]),
                "first_values": _sixteen_bits(kv.values[:, :, start:first]),
                "keys": pack(torch.cat([none.to(torch.uint8), *[p[0] for p in parts]], 2), self.key_bits),
                "keys_least": torch.cat([none.to(torch.float16), *[p[1] for p in parts]], 2),
                "keys_span": torch.cat([none.to(torch.float16), *[p[2] for p in parts]], 2),
                "values": pack(codes.flatten(-2), self.value_bits),
                "values_zero": zero.squeeze(-1),
                "values_span": span.squeeze(-1),
            },
            head_dim=keys.shape[-1],
            value_dim=values.shape[-1],
        )

    def load(self, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, Any]) -> StoredRun:
        """A run over tensors that `encode` made.

        Raises:
            ValueError: they do not fit together.
        """
        named(tensors, *_NAMES)
        try:
            head_dim, value_dim = int(metadata["head_dim"]), int(metadata["value_dim"])
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"the metadata {dict(metadata)!r} tells no head_dim and value_dim") from error
        run = QuantisedRun(self, dict(tensors), head_dim=head_dim, value_dim=value_dim)
        run.check()
        return run

    def nbytes(self, shape: KVShape, tokens: int) -> int:
        """Bytes of a run, if no number of it is beyond float16."""
        rest = max(tokens - FIRST_TOKENS, 0)
        keys = rest * packed_width(shape.head_dim, self.key_bits)
        keys += len(_edges(rest, self.key_group)) * shape.head_dim * 4
        groups = shape.value_dim // _divisor(shape.value_dim, self.value_group)
        values = rest * (packed_width(shape.value_dim, self.value_bits) + groups * 3)
        first = (tokens - rest) * (shape.head_dim + shape.value_dim) * 2
        return shape.layers * shape.kv_heads * (keys + values + first)


class QuantisedRun:
    """A `StoredRun` in few bits.

    Its tensors, ``(layers, kv_heads, seq or groups, width)``: ``first_keys``, rotated, and ``first_values`` of the
    first tokens; of the others ``keys`` and ``values``, packed codes, ``keys_least`` and ``keys_span`` per group and
    channel, ``values_zero`` and ``values_span`` per token and group of channels.
    """

    def __init__(
        self, codec: QuantisedCodec, tensors: dict[str, torch.Tensor], *, head_dim: int, value_dim: int
    ) -> None:
        self._codec, self._tensors = codec, tensors
        self._head_dim, self._value_dim = head_dim, value_dim
        self._first = KVRun(tensors["first_keys"], tensors["first_values"])

    @property
    def codec(self) -> str:
        """Name of the codec."""
        return self._codec.name

    @property
    def tokens(self) -> int:
        """Length of the run."""
        return self._first.tokens + self._tensors["keys"].shape[2]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self._tensors.values())

    def tensors(self) -> dict[str, torch.Tensor]:
        """See the class."""
        return dict(self._tensors)

    def metadata(self) -> dict[str, Any]:
        """Widths that packed tensors do not tell."""
        return {"head_dim": self._head_dim, "value_dim": self._value_dim}

    def place(self, into: RequestKV, at: int, *, offset: int, length: int, delta: int, rope: Rope | None) -> None:
        """Decode ``length`` tokens from ``offset`` into slots from ``at``; only the groups they touch are read.

        Raises:
            ValueError: there is no rotation.
        """
        if rope is None:
            raise ValueError(f"the codec {self.codec!r} stores keys without their rotation and needs to know it")
        first = self._first.tokens
        kept = min(max(first - offset, 0), length)
        if kept:
            self._first.place(into, at, offset=offset, length=kept, delta=delta, rope=rope)
        begin, end = offset + kept - first, offset + length - first
        if begin < end:
            self._place_values(into.values[:, :, at + kept : at + length], begin, end)
            self._place_keys(into.keys[:, :, at + kept : at + length], begin, end, at + kept, rope)

    def _place_keys(self, target: torch.Tensor, begin: int, end: int, position: int, rope: Rope) -> None:
        angles, bias = rope.angles(torch.arange(position, position + end - begin)), rope.key_bias
        for group, (a, b) in enumerate(_edges(self._tensors["keys"].shape[2], self._codec.key_group)):
            a, b = max(a, begin), min(b, end)
            if a >= b:
                continue
            packed = self._tensors["keys"][:, :, a:b].to(target.device)
            codes = unpack(packed, self._codec.key_bits, self._head_dim)
            least, span = (
                self._tensors[name][:, :, group : group + 1].to(target.device, torch.float32)
                for name in ("keys_least", "keys_span")
            )
            if bias is not None:
                least = least + bias
            part = slice(a - begin, b - begin)
            angles.rotate(dequantise(codes, least, span, self._codec.key_bits), target[:, :, part], part)

    def _place_values(self, target: torch.Tensor, begin: int, end: int) -> None:
        packed, zero, span = (
            self._tensors[name][:, :, begin:end].to(target.device) for name in ("values", "values_zero", "values_span")
        )
        codes = unpack(packed, self._codec.value_bits, self._value_dim)
        grouped = codes.view(*span.shape, codes.shape[-1] // span.shape[-1])
        least = least_of(zero, span)
        target.copy_(dequantise(grouped, least[..., None], span[..., None], self._codec.value_bits).flatten(-2))

    def check(self) -> None:
        """Raise a ValueError if the tensors are not of one run."""
        own, codec, rest = self._tensors, self._codec, self._tensors["keys"].shape[2:3]
        if any(tensor.dim() != 4 for tensor in own.values()) or min(self._head_dim, self._value_dim) < 1:
            raise ValueError(f"tensors of the codec {codec.name!r} have 4 dimensions and a width of at least 1")
        seq, first = rest[0], self._first.tokens
        groups = self._value_dim // _divisor(self._value_dim, codec.value_group)
        edges = len(_edges(seq, codec.key_group))
        expected = {
            "first_keys": (first, self._head_dim),
            "first_values": (first, self._value_dim),
            "keys": (seq, packed_width(self._head_dim, codec.key_bits)),
            "keys_least": (edges, self._head_dim),
            "keys_span": (edges, self._head_dim),
            "values": (seq, packed_width(self._value_dim, codec.value_bits)),
            "values_zero": (seq, groups),
            "values_span": (seq, groups),
        }
        lead = own["keys"].shape[:2]
        for name, shape in expected.items():
            if tuple(own[name].shape) != (*lead, *shape):
                raise ValueError(f"{name} has shape {tuple(own[name].shape)}; expected {(*lead, *shape)}")
            whole = name in ("keys", "values", "values_zero")
            if (own[name].dtype == torch.uint8) != whole or not (whole or own[name].is_floating_point()):
                raise ValueError(f"{name} is of {own[name].dtype}")


def _edges(tokens: int, group: int) -> list[tuple[int, int]]:
    """Groups of about equal size, none smaller than ``group`` unless there is only one."""
    count = max(tokens // group, 1) if tokens else 0
    cuts = [tokens * i // count for i in range(count + 1)] if count else [0]
    return list(pairwise(cuts))


def _divisor(width: int, most: int) -> int:
    """The largest divisor of ``width`` up to ``most``."""
    return next(n for n in range(min(width, most), 0, -1) if width % n == 0)


def _sixteen_bits(x: torch.Tensor) -> torch.Tensor:
    """A copy in the model's own dtype if that has 16 bits, else in float16 where that holds every number."""
    return x.contiguous().clone() if x.dtype.itemsize == 2 else compact(x).contiguous()
