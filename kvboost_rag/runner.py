"""Runs passes of an unmodified Hugging Face model over the cache of one request."""

from __future__ import annotations

import copy
import inspect as pyinspect
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch

from .hf import ATTENTION_NAME, cache_argument, eager_attention, step_output
from .kv import Cancelled, EndOfPass, RequestKV
from .model_spec import ModelSpec
from .passes import CURRENT, AttentionProbe, PassMask, PassState

_LOCKS: WeakKeyDictionary[Any, threading.Lock] = WeakKeyDictionary()
_LOCKS_LOCK = threading.Lock()
PATIENCE_S = 0.05  # a request that waits for its turn looks so often whether it was cancelled


def lock_of(model: Any) -> threading.Lock:
    """The lock to hold around all work with a model: engines that share it must not run it at the same time.

    A pass switches the attention of the model's config for its duration, and every layer reads it from there.
    """
    with _LOCKS_LOCK:
        return _LOCKS.setdefault(model.get_decoder(), threading.Lock())


@contextmanager
def holding(lock: threading.Lock | threading.RLock, cancel: threading.Event | None = None) -> Iterator[None]:
    """Hold a lock.

    Raises:
        Cancelled: ``cancel`` was set, also while waiting.
    """
    while not lock.acquire(timeout=-1 if cancel is None else PATIENCE_S):
        if cancel is not None and cancel.is_set():
            raise Cancelled
    try:
        if cancel is not None and cancel.is_set():
            raise Cancelled
        yield
    finally:
        lock.release()


class ModelRunner:
    """Runs passes of an unmodified model over a `RequestKV`."""

    def __init__(self, model: Any, spec: ModelSpec) -> None:
        self.model, self.spec = model, spec
        self.decoder = model.get_decoder()
        self._cache_arg = cache_argument(model)

    def new_kv(self, length: int, capacity: int) -> RequestKV:
        """An empty cache block for one request."""
        s = self.spec
        return RequestKV(
            s.layers, s.kv_heads, s.head_dim, s.value_dim,
            length=length, capacity=capacity, dtype=s.dtype, device=s.device,
        )  # fmt: skip

    @torch.inference_mode()
    def run(
        self,
        kv: RequestKV,
        cache: Any,
        ids: torch.Tensor,
        positions: torch.Tensor,
        *,
        last_layer: int | None = None,
        hidden: torch.Tensor | None = None,
        probe: AttentionProbe | None = None,
    ) -> torch.Tensor | None:
        """Run tokens at their positions, write their KV into the cache.

        Args:
            kv: the block; ``cache`` is a view of it.
            cache: of `cache_over`.
            ids: int64 ``(q,)``.
            positions: ascending int64 ``(q,)``.
            last_layer: end the pass once this layer's keys and values are written; no logits then.
            hidden: bool ``(kv,)``, slots without content that no row may see.
            probe: collects attention mass; the pass ends with its last layer, without logits.

        Returns:
            Logits of the last row, float32 ``(vocab,)``; None if the pass ended early.
        """
        total = kv.lengths[0]
        plain = hidden is None and len(ids) == total and probe is None
        masks = {} if plain and self._fits_windows(total) else self._masks(positions, total, hidden)
        argument = self._mask_argument(masks)
        kv.write_to(positions)
        inputs = {
            "input_ids": ids[None],
            "position_ids": positions[None],
            "attention_mask": argument,
            "use_cache": True,
        }
        state = PassState({m.ticket.data_ptr(): m for m in masks.values()}, self._fallback(), probe)
        kv.last_layer = last_layer
        try:
            with self._our_attention(state):
                out = self.model(**inputs, **{self._cache_arg: cache}, logits_to_keep=1)
        except EndOfPass:
            return None
        finally:
            kv.last_layer = None
            kv.write_to(None)
        return out.logits[0, -1].float()  # type: ignore[no-any-return]

    @torch.inference_mode()
    def greedy(self, kv: RequestKV, cache: Any, logits: torch.Tensor, count: int) -> list[int]:
        """The ``count`` most likely next tokens, whatever they are; leaves the cache as it was."""
        start = kv.lengths[0]
        tokens = [int(logits.argmax())]
        while len(tokens) < count:
            position = torch.tensor([[start + len(tokens) - 1]], device=logits.device)
            step = self._append(cache, torch.tensor([[tokens[-1]]], device=logits.device), position)
            tokens.append(int(step[-1].argmax()))
        kv.lengths = [start] * len(kv.lengths)
        return tokens

    @torch.inference_mode()
    def log_probs(self, kv: RequestKV, cache: Any, logits: torch.Tensor, answer: list[int]) -> torch.Tensor:
        """Log-probabilities at each token of ``answer`` behind a full cache, float32 ``(len(answer), vocab)``."""
        start = kv.lengths[0]
        positions = torch.arange(start, start + len(answer) - 1, device=logits.device)[None]
        rows = self._append(cache, torch.tensor([answer[:-1]], device=logits.device), positions)
        kv.lengths = [start] * len(kv.lengths)
        return torch.log_softmax(torch.cat([logits[None], rows]), dim=-1)

    def _append(self, cache: Any, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        out = self.model(input_ids=ids, position_ids=positions, use_cache=True, **{self._cache_arg: cache})
        return out.logits[0].float()  # type: ignore[no-any-return]

    def generate(self, ids: torch.Tensor, prefill: Any, cache: Any, generation_config: Any, **kwargs: Any) -> Any:
        """`model.generate` from a finished prefill: its first step returns the logits that are already there.

        Args:
            ids: prompt, int64 ``(1, n)``.
            prefill: logits of the last prompt token, float32 ``(vocab,)``.
            cache: holds all ``n`` prompt tokens.
            generation_config: transformers `GenerationConfig`.
            kwargs: streamer, stopping criteria, logits processors.
        """
        view = copy.copy(self.model)
        forward = self.model.forward
        pending = [prefill]
        for layer in cache.layers:  # generate must see the last prompt token as not yet run
            layer.crop(1)

        def first_step_done(*args: Any, **inputs: Any) -> Any:
            if not pending:
                return forward(*args, **inputs)
            for layer in cache.layers:
                layer._kv.lengths[layer._index] += 1
            return step_output(pending.pop()[None, None], self._cache_arg, cache)

        # The view shares every weight; only its own forward differs, so the user's model is never touched.
        first_step_done.__signature__ = pyinspect.signature(forward)  # type: ignore[attr-defined]
        view.forward = first_step_done
        view.generation_config = generation_config  # what is None there would be filled from the model's own
        return view.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            generation_config=generation_config,
            **{self._cache_arg: cache},
            **kwargs,
        )

    def _fits_windows(self, tokens: int) -> bool:
        return self._fallback() is None and all(w is None or tokens <= w for w in self.spec.layer_windows)

    def _masks(self, positions: torch.Tensor, total: int, hidden: torch.Tensor | None) -> dict[int | None, PassMask]:
        return {
            window: PassMask(
                positions, total, window=window, hidden=hidden, groups=self.spec.groups, dtype=self.spec.dtype
            )
            for window in set(self.spec.layer_windows)
        }

    def _mask_argument(self, masks: Mapping[int | None, PassMask]) -> Any:
        if not masks:
            return None if self.spec.layer_names is None else dict.fromkeys(set(self.spec.layer_names))
        if self.spec.layer_names is None:
            return next(iter(masks.values())).ticket
        pairs = zip(self.spec.layer_names, self.spec.layer_windows, strict=True)
        return {name: masks[window].ticket for name, window in pairs}

    def _fallback(self) -> Callable[..., Any] | None:
        """A model that was loaded with eager attention keeps it (soft caps are only applied there)."""
        config = self.decoder.config
        return self._eager() if config._attn_implementation in ("eager", None) else None

    def _eager(self) -> Callable[..., Any]:
        def run(module: Any, *args: Any, **kwargs: Any) -> Any:
            kwargs.setdefault("dropout", 0.0)
            return eager_attention(module)(module, *args, **kwargs)

        return run

    @contextmanager
    def _our_attention(self, state: PassState) -> Iterator[None]:
        config = self.decoder.config
        before = config._attn_implementation
        token = CURRENT.set(state)
        config._attn_implementation = ATTENTION_NAME
        try:
            yield
        finally:
            config._attn_implementation = before
            CURRENT.reset(token)
