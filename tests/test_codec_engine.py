"""Engines that store KV in few bits: near the uncompressed ones, honest about it, refused where a model breaks."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kvboost_rag import ConfigError, Engine, EngineConfig, SamplingParams, UnsupportedModelError
from kvboost_rag.gate import LIMIT
from kvboost_rag.model_spec import inspect_model, key_bias
from kvboost_rag.store import Chunk, codec_for
from tests.tiny import (
    SERVED,
    difference,
    engine_of,
    kl,
    model_of,
    new_model,
    off_by,
    plain_answer,
    plain_logits,
    prompt_of,
    text,
    tokenizer_of,
)

DOCUMENTS = [text(seed, 40) for seed in (700, 701, 702)]
SHUFFLED = [DOCUMENTS[i] for i in (2, 0, 1)]
LOSSY: tuple[Any, ...] = (8, "8/4", 4)
FEW = SamplingParams(max_tokens=6)
# Random weights are touchier than trained ones; these bear every codec.
STURDY = ("qwen3", "phi", "gpt-neox")
NEAR = {8: 2e-3, "8/4": 0.03, 4: 0.05}


def warm(model: Any, bits: Any, **config: Any) -> Engine:
    engine = engine_of(model, kv_bits=bits, **config)
    engine.warm(DOCUMENTS)
    return engine


@pytest.mark.parametrize("bits", [*LOSSY, "8", "4/8", 8.0, True, 2, None])
def test_a_setting_has_an_effect_or_is_refused(bits: Any) -> None:
    if bits in LOSSY and isinstance(bits, int | str) and not isinstance(bits, bool):
        for reuse in ("exact", "off"):
            with pytest.raises(ConfigError, match=r"kv_bits=16, or reuse='approximate'"):
                EngineConfig(kv_bits=bits, reuse=reuse)  # type: ignore[arg-type]
        assert EngineConfig(kv_bits=bits).kv_bits == bits
    else:
        with pytest.raises(ConfigError, match="kv_bits is"):
            EngineConfig(kv_bits=bits)


@pytest.mark.parametrize("name", STURDY)
def test_answers_of_reordered_documents_are_near_the_uncompressed_ones(name: str) -> None:
    prompt, sizes = prompt_of(SHUFFLED), []
    plain = warm(name, 16)
    wanted = plain.prefill(prompt)
    sizes.append(plain.stats().stored_bytes)
    answer = plain.generate(prompt, sampling=FEW)
    for bits in LOSSY:
        engine = warm(name, bits)
        sizes.append(engine.stats().stored_bytes)
        found = engine.prefill(prompt)
        assert found.usage.approximate_tokens >= wanted.usage.approximate_tokens > 100
        assert found.usage.exact_tokens == 0
        assert 0 < kl(wanted.logits, found.logits) < NEAR[bits]
        assert len(engine.generate(prompt, sampling=FEW).token_ids) == len(answer.token_ids)
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] < 0.3 * sizes[0]


KINDS = ("llama-yarn", "qwen2", "gemma3", "stablelm", "glm", "cohere2")  # one of each way to turn and bias keys


@pytest.mark.parametrize(
    "name",
    [*KINDS, *[pytest.param(n, marks=pytest.mark.slow) for n in sorted(set(SERVED) - set(STURDY) - set(KINDS))]],
)
def test_eight_bits_serve_every_family(name: str) -> None:
    prompt = prompt_of(SHUFFLED)
    engine = warm(name, 8)
    assert engine.codec_check is not None
    assert engine.codec_check.loss < LIMIT / 10
    # With repair, rounding may tip which tokens are recomputed.
    engine.recipe = replace(engine.recipe, strategy="none")
    plain = warm(name, 16)
    plain.recipe = engine.recipe
    found = engine.prefill(prompt)
    assert found.usage.approximate_tokens > 100
    assert difference(found.logits, plain.prefill(prompt).logits) < 0.05


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_models_of_half_precision_keep_their_bytes_or_lose_half(dtype: torch.dtype) -> None:
    model = new_model("qwen3").to(dtype)
    plain = warm(model, 16)
    keys = [chunk.kv.tensors()["keys"] for chunk in _chunks(plain)]
    assert {k.dtype for k in keys} == {dtype}
    engine = warm(model, 8)
    assert 0.5 < _kv_bytes(engine) / _kv_bytes(plain) < 0.75  # heads of 16 numbers have much to say about each
    found, wanted = engine.prefill(prompt_of(SHUFFLED)), plain.prefill(prompt_of(SHUFFLED))
    assert kl(wanted.logits, found.logits) < 0.05


def _chunks(engine: Engine) -> list[Any]:
    headers = engine._library.headers(engine._scope(None))
    with engine._library.pin([header.key for header in headers]) as runs:
        return [Chunk(header, runs[header.key]) for header in headers]


def _kv_bytes(engine: Engine) -> int:
    return sum(chunk.kv.nbytes for chunk in _chunks(engine))


@pytest.mark.parametrize("bits", LOSSY)
def test_the_budget_counts_encoded_bytes(bits: Any) -> None:
    engine = warm("qwen3", bits)
    spec = inspect_model(model_of("qwen3"))
    for chunk in _chunks(engine):
        assert chunk.kv.codec == codec_for(bits).name
        assert chunk.kv.nbytes == sum(tensor.nbytes for tensor in chunk.kv.tensors().values())
        assert chunk.kv.nbytes == codec_for(bits).nbytes(spec, len(chunk.header))  # what was reserved for it
    assert engine.stats().stored_bytes == sum(chunk.nbytes for chunk in _chunks(engine))
    room = engine.stats().stored_bytes
    tight = engine_of("qwen3", kv_bits=bits, ram_budget_bytes=room)
    assert tight.warm(DOCUMENTS).evicted == 0
    assert engine_of("qwen3", kv_bits=bits, ram_budget_bytes=room - 1).warm(DOCUMENTS).evicted == 1


@pytest.mark.parametrize("bits", LOSSY)
def test_a_chain_in_few_bits_is_reused_in_place_but_never_exact(bits: Any) -> None:
    engine = engine_of("qwen3", kv_bits=bits)
    first = engine.tokenize(prompt_of(DOCUMENTS))
    answer = list(engine.generate(first, sampling=FEW).token_ids)
    longer = [*first, *answer, *engine.tokenize(text(720, 12))]
    found = engine.prefill(longer)
    assert (found.usage.exact_tokens, found.usage.repaired_tokens) == (0, 0)
    assert found.usage.approximate_tokens >= len(first)
    assert found.usage.computed_tokens < len(longer) - len(first) + 2
    assert 0 < kl(plain_logits(engine.model, longer), found.logits) < NEAR[bits]
    # The new text saw its true history, so a third turn goes on behind it; nothing is stored twice.
    tokens = [header.origin for header in engine._library.headers(engine._scope(None))]
    assert "served" not in tokens
    third = [*longer, *engine.tokenize(text(721, 12))]
    assert engine.prefill(third).usage.approximate_tokens >= len(longer) - 1


@pytest.mark.parametrize("bits", [16, *LOSSY])
def test_a_call_that_asks_for_exact_gets_exact(bits: Any) -> None:
    engine = engine_of("qwen3", kv_bits=bits)
    prompt = prompt_of(DOCUMENTS)
    engine.prefill(prompt)
    found = engine.prefill(prompt, reuse="exact")
    assert off_by(engine, found) < 1e-3
    if bits == 16:
        assert found.usage.exact_tokens > 100
        assert found.fallback_reason is None
    else:
        assert found.usage.exact_tokens == found.usage.approximate_tokens == 0
        assert found.fallback_reason == f"nothing stored with kv_bits={bits!r} is exact"
        chunks = engine.stats().chunks
        engine.prefill(prompt, reuse="exact")
        assert engine.stats().chunks == chunks
    other = engine.prefill(text(730, 30), reuse="exact")  # nothing was found, so nothing was passed over
    assert other.fallback_reason is None


@pytest.mark.parametrize("bits", LOSSY)
def test_repairing_everything_is_a_full_prefill_in_few_bits_too(bits: Any) -> None:
    engine = warm("qwen3", bits, repair_ratio=1.0)
    moved = []
    for prompt in (prompt_of(DOCUMENTS), prompt_of(DOCUMENTS), prompt_of(SHUFFLED), prompt_of(SHUFFLED)):
        found = engine.prefill(prompt)
        assert off_by(engine, found) < 1e-3
        moved.append(found.usage.approximate_tokens)
    assert max(moved) > 100


@pytest.mark.parametrize("bits", LOSSY)
def test_prompts_as_they_were_served_do_not_drift(bits: Any) -> None:
    engine = warm("qwen3", bits)
    ids = engine.tokenize(prompt_of(SHUFFLED))
    first = engine.prefill(ids)
    errors = []
    for turn in range(6):
        ids = [*ids, *engine.tokenize(text(740 + turn, 3))]
        found = engine.prefill(ids)
        assert found.usage.repaired_tokens == 0  # it goes on from the turn before
        errors.append(kl(first.logits, engine.prefill(ids[: len(first.token_ids)]).logits))
    assert max(errors) < 2 * errors[0] + NEAR[bits]


@pytest.mark.parametrize("bits", [8, 4])
def test_forgetting_and_clearing_reach_what_is_encoded(bits: Any) -> None:
    engine = warm("qwen3", bits)
    engine.prefill(prompt_of(SHUFFLED))
    assert engine.forget(DOCUMENTS[0]) >= 1
    rest = engine.prefill(prompt_of([DOCUMENTS[0]]), store=False)
    assert rest.usage.approximate_tokens < 20  # what stood in front of it
    assert engine.clear() >= 1
    assert engine.stats().stored_bytes == 0
    assert engine.prefill(prompt_of(SHUFFLED)).usage.approximate_tokens == 0


def test_engines_with_other_codecs_have_other_fingerprints() -> None:
    prints = {engine_of("qwen3", kv_bits=bits).fingerprint for bits in (16, *LOSSY)}
    assert len(prints) == 4


def test_the_first_tokens_of_an_answer_are_those_of_plain_generation() -> None:
    engine = warm("qwen3", 8)
    ids = engine.tokenize(prompt_of(DOCUMENTS))
    engine.prefill(ids)
    assert list(engine.generate(ids, sampling=FEW).token_ids)[:3] == plain_answer(engine.model, ids, 3)


def _with_biases(scale: float) -> Any:
    model = new_model("qwen2")
    for layer in (model.model.layers[0], model.model.layers[-1]):
        bias = layer.self_attn.k_proj.bias
        bias.data = scale * bias.median().abs().clamp_min(0.1) * torch.randn(bias.shape).sign()
    return model


def test_biases_of_thirty_times_the_median_cost_no_fidelity() -> None:
    model = _with_biases(30.0)
    bias = key_bias(model, inspect_model(model))
    assert bias is not None
    assert torch.equal(bias[0].flatten(), model.model.layers[0].self_attn.k_proj.bias)
    assert bias.abs().max() > 2
    unbiased = engine_of("qwen2", kv_bits=8).codec_check
    biased = engine_of(model, kv_bits=8).codec_check
    assert unbiased is not None
    assert biased is not None
    assert biased.loss < 5 * unbiased.loss


def test_a_bias_behind_a_norm_of_keys_is_left_alone() -> None:
    for name in ("qwen3", "olmo2", "gemma3"):
        assert key_bias(model_of(name), inspect_model(model_of(name))) is None
    qwen3 = new_model("qwen3", attention_bias=True)
    assert qwen3.model.layers[0].self_attn.k_proj.bias is not None
    assert key_bias(qwen3, inspect_model(qwen3)) is None


def test_a_bias_that_changes_is_read_anew() -> None:
    model = new_model("qwen2")
    engine = warm(model, 8)
    engine.recipe = replace(engine.recipe, strategy="none")
    before = engine.prefill(prompt_of(SHUFFLED), store=False).logits
    biases = [layer.self_attn.k_proj.bias for layer in model.model.layers]
    kept = [bias.clone() for bias in biases]
    for bias in biases:
        bias += 5.0
    engine.warm(DOCUMENTS)
    found = engine.prefill(prompt_of(SHUFFLED), store=False)
    assert found.usage.approximate_tokens > 100
    plain = warm(model, 16)
    plain.recipe = engine.recipe
    assert difference(found.logits, plain.prefill(prompt_of(SHUFFLED)).logits) < 0.05
    for bias, old in zip(biases, kept, strict=True):
        bias.copy_(old)
    again = engine.prefill(prompt_of(SHUFFLED), store=False)
    assert again.usage.approximate_tokens > 100  # what was stored under the first state
    assert difference(again.logits, before) < 1e-4


def _broken() -> Any:
    """A model that answers from value channels a thousandth the size of their neighbours."""
    model = new_model("qwen3")
    for layer in model.model.layers:
        attention, width = layer.self_attn, 16
        for head in range(2):
            attention.v_proj.weight.data[head * width] *= 3000
        for head in range(4):
            attention.o_proj.weight.data[:, head * width] = 0
    return model


@pytest.mark.parametrize("bits", LOSSY)
def test_a_model_that_a_codec_breaks_is_refused_with_figures_and_remedy(bits: Any) -> None:
    milder = {4: "'8/4'", "8/4": "8", 8: "16"}[bits]
    with pytest.raises(
        UnsupportedModelError, match=rf"takes [\d.e+-]+ of what .* limit is 0\.01; use kv_bits={milder}"
    ):
        engine_of(_broken(), kv_bits=bits)
    engine_of(_broken(), kv_bits=16)


@pytest.mark.parametrize("name", ["llama-dynamic", "phi3-longrope"])
def test_keys_that_cannot_be_turned_back_are_refused(name: str) -> None:
    with pytest.raises(UnsupportedModelError, match=r"kv_bits is 8.*use EngineConfig\(kv_bits=16, reuse='exact'\)"):
        engine_of(name, kv_bits=8)
    engine_of(name, kv_bits=16, reuse="exact")


def test_the_gate_measures_once_and_remembers(tmp_path: Path) -> None:
    first = engine_of("qwen3", kv_bits=4, calibration_dir=tmp_path, selector="query")
    (file,) = tmp_path.glob("*-codec.json")
    assert first.codec_check is not None
    scores = json.loads(file.read_text())
    scores["scores"] |= {"kl": 0.5, "nothing_kl": 1.0}
    file.write_text(json.dumps(scores))
    with pytest.raises(UnsupportedModelError, match=r"takes 0\.5 of"):
        engine_of("qwen3", kv_bits=4, calibration_dir=tmp_path, selector="query")
    engine_of("qwen3", kv_bits=8, calibration_dir=tmp_path, selector="query")  # another codec has a measure of its own
    file.write_text("{")
    again = engine_of("qwen3", kv_bits=4, calibration_dir=tmp_path, selector="query")
    assert again.codec_check == first.codec_check
    assert len(list(tmp_path.glob("*-codec.json"))) == 2


def test_an_engine_without_a_tokenizer_is_measured_on_numbers() -> None:
    engine = engine_of("qwen3", None, kv_bits=8)
    assert engine.codec_check is not None
    assert 0 < engine.codec_check.loss < LIMIT
    assert engine_of("qwen3", None, kv_bits=16).codec_check is None


def test_plain_engines_still_have_exact_segments() -> None:
    engine = engine_of("qwen3", tokenizer_of(), kv_bits=16)
    prompt = prompt_of(DOCUMENTS)
    engine.prefill(prompt)
    assert engine.prefill(prompt).usage.exact_tokens > 100


def test_a_refused_codec_leaves_nothing_on_disk_and_nothing_open(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="kv_bits"):
        engine_of(_broken(), kv_bits=4, disk_path=tmp_path / "store", trace_path=tmp_path / "trace")
    assert list(tmp_path.iterdir()) == []
