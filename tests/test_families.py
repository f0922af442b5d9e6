"""Every family gives the answers of plain Hugging Face, whatever the plan."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import DynamicCache

from kvboost_rag import EngineConfig, SamplingParams
from kvboost_rag.chunks import Hit
from kvboost_rag.hf import cache_argument
from kvboost_rag.planner import make_plan
from tests.tiny import (
    LIMIT,
    SERVED,
    SLIDING,
    Forwards,
    engine_of,
    kl,
    model_of,
    off_by,
    plain_answer,
    plain_logits,
    prompt_of,
    random_ids,
    text,
)

DOCUMENTS = [text(seed, 25) for seed in (100, 101, 102)]
REORDERED = prompt_of(DOCUMENTS[::-1], preamble="Another preamble.")
FIRST = SamplingParams(max_tokens=6)

every_family = pytest.mark.parametrize("name", SERVED)


@every_family
def test_a_cold_prompt_gives_plain_logits_and_answer(name: str) -> None:
    engine = engine_of(name)
    ids = random_ids(1, 90)
    assert len(ids) > 3 * SLIDING
    cold = engine.prefill(ids)
    assert off_by(engine, cold) < LIMIT
    assert cold.cache.get_seq_length() == len(ids)
    answer = engine.generate(ids, reuse="off", sampling=FIRST)
    assert list(answer.token_ids) == plain_answer(engine.model, ids, 6)


@every_family
def test_a_long_pass_in_pieces_gives_plain_logits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvboost_rag.runner.PIECE_ROWS", 32)
    engine = engine_of(name, repair_ratio=1.0, store_prompts=False)
    ids = random_ids(1, 90)
    with Forwards(engine.model) as forwards:
        cold = engine.prefill(ids)
    assert forwards.rows == [32, 32, 26]
    assert off_by(engine, cold) < LIMIT
    engine.warm(DOCUMENTS)
    moved = engine.prefill(REORDERED)
    assert moved.usage.approximate_tokens > 80
    assert off_by(engine, moved) < LIMIT
    assert moved.cache.get_seq_length() == moved.usage.prompt_tokens


@every_family
def test_recomputing_every_moved_token_gives_plain_logits_and_answer(name: str) -> None:
    engine = engine_of(name, repair_ratio=1.0, store_prompts=False)
    engine.warm(DOCUMENTS)
    full = engine.prefill(REORDERED)
    assert full.usage.approximate_tokens > 80
    assert full.usage.repaired_tokens == full.usage.approximate_tokens
    assert full.usage.computed_tokens == full.usage.prompt_tokens
    assert off_by(engine, full) < LIMIT
    answer = engine.generate(REORDERED, sampling=FIRST)
    assert list(answer.token_ids) == plain_answer(engine.model, full.token_ids, 6)


@every_family
def test_an_exact_hit_up_to_the_middle_of_a_chunk_gives_plain_logits_and_answer(name: str) -> None:
    engine = engine_of(name, reuse="exact")
    stem = random_ids(1, 70)
    first = engine.generate([*stem, *random_ids(2, 20)], sampling=FIRST)
    assert first.usage.exact_tokens == 0
    other = [*stem, *random_ids(3, 30)]
    found = engine.prefill(other)
    assert (found.usage.exact_tokens, found.usage.approximate_tokens) == (70, 0)
    assert found.usage.computed_tokens == 30
    assert off_by(engine, found) < LIMIT
    again = engine.generate(other, sampling=FIRST)
    assert again.usage.exact_tokens == len(other) - 1
    assert list(again.token_ids) == plain_answer(engine.model, other, 6)


@every_family
def test_a_second_turn_is_exact_over_the_first_answer(name: str) -> None:
    engine = engine_of(name, reuse="exact")
    prompt = random_ids(1, 40)
    answer = engine.generate(prompt, sampling=SamplingParams(max_tokens=24)).token_ids
    turn = [*prompt, *answer, *random_ids(4, 12)]
    second = engine.generate(turn, sampling=FIRST)
    # The last generated token was never run, so its KV does not exist yet.
    assert second.usage.exact_tokens == len(prompt) + len(answer) - 1
    assert list(second.token_ids) == plain_answer(engine.model, turn, 6)
    third = engine.prefill(turn)
    assert off_by(engine, third) < LIMIT


@every_family
@pytest.mark.parametrize("selector", ["deviation", "query"])
def test_repair_runs_for_every_family_and_beats_none(name: str, selector: str) -> None:
    words = ("river", "stone", "garden", "letter", "winter", "copper", "signal", "harbor")
    prompts = [prompt_of(order, question=f"Which {w}?") for w in words for order in (DOCUMENTS[::-1], DOCUMENTS[1:])]
    plain = engine_of(name, repair="none", store_prompts=False)
    repaired = engine_of(name, selector=selector, repair_ratio=0.3, store_prompts=False)
    error = dict.fromkeys(("none", "repaired"), 0.0)
    for engine in (plain, repaired):
        engine.warm(DOCUMENTS)
    for prompt in prompts:
        full = plain_logits(plain.model, plain.tokenize(prompt))
        error["none"] += kl(full, plain.prefill(prompt).logits)
        got = repaired.prefill(prompt)
        assert 0 < got.usage.repaired_tokens < got.usage.approximate_tokens
        error["repaired"] += kl(full, got.logits)
    assert error["repaired"] < error["none"]


@every_family
def test_keys_of_a_moved_document_are_those_of_the_new_position(name: str) -> None:
    engine = engine_of(name, repair="none", store_prompts=False)
    document = engine.tokenize(text(7, 25))
    engine.warm(text(7, 25))
    ids = [*random_ids(5, 41), *document, 5]
    moved = engine.prefill(ids)
    run = moved.plan.runs[0]
    offset = run.start - 41
    alone = _plain_cache(name, document, start=41)
    for layer in range(3):
        got = moved.cache.layers[layer].keys[:, :, run.start : run.end]
        want = alone[layer][0][:, :, offset : offset + run.end - run.start]
        assert float((got - want).norm() / want.norm()) < LIMIT, f"layer {layer}"
        got = moved.cache.layers[layer].values[:, :, run.start : run.end]
        want = alone[layer][1][:, :, offset : offset + run.end - run.start]
        assert float((got - want).norm() / want.norm()) < LIMIT, f"layer {layer}"


@every_family
def test_the_first_layer_of_a_composed_cache_is_that_of_a_full_prefill(name: str) -> None:
    """There K and V depend on token and position alone, so a move forward or back must give them to the digit."""
    engine = engine_of(name, repair="none", store_prompts=False, pack_tokens=256, pack_orders=1)
    engine.warm(DOCUMENTS)
    found = engine.prefill(REORDERED)
    deltas = [segment.delta for segment in found.plan.segments if segment.kind == "approximate"]
    assert min(deltas) < 0 < max(deltas)
    keys, values = _plain_cache(name, list(found.token_ids), start=0)[0]
    assert torch.allclose(found.cache.layers[0].keys, keys, atol=1e-4)
    assert torch.allclose(found.cache.layers[0].values, values, atol=1e-4)


@torch.inference_mode()
def _plain_cache(name: str, ids: list[int], *, start: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Keys and values of plain Hugging Face for a text alone at positions ``start``…"""
    model = model_of(name)
    cache = DynamicCache()  # without a config, so that sliding layers keep all of it
    positions = torch.arange(start, start + len(ids))[None]
    model(input_ids=torch.tensor([ids]), position_ids=positions, use_cache=True, **{cache_argument(model): cache})
    return [(layer.keys, layer.values) for layer in cache.layers]


def test_a_hit_may_begin_and_end_inside_a_chunk() -> None:
    engine = engine_of(repair="none", store_prompts=False)
    engine.warm(text(7, 40))
    document = engine.tokenize(text(7, 40))
    quoted = [*random_ids(5, 20), *document[9:49], *random_ids(6, 8)]
    found = engine.prefill(quoted)
    segment = next(s for s in found.plan.segments if s.kind == "approximate")
    assert (segment.start, segment.end, segment.offset, segment.delta) == (20, 60, 9, 11)


def test_plans_of_the_engine_tile_the_prompt_and_compute_its_last_token() -> None:
    engine = engine_of(store_prompts=False)
    engine.warm(DOCUMENTS)
    plan = engine.prefill(REORDERED).plan
    assert [s.start for s in plan.segments[1:]] == [s.end for s in plan.segments[:-1]]
    assert plan.segments[-1].kind == "compute"
    assert plan.segments[-1].end == plan.prompt_tokens
    whole = make_plan(10, [Hit(0, 10, "k", 0)])
    assert np.array_equal([s.kind for s in whole.segments], ["exact", "compute"])


def test_the_default_configuration_needs_no_choice() -> None:
    assert EngineConfig().reuse == "approximate"
