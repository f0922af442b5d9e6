"""Arm: the `kvboost` package of the package registry, loaded in float32 like every other arm.

    python kvboost_package.py '{"model": "folder", "engine": {"recompute_strategy": "cacheblend"}}'

Its `from_pretrained` always loads float16, which CPUs run slowly; its engine also takes a loaded model, and gets one.
Its own `ttft_ms` starts after its repair has run; here the clock starts at the call and stops when its `on_token`
callback has the first token.
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
import warnings
from collections.abc import Sequence
from typing import Any

import torch
import transformers
from serve import Clock, First, private_stdout, serve
from transformers import AutoModelForCausalLM, AutoTokenizer


class KVBoostPackage:
    """The package's engine; documents are warmed one by one with its `warm`."""

    def __init__(self, model: str, engine: dict[str, Any]) -> None:
        from kvboost import KVBoost

        torch.set_num_threads(1)
        warnings.simplefilter("ignore")  # it uses names that transformers is about to drop
        tokenizer = AutoTokenizer.from_pretrained(model)
        loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        self._settings = engine
        self._engine = KVBoost(model=loaded, tokenizer=tokenizer, device="cpu", **engine)

    def describe(self) -> dict[str, Any]:
        versions = f"kvboost {importlib.metadata.version('kvboost')}, transformers {transformers.__version__}"
        return {"version": f"{versions}, torch {torch.__version__}", "dtype": "float32", "settings": self._settings}

    def warm(self, texts: Sequence[str]) -> dict[str, Any]:
        chunks = sum(int(self._engine.warm(text).chunks_stored) for text in texts)
        return {"warmed": f"{len(texts)} documents by its warm(), {chunks} chunks stored"}

    def ask(self, prompt: dict[str, Any], clock: Clock) -> First:
        tokens: list[int] = []

        def emitted(token: int) -> None:
            clock.first_token()
            tokens.append(token)

        done = self._engine.generate(prompt["text"], max_new_tokens=1, on_token=emitted)
        return First(tokens[0], done.prompt_tokens, done.cached_tokens, done.ttft_ms / 1e3)


if __name__ == "__main__":
    replies = private_stdout()
    serve(KVBoostPackage(**json.loads(sys.argv[1])), replies)
