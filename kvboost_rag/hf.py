"""The only file that imports transformers: loading, inspecting and running a Hugging Face model on our cache."""

from __future__ import annotations

import copy
import inspect as pyinspect
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import transformers
import xxhash
from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache

from .config import SamplingParams
from .errors import UnsupportedModelError
from .kv import RequestKV
from .passes import CURRENT, AttentionProbe, PassMask, PassState, attend, attention_mass, build_mask

ATTENTION_NAME = "kvboost_rag"
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


def load_pretrained(
    model: str, *, gguf_file: str | None = None, dtype: Any = "auto", device: Any = "auto", **hf: Any
) -> tuple[Any, Any]:
    """Load model and tokenizer by hub id or folder; ``hf`` goes to ``from_pretrained``."""
    shared = {key: hf[key] for key in ("revision", "token", "cache_dir", "trust_remote_code", "subfolder") if key in hf}
    if gguf_file is not None:
        hf["gguf_file"] = shared["gguf_file"] = gguf_file
    tokenizer = AutoTokenizer.from_pretrained(model, **shared)
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=dtype, **hf)
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if "device_map" not in hf:
        loaded = loaded.to(device)
    return loaded.eval(), tokenizer


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
    cache = DynamicCache()
    try:
        model(input_ids=torch.zeros((1, 1), dtype=torch.long, device=device), use_cache=True, **{_cache_arg(model): cache})
    except (AttributeError, TypeError, ValueError, IndexError) as error:
        raise UnsupportedModelError(f"{type(model).__name__} cannot run on a plain key/value cache: {error}") from error
    if any(getattr(layer, "keys", None) is None or layer.keys.dim() != 4 for layer in cache.layers):
        raise UnsupportedModelError(f"{type(model).__name__} keeps other state than keys and values")
    return cache


def _cache_arg(model: Any) -> str:
    # transformers 5.24 renamed `past_key_values` to `cache`.
    parameters = pyinspect.signature(model.forward).parameters
    return "cache" if "cache" in parameters else "past_key_values"


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


def fingerprint(model: Any, tokenizer: Any) -> str:
    """Identity of weights, adapters, tokenizer, RoPE and dtype; canonical across processes and machines."""
    h = xxhash.xxh3_128(b"kvboost-rag 1")
    config = model.config.to_dict()
    for volatile in ("_name_or_path", "transformers_version", "torch_dtype", "dtype", "architectures", "use_cache"):
        config.pop(volatile, None)
    h.update(json.dumps(config, sort_keys=True, default=str).encode())
    h.update(type(model).__name__.encode())
    for name, tensor in sorted(model.state_dict().items()):
        h.update(f"{name}|{tuple(tensor.shape)}|{tensor.dtype}|".encode())
        data = tensor.detach().cpu().contiguous().reshape(-1)
        h.update(data.view(torch.uint8).numpy() if data.numel() else b"")
    if tokenizer is not None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        text = backend.to_str() if backend is not None else json.dumps(sorted(tokenizer.get_vocab().items()))
        h.update(text.encode("utf-8", "surrogatepass"))
    return h.hexdigest()


def weights_version(model: Any) -> int:
    """A cheap number that changes when weights are replaced, edited in place, or an adapter is attached."""
    return hash(tuple((id(p), p.data_ptr(), _version_of(p)) for p in model.parameters()))


def _version_of(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


class SlotLayer(CacheLayerMixin):
    """One layer of a `RequestKV`, in the shape Hugging Face expects of a cache layer."""

    is_sliding = False
    is_croppable = True
    supports_early_init = False

    def __init__(self, kv: RequestKV, index: int) -> None:
        super().__init__()
        self._kv, self._index = kv, index
        self.is_initialized = True
        self.device, self.dtype = kv.keys.device, kv.keys.dtype
        self.keys, self.values = kv.view(index)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: the block exists before the first pass."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write into the pass's slots, or append; return the whole layer."""
        self.keys, self.values = self._kv.update(self._index, key_states, value_states)
        return self.keys, self.values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the mask for appended tokens."""
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        """Tokens held."""
        return self._kv.lengths[self._index]

    def get_max_length(self) -> int:
        """No maximum: the block grows."""
        return -1

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last ``-tokens_to_remove`` tokens (transformers counts them negative or positive)."""
        self._kv.crop(self._index, self.get_seq_length() - abs(tokens_to_remove))
        self.keys, self.values = self._kv.view(self._index)


def cache_over(kv: RequestKV) -> Cache:
    """A Hugging Face cache whose layers are those of ``kv``."""
    return Cache(layers=[SlotLayer(kv, index) for index in range(kv.keys.shape[0])])


def _kvboost_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    state = CURRENT.get()
    assert state is not None, "this attention only runs inside a pass of the engine"
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    mask = None if attention_mask is None else state.masks.get(attention_mask.data_ptr())
    probe = state.probe
    if probe is not None and mask is not None and module.layer_idx in probe.layers:
        probe.mass[module.layer_idx] = attention_mass(query, key, mask.full, probe.rows, scale)
    unusual = kwargs.get("softcap") is not None or kwargs.get("s_aux") is not None
    if state.fallback is not None or unusual or (mask is None and attention_mask is not None):
        run = state.fallback or eager_attention(module)
        result: tuple[torch.Tensor, torch.Tensor | None] = run(
            module, query, key, value, attention_mask, scaling=scaling, **kwargs
        )
        return result
    return attend(query, key, value, mask, scale), None


def eager_attention(module: Any) -> Callable[..., Any]:
    """The model family's own reference attention."""
    found = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    if found is None:
        raise UnsupportedModelError(f"{type(module).__name__} has no attention function that can be called from outside")
    return found  # type: ignore[no-any-return]


AttentionInterface.register(ATTENTION_NAME, _kvboost_attention)


class ModelRunner:
    """Runs passes of an unmodified model over a `RequestKV`."""

    def __init__(self, model: Any, spec: ModelSpec) -> None:
        self.model, self.spec = model, spec
        self.decoder = model.get_decoder()
        self._cache_arg = _cache_arg(model)
        self._decoder_cache_arg = _cache_arg(self.decoder)
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
        cache: Cache,
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
        inputs = {"input_ids": ids[None], "position_ids": positions[None], "attention_mask": argument, "use_cache": True}
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

    def generate(self, ids: torch.Tensor, prefill: Any, cache: Cache, generation_config: Any, **kwargs: Any) -> Any:
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
            return transformers.modeling_outputs.CausalLMOutputWithPast(
                logits=pending.pop()[None, None], **{self._cache_arg: cache}
            )

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


def generation_settings(model: Any, tokenizer: Any, sampling: SamplingParams, room: int) -> Any:
    """A transformers `GenerationConfig`: the model's own, overridden by what the caller set.

    Args:
        model: its ``generation_config`` gives the defaults.
        tokenizer: its end-of-sequence token also ends an answer; may be None.
        sampling: the caller's wishes.
        room: tokens that fit the window behind the prompt.
    """
    config = copy.deepcopy(model.generation_config)
    eos = config.eos_token_id
    ends = [] if eos is None else list(eos) if isinstance(eos, (list, tuple)) else [eos]
    extra = None if tokenizer is None else tokenizer.eos_token_id
    if extra is not None and extra not in ends:
        ends.append(extra)
    config.eos_token_id = ends or None
    if config.pad_token_id is None:
        config.pad_token_id = ends[0] if ends else 0
    config.max_new_tokens = max(1, min(sampling.max_tokens, room))
    config.max_length = config.min_length = config.min_new_tokens = None
    config.num_beams = config.num_return_sequences = 1
    config.return_dict_in_generate = False
    config.use_cache = True
    config.do_sample = sampling.temperature > 0
    config.temperature = sampling.temperature if config.do_sample else None
    for name in ("top_p", "top_k", "min_p"):
        value = getattr(sampling, name)
        if not config.do_sample:
            setattr(config, name, None)
        elif value is not None:
            setattr(config, name, value)
    if sampling.repetition_penalty is not None:
        config.repetition_penalty = sampling.repetition_penalty
    return config
