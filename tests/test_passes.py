"""What a sparse pass may see, and its attention, against the plain definition."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvboost_rag.chunks import as_ids
from kvboost_rag.hf import cache_over
from kvboost_rag.model_spec import inspect_model
from kvboost_rag.passes import BAND_ROWS, AttentionProbe, PassMask, attend, attention_mass
from kvboost_rag.runner import ModelRunner
from tests.tiny import LIMIT, model_of, new_model, random_ids

DIM = 8


@dataclass
class Case:
    """A pass: which positions run, over how long a cache, what is hidden."""

    positions: torch.Tensor
    kv_tokens: int
    window: int | None
    hidden: torch.Tensor | None
    kv_heads: int
    groups: int

    @property
    def mask(self) -> PassMask:
        return PassMask(
            self.positions,
            self.kv_tokens,
            window=self.window,
            hidden=self.hidden,
            groups=self.groups,
            dtype=torch.float32,
        )

    @property
    def visible(self) -> torch.Tensor:
        """Bool ``(q, kv)``, written pair by pair."""
        rows = []
        for p in self.positions.tolist():
            rows.append(
                [
                    j <= p
                    and (self.window is None or p - j < self.window)
                    and (self.hidden is None or not bool(self.hidden[j]))
                    for j in range(self.kv_tokens)
                ]
            )
        return torch.tensor(rows)


@st.composite
def _cases(draw: st.DrawFn) -> Case:
    n = draw(st.integers(1, 150))
    if draw(st.booleans()):
        first = draw(st.integers(0, n - 1))
        chosen = list(range(first, draw(st.integers(first + 1, n))))
    else:
        chosen = sorted(draw(st.sets(st.integers(0, n - 1), min_size=1)))
    hidden = None
    if draw(st.booleans()):
        hidden = torch.tensor(draw(st.lists(st.booleans(), min_size=n, max_size=n)))
        hidden[chosen] = False  # a pass fills the slots of its own rows
    window = draw(st.none() | st.integers(1, 60))
    return Case(torch.tensor(chosen), n, window, hidden, draw(st.integers(1, 2)), draw(st.integers(1, 3)))


def _tensors(case: Case, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    heads = case.kv_heads * case.groups
    query = torch.randn((1, heads, len(case.positions), DIM), generator=generator)
    key, value = torch.randn((2, 1, case.kv_heads, case.kv_tokens, DIM), generator=generator)
    return query, key, value


def _weights(case: Case, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Attention weights by the definition, float64 ``(heads, q, kv)``."""
    keys = key[0].double().repeat_interleave(case.groups, 0)
    scores = query[0].double() @ keys.transpose(1, 2) * DIM**-0.5
    return torch.softmax(scores.masked_fill(~case.visible, float("-inf")), -1)


@settings(max_examples=150, deadline=None)
@given(_cases())
def test_the_mask_shows_what_a_row_may_see_and_nothing_else(case: Case) -> None:
    full = case.mask.full()
    assert full.shape == (1, 1, len(case.positions), case.kv_tokens)
    assert torch.equal(full[0, 0] == 0, case.visible)
    assert bool(torch.isneginf(full[0, 0][~case.visible]).all())


@settings(max_examples=150, deadline=None)
@given(_cases())
def test_the_bands_together_are_the_mask(case: Case) -> None:
    seen = torch.zeros(len(case.positions), case.kv_tokens, dtype=torch.bool)
    for band in case.mask.bands:
        rows = band.last - band.first
        assert rows <= BAND_ROWS
        part = band.mask.reshape(case.groups, rows, band.high - band.low)
        assert all(torch.equal(part[0], other) for other in part)
        seen[band.first : band.last, band.low : band.high] = part[0] == 0
    assert torch.equal(seen, case.visible)


@settings(max_examples=150, deadline=None)
@given(_cases())
def test_attention_is_the_masked_softmax(case: Case) -> None:
    query, key, value = _tensors(case)
    out = attend(query, key, value, case.mask, DIM**-0.5)
    expected = _weights(case, query, key) @ value[0].double().repeat_interleave(case.groups, 0)
    assert out.shape == (1, len(case.positions), case.kv_heads * case.groups, DIM)
    assert torch.allclose(out[0].transpose(0, 1).double(), expected, atol=1e-5)


@settings(max_examples=100, deadline=None)
@given(_cases(), st.data())
def test_attention_mass_is_the_sum_of_the_weights_of_the_asking_rows(case: Case, data: st.DataObject) -> None:
    query, key, _ = _tensors(case)
    rows = sorted(data.draw(st.sets(st.integers(0, len(case.positions) - 1), min_size=1)))
    mass = attention_mass(query, key, case.mask, torch.tensor(rows), DIM**-0.5)
    assert torch.allclose(mass.double(), _weights(case, query, key)[:, rows].sum((0, 1)), atol=1e-4)
    assert float(mass.sum()) == pytest.approx(len(rows) * case.kv_heads * case.groups, rel=1e-4)


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_without_a_mask_attention_is_causal(kv_heads: int) -> None:
    case = Case(torch.arange(40), 40, None, None, kv_heads, 2)
    query, key, value = _tensors(case)
    assert torch.allclose(attend(query, key, value, None, 0.3), attend(query, key, value, case.mask, 0.3), atol=1e-5)


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3", "cohere"])
def test_a_probe_collects_the_attention_of_plain_hugging_face(name: str) -> None:
    ids = as_ids(random_ids(1, 60))
    rows = np.array([7, 30, 58, 59])
    eager = new_model(name, attn_implementation="eager")
    with torch.inference_mode():
        weights = eager(input_ids=torch.tensor(ids.tolist())[None], output_attentions=True).attentions
    model = model_of(name)
    runner = ModelRunner(model, inspect_model(model))
    kv = runner.new_kv(60, 60)
    probe = AttentionProbe(torch.from_numpy(rows), frozenset({0, 1, 2}))
    logits = runner.run(kv, cache_over(kv), torch.tensor(ids.tolist()), torch.arange(60), probe=probe)
    assert logits is None  # the pass ends with the last layer that is asked about
    for layer in range(3):
        assert torch.allclose(probe.mass[layer], weights[layer][0][:, rows].sum((0, 1)), atol=1e-4), layer


def test_a_full_pass_with_soft_caps_is_causal_whatever_attention_the_model_was_loaded_with() -> None:
    model = new_model("gemma2")
    ids = random_ids(3, 20)
    runner = ModelRunner(model, inspect_model(model))
    with torch.inference_mode():
        plain = model(input_ids=torch.tensor([ids])).logits[0, -1]
    model.config._attn_implementation = "flash_attention_2"  # what a GPU would have; ours runs in its place
    kv = runner.new_kv(20, 20)
    logits = runner.run(kv, cache_over(kv), torch.tensor(ids), torch.arange(20))
    assert logits is not None
    assert float((logits - plain).abs().max()) < LIMIT
