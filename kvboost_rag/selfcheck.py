"""Proof at load that moving keys and scattering queries are right for this very model; no hand-kept allow-list.

A probe encoded at offset b equals the one encoded at 0 and moved by b, in every layer; recomputing scattered tokens
over a full cache gives plain Hugging Face's logits; a row never sees what lies behind it; a pass that stops at a layer
and goes on from there gives the same logits, or the model's passes are never cut.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from .errors import UnsupportedModelError
from .hf import cache_over
from .kv import RequestKV
from .rope import Layout, Rope, RopeGroup
from .runner import ModelRunner

PROBE_TOKENS = 32
PROBE_OFFSET = 97  # odd and larger than the probe, so that no frequency turns full circle by chance

# Largest accepted relative error by dtype. In half precision two encodings of one text at two places differ by
# rounding alone, and deeper layers add to it; a wrong rotation is off by the order of 1.
_TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-3, torch.float16: 0.03, torch.bfloat16: 0.12}
_CANNOT_RUN = (TypeError, ValueError, RuntimeError, AttributeError, KeyError, IndexError)


@dataclass(frozen=True, slots=True)
class SelfCheck:
    """What the check measured.

    Attributes:
        layouts: per layer, how its rotary pairs lie; empty if moving was not asked for.
        move_error: worst relative error of moved keys over all layers.
        value_error: worst relative change of values with the position, which should be none.
        logit_error: worst relative difference to plain Hugging Face logits.
        cut_error: worst relative difference to those logits when a pass stops at a layer and goes on; infinite if it
            cannot.
        tolerance: limit of all of them; a `cut_error` beyond it only means that no pass is cut.
    """

    layouts: tuple[Layout, ...]
    move_error: float
    value_error: float
    logit_error: float
    cut_error: float
    tolerance: float

    @property
    def can_cut(self) -> bool:
        """Whether passes may stop at a layer and go on from there."""
        return self.cut_error <= self.tolerance


def self_check(runner: ModelRunner, *, moving: bool) -> tuple[Rope | None, SelfCheck]:
    """Check a model; find the layout of its rotary embedding by trying.

    Args:
        runner: of the model.
        moving: whether approximate reuse is asked for.

    Returns:
        The rotation to use (None if ``moving`` is false) and the figures.

    Raises:
        UnsupportedModelError: names the layer and the error.
    """
    tolerance = _TOLERANCE.get(runner.spec.dtype, 0.12)
    ids = _probe_ids(runner)
    logit_error = _check_passes(runner, ids, tolerance)
    if not moving:
        return None, SelfCheck((), 0.0, 0.0, logit_error, float("inf"), tolerance)
    if runner.spec.static_rope_tokens is not None:
        raise UnsupportedModelError(
            "the rotary frequencies of this model depend on the prompt length (dynamic NTK or long-rope), so keys "
            "cannot be moved; use EngineConfig(reuse='exact')",
            layer=0,
        )
    rope, layouts, move_error, value_error = _find_rope(runner, ids, tolerance)
    cut_error = _cut_error(runner, ids)
    return rope, SelfCheck(layouts, move_error, value_error, logit_error, cut_error, tolerance)


@torch.inference_mode()
def check_full_pass(runner: ModelRunner) -> None:
    """Check that a whole prompt at once gives plain Hugging Face's logits: all that is needed where nothing is reused.

    Raises:
        UnsupportedModelError: it does not.
    """
    tolerance = _TOLERANCE.get(runner.spec.dtype, 0.12)
    ids, name = _probe_ids(runner), type(runner.model).__name__
    try:
        plain = runner.model(input_ids=ids[None], use_cache=False).logits[0, -1].float()
        kv = runner.new_kv(len(ids), len(ids))
        ours = runner.run(kv, cache_over(kv), ids, torch.arange(len(ids), device=ids.device))
    except _CANNOT_RUN as error:
        raise UnsupportedModelError(f"{name} cannot run over our cache ({error}); use plain transformers") from error
    assert ours is not None
    off_by = float((ours - plain).abs().max() / plain.abs().max().clamp_min(1e-6))
    if not off_by <= tolerance:
        raise UnsupportedModelError(
            f"self-check failed: logits of {name} differ from plain Hugging Face by {off_by:.2g} (relative), the limit "
            f"is {tolerance:g}; use plain transformers"
        )


def _probe_ids(runner: ModelRunner) -> torch.Tensor:
    # Spread over the vocabulary; any ids do, since both sides of each comparison run the same ones.
    vocab = min(runner.spec.vocab, runner.model.get_input_embeddings().weight.shape[0])
    ids: torch.Tensor = (torch.arange(PROBE_TOKENS) * 7919 + 11) % vocab
    return ids.to(runner.spec.device)


@torch.inference_mode()
def _check_passes(runner: ModelRunner, ids: torch.Tensor, tolerance: float) -> float:
    n = len(ids)
    try:
        plain = runner.model(input_ids=ids[None], use_cache=False).logits[0].float()
        kv, cache = _encode(runner, ids)
        scattered = torch.cat([torch.arange(0, n - 1, 3), torch.tensor([n - 1])]).to(ids.device)
        last = runner.run(kv, cache, ids[scattered], scattered)
        middle = n // 2
        kv.keys[:, :, middle + 1 :] = 1e4  # whatever lies behind the row must not matter
        kv.values[:, :, middle + 1 :] = 1e4
        row = torch.tensor([middle], device=ids.device)
        inner = runner.run(kv, cache, ids[row], row)
    except _CANNOT_RUN as error:
        raise UnsupportedModelError(
            f"{type(runner.model).__name__} cannot run chosen tokens at chosen positions over a cache ({error}); "
            "use EngineConfig(reuse='off')"
        ) from error
    assert last is not None
    assert inner is not None
    scale = plain.abs().max().clamp_min(1e-6)
    errors = [float((last - plain[-1]).abs().max() / scale), float((inner - plain[middle]).abs().max() / scale)]
    worst = max(errors)
    if not worst <= tolerance:
        what = "recomputed logits" if errors[0] >= errors[1] else "causality of scattered queries"
        raise UnsupportedModelError(
            f"self-check failed: {what} differ from plain Hugging Face by {worst:.2g} (relative), the limit is "
            f"{tolerance:g}; use EngineConfig(reuse='off')"
        )
    return worst


@torch.inference_mode()
def _cut_error(runner: ModelRunner, ids: torch.Tensor) -> float:
    """How far logits move when some rows wait in front of the middle layer for the others."""
    n, layer = len(ids), runner.spec.layers // 2
    if layer == 0:
        return float("inf")
    try:
        plain = runner.model(input_ids=ids[None], use_cache=False).logits[0, -1].float()
        kv = runner.new_kv(n, n)
        kv.clear(0, n)
        cache = cache_over(kv)
        everything = torch.arange(n, device=ids.device)
        states = [runner.run_up_to(layer, kv, cache, ids[half], half) for half in torch.split(everything, n // 2)]
        ours = runner.run_from(layer, kv, cache, torch.cat(states), everything)
    except (UnsupportedModelError, *_CANNOT_RUN):
        return float("inf")
    return float((ours - plain).abs().max() / plain.abs().max().clamp_min(1e-6))


def _encode(runner: ModelRunner, ids: torch.Tensor, base: int = 0) -> tuple[RequestKV, Any]:
    """KV of ``ids`` encoded alone at positions ``base``…; the slots in front stay empty and unseen."""
    n = len(ids)
    kv = runner.new_kv(base + n, base + n)
    cache = cache_over(kv)
    positions = torch.arange(base, base + n, device=ids.device)
    hidden = None
    if base:
        kv.keys.zero_()
        kv.values.zero_()
        hidden = torch.arange(base + n, device=ids.device) < base
    runner.run(kv, cache, ids, positions, hidden=hidden)
    return kv, cache


def _find_rope(
    runner: ModelRunner, ids: torch.Tensor, tolerance: float
) -> tuple[Rope, tuple[Layout, ...], float, float]:
    spec, n, base = runner.spec, len(ids), PROBE_OFFSET
    still = _encode(runner, ids)[0]
    there = _encode(runner, ids, base)[0]
    keys, values = still.keys[:, :, :n], still.values[:, :, :n]
    moved_keys, moved_values = there.keys[:, :, base:], there.values[:, :, base:]
    layouts: list[Layout] = []
    move_error = value_error = 0.0
    for layer in range(spec.layers):
        error, layout = min(
            (_relative(_moved(keys[layer], spec.frequencies[layer], layout, base), moved_keys[layer]), layout)
            for layout in _candidates(spec.frequencies[layer])
        )
        change = _relative(values[layer], moved_values[layer])
        if not max(error, change) <= tolerance:
            what = f"keys moved by {base} positions are off by {error:.2g}"
            if error <= tolerance:
                what = f"values change with the position by {change:.2g}"
            raise UnsupportedModelError(
                f"self-check failed in layer {layer}: {what} (relative), the limit is {tolerance:g}. The positions of "
                "this model are not a plain rotary embedding, so its KV cannot be moved; use "
                "EngineConfig(reuse='exact')",
                layer=layer,
            )
        layouts.append(layout)
        move_error, value_error = max(move_error, error), max(value_error, change)
    return Rope(_groups(spec.frequencies, layouts), spec.layers), tuple(layouts), move_error, value_error


def _candidates(frequencies: torch.Tensor | None) -> tuple[Layout, ...]:
    return ("none",) if frequencies is None else ("half", "interleaved", "none")


def _moved(keys: torch.Tensor, frequencies: torch.Tensor | None, layout: Layout, delta: int) -> torch.Tensor:
    inv_freq = torch.ones(1, device=keys.device) if frequencies is None else frequencies.to(keys.device)
    if 2 * len(inv_freq) > keys.shape[-1]:
        return torch.full_like(keys, float("inf"))
    out = torch.empty_like(keys[None])
    Rope([RopeGroup((0,), inv_freq, layout)], 1).move(keys[None], delta, out)
    return out[0]


def _relative(a: torch.Tensor, b: torch.Tensor) -> float:
    error = float((a.float() - b.float()).norm() / b.float().norm().clamp_min(1e-12))
    return error if error == error else float("inf")


def _groups(frequencies: tuple[torch.Tensor | None, ...], layouts: list[Layout]) -> list[RopeGroup]:
    groups: dict[tuple[Any, ...], tuple[torch.Tensor, Layout, list[int]]] = {}
    for layer, (inv_freq, layout) in enumerate(zip(frequencies, layouts, strict=True)):
        values = torch.ones(1) if inv_freq is None else inv_freq
        key = (layout, *values.tolist())
        groups.setdefault(key, (values, layout, []))[2].append(layer)
    return [RopeGroup(tuple(layers), values, layout) for values, layout, layers in groups.values()]
