"""How KV lies in the store: a codec turns slots of a request's cache into a `StoredRun`, and loads it again.

A codec holds no state, so one of a name serves every model and every thread. A tier that keeps bytes writes
`StoredRun.tensors` and `StoredRun.metadata` beside the codec's name, and asks `codec_of(name).load` for the run again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ..kv import RequestKV, StoredRun
from ..rope import Rope


@dataclass(frozen=True, slots=True)
class KVShape:
    """Shape of one token's KV in a model."""

    layers: int
    kv_heads: int
    head_dim: int
    value_dim: int
    dtype: torch.dtype


class Codec(Protocol):
    """A form that KV is stored in."""

    @property
    def name(self) -> str:
        """What stored runs say they were made by. Another layout of tensors needs another name."""
        ...

    @property
    def lossless(self) -> bool:
        """Whether `StoredRun.place` gives back, bit for bit, what was encoded."""
        ...

    def encode(self, kv: RequestKV, start: int, end: int, rope: Rope | None) -> StoredRun:
        """A detached run of slots ``[start, end)``, whose positions are their numbers."""
        ...

    def load(self, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, Any]) -> StoredRun:
        """A run over tensors that were written before; they are neither copied nor read.

        Raises:
            ValueError: they do not fit together or are not of this codec.
        """
        ...

    def nbytes(self, shape: KVShape, tokens: int) -> int:
        """Bytes that `encode` will need for so many tokens."""
        ...


def named(tensors: Mapping[str, torch.Tensor], *names: str) -> list[torch.Tensor]:
    """The tensors of these names.

    Raises:
        ValueError: one is missing, or there are others.
    """
    if set(tensors) != set(names):
        raise ValueError(f"the tensors are {', '.join(sorted(tensors))}; expected {', '.join(sorted(names))}")
    return [tensors[name] for name in names]
