"""KV tensors: stored runs, and the one preallocated cache that a request computes in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from .memory import MEMORY
from .rope import Rope


class EndOfPass(Exception):
    """Unwinds a forward pass whose deeper layers nobody needs."""


class Cancelled(Exception):
    """The caller gave up on the request."""


GROW_TOKENS = 256


class StoredRun(Protocol):
    """KV of a run of tokens in the form in which the store holds it. Immutable, shared between readers.

    Its tensors may lie in read-only memory, such as a mapped file: nothing writes to them, and nothing but `place`
    reads more of them than their shapes.
    """

    @property
    def codec(self) -> str:
        """Name of the codec that made it and can load it again, see `store.codec_of`."""
        ...

    @property
    def tokens(self) -> int:
        """Length of the run."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        ...

    def tensors(self) -> dict[str, torch.Tensor]:
        """All tensors by name; with `metadata`, everything that the codec needs to load the run again."""
        ...

    def metadata(self) -> dict[str, Any]:
        """Small values for the codec, fit for JSON."""
        ...

    def place(self, into: RequestKV, at: int, *, offset: int, length: int, delta: int, rope: Rope | None) -> None:
        """Write ``length`` tokens from ``offset`` to slots ``[at, at + length)``, keys moved by ``delta`` positions.

        Slots are positions: token ``offset`` was encoded at position ``at - delta``. Without ``rope`` nothing moves.
        """
        ...


@dataclass(frozen=True, slots=True, eq=False)
class KVRun:
    """Keys and values as the model produced them: the `StoredRun` that loses nothing.

    Attributes:
        keys: ``(layers, kv_heads, seq, head_dim)``, rotated for their base position.
        values: ``(layers, kv_heads, seq, value_dim)``.
    """

    keys: torch.Tensor
    values: torch.Tensor

    @property
    def codec(self) -> str:
        """Always "plain"."""
        return "plain"

    @property
    def tokens(self) -> int:
        """Length of the run."""
        return self.keys.shape[2]

    @property
    def nbytes(self) -> int:
        """Bytes of both tensors."""
        return self.keys.nbytes + self.values.nbytes

    def tensors(self) -> dict[str, torch.Tensor]:
        """Both tensors."""
        return {"keys": self.keys, "values": self.values}

    def metadata(self) -> dict[str, Any]:
        """Nothing: the tensors say it all."""
        return {}

    def place(self, into: RequestKV, at: int, *, offset: int, length: int, delta: int, rope: Rope | None) -> None:
        """Copy ``length`` tokens from ``offset`` to slot ``at``, keys moved by ``delta`` positions."""
        keys = self.keys[:, :, offset : offset + length]
        target = into.keys[:, :, at : at + length]
        if delta == 0 or rope is None:
            target.copy_(keys)
        else:
            rope.move(keys.to(target.device), delta, target)
        into.values[:, :, at : at + length].copy_(self.values[:, :, offset : offset + length])


WriteHook = Callable[[int, torch.Tensor, torch.Tensor], None]


class RequestKV:
    """KV of one request: every layer in one block, written at chosen slots, grown in blocks while decoding.

    Attributes:
        keys: ``(layers, kv_heads, capacity, head_dim)``.
        values: ``(layers, kv_heads, capacity, value_dim)``.
        length: tokens that count, per layer while appending.
        slots: positions that the running pass writes, int64 ``(q,)``; None appends (decode).
        before_write: called with (layer, fresh keys, fresh values), each ``(kv_heads, q, dim)``, before a pass
            writes its slots, while the old content is still there.
        last_layer: layer behind whose write the pass ends with `EndOfPass`; None runs all layers.
        cancelled: asked at every layer; true ends the pass with `Cancelled`.
        between_layers: called at every layer of a pass; others may have the model meanwhile.
    """

    def __init__(
        self,
        layers: int,
        kv_heads: int,
        head_dim: int,
        value_dim: int,
        *,
        length: int,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        capacity = max(capacity, length)
        self.keys = MEMORY.empty((layers, kv_heads, capacity, head_dim), dtype, device)
        self.values = MEMORY.empty((layers, kv_heads, capacity, value_dim), dtype, device)
        self.lengths = [length] * layers
        self.slots: torch.Tensor | None = None
        self.before_write: WriteHook | None = None
        self.last_layer: int | None = None
        self.cancelled: Callable[[], bool] | None = None
        self.between_layers: Callable[[], None] | None = None
        self._slots_are: slice | None = None

    @property
    def capacity(self) -> int:
        """Tokens that fit before the block grows."""
        return self.keys.shape[2]

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self.keys.nbytes + self.values.nbytes

    def clear(self, start: int, end: int) -> None:
        """Write zeros over whatever the memory of slots ``[start, end)`` held before."""
        self.keys[:, :, start:end] = 0
        self.values[:, :, start:end] = 0

    def take(self, start: int, end: int) -> KVRun:
        """A detached copy of slots ``[start, end)``."""
        return KVRun(
            self.keys[:, :, start:end].clone(memory_format=torch.contiguous_format),
            self.values[:, :, start:end].clone(memory_format=torch.contiguous_format),
        )

    def write_to(self, slots: torch.Tensor | None) -> None:
        """Set the slots of the next pass; ascending int64 ``(q,)``, or None to append."""
        self.slots = slots
        self._slots_are = None
        if slots is not None and len(slots):
            first, last = int(slots[0]), int(slots[-1])
            if last - first + 1 == len(slots):
                self._slots_are = slice(first, last + 1)

    def update(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Write keys and values of a pass, ``(1, kv_heads, q, dim)``; return the whole layer ``(1, …, seq, dim)``."""
        if self.cancelled is not None and self.cancelled():
            raise Cancelled
        if self.slots is None:
            return self.append(layer, keys, values)
        if self.between_layers is not None:
            self.between_layers()
        if self.before_write is not None:
            self.before_write(layer, keys[0], values[0])
        if self._slots_are is not None:
            self.keys[layer, :, self._slots_are] = keys[0]
            self.values[layer, :, self._slots_are] = values[0]
        else:
            self.keys[layer].index_copy_(1, self.slots, keys[0])
            self.values[layer].index_copy_(1, self.slots, values[0])
        if layer == self.last_layer:
            raise EndOfPass
        return self.view(layer)

    def view(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of one layer, ``(1, kv_heads, seq, dim)``; views, not copies."""
        length = self.lengths[layer]
        return self.keys[layer : layer + 1, :, :length], self.values[layer : layer + 1, :, :length]

    def crop(self, layer: int, length: int) -> None:
        """Forget what lies behind ``length`` in one layer."""
        self.lengths[layer] = min(length, self.lengths[layer])

    def reserve(self, capacity: int) -> None:
        """Make room for ``capacity`` tokens."""
        if capacity <= self.capacity:
            return
        # Grow by a block or an eighth, so that a long answer copies its context a few times only.
        capacity = max(capacity, self.capacity + max(GROW_TOKENS, self.capacity // 8))
        filled = max(self.lengths)
        for name in ("keys", "values"):
            old: torch.Tensor = getattr(self, name)
            new = MEMORY.empty((old.shape[0], old.shape[1], capacity, old.shape[3]), old.dtype, old.device)
            new[:, :, :filled] = old[:, :, :filled]
            setattr(self, name, new)

    def append(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Write keys and values ``(1, kv_heads, q, dim)`` behind what there is; return the whole layer."""
        if keys.shape[0] != 1:
            raise ValueError(f"this cache holds one sequence, not {keys.shape[0]}; beam search is not supported")
        start = self.lengths[layer]
        end = start + keys.shape[2]
        self.reserve(end)
        self.keys[layer, :, start:end] = keys[0]
        self.values[layer, :, start:end] = values[0]
        self.lengths[layer] = end
        return self.view(layer)
