"""Arms: plain Hugging Face `generate`, and `generate` behind the longest prefix of any earlier prompt.

python hugging_face.py '{"model": "folder", "prefix": true, "budget_bytes": 2147483648}'
"""

from __future__ import annotations

import copy
import json
import sys
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
import transformers
from serve import Clock, First, private_stdout, serve
from transformers import AutoModelForCausalLM
from transformers.cache_utils import DynamicCache


class HuggingFace:
    """Greedy `generate`; with ``prefix``, over a copy of the cache of the prompt that agrees longest.

    This is what the Hugging Face guide calls prefix caching: prefill once, `copy.deepcopy` the cache, generate. Caches
    of earlier prompts are kept up to ``budget_bytes``, the least recently used leave first.
    """

    def __init__(self, model: str, *, prefix: bool, budget_bytes: int) -> None:
        torch.set_num_threads(1)
        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        self._prefix, self._budget_bytes = prefix, budget_bytes
        self._kept: OrderedDict[tuple[int, ...], DynamicCache] = OrderedDict()

    def describe(self) -> dict[str, Any]:
        return {"version": f"transformers {transformers.__version__}, torch {torch.__version__}", "dtype": "float32"}

    def warm(self, texts: Sequence[str]) -> dict[str, Any]:
        return {"warmed": "nothing: it learns from prompts only" if self._prefix else "nothing: it keeps nothing"}

    def ask(self, prompt: dict[str, Any], clock: Clock) -> First:
        ids = tuple(prompt["ids"])
        cache, reused = self._longest(ids) if self._prefix else (None, 0)
        full = torch.tensor([ids])
        out = self._model.generate(
            full,
            attention_mask=torch.ones_like(full),
            max_new_tokens=1,
            do_sample=False,
            pad_token_id=0,
            return_dict_in_generate=True,
            **({} if cache is None else {"cache": cache}),
        )
        token = int(out.sequences[0, -1])
        clock.first_token()
        if self._prefix:
            self._keep(ids, out.cache)
        return First(token, len(ids), reused)

    def _longest(self, ids: tuple[int, ...]) -> tuple[DynamicCache | None, int]:
        """A copy of the kept cache that agrees longest, cut to where it agrees; the last token always runs."""
        best = max(self._kept, key=lambda kept: common_prefix(kept, ids), default=None)
        length = 0 if best is None else min(common_prefix(best, ids), len(ids) - 1)
        if best is None or not length:
            return None, 0
        self._kept.move_to_end(best)
        cache = copy.deepcopy(self._kept[best])
        if len(best) > length:
            cache.crop(length - len(best))  # a negative count removes that many
        return cache, length

    def _keep(self, ids: tuple[int, ...], cache: DynamicCache) -> None:
        self._kept[ids] = cache
        self._kept.move_to_end(ids)
        while len(self._kept) > 1 and sum(map(_bytes, self._kept.values())) > self._budget_bytes:
            self._kept.popitem(last=False)


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """How many leading ids are equal."""
    for index, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return index
    return min(len(one), len(other))


def _bytes(cache: DynamicCache) -> int:
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)


if __name__ == "__main__":
    replies = private_stdout()
    serve(HuggingFace(**json.loads(sys.argv[1])), replies)
