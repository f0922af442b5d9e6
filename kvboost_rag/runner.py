"""Runs passes of an unmodified Hugging Face model over the cache of one request."""

from __future__ import annotations

import copy
import inspect as pyinspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from .hf import ATTENTION_NAME, cache_argument, eager_attention, step_output
from .kv import RequestKV
from .model_spec import ModelSpec
from .passes import CURRENT, AttentionProbe, PassMask, PassState, build_mask


class ModelRunner:
    """Runs passes of an unmodified model over a `RequestKV`."""

    def __init__(self, model: Any, spec: ModelSpec) -> None:
        self.model, self.spec = model, spec
        self.decoder = model.get_decoder()
        self._cache_arg = cache_argument(model)
        self._decoder_cache_arg = cache_argument(self.decoder)
        self._shallow: dict[int, Any] = {}

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
        layers: int | None = None,
        hidden: torch.Tensor | None = None,
        probe: AttentionProbe | None = None,
    ) -> torch.Tensor | None:
        """Run tokens at their positions, write their KV into the cache.

        Args:
            kv: the block; ``cache`` is a view of it.
            cache: of `cache_over`.
            ids: int64 ``(q,)``.
            positions: ascending int64 ``(q,)``.
            layers: run only the first so many layers; no logits then.
            hidden: bool ``(kv,)``, slots without content that no row may see.
            probe: collects attention mass.

        Returns:
            Logits of the last row, float32 ``(vocab,)``; None for a shallow run.
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
        state = PassState({m.full.data_ptr(): m for m in masks.values()}, self._fallback(), probe)
        try:
            with self._our_attention(state):
                if layers is not None and layers < self.spec.layers:
                    self._shallow_decoder(layers)(**inputs, **{self._decoder_cache_arg: cache})
                    return None
                out = self.model(**inputs, **{self._cache_arg: cache}, logits_to_keep=1)
        finally:
            kv.write_to(None)
        return out.logits[0, -1].float()  # type: ignore[no-any-return]

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
            window: build_mask(
                positions, total, window=window, hidden=hidden, groups=self.spec.groups, dtype=self.spec.dtype
            )
            for window in set(self.spec.layer_windows)
        }

    def _mask_argument(self, masks: Mapping[int | None, PassMask]) -> Any:
        if not masks:
            return None if self.spec.layer_names is None else dict.fromkeys(set(self.spec.layer_names))
        if self.spec.layer_names is None:
            return next(iter(masks.values())).full
        pairs = zip(self.spec.layer_names, self.spec.layer_windows, strict=True)
        return {name: masks[window].full for name, window in pairs}

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

    def _shallow_decoder(self, layers: int) -> Any:
        """The first layers of the decoder, sharing its weights; its own config says how many."""
        if layers not in self._shallow:
            view = copy.copy(self.decoder)
            view._modules = dict(self.decoder._modules)
            view.layers = self.decoder.layers[:layers]
            if hasattr(view, "norm"):
                view.norm = torch.nn.Identity()
            view.config = copy.copy(self.decoder.config)
            view.config.num_hidden_layers = layers
            if getattr(view.config, "layer_types", None) is not None:
                view.config.layer_types = list(self.decoder.config.layer_types[:layers])
            self._shallow[layers] = view
        return self._shallow[layers]
