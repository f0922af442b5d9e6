"""The real small model: real passages, reordered, behind another preamble, over several turns."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pytest
import torch

from kvboost_rag import Engine, EngineConfig, SamplingParams
from tests.tiny import LIMIT, kl, off_by, plain_answer

pytestmark = pytest.mark.model

NAMES = ("lambda", "with", "assert", "break", "global", "exceptions")
PASSAGES = [topics[name].strip()[:700].rsplit("\n\n", 1)[0] for name in NAMES]
ORDERS = ((3, 0, 5, 1, 4, 2), (5, 4, 3, 2, 1, 0), (1, 3, 0, 2, 5, 4))
QUESTIONS = ("What does the lambda keyword make?", "When does assert raise an error?", "What does break end?")
ANSWER = SamplingParams(max_tokens=16)


def _messages(
    order: tuple[int, ...], question: str, *, preamble: str = "Answer from the context."
) -> list[dict[str, Any]]:
    context = "\n\n".join(PASSAGES[i] for i in order)
    return [
        {"role": "system", "content": preamble},
        {"role": "user", "content": f"Context:\n\n{context}\n\nQuestion: {question}"},
    ]


@pytest.fixture(scope="module")
def engine(model_path: Path) -> Engine:
    """Warmed with the passages; prompts leave nothing behind."""
    config = EngineConfig(selector="deviation", fallback=False, store_prompts=False)
    engine = Engine.from_pretrained(str(model_path), dtype=torch.float32, config=config)
    assert engine.warm(PASSAGES).computed == len(PASSAGES)
    return engine


@pytest.fixture(scope="module")
def exact(engine: Engine) -> Engine:
    """The same model in exact mode."""
    return Engine(engine.model, engine.tokenizer, EngineConfig(reuse="exact"))


def test_reordered_passages_behind_another_preamble_are_found_almost_to_the_token(engine: Engine) -> None:
    documents = sum(len(engine.tokenize(passage)) for passage in PASSAGES)
    for order, question in zip(ORDERS, QUESTIONS, strict=True):
        for preamble in (
            "Answer from the context.",
            "You are a librarian. Quote what you find, and be brief about it.",
        ):
            usage = engine.prefill(_messages(order, question, preamble=preamble)).usage
            assert usage.exact_tokens + usage.approximate_tokens >= 0.98 * documents
            assert usage.computed_tokens < 0.35 * usage.prompt_tokens


def test_approximate_answers_are_much_nearer_than_answers_without_documents(engine: Engine) -> None:
    control = ours = 0.0
    for order, question in zip(ORDERS, QUESTIONS, strict=True):
        messages = _messages(order, question)
        full = engine.prefill(messages, reuse="off").logits
        ours += kl(full, engine.prefill(messages).logits)
        control += kl(full, engine.prefill(_messages((), question), reuse="off").logits)
    assert ours < 0.25 * control


def test_recomputing_everything_is_a_full_prefill(engine: Engine) -> None:
    recipe = engine.recipe
    engine.recipe = replace(recipe, ratio=1.0)
    try:
        found = engine.prefill(_messages(ORDERS[0], QUESTIONS[0]))
    finally:
        engine.recipe = recipe
    assert found.usage.approximate_tokens > 0
    assert off_by(engine, found) < LIMIT


def test_exact_answers_are_those_of_plain_hugging_face(exact: Engine) -> None:
    end = exact.model.generation_config.eos_token_id
    messages = _messages(ORDERS[0], QUESTIONS[0])
    for question in QUESTIONS[:2]:
        messages = _messages(ORDERS[0], question)
        answer = exact.generate(messages, sampling=ANSWER)
        assert list(answer.token_ids) == plain_answer(exact.model, exact.tokenize(messages), 16, eos_token_id=end)
    assert answer.usage.exact_tokens > 0.9 * answer.usage.prompt_tokens
    messages += [{"role": "assistant", "content": answer.text}, {"role": "user", "content": "And otherwise?"}]
    second = exact.prefill(messages)
    assert second.usage.exact_tokens >= answer.usage.prompt_tokens
    assert off_by(exact, second) < LIMIT


def test_a_stream_is_the_answer(engine: Engine) -> None:
    messages = _messages(ORDERS[1], QUESTIONS[1])
    whole = engine.generate(messages, sampling=ANSWER)
    deltas = list(engine.stream(messages, sampling=ANSWER))
    assert "".join(delta.text for delta in deltas) == whole.text
    assert len(deltas) > 4
    assert whole.text.strip()
