"""The codecs there are, by name and by `EngineConfig.kv_bits`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..config import KVBits
from ..kv import KVRun, RequestKV, StoredRun
from ..rope import Rope
from .codec_base import Codec, KVShape, named
from .quantised import QuantisedCodec

__all__ = ["Codec", "KVShape", "PlainCodec", "codec_for", "codec_of"]


@dataclass(frozen=True, slots=True)
class PlainCodec:
    """KV as the model produced it."""

    name: str = "plain"
    lossless: bool = True

    def encode(self, kv: RequestKV, start: int, end: int, rope: Rope | None) -> StoredRun:
        """A copy of the slots."""
        return kv.take(start, end)

    def load(self, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, Any]) -> StoredRun:
        """A run over ``keys`` and ``values``.

        Raises:
            ValueError: they are not of one run.
        """
        keys, values = named(tensors, "keys", "values")
        if keys.dim() != 4 or values.dim() != 4 or keys.shape[:3] != values.shape[:3]:
            raise ValueError(f"keys {tuple(keys.shape)} and values {tuple(values.shape)} are not of one run")
        return KVRun(keys, values)

    def nbytes(self, shape: KVShape, tokens: int) -> int:
        """Two tensors in the model's own dtype."""
        per_token = shape.layers * shape.kv_heads * (shape.head_dim + shape.value_dim)
        return tokens * per_token * shape.dtype.itemsize


# Groups of keys are long: shorter ones gain less than the bytes of their least values and spans cost (measured).
_BY_BITS: dict[KVBits, Codec] = {
    16: PlainCodec(),
    8: QuantisedCodec("int8", key_bits=8, value_bits=8, key_group=128),
    "8/4": QuantisedCodec("int8-int4", key_bits=8, value_bits=4, key_group=128),
    4: QuantisedCodec("int4", key_bits=4, value_bits=4, key_group=128, wide_share=4),
}
_BY_NAME: dict[str, Codec] = {codec.name: codec for codec in _BY_BITS.values()}


def codec_for(kv_bits: KVBits) -> Codec:
    """The codec of `EngineConfig.kv_bits`."""
    return _BY_BITS[kv_bits]


def codec_of(name: str) -> Codec:
    """The codec of a name.

    Raises:
        ValueError: there is none, for instance because a newer version wrote it.
    """
    if name not in _BY_NAME:
        raise ValueError(f"there is no codec {name!r}; known are {', '.join(sorted(_BY_NAME))}")
    return _BY_NAME[name]
