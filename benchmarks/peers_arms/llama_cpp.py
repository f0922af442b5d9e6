"""Arm: llama.cpp's server inside a packaged build (`xllamacpp`), one slot, prompt cache and cache reuse on.

    python llama_cpp.py '{"model": "file.gguf", "cache_reuse_tokens": 64, "context_tokens": 4096, "cache_mib": 2048}'

The server runs inside this process, without a socket, so the process's CPU seconds are its own. Prompts are token ids:
its own tokenizer does not run.
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import xllamacpp
from serve import Clock, First, private_stdout, serve


class LlamaCpp:
    """`llama-server --parallel 1 --threads 1 --cache-reuse N`; everything else as the build has it by default."""

    def __init__(self, model: str, *, cache_reuse_tokens: int, context_tokens: int, cache_mib: int) -> None:
        params = xllamacpp.CommonParams()
        params.model.path = model
        params.n_ctx = context_tokens
        params.n_parallel = 1
        params.n_cache_reuse = cache_reuse_tokens
        params.cache_ram_mib = cache_mib
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
        params.verbosity = 1
        self._file, self._cache_reuse_tokens = Path(model).name, cache_reuse_tokens
        self._server = xllamacpp.Server(params)

    def describe(self) -> dict[str, Any]:
        return {
            "version": f"xllamacpp {importlib.metadata.version('xllamacpp')}",
            "file": self._file,
            "cache_reuse_tokens": self._cache_reuse_tokens,
            "build": xllamacpp.get_system_info().strip(),
        }

    def warm(self, texts: Sequence[str]) -> dict[str, Any]:
        return {"warmed": "nothing: it learns from prompts only"}

    def ask(self, prompt: dict[str, Any], clock: Clock) -> First:
        request = {"prompt": prompt["ids"], "n_predict": 1, "temperature": 0, "cache_prompt": True, "n_probs": 1}
        done = self._server.handle_completions(request)
        clock.first_token()
        timings = done["timings"]
        ran, given = timings["cache_n"] + timings["prompt_n"], len(prompt["ids"])
        if ran != given:
            raise RuntimeError(f"llama.cpp ran {ran} prompt tokens of the {given} it was given")
        token = done["choices"][0]["logprobs"]["content"][0]["id"]
        return First(token, ran, timings["cache_n"], (timings["prompt_ms"] + timings["predicted_ms"]) / 1e3)


if __name__ == "__main__":
    replies = private_stdout()
    serve(LlamaCpp(**json.loads(sys.argv[1])), replies)
