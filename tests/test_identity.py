"""Who may use a chunk: the same namespace of the very same model, and nobody else."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kvboost_rag import ConfigError, Engine, SamplingParams
from kvboost_rag.fingerprints import fingerprint
from tests.tiny import LIMIT, engine_of, model_of, new_model, off_by, plain_answer, prompt_of, text, tokenizer_of

ROOT = Path(__file__).parent.parent
DOCUMENTS = [text(seed, 25) for seed in (100, 101, 102)]
PROMPT = prompt_of(DOCUMENTS)


def _reused(engine: Engine, namespace: str | None = None) -> int:
    usage = engine.prefill(PROMPT, namespace=namespace, store=False).usage
    return usage.exact_tokens + usage.approximate_tokens


def _filled(model: Any, **config: Any) -> Engine:
    engine = engine_of(model, **config)
    engine.warm(DOCUMENTS)
    engine.prefill(PROMPT)
    assert _reused(engine) > 80
    return engine


# ---- namespaces ------------------------------------------------------------------------------------------------------


def test_a_namespace_never_hits_what_another_stored() -> None:
    engine = engine_of()
    engine.warm(DOCUMENTS, namespace="a")
    engine.prefill(PROMPT, namespace="a")
    for other in ("b", "A", "a ", "aa", None):
        assert _reused(engine, other) == 0, other
    assert _reused(engine, "a") > 80


def test_the_configured_namespace_is_the_default() -> None:
    engine = engine_of(namespace="tenant")
    engine.warm(DOCUMENTS)
    assert _reused(engine) == _reused(engine, "tenant") > 80
    assert _reused(engine, "default") == 0


@pytest.mark.parametrize("namespace", ["ü", "a/b", "\x00", "x" * 1000])
def test_any_other_text_names_a_namespace(namespace: str) -> None:
    engine = engine_of()
    engine.warm(DOCUMENTS, namespace=namespace)
    assert _reused(engine, namespace) > 80
    assert _reused(engine) == 0


@pytest.mark.parametrize("namespace", ["", 7, b"a", ["a"]])
def test_a_namespace_is_a_text_and_not_empty(namespace: Any) -> None:
    engine = engine_of()
    for use in (
        lambda: engine.prefill(PROMPT, namespace=namespace),
        lambda: engine.warm(DOCUMENTS, namespace=namespace),
        lambda: engine.forget(DOCUMENTS, namespace=namespace),
        lambda: engine.clear(namespace),
    ):
        with pytest.raises(ConfigError, match="namespace"):
            use()


def test_forgetting_in_one_namespace_leaves_the_other() -> None:
    engine = engine_of()
    for name in ("a", "b"):
        engine.warm(DOCUMENTS, namespace=name)
    assert engine.forget(DOCUMENTS, namespace="a") == len(DOCUMENTS)
    assert (_reused(engine, "a"), _reused(engine, "b") > 80) == (0, True)


# ---- fingerprints ----------------------------------------------------------------------------------------------------


def test_equal_models_have_equal_fingerprints() -> None:
    assert engine_of(new_model("llama")).fingerprint == engine_of(new_model("llama")).fingerprint


def test_the_fingerprint_is_the_same_in_another_process() -> None:
    code = (
        "from tests.tiny import new_model, tokenizer_of; from kvboost_rag.fingerprints import fingerprint\n"
        "print(fingerprint(new_model('gemma3'), tokenizer_of()))"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": "123"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.split()[-1] == fingerprint(new_model("gemma3"), tokenizer_of())


def test_another_model_tokenizer_dtype_rotation_or_seed_is_another_fingerprint() -> None:
    plain, other = tokenizer_of(), tokenizer_of(20)
    theta = {"rope_parameters": {"rope_type": "default", "rope_theta": 2e4}}
    found = [
        fingerprint(model_of("llama"), plain),
        fingerprint(model_of("llama"), other),
        fingerprint(model_of("llama"), None),
        fingerprint(model_of("qwen2"), plain),
        fingerprint(new_model("llama", seed=1), plain),
        fingerprint(new_model("llama").to(torch.bfloat16), plain),
        fingerprint(new_model("llama", **theta), plain),
        fingerprint(new_model("llama", rms_norm_eps=1e-3), plain),
    ]
    assert len(set(found)) == len(found)


def test_where_a_model_was_loaded_from_is_no_part_of_it(tmp_path: Path) -> None:
    model = new_model("llama")
    for folder in ("one", "two"):
        model.save_pretrained(tmp_path / folder)
        tokenizer_of().save_pretrained(tmp_path / folder)
    engines = [Engine.from_pretrained(str(tmp_path / folder), config=engine_of().config) for folder in ("one", "two")]
    assert engines[0].fingerprint == engines[1].fingerprint
    assert off_by(engines[0], engines[0].prefill(PROMPT)) < LIMIT


# ---- changes under a running engine ----------------------------------------------------------------------------------


def _weight(model: Any) -> torch.nn.Parameter:
    weight: torch.nn.Parameter = model.model.layers[1].self_attn.k_proj.weight
    return weight


def _set_weight(model: Any, weight: torch.nn.Parameter) -> None:
    model.model.layers[1].self_attn.k_proj.weight = weight


CHANGES: dict[str, Callable[[Any], Any]] = {
    "in place": lambda model: _weight(model).mul_(1.5),
    "one number": lambda model: _weight(model)[0, 0].add_(1.0),
    "through .data": lambda model: _weight(model).data.mul_(1.5),
    "added to .data": lambda model: setattr(_weight(model), "data", _weight(model).data + 0.1),
    "through numpy": lambda model: _weight(model).detach().numpy().__imul__(2),
    "another state": lambda model: model.load_state_dict(new_model("llama", seed=3).state_dict()),
    "another parameter": lambda model: _set_weight(model, torch.nn.Parameter(_weight(model) * 1.5)),
    "another module": lambda model: setattr(
        model.model.layers[1], "mlp", new_model("llama", seed=3).model.layers[1].mlp
    ),
    "another layer": lambda model: model.model.layers.__setitem__(0, new_model("llama", seed=3).model.layers[0]),
    "another precision": lambda model: model.to(torch.float64),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("selector", ["deviation", "query"])
def test_after_any_change_of_the_weights_nothing_old_is_used(change: Callable[[Any], Any], selector: str) -> None:
    model = new_model("llama")
    engine = _filled(model, selector=selector)
    before = engine.fingerprint
    change(model)
    cold = engine.prefill(PROMPT, store=False)
    assert cold.usage.exact_tokens == cold.usage.approximate_tokens == 0
    assert off_by(engine, cold) < LIMIT
    assert engine.fingerprint != before
    assert engine.warm(DOCUMENTS).computed == len(DOCUMENTS)
    assert _reused(engine) > 80
    answer = engine.generate(PROMPT, reuse="exact", sampling=SamplingParams(max_tokens=4))
    assert list(answer.token_ids) == plain_answer(model, engine.tokenize(PROMPT), 4)


def test_a_change_that_is_taken_back_finds_its_chunks_again() -> None:
    model = new_model("llama")
    engine = _filled(model)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.load_state_dict(new_model("llama", seed=3).state_dict())
    assert _reused(engine) == 0
    model.load_state_dict(state)
    assert _reused(engine) > 80


def test_a_change_is_noticed_by_streams_and_warming_too() -> None:
    model = new_model("llama")
    engine = _filled(model)
    _weight(model).mul_(1.5)
    last = list(engine.stream(PROMPT, sampling=SamplingParams(max_tokens=2), store=False))[-1].generation
    assert last is not None
    assert last.usage.exact_tokens == last.usage.approximate_tokens == 0
    _weight(model).mul_(1.5)
    assert engine.warm(DOCUMENTS).already_warm == 0


def test_a_model_that_becomes_unservable_is_refused_until_it_is_right_again() -> None:
    model = new_model("llama")
    engine = _filled(model)
    norm = model.model.norm
    model.model.norm = torch.nn.Linear(64, 63)
    for _ in range(2):
        with pytest.raises(Exception, match=r"mat1 and mat2|size"):
            engine.prefill(PROMPT)
    model.model.norm = norm
    assert off_by(engine, engine.prefill(PROMPT)) < LIMIT


@pytest.mark.filterwarnings("ignore")  # PEFT's own
def test_adapters_that_are_switched_disabled_scaled_or_merged_have_their_own_chunks() -> None:
    peft = pytest.importorskip("peft")
    model = new_model("llama")
    config = peft.LoraConfig(r=4, lora_alpha=32, target_modules=["q_proj", "k_proj", "v_proj"], init_lora_weights=False)
    engine = _filled(model)

    def fresh() -> None:
        cold = engine.prefill(PROMPT, store=False)
        assert cold.usage.exact_tokens == cold.usage.approximate_tokens == 0
        assert off_by(engine, cold) < LIMIT

    adapted = peft.get_peft_model(model, config, adapter_name="first").eval()
    fresh()
    engine.warm(DOCUMENTS)
    adapted.add_adapter("second", config)
    adapted.set_adapter("second")
    fresh()
    engine.warm(DOCUMENTS)
    adapted.set_adapter("first")
    fresh()  # another adapter beside it is another structure, so all was inspected anew
    engine.warm(DOCUMENTS)
    with adapted.disable_adapter():
        fresh()
    for name in ("first", "second", "first"):
        adapted.set_adapter(name)
        assert _reused(engine) > 80
    adapted.merge_adapter()
    fresh()
