"""One request: what is reused, what is computed, how near to a full prefill, and what is reported."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from statistics import fmean
from typing import Any

import pytest
import torch

from kvboost_rag import Engine, SamplingParams
from kvboost_rag.costs import CostModel
from kvboost_rag.kv import RequestKV
from kvboost_rag.stats import Usage
from tests.tiny import (
    LIMIT,
    Forwards,
    engine_of,
    kl,
    new_model,
    off_by,
    plain_answer,
    plain_logits,
    prompt_of,
    random_ids,
    text,
    tokenizer_of,
)

DOCUMENTS = [text(seed, 25) for seed in (100, 101, 102)]
REORDERED = prompt_of(DOCUMENTS[::-1], preamble="Another preamble.")
REPAIRS: list[dict[str, Any]] = [
    {"repair": "none"},
    {"repair": "selective"},
    {"selector": "deviation"},
    {"selector": "query"},
    {"selector": "auto"},
    {"selector": "query", "repair_ratio": 0.0},
    {"selector": "deviation", "repair_ratio": 0.9},
    {"repair_ratio": 1.0},
]
every_repair = pytest.mark.parametrize("repair", REPAIRS, ids=lambda r: " ".join(map(str, r.values())))


@contextmanager
def _layer_rows(model: Any) -> Iterator[tuple[list[int], list[int]]]:
    """Tokens that entered, and that left, each layer so far: a probe may end inside a layer."""
    layers = model.get_decoder().layers
    entered, left = [0] * len(layers), [0] * len(layers)

    def note(rows: list[int], index: int) -> Any:
        def hook(module: Any, args: Any, kwargs: Any, *output: Any) -> None:
            rows[index] += (args[0] if args else kwargs["hidden_states"]).shape[1]

        return hook

    handles = []
    for i, layer in enumerate(layers):
        handles.append(layer.register_forward_pre_hook(note(entered, i), with_kwargs=True))
        handles.append(layer.register_forward_hook(note(left, i), with_kwargs=True))
    try:
        yield entered, left
    finally:
        for handle in handles:
            handle.remove()


# ---- exact -----------------------------------------------------------------------------------------------------------


def test_exact_mode_never_uses_what_stands_elsewhere() -> None:
    engine = engine_of(reuse="exact")
    engine.warm(DOCUMENTS)
    for prompt in (REORDERED, REORDERED[40:], prompt_of(DOCUMENTS)):
        found = engine.prefill(prompt)
        assert found.usage.approximate_tokens == found.usage.repaired_tokens == 0
        assert {segment.kind for segment in found.plan.segments} <= {"exact", "compute"}
        assert off_by(engine, found) < LIMIT


@pytest.mark.parametrize("shared", [1, 15, 16, 17, 50, 79])
def test_an_exact_hit_is_counted_token_by_token(shared: int) -> None:
    engine = engine_of(reuse="exact")
    stem = random_ids(1, 80)
    engine.prefill(stem)
    other = [*stem[:shared], *[9 if token != 9 else 10 for token in stem[shared:]], 11]
    found = engine.prefill(other)
    assert found.usage.exact_tokens == shared
    assert off_by(engine, found) < LIMIT


@pytest.mark.parametrize("chunking", ["fixed", "semantic", "document"])
def test_an_exact_chain_goes_on_over_chunk_borders(chunking: str) -> None:
    engine = engine_of(reuse="exact", chunking=chunking, chunk_tokens=20)
    first, second = prompt_of(DOCUMENTS), prompt_of([*DOCUMENTS, text(9, 20)], question="Why?")
    engine.prefill(first)
    found = engine.prefill(second)
    assert len([s for s in found.plan.segments if s.kind == "exact"]) > (1 if chunking == "fixed" else 0)
    a, b = engine.tokenize(first), engine.tokenize(second)
    assert found.usage.exact_tokens == next(i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)
    assert off_by(engine, found) < LIMIT


def test_a_conversation_is_exact_over_all_earlier_turns() -> None:
    engine = engine_of(reuse="exact")
    messages = [{"role": "system", "content": text(1, 20)}, {"role": "user", "content": "Which river?"}]
    known = 0
    for turn in range(3):
        said = tokenizer_of().encode(f"The {text(50 + turn, 6)}")
        script = iter([*said, tokenizer_of().eos_token_id])

        def say(ids: torch.Tensor, scores: torch.Tensor, script: Any = script) -> torch.Tensor:
            return torch.full_like(scores, -1e9).index_fill_(1, torch.tensor([next(script)]), 0.0)

        answer = engine.generate(messages, sampling=SamplingParams(max_tokens=60, logits_processors=(say,)))
        assert answer.usage.exact_tokens == known
        # The end of the turn was the last token generated and never ran; its text is the template's next token.
        known = answer.usage.prompt_tokens + answer.usage.completion_tokens - 1
        messages += [{"role": "assistant", "content": answer.text}, {"role": "user", "content": f"And {turn}?"}]
    found = engine.prefill(messages)
    assert found.usage.exact_tokens == known
    assert off_by(engine, found) < LIMIT


def test_the_same_prompt_again_runs_one_token() -> None:
    engine = engine_of(reuse="exact")
    engine.prefill(REORDERED)
    again = engine.prefill(REORDERED)
    assert again.usage == Usage(
        prompt_tokens=len(again.token_ids), exact_tokens=len(again.token_ids) - 1, computed_tokens=1
    )
    assert off_by(engine, again) < LIMIT


def test_off_computes_everything_and_keeps_nothing() -> None:
    for engine in (engine_of(reuse="off"), engine_of(), engine_of(reuse="exact")):
        for _ in range(2):
            full = engine.prefill(REORDERED, reuse="off")
            assert full.usage == Usage(prompt_tokens=len(full.token_ids), computed_tokens=len(full.token_ids))
            assert off_by(engine, full) < LIMIT
        assert engine.stats().chunks == 0


def test_one_call_may_use_a_narrower_mode() -> None:
    engine = engine_of()
    engine.warm(DOCUMENTS)
    assert engine.prefill(REORDERED).usage.approximate_tokens > 0
    exact = engine.prefill(REORDERED, reuse="exact")
    assert exact.usage.approximate_tokens == 0
    assert off_by(engine, exact) < LIMIT


# ---- approximate -----------------------------------------------------------------------------------------------------


@every_repair
def test_usage_adds_up_and_the_last_token_is_computed(repair: dict[str, Any]) -> None:
    engine = engine_of(**repair)
    engine.warm(DOCUMENTS)
    found = engine.prefill(REORDERED)
    usage, plan = found.usage, found.plan
    documents = sum(len(engine.tokenize(document)) for document in DOCUMENTS)
    assert usage.exact_tokens + usage.approximate_tokens + usage.new_tokens == usage.prompt_tokens
    assert usage.prompt_tokens == len(found.token_ids) == len(engine.tokenize(REORDERED))
    assert documents - 2 * len(DOCUMENTS) <= usage.approximate_tokens <= documents
    assert usage.new_tokens == plan.tokens("compute")
    assert plan.segments[-1].kind == "compute"
    assert usage.new_tokens <= usage.computed_tokens
    assert found.fallback_reason is None


@every_repair
def test_computed_tokens_are_what_the_layers_ran(repair: dict[str, Any]) -> None:
    engine = engine_of(new_model("llama", num_hidden_layers=4), **repair)
    engine.warm(DOCUMENTS)
    with _layer_rows(engine.model) as (entered, left):
        found = engine.prefill(REORDERED)
    assert sum(left) / 4 <= found.usage.computed_tokens <= math.ceil(sum(entered) / 4 - 1e-6)
    if engine.recipe.probe(found.plan.runs) is None:
        assert found.usage.computed_tokens * 4 == sum(entered) == sum(left)


@pytest.mark.parametrize(
    ("repair", "tokens"),
    [
        ({"repair": "none"}, lambda moved, runs: 0),
        ({"selector": "query", "repair_ratio": 0.0}, lambda moved, runs: 4 * runs),
        ({"floor_tokens": 0, "repair_ratio": 0.0}, lambda moved, runs: 0),
        ({"floor_tokens": 9, "repair_ratio": 0.0}, lambda moved, runs: 9 * runs),
        ({"repair": "selective"}, lambda moved, runs: 16 * runs),
        ({"repair": "selective", "window_tokens": 10}, lambda moved, runs: 10 * runs),
        ({"selector": "query", "repair_ratio": 0.2}, lambda moved, runs: 4 * runs + round(0.2 * moved)),
        ({"selector": "deviation", "repair_ratio": 0.2}, lambda moved, runs: 4 * runs + round(0.2 * moved)),
        ({"repair_ratio": 1.0}, lambda moved, runs: moved),
    ],
)
def test_every_repair_recomputes_what_it_is_configured_to(repair: dict[str, Any], tokens: Any) -> None:
    engine = engine_of(**repair)
    engine.warm(DOCUMENTS)
    usage = engine.prefill(REORDERED).usage
    assert usage.repaired_tokens == tokens(usage.approximate_tokens, len(DOCUMENTS))


@pytest.mark.parametrize("count", [0, 1, 9])
def test_so_many_short_passages_are_recomputed_whole(count: int) -> None:
    engine = engine_of(selector="query", repair_ratio=0.0, repair_whole_passages=count)
    engine.warm(DOCUMENTS)
    found = engine.prefill(REORDERED)
    runs = [len(run) for run in found.plan.runs]
    # One that is asked about, and the one right behind it if it goes on about it.
    asked = [runs[i : i + length] for i in range(len(runs)) for length in (1, 2)]
    wholes = {0: [[]], 1: asked, 9: [runs]}[count]
    assert found.usage.repaired_tokens in {sum(whole) + 4 * (len(runs) - len(whole)) for whole in wholes}


@pytest.mark.parametrize("size", [0, 16])
def test_the_place_that_a_question_quotes_is_recomputed(size: int) -> None:
    engine = engine_of(selector="query", repair_ratio=0.0, repair_spot_tokens=size, store_prompts=False)
    documents = [text(seed, 120) for seed in (1, 2, 3)]
    quoted = " ".join(documents[1].split()[60:66])
    engine.warm(documents)
    found = engine.prefill(prompt_of(documents[::-1], question=f"Where does it say: {quoted}?"))
    runs, asked = found.plan.runs, found.plan.asked
    assert asked is not None
    assert len(runs) == 3
    assert all(len(run) >= 128 for run in runs)
    assert len(asked.spots) in {size, 2 * size}
    assert found.usage.repaired_tokens == len(asked.spots) + 4 * len(runs)
    assert size == 0 or " ".join(quoted.split()[2:4]) in engine.tokenizer.decode(
        [found.token_ids[i] for i in asked.spots]
    )


@every_repair
def test_approximate_answers_repeat_bit_for_bit(repair: dict[str, Any]) -> None:
    engine = engine_of(store_prompts=False, **repair)
    engine.warm(DOCUMENTS)
    assert torch.equal(engine.prefill(REORDERED).logits, engine.prefill(REORDERED).logits)


@every_repair
def test_serving_a_prompt_leaves_the_stored_chunks_as_they_are(repair: dict[str, Any]) -> None:
    engine = engine_of(store_prompts=False, **repair)
    engine.warm(DOCUMENTS)
    keys = [header.key for header in engine._library.headers(engine._scope(None))]
    with engine._library.pin(keys) as chunks:
        assert chunks is not None
        before = {key: (run.keys.clone(), run.values.clone()) for key, run in chunks.items()}
        engine.generate(REORDERED, sampling=SamplingParams(max_tokens=4))
        for key, (keys_, values) in before.items():
            assert torch.equal(chunks[key].keys, keys_)
            assert torch.equal(chunks[key].values, values)


@pytest.mark.parametrize("selector", ["deviation", "query"])
@pytest.mark.parametrize("name", ["qwen3", "olmo2"])
def test_fidelity_grows_with_the_budget_up_to_a_full_prefill(name: str, selector: str) -> None:
    prompts = []
    for seed in range(12):
        documents = [text(1000 + 10 * seed + i, 20) for i in range(4)]
        prompts.append((documents, prompt_of(documents[::-1])))
    means = []
    for ratio in (0.0, 0.1, 0.3, 1.0):
        engine = engine_of(name, selector=selector, repair_ratio=ratio, store_prompts=False)
        errors = []
        for documents, prompt in prompts:
            engine.warm(documents)
            full = plain_logits(engine.model, engine.tokenize(prompt))
            errors.append(kl(full, engine.prefill(prompt).logits))
        means.append(fmean(errors))
    assert means == sorted(means, reverse=True)
    assert means[2] < 0.8 * means[0]
    assert means[3] < 1e-6


@pytest.mark.parametrize("name", ["llama", "glm", "gemma3"])
@pytest.mark.parametrize("weight", [0.0, 0.5, 1.0])
def test_unrepaired_tokens_get_a_share_of_the_mean_change_of_their_run(name: str, weight: float) -> None:
    engine = engine_of(name, selector="query", repair_ratio=0.12, floor_tokens=0, store_prompts=False)
    engine.warm(DOCUMENTS)
    repaired = replace(engine.recipe, offset=weight)
    engine.recipe = replace(repaired, strategy="none")
    stale = engine.prefill(REORDERED).cache
    engine.recipe = repaired
    found = engine.prefill(REORDERED)
    rope = engine._serving._executor.rope
    assert rope is not None
    recomputed = 0
    for run in found.plan.runs:
        span = slice(run.start, run.end)
        layer = 2  # the first layer's K and V depend on the token alone
        changes = []
        for part in ("keys", "values"):
            after, before = (getattr(cache.layers[layer], part)[0, :, span] for cache in (found.cache, stale))
            changes.append(after - before)
        # Keys are compared before rotation.
        cos, sin = rope.tables(layer, torch.arange(run.start, run.end))
        changes[0] = rope.turn(layer, changes[0], cos, -sin)
        change = torch.cat(changes, -1)
        usual = change.median(1, keepdim=True).values
        others = (change - usual).abs().amax((0, 2)) > 1e-4
        recomputed += int(others.sum())
        assert int(others.sum()) < len(others) / 2
        # The mean of fewer than two is noise, and not used.
        expected = weight * change[:, others].mean(1, keepdim=True) if int(others.sum()) > 1 else torch.zeros(())
        assert float((usual - expected).abs().max()) < 1e-4
    assert recomputed == found.usage.repaired_tokens


def test_a_moved_document_after_an_exact_beginning() -> None:
    engine = engine_of()
    engine.warm(DOCUMENTS[:1], context="Read this.\n\n")
    engine.warm(DOCUMENTS[1:])
    found = engine.prefill(prompt_of([DOCUMENTS[0], DOCUMENTS[2], DOCUMENTS[1]]))
    kinds = [segment.kind for segment in found.plan.segments]
    assert kinds[0] == "exact"
    assert kinds.count("approximate") == 2
    assert found.usage.exact_tokens >= len(engine.tokenize("Read this.\n\n")) + len(engine.tokenize(DOCUMENTS[0])) - 2


def test_a_long_new_preamble_runs_once() -> None:
    # Both passes of "query" would otherwise run it.
    engine = engine_of(selector="query")
    engine.warm(DOCUMENTS)
    preamble = text(55, 40)
    with Forwards(engine.model) as forwards:
        found = engine.prefill(prompt_of(DOCUMENTS[::-1], preamble=preamble))
    length = len(engine.tokenize(preamble))
    assert length > 32
    assert [rows for rows in forwards.rows if rows >= length - 1] == [forwards.rows[0]]
    assert found.usage.computed_tokens < found.usage.prompt_tokens


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt-oss", "cohere2"])
@pytest.mark.parametrize("selector", ["query", "deviation"])
def test_what_the_memory_held_before_never_matters(name: str, selector: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # A probe looks over slots that nothing has filled yet; hidden by a mask, NaN still spreads.
    engine = engine_of(name, selector=selector, store_prompts=False)
    engine.warm(DOCUMENTS)
    between = text(57, 60)
    prompt = prompt_of([DOCUMENTS[1], between, DOCUMENTS[0], between[9:], DOCUMENTS[2]], preamble=text(56, 40))
    clean = engine.prefill(prompt)
    blank = RequestKV.__init__

    def dirty(kv: RequestKV, *args: Any, **options: Any) -> None:
        blank(kv, *args, **options)
        kv.keys.fill_(float("nan"))
        kv.values.fill_(float("nan"))

    monkeypatch.setattr(RequestKV, "__init__", dirty)
    found = engine.prefill(prompt)
    assert found.usage.approximate_tokens > 60
    assert torch.equal(found.logits, clean.logits)
    assert not found.logits.isnan().any()


# ---- fallback --------------------------------------------------------------------------------------------------------

CHEAP_TO_COMPUTE = CostModel(pass_s=0.0, token_s=1e-9, pair_s=0.0, move_s=1.0)
CHEAP_TO_MOVE = CostModel(pass_s=0.0, token_s=1.0, pair_s=0.0, move_s=1e-9)


def test_a_prompt_that_is_cheaper_to_compute_is_computed_and_says_why() -> None:
    engine = engine_of(fallback=True)
    engine.warm(DOCUMENTS)
    engine._serving.planning.costs = CHEAP_TO_COMPUTE
    full = engine.prefill(REORDERED, store=False)
    assert full.usage.approximate_tokens == 0
    assert off_by(engine, full) < LIMIT
    assert "not worth" in str(full.fallback_reason)
    answer = engine.generate(REORDERED, sampling=SamplingParams(max_tokens=4))
    assert "not worth" in str(answer.fallback_reason)
    assert list(answer.token_ids) == plain_answer(engine.model, full.token_ids, 4)
    assert sum(engine.stats().fallbacks.values()) == 2
    engine._serving.planning.costs = CHEAP_TO_MOVE
    assert engine.prefill(REORDERED).usage.approximate_tokens > 0
    assert sum(engine.stats().fallbacks.values()) == 2


def test_no_fallback_where_it_is_switched_off() -> None:
    engine = engine_of(fallback=False)
    engine.warm(DOCUMENTS)
    engine._serving.planning.costs = CHEAP_TO_COMPUTE
    found = engine.prefill(REORDERED)
    assert found.usage.approximate_tokens > 0
    assert found.fallback_reason is None


def test_the_default_cost_model_is_measured_and_lets_a_request_through_either_way() -> None:
    engine = engine_of(fallback=True)
    costs = engine._serving.planning.costs
    assert costs is not None
    assert costs.token_s > 0
    assert costs.move_s > 0
    engine.warm(DOCUMENTS)
    found = engine.prefill(REORDERED)
    assert (found.usage.approximate_tokens == 0) == (found.fallback_reason is not None)


# ---- what comes back -------------------------------------------------------------------------------------------------


def test_a_prefill_can_be_continued_by_its_caller() -> None:
    engine = engine_of()
    engine.warm(DOCUMENTS)
    found = engine.prefill(REORDERED)
    assert found.logits.shape == (engine.model.config.vocab_size,)
    assert found.logits.dtype == torch.float32
    assert found.cache.get_seq_length() == len(found.token_ids)
    ids = torch.tensor([[*found.token_ids, int(found.logits.argmax())]])
    longer = engine.model.generate(
        ids, attention_mask=torch.ones_like(ids), cache=found.cache, max_new_tokens=3, do_sample=False, pad_token_id=0
    )
    assert longer.shape[1] == ids.shape[1] + 3
    again = engine.generate(REORDERED, sampling=SamplingParams(max_tokens=4), store=False)
    assert longer[0, len(found.token_ids) :].tolist() == list(again.token_ids)


def test_timing_is_ordered_and_complete() -> None:
    engine = engine_of()
    engine.warm(DOCUMENTS)
    timing = engine.generate(REORDERED, sampling=SamplingParams(max_tokens=8)).timing
    parts = (timing.queue_s, timing.tokenize_s, timing.lookup_s, timing.load_s, timing.prefill_s)
    assert all(part >= 0 for part in parts)
    assert timing.lookup_s > 0
    assert timing.load_s > 0
    assert 0 < timing.model_s <= timing.prefill_s
    assert sum(parts) <= timing.ttft_s <= timing.total_s


def test_time_spent_waiting_for_another_request_is_told_apart() -> None:
    engine = engine_of()
    with ThreadPoolExecutor(1) as pool:
        with engine._scheduler.alone():  # as another request would hold it
            waiting = pool.submit(engine.generate, REORDERED, sampling=SamplingParams(max_tokens=2))
            time.sleep(0.3)
        timing = waiting.result().timing
    assert 0.1 < timing.queue_s <= timing.ttft_s
    assert timing.prefill_s < timing.queue_s


def test_stats_are_the_sums_of_the_requests() -> None:
    engine = engine_of()
    engine.warm(DOCUMENTS)
    usages = [
        engine.prefill(REORDERED).usage,
        engine.prefill(REORDERED).usage,
        engine.generate(prompt_of(DOCUMENTS), sampling=SamplingParams(max_tokens=5)).usage,
        list(engine.stream("Why?", sampling=SamplingParams(max_tokens=3)))[-1].generation.usage,  # type: ignore[union-attr]
    ]
    stats = engine.stats()
    assert stats.requests == 4
    for name in Usage.__dataclass_fields__:
        assert getattr(stats, name) == sum(getattr(usage, name) for usage in usages), name
    assert stats.completion_tokens == 8


def test_the_users_model_stays_as_it_was() -> None:
    model = new_model("gemma3")
    before = (
        model.config._attn_implementation,
        model.config.to_dict(),
        type(model.model.norm),
        len(model.model.layers),
    )
    ids = random_ids(4, 60)
    logits = plain_logits(model, ids)
    engine = engine_of(model)
    engine.warm(DOCUMENTS)
    engine.generate(REORDERED, sampling=SamplingParams(max_tokens=4))
    after = (model.config._attn_implementation, model.config.to_dict(), type(model.model.norm), len(model.model.layers))
    assert after == before
    assert torch.equal(plain_logits(model, ids), logits)
    assert "forward" not in vars(model)


def test_the_recipe_can_be_changed_between_requests() -> None:
    engine = engine_of(repair="none", store_prompts=False)
    engine.warm(DOCUMENTS)
    assert engine.prefill(REORDERED).usage.repaired_tokens == 0
    engine.recipe = engine_of(repair_ratio=1.0).recipe
    assert off_by(engine, engine.prefill(REORDERED)) < LIMIT


def test_an_engine_is_a_context_manager() -> None:
    with engine_of() as engine:
        assert isinstance(engine, Engine)
        engine.warm(DOCUMENTS)
        assert engine.stats().stored_bytes > 0
    assert engine.stats().stored_bytes == 0
