"""Which codecs a model can bear: measured once per model on built-in text, remembered, refused where it loses too much.

Some models answer from keys and values in 4 bits as from full ones, others fall apart (a Qwen2.5-7B scored 0 of 120
where a Mistral scored 84 of 84). Nothing in their configs tells which, so every lossy codec is tried at load: documents
are put through the codec where they stand in a prompt, and the answer is compared with the one from their full KV.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .calibration import ANSWER_TOKENS, read_scores, write_scores
from .calibration_text import ORDERS, PASSAGES, PROMPT, QUESTIONS
from .chunks import IntArray, as_ids
from .config import EngineConfig, KVBits
from .errors import UnsupportedModelError
from .kv import StoredRun
from .model_spec import ModelSpec
from .planner import Plan, Segment, make_plan
from .prefill import Executor
from .prompts import PromptEncoder
from .repair import Recipe
from .store import Codec

LIMIT = 0.01  # of what the documents change in an answer
LEAST_KL = 0.1  # nats; documents that change less tell nothing about a share of it
_MILDER: dict[KVBits, KVBits] = {4: "8/4", "8/4": 8, 8: 16}


@dataclass(frozen=True, slots=True)
class CodecCheck:
    """What a codec costs on this model.

    Attributes:
        codec: its name.
        kl: mean KL of answers from encoded documents to those from full KV, nats.
        nothing_kl: the same for answers without documents.
        limit: of `loss`.
    """

    codec: str
    kl: float
    nothing_kl: float
    limit: float = LIMIT

    @property
    def loss(self) -> float:
        """Share of the documents' effect on the answer that the codec undoes."""
        return self.kl / max(self.nothing_kl, LEAST_KL)


def check_rotation(spec: ModelSpec, kv_bits: KVBits) -> None:
    """Refuse a codec whose keys could not be turned back.

    Raises:
        UnsupportedModelError: the rotary frequencies depend on the length of the prompt.
    """
    if spec.static_rope_tokens is not None:
        raise UnsupportedModelError(
            f"kv_bits is {kv_bits!r}, which stores keys without their rotation, but the rotary frequencies of this "
            "model depend on the prompt length (dynamic NTK or long-rope); use EngineConfig(kv_bits=16, reuse='exact')",
            layer=0,
        )


def check_codec(
    executor: Executor, encoder: PromptEncoder | None, config: EngineConfig, codec: Codec, identity: str
) -> CodecCheck:
    """Measure what a codec loses, or remember it from an earlier load.

    Args:
        executor: runs the model.
        encoder: tokenises the built-in text; without a tokenizer, numbers take its place.
        config: `calibration_dir`.
        codec: the one to try.
        identity: of model and codec.

    Raises:
        UnsupportedModelError: it loses more than the limit.
    """
    folder = config.calibration_dir
    path = None if folder is None else Path(folder).expanduser() / f"{identity}-codec.json"
    scores = read_scores(path, {"kl", "nothing_kl"})
    if scores is None:
        check = measure_codec(executor, encoder, codec)
        write_scores(path, {"kl": check.kl, "nothing_kl": check.nothing_kl})
    else:
        check = CodecCheck(codec.name, scores["kl"], scores["nothing_kl"])
    if not check.loss <= check.limit:
        raise UnsupportedModelError(
            f"kv_bits={config.kv_bits!r} takes {check.loss:.2g} of what documents change in this model's answers (KL "
            f"{check.kl:.2g} nats on built-in text), the limit is {check.limit:g}; use "
            f"kv_bits={_MILDER[config.kv_bits]!r}"
        )
    return check


def measure_codec(executor: Executor, encoder: PromptEncoder | None, codec: Codec) -> CodecCheck:
    """What a codec costs on the built-in text, or on numbers where there is no tokenizer."""
    prompts = _prompts(executor.runner.spec, encoder)
    kl = nothing_kl = 0.0
    for prompt in prompts:
        encoded, nothing = _divergences(executor, prompt, codec)
        kl, nothing_kl = kl + encoded / len(prompts), nothing_kl + nothing / len(prompts)
    return CodecCheck(codec.name, kl, nothing_kl)


@dataclass(frozen=True, slots=True)
class _Prompt:
    """Ids, and where its documents lie; without them it is the control."""

    ids: IntArray
    documents: tuple[tuple[int, int], ...]


def _prompts(spec: ModelSpec, encoder: PromptEncoder | None) -> list[_Prompt]:
    room = spec.window_tokens - ANSWER_TOKENS
    made = []
    for order, question in zip(ORDERS, QUESTIONS, strict=True):
        if encoder is None:
            texts = [_numbers(spec, 80, PASSAGES[i]) for i in order]
            before, after = _numbers(spec, 4, "before"), _numbers(spec, 16, question)
        else:
            texts = [encoder.encode_text(PASSAGES[i] + "\n\n") for i in order]
            head, tail = PROMPT.split("{context}")
            before, after = encoder.encode(head), encoder.encode_text(tail.format(question=question))
        # A short window gets the beginnings of the passages.
        most = max((room - len(before) - len(after)) // len(texts), 1)
        texts = [text[:most] for text in texts]
        ends = np.cumsum([len(before), *map(len, texts)]).tolist()
        ids = as_ids(np.concatenate([before, *texts, after]))
        made.append(_Prompt(ids, tuple(itertools.pairwise(ends))))
    return made


def _numbers(spec: ModelSpec, count: int, seed: str) -> IntArray:
    start = sum(map(ord, seed))
    return as_ids([(start + 7919 * i * i + 104729 * i) % spec.vocab for i in range(count)])


def _divergences(executor: Executor, prompt: _Prompt, codec: Codec) -> tuple[float, float]:
    """KL of the answer from encoded documents, and of that from none, to the one from full KV, nats."""
    runner, recipe = executor.runner, Recipe(strategy="none")
    full = executor.run(prompt.ids, make_plan(len(prompt.ids), ()), {}, recipe, room=ANSWER_TOKENS)
    answer = runner.greedy(full.kv, full.cache, full.logits, ANSWER_TOKENS)
    reference = runner.log_probs(full.kv, full.cache, full.logits, answer)

    def against(ids: IntArray, plan: Plan, chunks: Mapping[str, StoredRun]) -> float:
        done = executor.run(ids, plan, chunks, recipe, room=ANSWER_TOKENS)
        other = runner.log_probs(done.kv, done.cache, done.logits, answer)
        return float((reference.exp() * (reference - other)).sum(-1).mean())

    encoded = {str(a): codec.encode(full.kv, a, b, executor.rope) for a, b in prompt.documents}
    start, end = prompt.documents[0][0], prompt.documents[-1][1]
    rest = as_ids(np.concatenate([prompt.ids[:start], prompt.ids[end:]]))
    return against(prompt.ids, _plan(prompt), encoded), against(rest, make_plan(len(rest), ()), {})


def _plan(prompt: _Prompt) -> Plan:
    """Documents out of the store, right where they are; all else computed."""
    n, start, end = len(prompt.ids), prompt.documents[0][0], prompt.documents[-1][1]
    segments = [Segment("compute", 0, start)] if start else []
    segments += [Segment("approximate", a, b, str(a), settled=True, lossy=True) for a, b in prompt.documents]
    return Plan(n, (*segments, Segment("compute", end, n)))
