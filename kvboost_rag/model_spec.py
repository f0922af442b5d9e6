"""What the engine must know of a model: shapes, windows, masks, rotary frequencies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .errors import UnsupportedModelError
from .hf import cache_argument, plain_cache

_KNOWN_LAYERS = {"full_attention", "sliding_attention"}


@dataclass(frozen=True, slots=True, eq=False)
class ModelSpec:
    """What the engine must know of a model.

    Attributes:
        layers, kv_heads, head_dim, value_dim: shape of the KV.
        groups: query heads per KV head.
        vocab: size of the output.
        window_tokens: context window.
        layer_windows: per layer, sliding window in tokens or None.
        layer_names: per layer, the key under which the model looks for its mask; None where one mask serves all.
        static_rope_tokens: prompt length up to which the rotary frequencies do not depend on the length; None = always.
        frequencies: per layer, rotary inverse frequencies float32 ``(m,)``, or None where the model has none.
        active_parameters: weights that a token meets on its way through the layers (for the cost model).
    """

    layers: int
    kv_heads: int
    head_dim: int
    value_dim: int
    groups: int
    vocab: int
    window_tokens: int
    layer_windows: tuple[int | None, ...]
    layer_names: tuple[str, ...] | None
    static_rope_tokens: int | None
    frequencies: tuple[torch.Tensor | None, ...]
    active_parameters: int
    dtype: torch.dtype
    device: torch.device


def inspect_model(model: Any) -> ModelSpec:
    """Read a model's structure from its config and a one-token forward.

    Raises:
        UnsupportedModelError: layers whose cache is not one K and one V of equal shape per token.
    """
    decoder = model.get_decoder()
    config = decoder.config
    names, windows = _layer_plan(config)
    weight = next(model.parameters())
    cache = _probe_cache(model, weight.device)
    shapes = {(tuple(layer.keys.shape), tuple(layer.values.shape)) for layer in cache.layers}
    if len(shapes) != 1 or len(cache.layers) != len(windows):
        raise UnsupportedModelError(
            f"the {len(cache.layers)} cache layers of {type(model).__name__} have {len(shapes)} different shapes for "
            f"{len(windows)} decoder layers; only models with one K and V shape in every layer can reuse KV; "
            "use plain transformers for this model"
        )
    keys, values = cache.layers[0].keys, cache.layers[0].values
    frequencies, static = _rope_of(decoder, names, len(windows))
    heads = getattr(config, "num_attention_heads", keys.shape[1])
    embed = model.get_input_embeddings().weight.numel()
    total = sum(p.numel() for p in model.parameters())
    output = model.get_output_embeddings()
    tied = output is None or output.weight is model.get_input_embeddings().weight
    return ModelSpec(
        layers=len(windows),
        kv_heads=keys.shape[1],
        head_dim=keys.shape[3],
        value_dim=values.shape[3],
        groups=heads // keys.shape[1],
        vocab=config.vocab_size,
        window_tokens=int(config.max_position_embeddings),
        layer_windows=windows,
        layer_names=names if len(set(windows)) > 1 else None,
        static_rope_tokens=static,
        frequencies=frequencies,
        active_parameters=max(total - embed * (1 if tied else 2), 1),
        dtype=keys.dtype,
        device=keys.device,
    )


def key_bias(model: Any, spec: ModelSpec) -> torch.Tensor | None:
    """What the model adds to every key before it turns it, float32 ``(layers, kv_heads, 1, head_dim)``.

    None where that is nothing, or no constant: a norm of keys behind the projection scales the bias by the token.
    Whoever takes it off must put the same back: then a layer that is read wrongly costs precision, not truth.
    """
    found = []
    for layer in getattr(model.get_decoder(), "layers", ()):
        attention = getattr(layer, "self_attn", None)
        bias = getattr(getattr(attention, "k_proj", None), "bias", None)
        normed = any(getattr(attention, name, None) is not None for name in ("k_norm", "k_layernorm"))
        if bias is None or normed or bias.numel() != spec.kv_heads * spec.head_dim:
            return None
        found.append(bias.detach().to(torch.float32).view(spec.kv_heads, 1, spec.head_dim))
    return torch.stack(found) if len(found) == spec.layers else None


def _layer_plan(config: Any) -> tuple[tuple[str, ...], tuple[int | None, ...]]:
    window = getattr(config, "sliding_window", None)
    names = getattr(config, "layer_types", None)
    if names is None:
        count = config.num_hidden_layers
        return ("full_attention",) * count, (window,) * count
    unknown = [(i, name) for i, name in enumerate(names) if name not in _KNOWN_LAYERS]
    if unknown:
        layer, name = unknown[0]
        raise UnsupportedModelError(
            f"layer {layer} is of type {name!r}, whose state is not one K and V per token; only full and sliding "
            "attention can be reused; use plain transformers for this model",
            layer=layer,
        )
    return tuple(names), tuple(window if name == "sliding_attention" else None for name in names)


@torch.inference_mode()
def _probe_cache(model: Any, device: torch.device) -> Any:
    cache = plain_cache()
    ids = torch.zeros((1, 1), dtype=torch.long, device=device)
    try:
        model(input_ids=ids, use_cache=True, **{cache_argument(model): cache})
    except (AttributeError, TypeError, ValueError, IndexError) as error:
        raise UnsupportedModelError(f"{type(model).__name__} cannot run on a plain key/value cache: {error}") from error
    if any(getattr(layer, "keys", None) is None or layer.keys.dim() != 4 for layer in cache.layers):
        raise UnsupportedModelError(f"{type(model).__name__} keeps other state than keys and values")
    return cache


def _rope_of(decoder: Any, names: Sequence[str], layers: int) -> tuple[tuple[torch.Tensor | None, ...], int | None]:
    """Frequencies per layer, and the length up to which they are static."""
    rotary = getattr(decoder, "rotary_emb", None)
    if rotary is None:
        return (None,) * layers, None
    found: list[torch.Tensor | None] = []
    static: int | None = None
    for name in names:
        prefix = f"{name}_" if hasattr(rotary, f"{name}_inv_freq") else ""
        inv_freq = getattr(rotary, f"{prefix}original_inv_freq", getattr(rotary, f"{prefix}inv_freq", None))
        found.append(None if inv_freq is None else inv_freq.detach().float())
        kind = getattr(rotary, "rope_type", "default")
        kind = kind.get(name, "default") if isinstance(kind, Mapping) else kind
        if kind in ("dynamic", "longrope"):
            parameters = decoder.config.rope_parameters
            parameters = parameters.get(name, parameters)
            original = parameters.get("original_max_position_embeddings") or decoder.config.max_position_embeddings
            static = min(int(original), static) if static is not None else int(original)
    return tuple(found), static
