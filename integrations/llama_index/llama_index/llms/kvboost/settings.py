"""LlamaIndex's global settings: a model and its tokenizer belong together."""

from __future__ import annotations

from llama_index.core import Settings

from kvboost_rag import ConfigError

from .base import KVBoost


def configure_settings(llm: KVBoost) -> KVBoost:
    """Make a model LlamaIndex's default, and count tokens with its own tokenizer.

    With the model alone, LlamaIndex counts with another model's tokenizer: prompts are then packed too full or too
    loosely, and documents that would fit are split, so that their KV is not found.

    Example:
        >>> llm = configure_settings(KVBoost(model="HuggingFaceTB/SmolLM2-135M-Instruct"))

    Returns:
        The model.

    Raises:
        ConfigError: it is none.
    """
    if not isinstance(llm, KVBoost):
        raise ConfigError(
            f"llm is a {type(llm).__name__}; give a KVBoost, as in configure_settings(KVBoost(engine=engine))"
        )
    Settings.llm = llm
    Settings.tokenizer = llm.get_token_ids
    return llm
