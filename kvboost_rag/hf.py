"""The only file that imports transformers: loading, our cache layer, our attention, generation settings."""

from __future__ import annotations

import contextlib
import copy
import inspect as pyinspect
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    AttentionInterface,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
)
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils import logging

from .batching import CURRENT_BATCH, Batch
from .config import SamplingParams
from .errors import ConfigError, ModelLoadError, UnsupportedModelError
from .kv import EndOfPass, RequestKV
from .loading import check_gguf, check_memory, check_reachable, explaining, place_of
from .passes import CURRENT, PassMask, attend, attention_mass
from .progress import visible

ATTENTION_NAME = "kvboost_rag"
_DECODER = "give a decoder, such as 'HuggingFaceTB/SmolLM2-135M-Instruct'"


def load_pretrained(
    model: str,
    *,
    gguf_file: str | None = None,
    dtype: Any = "auto",
    device: Any = "auto",
    show_progress: bool = False,
    **hf: Any,
) -> tuple[Any, Any]:
    """Load model and tokenizer by hub id or folder; ``hf`` goes to ``from_pretrained``.

    Raises:
        ConfigError: what is meant as a folder is none, or holds no model.
        ModelLoadError: there is no such model, it is damaged, it is no decoder, or it does not fit the memory.
    """
    place = place_of(model, gguf_file)
    if gguf_file is not None:
        check_gguf(gguf_file)
    check_reachable(place, hf)
    names = ("revision", "token", "cache_dir", "trust_remote_code", "subfolder")
    shared: dict[str, Any] = {key: hf[key] for key in names if key in hf}
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    with explaining(place), _bars(show_progress):
        if gguf_file is not None:
            hf["gguf_file"] = shared["gguf_file"] = gguf_file
        elif "config" not in hf:
            hf["config"] = AutoConfig.from_pretrained(place, **shared)
        if (config := hf.get("config")) is not None:
            _must_be_a_decoder(place, config)
        if str(device) == "cpu" and "device_map" not in hf and "quantization_config" not in hf:
            check_memory(place, _dtype_in_memory(dtype, config), hf)
        tokenizer = AutoTokenizer.from_pretrained(place, **shared)
        both: Any = AutoModelForCausalLM.from_pretrained(place, dtype=dtype, output_loading_info=True, **hf)
    loaded, report = both
    if missing := sorted(report["missing_keys"]):
        raise ModelLoadError(
            f"{place} lacks {len(missing)} of the weights that an answer needs, such as {missing[0]}, and would talk "
            f"nonsense: it is an encoder, or was saved without its head; {_DECODER}"
        )
    if "device_map" not in hf:
        loaded = loaded.to(device)
    return loaded.eval(), tokenizer


def load_tokenizer(model: str) -> tuple[Any, Any]:
    """Tokenizer and configuration of a model by hub id or folder, without its weights.

    Returns:
        None for a configuration that is not there.

    Raises:
        ConfigError: there is no such folder.
        ModelLoadError: there is no such model on the hub, or its files cannot be read.
    """
    place = Path(model).expanduser()
    if not place.is_dir():
        model = place_of(model, None)
        check_reachable(model, {})
        with explaining(model):
            return AutoTokenizer.from_pretrained(model), AutoConfig.from_pretrained(model)
    with explaining(model):
        config = AutoConfig.from_pretrained(place) if (place / "config.json").is_file() else None
        return AutoTokenizer.from_pretrained(place), config


def _must_be_a_decoder(place: str, config: Any) -> None:
    """Refuse what transformers would load as a decoder, or refuse with a list of all there are."""
    masked = type(config) in MODEL_FOR_MASKED_LM_MAPPING and not getattr(config, "is_decoder", False)
    if masked or config.is_encoder_decoder or type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ModelLoadError(
            f"{place} is a {type(config).model_type or type(config).__name__} model, which does not continue text "
            f"token by token; {_DECODER}"
        )


def _dtype_in_memory(dtype: Any, config: Any) -> torch.dtype | None:
    """What weights become; None if each stays as it is stored."""
    asked = getattr(config, "dtype", None) if dtype in ("auto", None) else dtype
    found = getattr(torch, asked, None) if isinstance(asked, str) else asked
    quantised = getattr(config, "quantization_config", None) is not None
    return found if isinstance(found, torch.dtype) and not quantised else None


@contextlib.contextmanager
def _bars(show: bool) -> Iterator[None]:
    """Show or hide the bars of transformers, which are shown by default, also in the log of a server."""

    def hooked(make: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        return make(*args, **{**options, "disable": not (show and visible())})

    before = logging.set_tqdm_hook(hooked)
    try:
        yield
    finally:
        logging.set_tqdm_hook(before)


def cache_argument(model: Any) -> str:
    """Name under which the model takes its cache."""
    # transformers 5.24 renamed `past_key_values` to `cache`.
    parameters = pyinspect.signature(model.forward).parameters
    return "cache" if "cache" in parameters else "past_key_values"


def plain_cache() -> Any:
    """Hugging Face's own growing cache."""
    return DynamicCache()


def step_output(logits: torch.Tensor, cache_name: str, cache: Any) -> Any:
    """What a model returns from one step: logits ``(1, 1, vocab)`` and its cache."""
    return CausalLMOutputWithPast(logits=logits, **{cache_name: cache})


class SlotLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """One layer of a `RequestKV`, in the shape Hugging Face expects of a cache layer."""

    is_sliding = False
    is_croppable = True
    supports_early_init = False

    def __init__(self, kv: RequestKV, index: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
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
        self.renew()

    def renew(self) -> None:
        """Show what the block holds now: others may have appended to it."""
        self.keys, self.values = self._kv.view(self._index)


class BatchLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """One layer of the blocks of several requests, of which each takes one row."""

    is_sliding = False
    is_croppable = False
    supports_early_init = False

    def __init__(self, batch: Batch, index: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._batch, self._index = batch, index
        self.is_initialized = True
        block = batch.kvs[0].keys
        self.device, self.dtype = block.device, block.dtype

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: the blocks exist."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append each row to its request; our attention finds the keys there, and not in what this returns."""
        self._batch.update(self._index, key_states, value_states)
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Of the longest request."""
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        """Tokens of the longest request."""
        return max(kv.lengths[self._index] for kv in self._batch.kvs)

    def get_max_length(self) -> int:
        """No maximum: blocks grow."""
        return -1


def cache_over_batch(batch: Batch) -> Cache:
    """A Hugging Face cache that writes each row of a decode step into its own request."""
    return Cache(layers=[BatchLayer(batch, index) for index in range(len(batch.kvs[0].lengths))])


def decoding_experts(model: Any) -> contextlib.AbstractContextManager[Any]:
    """How a mixture of experts runs a decode step on this device."""
    if model.device.type == "cpu":  # nothing changes there
        return contextlib.nullcontext()
    return model._optimize_model_for_decode()  # type: ignore[no-any-return] # pragma: no cover - not tried on the development machines


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
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    unusual = kwargs.get("softcap") is not None or kwargs.get("s_aux") is not None
    if (batch := CURRENT_BATCH.get()) is not None:
        own = batch.fallback or (eager_attention(module) if unusual else None)
        return batch.attend(module, query, scale, own, **kwargs), None
    state = CURRENT.get()
    assert state is not None, "this attention only runs inside a pass of the engine"
    mask = None if attention_mask is None else state.masks.get(attention_mask.data_ptr())
    probe = state.probe
    if probe is not None and mask is not None and module.layer_idx in probe.layers:
        probe.mass[module.layer_idx] = attention_mass(query, key, mask, probe.rows, scale)
        if probe.ends_pass and len(probe.mass) == len(probe.layers):
            raise EndOfPass
    if state.fallback is not None or unusual or (mask is None and attention_mask is not None):
        run = state.fallback or eager_attention(module)
        plain = attention_mask if mask is None else mask.full()
        if plain is None:  # a full pass leaves causality to the attention, and this one knows none of its own
            rows = torch.arange(query.shape[2], device=query.device)
            plain = PassMask(rows, key.shape[2], window=None, hidden=None, groups=1, dtype=query.dtype).full()
        result: tuple[torch.Tensor, torch.Tensor | None] = run(
            module, query, key, value, plain, scaling=scaling, **kwargs
        )
        return result
    return attend(query, key, value, mask, scale), None


def eager_attention(module: Any) -> Callable[..., Any]:
    """The model family's own reference attention."""
    found = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    if found is None:
        name = type(module).__name__
        raise UnsupportedModelError(f"{name} has no attention function that can be called from outside")
    return found  # type: ignore[no-any-return]


AttentionInterface.register(ATTENTION_NAME, _kvboost_attention)


def stop_strings(model: Any, tokenizer: Any, sampling: SamplingParams) -> tuple[str, ...]:
    """The caller's stop strings and the model's own.

    Raises:
        ConfigError: there are some, but no tokenizer that could tell the text of an answer.
    """
    own = (model.generation_config.stop_strings if sampling.model_stops else None) or ()
    stops = (*sampling.stop, *((own,) if isinstance(own, str) else own))
    if stops and tokenizer is None:
        raise ConfigError(f"stop is {list(stops)!r}, but without a tokenizer an answer has no text; load a tokenizer")
    return stops


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
    config.max_length = None
    config.num_beams = config.num_return_sequences = 1
    config.return_dict_in_generate = False
    config.use_cache = True
    config.cache_implementation = None  # it runs on our cache
    config.stop_strings = None  # see `stop_strings`
    config.token_healing = False  # it would rewrite the prompt
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
