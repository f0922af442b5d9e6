"""What one sparse pass attends to: masks in bands, and the attention it runs with.

A pass runs chosen tokens of a prompt at their true positions over the whole cache. Its rows are sorted by position, so
a band of neighbouring rows needs only the keys up to its last row: few queries over a long cache cost what they see.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch

BAND_ROWS = 32


@dataclass(frozen=True, slots=True, eq=False)
class Band:
    """Rows ``[first, last)`` of a pass and the keys ``[low, high)`` they may see.

    Attributes:
        mask: additive, ``(1, 1, groups·rows, high-low)``; rows repeated for each query head of a group.
    """

    first: int
    last: int
    low: int
    high: int
    mask: torch.Tensor


class PassMask:
    """Which keys the rows of a pass may see, for one window size.

    Args:
        positions: of the rows, ascending int64 ``(q,)``.
        kv_tokens: length of the cache.
        window: keys further back than this are not seen; None sees everything in front.
        hidden: bool ``(kv,)``, slots that hold nothing yet; None if all are filled or written by this pass.
        groups: query heads per KV head.
        dtype: of the attention scores.
    """

    def __init__(
        self,
        positions: torch.Tensor,
        kv_tokens: int,
        *,
        window: int | None,
        hidden: torch.Tensor | None,
        groups: int,
        dtype: torch.dtype,
    ) -> None:
        self._positions, self._window, self._hidden, self._dtype = positions, window, hidden, dtype
        self._slots = torch.arange(kv_tokens, device=positions.device)
        # The model only hands this on, so it has the shape of the mask and no memory; `Pass` looks the mask up by it.
        self.ticket = torch.zeros(1, dtype=dtype, device=positions.device).expand(1, 1, len(positions), kv_tokens)
        self.bands = tuple(self._bands(groups))

    def rows(self, rows: torch.Tensor | slice) -> torch.Tensor:
        """Additive mask of some rows, ``(1, 1, rows, kv)``: 0 where a row may look, -inf elsewhere."""
        return self._additive(self._positions[rows], self._slots, self._hidden)[None, None]

    def full(self) -> torch.Tensor:
        """The whole additive mask, ``(1, 1, q, kv)``, for attention that knows no bands."""
        return self.rows(slice(None))

    def _bands(self, groups: int) -> Iterator[Band]:
        q = len(self._positions)
        spans = [(first, min(first + BAND_ROWS, q)) for first in range(0, q, BAND_ROWS)]
        firsts = self._positions[[first for first, _ in spans]].tolist()
        lasts = self._positions[[last - 1 for _, last in spans]].tolist()
        contiguous = self._hidden is None and lasts[-1] - firsts[0] + 1 == q
        shared = self._shared(groups, lasts[-1]) if contiguous else None
        for (first, last), start, end in zip(spans, firsts, lasts, strict=True):
            low = 0 if self._window is None else max(0, start - self._window + 1)
            if shared is not None:
                # Contiguous rows see the same pattern shifted by their position: one matrix serves all bands.
                at = shared.shape[1] - BAND_ROWS - (start - low)
                mask = shared[:, at : at + (end + 1 - low)].view(groups, BAND_ROWS, -1)[:, : last - first]
                mask = mask.flatten(0, 1)
            else:
                hidden = None if self._hidden is None else self._hidden[low : end + 1]
                mask = self._additive(self._positions[first:last], self._slots[low : end + 1], hidden).repeat(groups, 1)
            yield Band(first, last, low, end + 1, mask[None, None])

    def _shared(self, groups: int, last: int) -> torch.Tensor:
        rows = torch.arange(BAND_ROWS, device=self._slots.device)
        columns = torch.arange(-last, BAND_ROWS, device=self._slots.device)
        return self._additive(rows, columns, None).repeat(groups, 1)

    def _additive(self, positions: torch.Tensor, slots: torch.Tensor, hidden: torch.Tensor | None) -> torch.Tensor:
        blocked = slots[None, :] > positions[:, None]
        if self._window is not None:
            blocked |= slots[None, :] <= positions[:, None] - self._window
        if hidden is not None:
            blocked |= hidden[None, :]
        return torch.zeros(blocked.shape, dtype=self._dtype, device=slots.device).masked_fill_(blocked, float("-inf"))


@dataclass(slots=True, eq=False)
class AttentionProbe:
    """Collects how much attention some rows pay to each slot, summed over heads and rows.

    Attributes:
        rows: indices of the rows in the pass, int64 ``(r,)``.
        layers: layers that count.
        mass: filled by the pass, one float32 ``(kv,)`` per layer.
        ends_pass: whether the pass ends once all layers that count are seen.
    """

    rows: torch.Tensor
    layers: frozenset[int]
    mass: dict[int, torch.Tensor] = field(default_factory=dict)
    ends_pass: bool = True


@dataclass(slots=True, eq=False)
class PassState:
    """The running pass, as our attention function sees it.

    Attributes:
        masks: by data pointer of what the model was given as mask, since that is all it hands on.
        fallback: attention to use where the model asks for more than masked softmax (soft caps, sinks).
        probe: where to collect attention mass, if anywhere.
    """

    masks: Mapping[int, PassMask]
    fallback: Callable[..., Any] | None
    probe: AttentionProbe | None = None


CURRENT: ContextVar[PassState | None] = ContextVar("kvboost_rag_pass", default=None)


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: PassMask | None, scaling: float
) -> torch.Tensor:
    """Grouped attention of ``query (1, heads, q, dim)`` over ``key``/``value`` ``(1, kv_heads, kv, dim)``.

    Query heads that share a KV head are laid out as extra rows, so keys and values are never repeated.

    Returns:
        ``(1, q, heads, value_dim)``.
    """
    sdpa = torch.nn.functional.scaled_dot_product_attention
    heads, rows, dim = query.shape[1:]
    kv_heads = key.shape[1]
    if mask is None:
        out = sdpa(query, key, value, is_causal=rows > 1, scale=scaling, enable_gqa=heads != kv_heads)
        return out.transpose(1, 2).contiguous()
    groups = heads // kv_heads
    out = query.new_empty((1, rows, heads, value.shape[-1]))
    for band in mask.bands:
        n = band.last - band.first
        part = query[:, :, band.first : band.last].reshape(1, kv_heads, groups * n, dim)
        seen = slice(band.low, band.high)
        result = sdpa(part, key[:, :, seen], value[:, :, seen], attn_mask=band.mask, scale=scaling)
        out[:, band.first : band.last] = result.reshape(1, heads, n, -1).transpose(1, 2)
    return out


def attention_mass(
    query: torch.Tensor, key: torch.Tensor, mask: PassMask, rows: torch.Tensor, scaling: float
) -> torch.Tensor:
    """Attention that ``rows`` of a pass pay to each slot, summed over heads and rows, float32 ``(kv,)``.

    Args:
        query: ``(1, heads, q, dim)``.
        key: ``(1, kv_heads, kv, dim)``.
        mask: of the pass.
        rows: int64 ``(r,)``.
        scaling: factor of the scores.
    """
    kv_heads = key.shape[1]
    part = query[0, :, rows]
    heads, r, dim = part.shape
    grouped = (part * scaling).reshape(kv_heads, heads // kv_heads * r, dim)
    scores = torch.matmul(grouped, key[0].transpose(1, 2)).reshape(heads, r, -1).float()
    scores += mask.rows(rows)[0].float()
    return torch.softmax(scores, dim=-1).sum(dim=(0, 1))
