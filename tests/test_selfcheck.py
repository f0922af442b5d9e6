"""What cannot be served is refused at load, with the layer and the error; what can be, is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvboost_rag import SamplingParams, UnsupportedModelError
from kvboost_rag.model_spec import inspect_model
from kvboost_rag.runner import ModelRunner
from kvboost_rag.selfcheck import self_check
from tests.tiny import (
    LENGTH_DEPENDENT,
    LIMIT,
    ORIGINAL,
    PECULIAR,
    SERVED,
    STATEFUL,
    UNMOVABLE,
    engine_of,
    model_of,
    new_model,
    off_by,
    plain_answer,
    prompt_of,
    random_ids,
    text,
)

DOCUMENTS = [text(seed, 25) for seed in (100, 101, 102)]
INTERLEAVED = {"glm", "cohere", "cohere2"}
WITHOUT_POSITION = {("cohere2", 1), ("smollm3", 1)}


# ---- served ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SERVED)
def test_the_layout_of_each_layer_is_found_by_trying(name: str) -> None:
    checked = engine_of(name).checked
    assert checked is not None
    for layer, layout in enumerate(checked.layouts):
        rotary = "interleaved" if name in INTERLEAVED else "half"
        assert layout == ("none" if (name, layer) in WITHOUT_POSITION else rotary), layer
    assert max(checked.move_error, checked.value_error, checked.logit_error) < checked.tolerance / 10


def test_each_rotary_base_is_its_own_group() -> None:
    model = model_of("gemma3")
    rope, _ = self_check(ModelRunner(model, inspect_model(model)), moving=True)
    assert rope is not None
    assert sorted(group.layers for group in rope.groups) == [(0, 2), (1,)]
    local, full = rope.group_of[0].inv_freq, rope.group_of[1].inv_freq
    assert not torch.allclose(local, full)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_precisions_pass(dtype: torch.dtype) -> None:
    engine = engine_of(new_model("llama").to(dtype))
    checked = engine.checked
    assert checked is not None
    assert checked.layouts == ("half",) * 3
    engine.warm(DOCUMENTS)
    found = engine.prefill(prompt_of(DOCUMENTS[::-1]))
    assert found.usage.approximate_tokens > 80
    assert found.cache.layers[0].keys.dtype == dtype
    assert bool(found.logits.isfinite().all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_recomputing_everything_in_half_precision_is_plain_within_rounding(dtype: torch.dtype) -> None:
    engine = engine_of(new_model("llama").to(dtype), repair_ratio=1.0)
    engine.warm(DOCUMENTS)
    assert off_by(engine, engine.prefill(prompt_of(DOCUMENTS[::-1]))) < 0.05


def test_the_check_leaves_the_model_as_it_was() -> None:
    model = new_model("gemma2")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    implementation = model.config._attn_implementation
    engine_of(model)
    assert model.config._attn_implementation == implementation
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name


# ---- refused ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*UNMOVABLE, *STATEFUL, *LENGTH_DEPENDENT, *PECULIAR])
def test_models_that_cannot_move_keys_are_refused_for_approximate_reuse(name: str) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        engine_of(name)
    message = str(caught.value)
    assert "use EngineConfig(reuse=" in message or "use plain transformers" in message


def test_learned_positions_are_refused_with_layer_and_error_but_serve_exact_hits() -> None:
    with pytest.raises(
        UnsupportedModelError, match=r"layer 0: keys moved by 97 positions are off by \d.*reuse='exact'"
    ):
        engine_of("gpt2")
    engine = engine_of("gpt2", reuse="exact")
    stem = random_ids(1, 60)
    engine.prefill([*stem, *random_ids(2, 9)])
    found = engine.prefill([*stem, *random_ids(3, 20)])
    assert found.usage.exact_tokens == 60
    assert off_by(engine, found) < LIMIT


@pytest.mark.parametrize("reuse", ["off", "exact", "approximate"])
@pytest.mark.parametrize(("name", "layer"), [("lfm2", 1), ("qwen3-next", 1), ("mamba", 0)])
def test_layers_with_other_state_are_refused_by_name_in_every_mode(name: str, layer: int, reuse: str) -> None:
    with pytest.raises(UnsupportedModelError, match=rf"layer {layer} is of type '(conv|linear_attention)'") as caught:
        engine_of(name, reuse=reuse)
    assert caught.value.layer == layer


@pytest.mark.parametrize("reuse", ["off", "exact", "approximate"])
@pytest.mark.parametrize("name", [*SERVED, *UNMOVABLE, *LENGTH_DEPENDENT, *PECULIAR])
def test_a_model_is_refused_at_load_or_answers_as_plain_hugging_face(name: str, reuse: str) -> None:
    try:
        engine = engine_of(name, reuse=reuse)
    except UnsupportedModelError:
        assert name not in SERVED
        return
    ids = random_ids(1, 50)
    assert off_by(engine, engine.prefill(ids)) < LIMIT
    answer = engine.generate(ids, sampling=SamplingParams(max_tokens=3))
    assert list(answer.token_ids) == plain_answer(engine.model, ids, 3)


def _wrong_frequency(layer: Any) -> Callable[..., Any]:
    """The layer gets positions that run twice as fast as the model's frequencies say."""

    def forward(hidden: torch.Tensor, *args: Any, position_embeddings: Any, **kwargs: Any) -> Any:
        cos, sin = position_embeddings
        twice = (cos * cos - sin * sin, 2 * sin * cos)
        return type(layer).forward(layer, hidden, *args, position_embeddings=twice, **kwargs)

    return forward


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_a_layer_with_another_rotation_is_refused_by_its_number(layer: int) -> None:
    model = new_model("llama")
    broken = model.model.layers[layer]
    broken.forward = _wrong_frequency(broken)
    with pytest.raises(UnsupportedModelError, match=rf"layer {layer}: keys moved") as caught:
        engine_of(model)
    assert caught.value.layer == layer
    engine = engine_of(model, reuse="exact")
    assert off_by(engine, engine.prefill(random_ids(1, 50))) < LIMIT


def test_values_that_depend_on_the_position_are_refused() -> None:
    model = new_model("llama")
    attention = model.model.layers[1].self_attn
    at: dict[str, torch.Tensor] = {}
    model.model.layers[1].register_forward_pre_hook(lambda m, a, k: at.update(p=k["position_ids"]), with_kwargs=True)
    attention.v_proj.register_forward_hook(lambda m, a, out: out * (1 + 0.01 * at["p"][..., None]))
    with pytest.raises(UnsupportedModelError, match="layer 1: values change with the position") as caught:
        engine_of(model)
    assert caught.value.layer == 1


def test_a_model_that_looks_behind_a_token_is_refused() -> None:
    model = new_model("llama")
    # A mean over the whole pass makes a token's output depend on what else runs.
    model.model.layers[1].mlp.register_forward_hook(lambda m, a, out: out + out.mean(1, keepdim=True))
    with pytest.raises(UnsupportedModelError, match=r"recomputed logits|causality"):
        engine_of(model)


# ---- frequencies that depend on the length ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", LENGTH_DEPENDENT)
def test_length_dependent_frequencies_say_that_keys_cannot_be_moved(name: str) -> None:
    with pytest.raises(UnsupportedModelError, match=r"depend on the prompt length.*reuse='exact'"):
        engine_of(name)


@pytest.mark.parametrize("name", LENGTH_DEPENDENT)
def test_length_dependent_frequencies_serve_exact_hits_up_to_the_original_length(name: str) -> None:
    engine = engine_of(name, reuse="exact")
    stem = random_ids(1, 40)
    engine.prefill([*stem, *random_ids(2, 9)])
    prompt = [*stem, *random_ids(3, 15)]
    found = engine.prefill(prompt)
    assert found.usage.exact_tokens == 40
    assert found.fallback_reason is None
    assert off_by(engine, found) < LIMIT
    answer = engine.generate(prompt, sampling=SamplingParams(max_tokens=6))
    assert list(answer.token_ids) == plain_answer(engine.model, prompt, 6)


def test_beyond_the_original_length_everything_is_computed_and_the_reason_given() -> None:
    engine = engine_of("phi3-longrope", reuse="exact")
    prompt = random_ids(1, ORIGINAL + 10)
    for _ in range(2):
        found = engine.prefill(prompt)
        assert found.usage.exact_tokens == 0
        assert str(ORIGINAL) in str(found.fallback_reason)
        assert str(len(prompt)) in str(found.fallback_reason)
        assert off_by(engine, found) < LIMIT
    assert sum(engine.stats().fallbacks.values()) == 2


@pytest.mark.parametrize("tokens", [ORIGINAL - 4, ORIGINAL - 1, ORIGINAL, ORIGINAL + 1, ORIGINAL + 30])
def test_an_answer_that_crosses_the_original_length_is_that_of_plain_generate(tokens: int) -> None:
    engine = engine_of("phi3-longrope", reuse="exact")
    prompt = random_ids(5, tokens)
    expected = plain_answer(engine.model, prompt, 10)
    for _ in range(2):
        assert list(engine.generate(prompt, sampling=SamplingParams(max_tokens=10)).token_ids) == expected


def test_a_long_prompt_does_not_change_the_frequencies_of_the_next_short_one() -> None:
    engine = engine_of(new_model("phi3-longrope"), reuse="exact")
    short, long = random_ids(1, 30), random_ids(2, ORIGINAL + 20)
    engine.prefill(short)
    engine.prefill(long)
    again = engine.prefill([*short, 7, 8, 9])
    assert again.usage.exact_tokens == 30
    assert off_by(engine, again) < LIMIT
