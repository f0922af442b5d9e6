"""Real engines on tiny models whose words a test may decide, and a small corpus to ask about.

A tiny model cannot choose a tool. The script stands in for its choice only: prompts, reuse, grammars and the reading of
answers are those of the engine.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Sequence
from typing import Any
from zlib import crc32

import numpy as np
import torch
from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.messages import AIMessage, BaseMessage

from kvboost_rag import Engine, EngineConfig, SamplingParams
from kvboost_rag.tools import Dialect, ToolCall
from kvboost_rag.tools.prompting import write_calls
from tests.chat_tokenizers import MAKERS
from tests.tiny import new_model

Step = str | list[ToolCall] | None

_FACTS = {
    "lighthouse": "The lighthouse of Vell was built in 1872 by Mara Osk. Its lamp burns whale oil and can be seen for "
    "thirty miles. The keeper climbs two hundred and eleven steps every evening to light the lamp.",
    "harbour": "The harbour of Vell opens at six in the morning and closes when the tide turns. Ships that arrive late "
    "wait outside the mole until the next day. The harbour master keeps the list of berths.",
    "market": "The market of Vell is held on Thursdays in the square behind the church. Farmers sell cheese, apples "
    "and wool there, and the brewer sells a dark beer that is made only in autumn.",
    "school": "The school of Vell has forty pupils and two teachers. Lessons begin at eight and end at noon, and in "
    "the last week of May the pupils paint the boats of the fishermen.",
}
DOCUMENTS = [Document(id=name, page_content=text, metadata={"source": name}) for name, text in _FACTS.items()]


class WordEmbeddings(Embeddings):
    """Unit vectors of hashed words: texts that share words are near."""

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        return [self.embed_query(text) for text in texts]

    def embed_query(self, text: str) -> list[float]:
        vector = np.zeros(256)
        for word in re.findall(r"\w{4,}", text.lower()):
            vector[crc32(word.encode()) % 256] += 1
        unit: list[float] = (vector / max(1.0, float(np.linalg.norm(vector)))).tolist()
        return unit


def call(name: str, **arguments: Any) -> list[ToolCall]:
    """A step of a script: a call of a tool. Add two for two calls in one answer."""
    return [ToolCall("", name, arguments)]


class ScriptedEngine(Engine):
    """An engine that notes its prompts and says what it is told to.

    Attributes:
        script: what the next answers say: text, or calls, or None for the model's own words. Empty: its own words.
        prompts: the prompts so far, rendered.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.script: list[Step] = []
        self.prompts: list[str] = []
        super().__init__(*args, **kwargs)

    def tokens(self, text: str) -> int:
        """How many tokens a text has."""
        return len(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def generate(self, prompt: Any, **options: Any) -> Any:
        return super().generate(prompt, **self._scripted(prompt, options))

    def stream(self, prompt: Any, **options: Any) -> Any:
        return super().stream(prompt, **self._scripted(prompt, options))

    async def agenerate(self, prompt: Any, **options: Any) -> Any:
        return await super().agenerate(prompt, **self._scripted(prompt, options))

    def astream(self, prompt: Any, **options: Any) -> Any:
        return super().astream(prompt, **self._scripted(prompt, options))

    def _scripted(self, prompt: Any, options: dict[str, Any]) -> dict[str, Any]:
        self.prompts.append(self.tokenizer.decode(self.tokenize(prompt, tools=options.get("tools"))))
        step = self.script.pop(0) if self.script else None
        if step is None:
            return options
        text = step if isinstance(step, str) else write_calls(step, Dialect(self.model, self.tokenizer).format)
        ids = [*self.tokenizer(text, add_special_tokens=False)["input_ids"], self.tokenizer.eos_token_id]
        sampling: SamplingParams = options["sampling"]
        assert len(ids) <= sampling.max_tokens, f"the script's answer has {len(ids)} tokens"
        # In front of a grammar's processor, which may still forbid what the script wants.
        said = dataclasses.replace(sampling, logits_processors=(_Prefers(ids), *sampling.logits_processors))
        return {**options, "sampling": said}


class _Prefers:
    """A logits processor that wants one token after the other."""

    def __init__(self, ids: Sequence[int]) -> None:
        self._ids, self._prompt_tokens = ids, -1

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if self._prompt_tokens < 0:
            self._prompt_tokens = input_ids.shape[1]
        at = input_ids.shape[1] - self._prompt_tokens
        wanted = scores.clone()
        if at < len(self._ids):
            wanted[0, self._ids[at]] = scores.max() + 1e3
        return wanted


def scripted(family: str = "qwen2.5", *steps: Step, window: int = 8192, **config: Any) -> ScriptedEngine:
    """A fresh engine on a tiny model with the tokenizer and chat template of a family.

    Args:
        family: "qwen2.5" has a template that shows tools, "smollm2" one that does not.
        steps: the script.
        window: context window.
        config: of the engine; reuse is never declined as not worth it, as it would be for a model this small.
    """
    settings = {
        "selector": "deviation",
        "fallback": False,
        "pack_tokens": 0,
        "repair_least_tokens": 0,
        "repair_whole_passages": 0,
        **config,
    }
    engine = ScriptedEngine(_model(family, window), _tokenizer(family), EngineConfig(**settings))
    engine.script = list(steps)
    return engine


@functools.cache
def _tokenizer(family: str) -> Any:
    return MAKERS[family]()


@functools.cache
def _model(family: str, window: int) -> Any:
    width = -(-len(_tokenizer(family)) // 8) * 8
    return new_model("llama", vocab_size=width, max_position_embeddings=window, num_hidden_layers=2)


def reused(message: BaseMessage) -> int:
    """Prompt tokens that were not computed again."""
    assert isinstance(message, AIMessage)
    assert message.usage_metadata is not None
    return message.usage_metadata["input_token_details"]["cache_read"]


def prompt_tokens(message: BaseMessage) -> int:
    """All prompt tokens."""
    assert isinstance(message, AIMessage)
    assert message.usage_metadata is not None
    return message.usage_metadata["input_tokens"]
