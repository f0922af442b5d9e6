"""A GGUF file with exactly the weights of a Hugging Face folder, in float32, for the llama.cpp arms of `peers.py`.

Only what the benchmark's models need: the `llama` and `qwen2` architectures, plain RoPE, byte-level BPE tokenizers.
Prompts reach llama.cpp as token ids, so the tokenizer in the file only turns ids back into text.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors import safe_open

ARCHITECTURES = {"llama": gguf.MODEL_ARCH.LLAMA, "qwen2": gguf.MODEL_ARCH.QWEN2}


class ConversionError(Exception):
    """The folder holds a model that this small converter does not know."""


def float32_file(model: Path, cache: Path) -> Path:
    """The GGUF file of a model folder below ``cache``; written once, and again when the weights change.

    Raises:
        ConversionError: the architecture, its positions or its tokenizer are not among the known ones.
    """
    weights = sorted(model.glob("*.safetensors"))
    if not weights:
        raise ConversionError(f"{model} holds no safetensors; name a folder that `make demo` could use")
    newest = max(path.stat().st_mtime_ns for path in weights)
    target = cache / f"{model.name}-{newest:x}-f32.gguf"
    if target.is_file():
        return target
    cache.mkdir(parents=True, exist_ok=True)
    descriptor, scratch = tempfile.mkstemp(prefix=".gguf-", dir=cache)
    os.close(descriptor)
    try:
        _write(model, weights, Path(scratch))
        Path(scratch).replace(target)
    finally:
        Path(scratch).unlink(missing_ok=True)
    return target


def _write(model: Path, weights: list[Path], target: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    kind = config["model_type"]
    rope = config.get("rope_parameters") or {"rope_type": "default", "rope_theta": config.get("rope_theta", 1e4)}
    if kind not in ARCHITECTURES or rope.get("rope_type", "default") != "default" or config.get("use_sliding_window"):
        raise ConversionError(
            f"model type {kind!r} with {rope.get('rope_type')!r} positions: only {', '.join(ARCHITECTURES)} with "
            "default positions and full attention are converted; leave out the llama.cpp arms for it (--arms)"
        )
    writer = gguf.GGUFWriter(target, kind)
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    _add_tokenizer(writer, model, config)
    names = gguf.get_tensor_name_map(ARCHITECTURES[kind], config["num_hidden_layers"])
    for name, values in _tensors(weights):
        if name == "lm_head.weight" and config.get("tie_word_embeddings"):
            continue
        if kind == "llama" and (".q_proj." in name or ".k_proj." in name):
            values = interleaved(values, heads if ".q_proj." in name else kv_heads)
        mapped = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if mapped is None:
            raise ConversionError(f"tensor {name!r} has no name in GGUF; leave out the llama.cpp arms (--arms)")
        writer.add_tensor(mapped, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def interleaved(weight: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Rows ``(heads · head_dim, …)`` from Hugging Face's half-split rotary order to llama.cpp's pairs."""
    rows, *rest = weight.shape
    split = weight.reshape(heads, 2, rows // heads // 2, *rest)
    return np.ascontiguousarray(split.swapaxes(1, 2).reshape(weight.shape))


def _tensors(weights: list[Path]) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    for path in weights:
        with safe_open(path, framework="pt") as file:  # numpy cannot read bfloat16
            for name in file.keys():
                yield name, file.get_tensor(name).float().numpy()


def _add_tokenizer(writer: gguf.GGUFWriter, model: Path, config: dict[str, Any]) -> None:
    data = json.loads((model / "tokenizer.json").read_text())
    if data["model"]["type"] != "BPE" or data["model"].get("byte_fallback"):
        raise ConversionError(f"{model.name} has no byte-level BPE tokenizer; leave out the llama.cpp arms (--arms)")
    texts = {index: token for token, index in data["model"]["vocab"].items()}
    types = dict.fromkeys(texts, gguf.TokenType.NORMAL)
    for added in data["added_tokens"]:
        texts[added["id"]] = added["content"]
        types[added["id"]] = gguf.TokenType.CONTROL if added["special"] else gguf.TokenType.USER_DEFINED
    ids = range(config["vocab_size"])
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in data["model"]["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([texts.get(index, f"[PAD{index}]") for index in ids])
    writer.add_token_types([types.get(index, gguf.TokenType.UNUSED) for index in ids])
    writer.add_token_merges(merges)
    if config.get("bos_token_id") is not None:
        writer.add_bos_token_id(config["bos_token_id"])
    if isinstance(config.get("eos_token_id"), int):
        writer.add_eos_token_id(config["eos_token_id"])
    writer.add_add_bos_token(False)
