"""Arm: kvboost-rag with its default configuration; documents are warmed as a user who ingests a store does.

python ours.py '{"model": "folder"}'
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from serve import Clock, First, private_stdout, serve

sys.path.append(str(Path(__file__).resolve().parents[1]))

import torch
from common import ingest
from workload import Passage

from kvboost_rag import Engine, SamplingParams


class Ours:
    """An engine as `Engine.from_pretrained(model)` gives it, on one torch thread."""

    def __init__(self, model: str) -> None:
        torch.set_num_threads(1)
        self._engine = Engine.from_pretrained(model, dtype=torch.float32)

    def describe(self) -> dict[str, Any]:
        return {"version": f"kvboost-rag of this checkout, torch {torch.__version__}", "dtype": "float32"}

    def warm(self, texts: Sequence[str]) -> dict[str, Any]:
        ingest(self._engine, [Passage("", text) for text in texts], seed=0)
        return {"warmed": f"{len(texts)} documents by engine.warm"}

    def ask(self, prompt: dict[str, Any], clock: Clock) -> First:
        for delta in self._engine.stream(prompt["messages"], sampling=SamplingParams(max_tokens=1)):
            clock.first_token()  # the first delta is emitted before anything of the prompt is stored
            generation = delta.generation
        usage = generation.usage
        reused = usage.exact_tokens + usage.approximate_tokens
        return First(generation.token_ids[0], usage.prompt_tokens, reused, generation.timing.ttft_s)


if __name__ == "__main__":
    replies = private_stdout()
    serve(Ours(**json.loads(sys.argv[1])), replies)
