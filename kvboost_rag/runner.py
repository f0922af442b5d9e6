"""Runs passes of an unmodified Hugging Face model over the cache of one request, and decode steps over several."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

from .batching import CURRENT_BATCH, Batch
from .depth import Depth
from .hf import ATTENTION_NAME, cache_argument, cache_over_batch, eager_attention
from .kv import EndOfPass, RequestKV
from .model_spec import ModelSpec
from .passes import CURRENT, AttentionProbe, PassMask, PassState
from .scheduler import Turn, scheduler_of

PIECE_ROWS = 512  # tokens of a pass that run at once


class ModelRunner:
    """Runs passes of an unmodified model over a `RequestKV`, and decode steps over several. Thread-safe."""

    def __init__(self, model: Any, spec: ModelSpec) -> None:
        self.model, self.spec = model, spec
        self.decoder = model.get_decoder()
        self.scheduler = scheduler_of(model)
        self.cache_argument = cache_argument(model)
        self._depth = Depth(model, spec.layers)
        # Weights that are moved in and out layer by layer are where a forward expects them in that forward only.
        placed = getattr(model, "hf_device_map", None) or {}
        self._gives_way = not {"cpu", "disk"} & {str(place) for place in placed.values()} or len(set(placed)) == 1

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
        if len(ids) > PIECE_ROWS and last_layer is None and probe is None and kv.before_write is None:
            return self._in_pieces(kv, cache, ids, positions, hidden)
        return self._pass(kv, cache, ids, positions, last_layer=last_layer, hidden=hidden, probe=probe)

    @torch.inference_mode()
    def run_up_to(
        self,
        layer: int,
        kv: RequestKV,
        cache: Any,
        ids: torch.Tensor,
        positions: torch.Tensor,
        *,
        probe: AttentionProbe | None = None,
    ) -> torch.Tensor:
        """`run` as far as the layers in front of ``layer``.

        Returns:
            What goes into that layer, ``(q, hidden)``; see `run_from`.
        """
        model, states = self._depth.ending_before(layer)
        self._pass(kv, cache, ids, positions, hidden=None, probe=probe, model=model)
        return states[0]

    @torch.inference_mode()
    def run_from(
        self, layer: int, kv: RequestKV, cache: Any, states: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """`run` from ``layer`` on, with what goes into it, ``(q, hidden)``; gives the logits of the last row."""
        model = self._depth.beginning_at(layer)
        logits = self._pass(kv, cache, states, positions, hidden=None, model=model, embedded=True)
        assert logits is not None
        return logits

    def _in_pieces(
        self, kv: RequestKV, cache: Any, ids: torch.Tensor, positions: torch.Tensor, hidden: torch.Tensor | None
    ) -> torch.Tensor | None:
        """A long pass: a layer of a piece is so short that others need not wait long for their turn; costs no more."""
        lengths, logits = kv.lengths, None
        try:
            for first in range(0, len(ids), PIECE_ROWS):
                rows = slice(first, first + PIECE_ROWS)
                end = int(positions[rows][-1]) + 1  # a row sees nothing behind it, where slots may hold anything
                kv.lengths = [end] * len(lengths)
                seen = None if hidden is None else hidden[:end]
                logits = self._pass(kv, cache, ids[rows], positions[rows], hidden=seen)
        finally:
            kv.lengths = lengths
        return logits

    def _pass(
        self,
        kv: RequestKV,
        cache: Any,
        given: torch.Tensor,
        positions: torch.Tensor,
        *,
        hidden: torch.Tensor | None,
        last_layer: int | None = None,
        probe: AttentionProbe | None = None,
        model: Any = None,
        embedded: bool = False,
    ) -> torch.Tensor | None:
        total = kv.lengths[0]
        plain = hidden is None and len(given) == total and probe is None
        masks = {} if plain and self._fits_windows(total) else self._masks(positions, total, hidden)
        argument = self._mask_argument(masks)
        kv.write_to(positions)
        inputs = {
            "inputs_embeds" if embedded else "input_ids": given[None],
            "position_ids": positions[None],
            "attention_mask": argument,
            "use_cache": True,
        }
        kv.last_layer = last_layer
        try:
            with self.scheduler.taking(len(given)) as turn:
                state = PassState({m.ticket.data_ptr(): m for m in masks.values()}, self._fallback(), probe)
                with self._our_attention() as attention, _entered(CURRENT, state):
                    kv.between_layers = self._between_layers(turn, attention)
                    out = (model or self.model)(**inputs, **{self.cache_argument: cache}, logits_to_keep=1)
        except EndOfPass:
            return None
        finally:
            kv.last_layer = kv.between_layers = None
            kv.write_to(None)
        return out.logits[0, -1].float()  # type: ignore[no-any-return]

    def _between_layers(self, turn: Turn | None, attention: _Attention) -> Callable[[], None] | None:
        if turn is None or not self._gives_way:
            return None

        def give_way() -> None:
            if self.scheduler.is_wanted(turn):
                attention.off()  # others find the model's config as it was
                self.scheduler.give_way(turn)
                attention.on()

        return give_way

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
        with self.scheduler.taking(ids.shape[1]):
            out = self.model(input_ids=ids, position_ids=positions, use_cache=True, **{self.cache_argument: cache})
        return out.logits[0].float()  # type: ignore[no-any-return]

    @torch.no_grad()
    def step(self, ids: torch.Tensor, kvs: Sequence[RequestKV]) -> torch.Tensor:
        """Append one token to each of several requests, in one forward. The scheduler's holder calls it.

        Args:
            ids: int64 ``(rows, 1)``.
            kvs: block of each row's request; as it was if this raises.

        Returns:
            Logits ``(rows, 1, vocab)``.
        """
        before = [list(kv.lengths) for kv in kvs]
        batch = Batch(kvs, self.spec.layer_windows, self._fallback())
        inputs = {
            "input_ids": ids,
            "position_ids": torch.tensor([[lengths[0]] for lengths in before], device=ids.device),
            "attention_mask": self._mask_argument({}),
            "use_cache": True,
            self.cache_argument: cache_over_batch(batch),
        }
        try:
            with self._our_attention(), _entered(CURRENT_BATCH, batch):
                return self.model.forward(**inputs, logits_to_keep=1).logits  # type: ignore[no-any-return]
        except BaseException:
            for kv, lengths in zip(kvs, before, strict=True):
                kv.lengths = lengths
            raise

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
    def _our_attention(self) -> Iterator[_Attention]:
        attention = _Attention(self.decoder.config)
        attention.on()
        try:
            yield attention
        finally:
            attention.off()


class _Attention:
    """Our attention in place of the model's own, by its config, which every layer reads; while the model is ours."""

    def __init__(self, config: Any) -> None:
        self._config, self._before, self._on = config, config._attn_implementation, False

    def on(self) -> None:
        self._before, self._on = self._config._attn_implementation, True
        self._config._attn_implementation = ATTENTION_NAME

    def off(self) -> None:
        """Put the model's own back. Nothing where that was done: the model may be somebody else's by now."""
        if self._on:
            self._config._attn_implementation, self._on = self._before, False


@contextmanager
def _entered(variable: ContextVar[Any], value: Any) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)
