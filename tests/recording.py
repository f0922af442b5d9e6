"""Real tiny engines that note what they are asked, and answers whose tokens a test decides."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from kvboost_rag import Engine, EngineConfig, SamplingParams
from tests.chat_tokenizers import MAKERS
from tests.tiny import SETTINGS, new_model, tokenizer_of

WINDOW = 4096  # tiny tokenizers write a tool in a few hundred tokens


class Says:
    """A logits processor that wants given ids, whatever the model would like best. Grammars behind it still rule.

    Args:
        ids: of the answer.
    """

    def __init__(self, ids: Sequence[int]) -> None:
        self._ids = list(ids)
        self._start: int | None = None

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if self._start is None:
            self._start = input_ids.shape[1]
        at = input_ids.shape[1] - self._start
        wanted = scores.clone()
        if at < len(self._ids):
            wanted[0, self._ids[at]] = scores.max() + 1e3
        return wanted


class RecordingEngine(Engine):
    """An engine that notes what it is asked.

    Attributes:
        asked: prompt and options of every request.
        says: text of the next answers, marker tokens and all; None lets the model decide.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.asked: list[tuple[Any, dict[str, Any]]] = []
        self.says: str | None = None
        super().__init__(*args, **kwargs)

    @property
    def prompt(self) -> Any:
        return self.asked[-1][0]

    @property
    def options(self) -> dict[str, Any]:
        return self.asked[-1][1]

    @property
    def sampling(self) -> SamplingParams:
        return self.options["sampling"]

    @property
    def ids(self) -> list[int]:
        """Of the last prompt."""
        return self.tokenize(self.prompt, tools=self.options.get("tools"))

    @property
    def text(self) -> str:
        """The last prompt, rendered."""
        return self.tokenizer.decode(self.ids)

    def generate(self, prompt: Any, **options: Any) -> Any:
        return super().generate(prompt, **self._noted(prompt, options))

    def stream(self, prompt: Any, **options: Any) -> Any:
        return super().stream(prompt, **self._noted(prompt, options))

    async def agenerate(self, prompt: Any, **options: Any) -> Any:
        return await super().agenerate(prompt, **self._noted(prompt, options))

    def astream(self, prompt: Any, **options: Any) -> Any:
        return super().astream(prompt, **self._noted(prompt, options))

    def _noted(self, prompt: Any, options: dict[str, Any]) -> dict[str, Any]:
        self.asked.append((prompt, options))
        if self.says is None:
            return options
        ids = [*self.tokenizer(self.says, add_special_tokens=False)["input_ids"], self.tokenizer.eos_token_id]
        sampling: SamplingParams = options.get("sampling") or SamplingParams()
        said = dataclasses.replace(sampling, logits_processors=(Says(ids), *sampling.logits_processors))
        return {**options, "sampling": said}


def recording(tokenizer: Any = None, *, model: Any = None, window: int = WINDOW, **config: Any) -> RecordingEngine:
    """A recording engine on a tiny model.

    Args:
        tokenizer: a name of `chat_tokenizers.MAKERS`, or a tokenizer; the one of `tiny` by default.
        model: a fresh one by default.
        window: context window of the fresh one.
        config: of the engine, over those of `tiny.engine_of`.
    """
    chosen = MAKERS[tokenizer]() if isinstance(tokenizer, str) else tokenizer or tokenizer_of()
    if model is None:
        width = -(-len(chosen) // 8) * 8
        model = new_model("llama", vocab_size=width, max_position_embeddings=window)
    return RecordingEngine(model, chosen, EngineConfig(**{**SETTINGS, **config}))
