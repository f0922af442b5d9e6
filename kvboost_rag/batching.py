"""One decode step of several requests as one forward: linear layers shared, each row over its own request's keys.

Nothing is padded and no keys are copied: the model gets one token of each request as a batch, our cache layer writes
each row into its request's own block, and our attention runs row by row over these blocks. Reading the weights, which
is what a step costs on a CPU, is shared by all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any

import torch

from .kv import RequestKV


class Batch:
    """The running batched step.

    Args:
        kvs: block of each request, in the order of the rows.
        windows: per layer, sliding window in tokens or None.
        fallback: attention of a model that was loaded to use its own.
    """

    def __init__(
        self, kvs: Sequence[RequestKV], windows: Sequence[int | None], fallback: Callable[..., Any] | None
    ) -> None:
        self.kvs, self.fallback = tuple(kvs), fallback
        self._windows = windows
        self._seen: list[tuple[torch.Tensor, torch.Tensor]] = []

    def update(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Append row *i* of ``(rows, kv_heads, 1, dim)`` to request *i*; `attend` then sees that layer."""
        self._seen = []
        for row, kv in enumerate(self.kvs):
            seen = kv.append(layer, keys[row : row + 1], values[row : row + 1])
            window = self._windows[layer]
            if window is not None and seen[0].shape[2] > window:
                seen = seen[0][:, :, -window:], seen[1][:, :, -window:]
            self._seen.append(seen)

    def attend(
        self,
        module: Any,
        query: torch.Tensor,
        scaling: float,
        own: Callable[..., Any] | None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Attention of each row ``query (rows, heads, 1, dim)`` over its own request.

        Args:
            module: the attention layer.
            query: one token of each request.
            scaling: factor of the scores.
            own: the family's own attention, where it does more than masked softmax.
            kwargs: what the layer hands to its attention.

        Returns:
            ``(rows, 1, heads, value_dim)``.
        """
        out = []
        for row, (keys, values) in enumerate(self._seen):
            one = query[row : row + 1]
            if own is None:
                out.append(_attend(one, keys, values, scaling))
            else:
                # No mask would do, but some families take its shape for granted.
                everything = one.new_zeros((1, 1, 1, keys.shape[2]))
                out.append(own(module, one, keys, values, everything, scaling=scaling, **kwargs)[0])
        return torch.cat(out)


CURRENT_BATCH: ContextVar[Batch | None] = ContextVar("kvboost_rag_batch", default=None)


def _attend(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float) -> torch.Tensor:
    """One token over all it may see. Heads that share a KV head are laid out as rows, so nothing is repeated."""
    _, heads, _, dim = query.shape
    grouped = query.reshape(1, keys.shape[1], -1, dim)
    out = torch.nn.functional.scaled_dot_product_attention(grouped, keys, values, scale=scaling)
    return out.reshape(1, 1, heads, -1)
