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
from .quantise import (
    codes_of,
    compact,
    dequantise,
    least_of,
    pack,
    pack_pairs,
    packed_width,
    quantise,
    quantise_about_zero,
    unpack,
    unpack_pairs,
)

FIRST_TOKENS = 4
FINE_BITS = 2  # more, for wide channels
_BYTES, _FLOATS = {torch.uint8}, {torch.float16, torch.bfloat16, torch.float32}
_DTYPES = {
    "first_keys": _FLOATS,
    "first_values": _FLOATS,
    "keys": _BYTES,
    "keys_least": _FLOATS,
    "keys_span": _FLOATS,
    "values": _BYTES,
    "values_zero": _BYTES,
    "values_span": _FLOATS,
    "keys_wide": {torch.uint8, torch.int16},
    "keys_fine": _BYTES,
}
_WIDE_NAMES = ("keys_wide", "keys_fine")
_NAMES = tuple(name for name in _DTYPES if name not in _WIDE_NAMES)


@dataclass(frozen=True, slots=True)
class QuantisedCodec:
    """Keys and values in few bits.

    Attributes:
        name: see `Codec`.
        key_bits, value_bits: 4 or 8.
        key_group: tokens that share a channel's least value and span; a run has as many groups as fit, of equal size.
        value_group: most channels that share those of a token.
        wide_share: one channel of so many gets 2 bits more, per head those that reach furthest; 0 gives them to none.
            In few bits they make most of the error, and a quarter of them costs half a bit per number.
    """

    name: str
    key_bits: int
    value_bits: int
    key_group: int
    value_group: int = 64
    wide_share: int = 0
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
        values = kv.values[:, :, first:end].to(torch.float32)
        width = _divisor(values.shape[-1], self.value_group)
        codes, zero, span = quantise_about_zero(
            values.view(*values.shape[:-1], values.shape[-1] // width, width), self.value_bits
        )
        return QuantisedRun(
            self,
            {
                "first_keys": _sixteen_bits(kv.keys[:, :, start:first]),
                "first_values": _sixteen_bits(kv.values[:, :, start:first]),
                **self._key_tensors(keys),
                "values": pack(codes.flatten(-2), self.value_bits),
                "values_zero": zero.squeeze(-1),
                "values_span": span.squeeze(-1),
            },
            head_dim=keys.shape[-1],
            value_dim=values.shape[-1],
        )

    def _key_tensors(self, keys: torch.Tensor) -> dict[str, torch.Tensor]:
        """Keys ``(layers, kv_heads, seq, head_dim)`` without rotation and bias, float32, in groups of tokens."""
        none = keys.new_empty((*keys.shape[:2], 0, keys.shape[3]))
        codes, least, span = [none.to(torch.uint8)], [none.to(torch.float16)], [none.to(torch.float16)]
        wide, fine = self._widest(keys), list[torch.Tensor]()
        for a, b in _edges(keys.shape[2], self.key_group):
            part = keys[:, :, a:b]
            coarse, low, reach = quantise(part, 2, self.key_bits)
            if wide is not None:
                chosen = wide.long()
                args = (
                    part.gather(3, chosen.expand(-1, -1, b - a, -1)),
                    low.gather(3, chosen),
                    reach.gather(3, chosen),
                )
                six = codes_of(*args, self.key_bits + FINE_BITS)
                coarse.scatter_(3, chosen.expand_as(six), six >> FINE_BITS)
                fine.append(pack_pairs(six & 3))
            for found, one in ((codes, coarse), (least, low), (span, reach)):
                found.append(one)
        tensors = {
            "keys": pack(torch.cat(codes, 2), self.key_bits), "keys_least": torch.cat(least, 2),
            "keys_span": torch.cat(span, 2),
        }  # fmt: skip
        if wide is None:
            return tensors
        empty = none[..., : wide.shape[-1] // 4].to(torch.uint8)
        return {**tensors, "keys_wide": wide, "keys_fine": torch.cat([empty, *fine], 2)}

    def _widest(self, keys: torch.Tensor) -> torch.Tensor | None:
        """Indices ``(layers, kv_heads, 1, n)`` of the channels that reach furthest; None where there are none."""
        count = self.wide_channels(keys.shape[3])
        if not count:
            return None
        reach = keys.new_zeros((*keys.shape[:2], keys.shape[3]))
        if keys.shape[2]:
            reach = keys.amax(2) - keys.amin(2)
        found = reach.topk(count, -1).indices.sort(-1).values[:, :, None]
        return found.to(torch.uint8 if keys.shape[3] <= 256 else torch.int16)

    def wide_channels(self, head_dim: int) -> int:
        """Channels of a head that get more bits; four fill a byte of theirs."""
        return head_dim // self.wide_share // 4 * 4 if self.wide_share else 0

    def load(self, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, Any]) -> StoredRun:
        """A run over tensors that `encode` made.

        Raises:
            ValueError: they do not fit together.
        """
        try:
            head_dim, value_dim = int(metadata["head_dim"]), int(metadata["value_dim"])
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"the metadata {dict(metadata)!r} tells no head_dim and value_dim") from error
        named(tensors, *_NAMES, *(_WIDE_NAMES if self.wide_channels(head_dim) else ()))
        run = QuantisedRun(self, dict(tensors), head_dim=head_dim, value_dim=value_dim)
        run.check()
        return run

    def nbytes(self, shape: KVShape, tokens: int) -> int:
        """Bytes of a run, if no number of it is beyond float16."""
        rest = max(tokens - FIRST_TOKENS, 0)
        keys = rest * packed_width(shape.head_dim, self.key_bits)
        keys += len(_edges(rest, self.key_group)) * shape.head_dim * 4
        wide = self.wide_channels(shape.head_dim)
        keys += wide * (1 if shape.head_dim <= 256 else 2) + rest * wide // 4
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
            numbers, levels = self._key_codes(codes, a, b)
            angles.rotate(dequantise(numbers, least, span, levels), target[:, :, part], part)

    def _key_codes(self, coarse: torch.Tensor, a: int, b: int) -> tuple[torch.Tensor, float | torch.Tensor]:
        """Codes of tokens ``[a, b)``, those of wide channels with a fraction, and the greatest of each channel."""
        levels = float((1 << self._codec.key_bits) - 1)
        if "keys_wide" not in self._tensors:
            return coarse, levels
        chosen = self._tensors["keys_wide"].to(coarse.device, torch.int64)
        fine = unpack_pairs(self._tensors["keys_fine"][:, :, a:b].to(coarse.device)).to(torch.float32)
        fraction = 1 << FINE_BITS
        most = torch.full((*chosen.shape[:3], self._head_dim), levels, device=coarse.device)
        most.scatter_(3, chosen, levels + (fraction - 1) / fraction)
        numbers = coarse.to(torch.float32)
        return numbers.scatter_add_(3, chosen.expand_as(fine), fine.div_(fraction)), most

    def _place_values(self, target: torch.Tensor, begin: int, end: int) -> None:
        packed, zero, span = (
            self._tensors[name][:, :, begin:end].to(target.device) for name in ("values", "values_zero", "values_span")
        )
        codes = unpack(packed, self._codec.value_bits, self._value_dim)
        grouped = codes.view(*span.shape, codes.shape[-1] // span.shape[-1])
        least = least_of(zero, span)
        target.copy_(
            dequantise(grouped, least[..., None], span[..., None], (1 << self._codec.value_bits) - 1).flatten(-2)
        )

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
        if wide := codec.wide_channels(self._head_dim):
            expected |= {"keys_wide": (1, wide), "keys_fine": (seq, wide // 4)}
        lead = own["keys"].shape[:2]
        for name, shape in expected.items():
            if tuple(own[name].shape) != (*lead, *shape):
                raise ValueError(f"{name} has shape {tuple(own[name].shape)}; expected {(*lead, *shape)}")
            if own[name].dtype not in _DTYPES[name]:
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
