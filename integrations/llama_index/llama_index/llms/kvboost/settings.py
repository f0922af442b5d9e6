"""LlamaIndex's global settings: a model and its tokenizer belong together."""

from __future__ import annotations

from llama_index.core import Settings

from .base import KVBoost


def configure_settings(llm: KVBoost) -> KVBoost:
    """Make a model LlamaIndex's default, and count tokens with its own tokenizer.

    With the model alone, LlamaIndex counts with another model's tokenizer: prompts are then packed too full or too
    loosely, and documents that would fit are split, so that their KV is not found.

    Example:
        >>> llm = configure_settings(KVBoost(model="HuggingFaceTB/SmolLM2-135M-Instruct"))

    Returns:
        The model.
    """
    Settings.llm = llm
    Settings.tokenizer = llm.get_token_ids
    return llm
