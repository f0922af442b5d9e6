"""Passes that stop in the middle of the depth: what waits there, what catches up, and what comes out."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest
import torch

from kvboost_rag import Engine, Prefill, UnsupportedModelError, prefill
from kvboost_rag.depth import Depth
from kvboost_rag.kv import EndOfPass
from tests.tiny import LIMIT, SERVED, difference, engine_of, model_of, prompt_of, random_ids, text

DOCUMENTS = [text(seed, 40) for seed in (400, 401, 402)]
PROMPT = prompt_of(DOCUMENTS[::-1])


def _warm(model: str = "llama", **config: object) -> Engine:
    engine = engine_of(model, selector="query", **config)
    engine.warm(DOCUMENTS)
    return engine


def _run(engine: Engine, **recipe: object) -> Prefill:
    engine.recipe = replace(engine.recipe, **recipe)  # type: ignore[arg-type]
    return engine.prefill(PROMPT, store=False)


@pytest.mark.parametrize("model", list(SERVED))
def test_every_family_can_be_cut_and_gives_the_same(model: str) -> None:
    engine = _warm(model)
    assert engine.checked is not None
    assert engine.checked.can_cut
    # A share that rounds to no token at all stops, chooses nothing and goes on: one pass over new tokens and floor.
    cut = _run(engine, ratio=1e-9, floor_tokens=4, offset=0.5, rerun=False)
    whole = _run(engine, ratio=0.0, floor_tokens=4)
    assert cut.usage == whole.usage
    assert difference(cut.logits, whole.logits) < LIMIT


@pytest.mark.parametrize("model", ["llama", "gemma3", "gpt-neox", "mixtral"])
def test_chosen_tokens_are_paid_for_once(model: str) -> None:
    engine = _warm(model)
    joined, rerun = (_run(engine, ratio=0.2, rerun=again) for again in (False, True))
    assert joined.usage.repaired_tokens == rerun.usage.repaired_tokens > 0
    new = joined.plan.tokens("compute")
    # And the last token once more, up to where it waited.
    assert joined.usage.computed_tokens - new - joined.usage.repaired_tokens in (0, 1)
    assert rerun.usage.computed_tokens > joined.usage.computed_tokens
    assert torch.isfinite(joined.logits).all()


class Wrapped(torch.nn.Module):
    """What adapters do to a model."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.base = torch.nn.ModuleDict({"model": inner})

    def get_decoder(self) -> torch.nn.Module:
        return self.base["model"].get_decoder()

    def forward(self, **inputs: Any) -> Any:
        return self.base["model"](**inputs)


def test_a_wrapped_model_is_cut_where_its_decoder_is() -> None:
    model, ids = model_of("llama"), torch.tensor([random_ids(1, 12)])
    depth = Depth(Wrapped(model), 3)
    lower, states = depth.ending_before(1)
    with torch.no_grad():
        with pytest.raises(EndOfPass):
            lower(input_ids=ids, use_cache=False)
        upper = depth.beginning_at(1)(inputs_embeds=states[0][None], use_cache=False).logits
        assert difference(upper[0], model(input_ids=ids).logits[0]) < LIMIT
    with pytest.raises(UnsupportedModelError, match="no list of its 7 layers"):
        Depth(model, 7).beginning_at(1)


def test_repair_in_the_middle_comes_nearer_to_a_full_prefill() -> None:
    engine = _warm()
    full = engine.prefill(PROMPT, reuse="off").logits.log_softmax(-1)
    off = []
    for ratio in (0.0, 0.3, 0.9):
        ours = _run(engine, ratio=ratio, floor_tokens=0, offset=0.0).logits.log_softmax(-1)
        off.append(float((full.exp() * (full - ours)).sum()))
    assert off[2] < off[0]


def test_a_model_that_cannot_be_cut_runs_its_new_tokens_again() -> None:
    engine = _warm()
    joined = _run(engine, ratio=0.2)
    engine._serving._executor.cuts = False
    again = _run(engine, ratio=0.2)
    assert again.usage.computed_tokens > joined.usage.computed_tokens


def test_many_new_tokens_do_not_wait_in_the_middle(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = _warm()
    joined = _run(engine, ratio=0.2)
    monkeypatch.setattr(prefill, "MOST_JOINING", joined.plan.tokens("compute") - 1)
    assert _run(engine, ratio=0.2).usage.computed_tokens > joined.usage.computed_tokens


@pytest.mark.parametrize("model", ["llama", "gemma2"])
def test_passes_that_give_way_in_the_middle_stay_apart(model: str) -> None:
    engine = _warm(model)
    engine.recipe = replace(engine.recipe, ratio=0.2)
    prompts = [prompt_of([DOCUMENTS[i], DOCUMENTS[j]], question=f"{i} {j}?") for i in range(3) for j in range(3)]
    alone = [engine.prefill(prompt, store=False).logits for prompt in prompts]
    found: dict[int, torch.Tensor] = {}

    def run(number: int) -> None:
        for _ in range(3):
            found[number] = engine.prefill(prompts[number], store=False).logits

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, logits in enumerate(alone):
        assert difference(found[number], logits) < LIMIT
