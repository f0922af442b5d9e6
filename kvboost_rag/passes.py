"""What one sparse pass attends to: masks in bands, and the attention it runs with.

A pass runs chosen tokens of a prompt at their true positions over the whole cache. Its rows are sorted by position, so
a band of neighbouring rows needs only the keys up to its last row: few queries over a long cache cost what they see.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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


@dataclass(frozen=True, slots=True, eq=False)
class PassMask:
    """Mask of one window size: the whole 4-D tensor for the model, the bands for our attention.

    Attributes:
        full: additive ``(1, 1, q, kv)``, 0 where a row may look and -inf elsewhere.
    """

    full: torch.Tensor
    bands: tuple[Band, ...]


def build_mask(
    positions: torch.Tensor,
    kv_tokens: int,
    *,
    window: int | None,
    hidden: torch.Tensor | None,
    groups: int,
    dtype: torch.dtype,
) -> PassMask:
    """Causal (and windowed) mask of the rows at ``positions``.

    Args:
        positions: ascending int64 ``(q,)``.
        kv_tokens: length of the cache.
        window: keys further back than this are not seen; None sees everything.
        hidden: bool ``(kv,)``, slots that hold nothing yet; None if all are filled or written by this pass.
        groups: query heads per KV head.
        dtype: of the attention scores.
    """
    slots = torch.arange(kv_tokens, device=positions.device)
    blocked = slots[None, :] > positions[:, None]
    if window is not None:
        blocked |= slots[None, :] <= positions[:, None] - window
    if hidden is not None:
        blocked |= hidden[None, :]
    full = torch.zeros(blocked.shape, dtype=dtype, device=positions.device).masked_fill_(blocked, float("-inf"))
    bands = []
    for first in range(0, len(positions), BAND_ROWS):
        last = min(first + BAND_ROWS, len(positions))
        high = int(positions[last - 1]) + 1
        low = 0 if window is None else max(0, int(positions[first]) - window + 1)
        bands.append(Band(first, last, low, high, full[first:last, low:high].repeat(groups, 1)[None, None]))
    return PassMask(full[None, None], tuple(bands))


@dataclass(slots=True, eq=False)
class AttentionProbe:
    """Collects how much attention some rows pay to each slot, summed over heads and rows.

    Attributes:
        rows: indices of the rows in the pass, int64 ``(r,)``.
        layers: layers that count.
        mass: filled by the pass, one float32 ``(kv,)`` per layer.
    """

    rows: torch.Tensor
    layers: frozenset[int]
    mass: dict[int, torch.Tensor] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class PassState:
    """The running pass, as our attention function sees it.

    Attributes:
        masks: by data pointer of `PassMask.full`, since that tensor is all the model hands on.
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
    query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor, rows: torch.Tensor, scaling: float
) -> torch.Tensor:
    """Attention that ``rows`` of a pass pay to each slot, summed over heads and rows, float32 ``(kv,)``.

    Args:
        query: ``(1, heads, q, dim)``.
        key: ``(1, kv_heads, kv, dim)``.
        mask: additive ``(1, 1, q, kv)``.
        rows: int64 ``(r,)``.
        scaling: factor of the scores.
    """
    kv_heads = key.shape[1]
    part = query[0, :, rows]
    heads, r, dim = part.shape
    grouped = (part * scaling).reshape(kv_heads, heads // kv_heads * r, dim)
    scores = torch.matmul(grouped, key[0].transpose(1, 2)).reshape(heads, r, -1).float()
    scores += mask[0, :, rows].float()
    return torch.softmax(scores, dim=-1).sum(dim=(0, 1))


def positions_tensor(positions: Sequence[int] | Any, device: torch.device) -> torch.Tensor:
    """Positions as int64 ``(q,)`` on ``device``."""
    return torch.as_tensor(positions, dtype=torch.int64, device=device)
