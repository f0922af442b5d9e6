"""Random tiny models of many families, a tiny tokenizer with a chat template, and plain Hugging Face beside them."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from kvboost_rag import Engine, EngineConfig, Prefill

VOCAB = 360
WINDOW = 512  # context window
SLIDING = 24  # much shorter than the prompts of the tests
LIMIT = 1e-3  # of logit differences, relative to the scale of the logits
ORIGINAL = 64  # where length-dependent rotary frequencies begin to change

# The yarn and long-rope configs warn about factors that only matter to a trained model.
transformers.logging.set_verbosity_error()

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": WINDOW,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": ORIGINAL}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": ORIGINAL,
}
_LONG = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0 + i / 8 for i in range(8)],
    "long_factor": [2.0 + i for i in range(8)],
    "original_max_position_embeddings": ORIGINAL,
}
_MOE = {"num_local_experts": 4, "num_experts_per_tok": 2}
_BAND = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "sliding_window": SLIDING}

# Name → (class, what differs from the common config).
SERVED: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}),
    "llama-llama3": ("Llama", {"rope_parameters": _LLAMA3}),
    "llama-yarn": ("Llama", {"rope_parameters": _YARN}),  # scales cos and sin
    "qwen2": ("Qwen2", {}),  # q, k, v biases
    "qwen2-sliding": ("Qwen2", {"use_sliding_window": True, "max_window_layers": 1, "sliding_window": SLIDING}),
    "qwen3": ("Qwen3", {}),  # norms of q and k
    "mistral": ("Mistral", {"sliding_window": SLIDING}),
    "mixtral": ("Mixtral", _MOE),
    "gemma": ("Gemma", {}),
    "gemma2": ("Gemma2", {**_BAND, "query_pre_attn_scalar": 16, "attn_implementation": "eager"}),  # soft caps
    "gemma3": ("Gemma3", {**_BAND, "query_pre_attn_scalar": 16}),  # two rotary bases
    "phi3": ("Phi3", {"sliding_window": SLIDING}),  # fused q, k, v
    "phi": ("Phi", {"partial_rotary_factor": 0.5}),  # layers in parallel, partial rotary, biases
    "stablelm": ("StableLm", {"partial_rotary_factor": 0.5}),
    "gpt-neox": ("GPTNeoX", {"num_key_value_heads": 4}),  # a quarter of the head is rotary
    "glm": ("Glm", {"partial_rotary_factor": 0.5}),  # interleaved and partial
    "cohere": ("Cohere", {"logit_scale": 1.0}),  # interleaved
    "cohere2": ("Cohere2", {**_BAND, "logit_scale": 1.0}),  # full layers without positions
    "olmo2": ("Olmo2", {}),
    "smollm3": ("SmolLM3", {"no_rope_layer_interval": 2}),  # a layer without positions
    "gpt-oss": ("GptOss", {**_BAND, **_MOE, "rope_parameters": _YARN, "attn_implementation": "eager"}),  # sinks
}
# Exact reuse up to the original length only.
LENGTH_DEPENDENT: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-dynamic": (
        "Llama",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
         "max_position_embeddings": ORIGINAL},
    ),
    "phi3-longrope": ("Phi3", {"rope_parameters": _LONG, "original_max_position_embeddings": ORIGINAL}),
}  # fmt: skip
# Positions that are no rotary embedding.
UNMOVABLE: dict[str, tuple[str, dict[str, Any]]] = {
    "bloom": ("Bloom", {"n_layer": 3, "n_head": 4}),
    "gpt2": ("GPT2", {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": WINDOW}),
}
# Attention of the model's own making.
PECULIAR: dict[str, tuple[str, dict[str, Any]]] = {
    "mpt": ("Mpt", {"d_model": 64, "n_layers": 3, "n_heads": 4, "max_seq_len": WINDOW}),
    "doge": ("Doge", {}),
    "jetmoe": ("JetMoe", {}),
}
# State that is not one K and one V per token.
STATEFUL: dict[str, tuple[str, dict[str, Any]]] = {
    "lfm2": ("Lfm2", {"layer_types": ["full_attention", "conv", "full_attention"]}),
    "qwen3-next": (
        "Qwen3Next",
        {"layer_types": ["full_attention", "linear_attention", "full_attention"], "linear_key_head_dim": 16,
         "linear_value_head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 2, "num_experts": 4,
         "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32},
    ),
    "mamba": ("Mamba", {"state_size": 8}),
}  # fmt: skip
_ALL = {**SERVED, **LENGTH_DEPENDENT, **UNMOVABLE, **PECULIAR, **STATEFUL}
_HEADS = {"GPT2": "GPT2LMHeadModel"}
_CONFIGS = {"Gemma3": "Gemma3TextConfig"}


def new_model(name: str, *, seed: int = 0, **changes: Any) -> Any:
    """A fresh random model that the test may change."""
    family, own = _ALL[name]
    config_class = getattr(transformers, _CONFIGS.get(family, f"{family}Config"))
    model_class = getattr(transformers, _HEADS.get(family, f"{family}ForCausalLM"))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config_class(**{**_COMMON, **own, **changes})).eval()
        for parameter in model.parameters():
            if parameter.dim() == 1:  # biases start at 0 and norms at 1: neither would show when it is left out
                parameter.data += 0.3 * torch.randn_like(parameter)
            parameter.requires_grad_(False)
    model.generation_config.eos_token_id = None
    return model


@functools.cache
def model_of(name: str) -> Any:
    """The family's model, shared by the tests; nobody may change it."""
    return new_model(name)


WORDS = (
    "river stone paper winter garden engine copper signal market valley window letter orange silver forest harbor "
    "butter candle meadow pocket rocket saddle timber velvet walnut yellow"
).split()
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@functools.cache
def tokenizer_of(fewer_merges: int = 0) -> PreTrainedTokenizerFast:
    """Byte-level BPE over `WORDS`, with ChatML markers; fewer merges give another tokenizer of the same texts."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB - fewer_merges,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[AddedToken(t, special=True) for t in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")],
        show_progress=False,
    )
    backend.train_from_iterator([text(seed, 200) for seed in range(4)], trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", bos_token=None)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def text(seed: int, words: int) -> str:
    """Random sentences; two seeds share no run long enough to be found."""
    draw = random.Random(seed)
    parts = [draw.choice(WORDS) + (". " if i % 7 == 6 else "\n\n" if i % 31 == 30 else " ") for i in range(words)]
    return "".join(parts).strip() + "."


def random_ids(seed: int, tokens: int) -> list[int]:
    """Ids of ordinary tokens (the first three are markers)."""
    draw = random.Random(seed)
    return [draw.randrange(3, VOCAB) for _ in range(tokens)]


def prompt_of(documents: Sequence[str], *, preamble: str = "Read this.", question: str = "Which river?") -> str:
    """Documents between a preamble and a question."""
    return "\n\n".join([preamble, *documents, question])


SETTINGS: dict[str, Any] = {
    "fallback": False,
    "pack_tokens": 0,
    "repair_least_tokens": 0,
    "repair_whole_passages": 0,
    "calibration_dir": None,
}


def engine_of(model: Any = "llama", tokenizer: Any = "default", **config: Any) -> Engine:
    """An engine on a tiny model.

    Without the cost model, which would always rather compute a tiny model's prompt, and with each document encoded
    alone, so that a test knows what its keys have seen.
    """
    chosen = tokenizer_of() if tokenizer == "default" else tokenizer
    settings = EngineConfig(**{**SETTINGS, **config})
    return Engine(model_of(model) if isinstance(model, str) else model, chosen, settings)


@torch.inference_mode()
def plain_logits(model: Any, ids: Sequence[int]) -> torch.Tensor:
    """Logits of the last token by plain Hugging Face, float32 ``(vocab,)``."""
    logits: torch.Tensor = model(input_ids=torch.tensor([list(ids)]), use_cache=False).logits[0, -1].float()
    return logits


def plain_answer(model: Any, ids: Sequence[int], tokens: int, **options: Any) -> list[int]:
    """Greedy continuation by plain Hugging Face, up to the tokenizer's end of sequence."""
    prompt = torch.tensor([list(ids)])
    options = {"do_sample": False, "pad_token_id": 0, "eos_token_id": tokenizer_of().eos_token_id, **options}
    out = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=tokens, **options)
    answer: list[int] = out[0, len(ids) :].tolist()
    return answer


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """Largest difference of two logit vectors, relative to the scale of the second."""
    return float((a - b).abs().max() / b.abs().max().clamp_min(1.0))


def off_by(engine: Engine, prefill: Prefill) -> float:
    """How far a prefill's logits are from those of plain Hugging Face."""
    return difference(prefill.logits, plain_logits(engine.model, prefill.token_ids))


def kl(full: torch.Tensor, other: torch.Tensor) -> float:
    """KL of `other` from `full`, nats."""
    p, q = torch.log_softmax(full.double(), -1), torch.log_softmax(other.double(), -1)
    return float((p.exp() * (p - q)).sum())


class Forwards:
    """Counts what a model runs, layer by layer, while the block is entered.

    Attributes:
        rows: tokens of each pass through the first layer.
    """

    def __init__(self, model: Any, *, each: Callable[[int], None] | None = None) -> None:
        self._model, self._each = model, each
        self.rows: list[int] = []

    def __enter__(self) -> Forwards:
        self._handle = self._model.get_decoder().layers[0].register_forward_pre_hook(self._note, with_kwargs=True)
        return self

    def __exit__(self, *exc: object) -> None:
        self._handle.remove()

    def _note(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden = args[0] if args else kwargs["hidden_states"]
        self.rows.append(hidden.shape[1])
        if self._each is not None:
            self._each(len(self.rows))
