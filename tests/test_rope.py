"""Moving keys is turning them by the difference of positions, in every layout."""

from __future__ import annotations

import itertools
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvboost_rag.rope import Layout, Rope, RopeGroup

LAYERS, HEADS, DIM = 3, 2, 16
LAYOUTS = get_args(Layout)
PARTS = {"whole head": 8, "half of the head": 4, "a quarter": 2}


def _freq(pairs: int) -> torch.Tensor:
    return 1e4 ** (-torch.arange(pairs, dtype=torch.float32) / pairs)


def _rope(layout: Layout, pairs: int = 8) -> Rope:
    return Rope([RopeGroup(tuple(range(LAYERS)), _freq(pairs), layout)], LAYERS)


def _keys(tokens: int, seed: int = 0) -> torch.Tensor:
    return torch.randn((LAYERS, HEADS, tokens, DIM), generator=torch.Generator().manual_seed(seed))


def _encoded(raw: torch.Tensor, positions: torch.Tensor, layout: Layout, pairs: int) -> torch.Tensor:
    """Keys at their positions, by complex numbers in float64; written without a look at the engine's way."""
    if layout == "none":
        return raw.double()
    where = torch.arange(2 * pairs)
    if layout == "half":
        order = torch.stack([where[:pairs], where[pairs:]], 1)
    else:
        order = where.reshape(pairs, 2)
    plane = torch.view_as_complex(raw.double()[..., order].contiguous())
    angle = positions.double()[:, None] * _freq(pairs).double()[None]
    turned = torch.view_as_real(plane * torch.polar(torch.ones_like(angle), angle))
    out = raw.double().clone()
    out[..., order.reshape(-1)] = turned.flatten(-2)
    return out


def _moved(rope: Rope, keys: torch.Tensor, delta: int) -> torch.Tensor:
    out = torch.empty_like(keys)
    rope.move(keys, delta, out)
    return out


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("pairs", PARTS.values(), ids=PARTS)
@settings(max_examples=25, deadline=None)
@given(base=st.integers(0, 5000), delta=st.integers(-5000, 5000))
def test_a_moved_key_is_the_key_of_the_new_position(layout: Layout, pairs: int, base: int, delta: int) -> None:
    raw, positions = _keys(5), torch.arange(base, base + 5)
    before = _encoded(raw, positions, layout, pairs).float()
    after = _encoded(raw, positions + delta, layout, pairs).float()
    assert torch.allclose(_moved(_rope(layout, pairs), before, delta), after, atol=2e-6)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_there_and_back_is_the_identity(layout: Layout) -> None:
    rope, keys = _rope(layout), _keys(7)
    assert torch.allclose(_moved(rope, _moved(rope, keys, 1234), -1234), keys, atol=1e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_moves_are_one(layout: Layout) -> None:
    rope, keys = _rope(layout), _keys(7)
    assert torch.allclose(_moved(rope, _moved(rope, keys, 300), -71), _moved(rope, keys, 229), atol=1e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_move_by_nothing_changes_no_bit(layout: Layout) -> None:
    keys = _keys(7)
    assert torch.equal(_moved(_rope(layout), keys, 0), keys)


@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_dimensions_beyond_the_rotary_part_stay(layout: Layout) -> None:
    keys = _keys(7)
    moved = _moved(_rope(layout, pairs=4), keys, 99)
    assert torch.equal(moved[..., 8:], keys[..., 8:])
    assert not torch.allclose(moved[..., :8], keys[..., :8])


@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_moving_keeps_the_length_of_every_key(layout: Layout) -> None:
    # So whatever factor the model's own cos and sin carry is not applied a second time.
    keys = 1.7 * _keys(7)
    moved = _moved(_rope(layout), keys, 4321)
    assert torch.allclose(moved.norm(dim=-1), keys.norm(dim=-1), rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_half_precision_is_turned_in_float32(layout: Layout, dtype: torch.dtype) -> None:
    keys = _keys(64).to(dtype)
    moved = _moved(_rope(layout), keys, 4321)
    assert moved.dtype == dtype
    assert torch.equal(moved, _moved(_rope(layout), keys.float(), 4321).to(dtype))


def test_far_positions_lose_no_precision() -> None:
    raw, far = _keys(3), torch.arange(131_000, 131_003)
    start = _encoded(raw, torch.arange(3), "half", 8).float()
    assert torch.allclose(_moved(_rope("half"), start, 131_000), _encoded(raw, far, "half", 8).float(), atol=1e-5)


def test_each_layer_is_turned_by_its_own_group() -> None:
    slow, fast = _freq(8), 3 * _freq(8)
    rope = Rope([RopeGroup((0, 2), slow, "half"), RopeGroup((1,), fast, "interleaved")], LAYERS)
    keys = _keys(5)
    moved = _moved(rope, keys, 50)
    for layer, (freq, layout) in enumerate([(slow, "half"), (fast, "interleaved"), (slow, "half")]):
        alone = Rope([RopeGroup((0,), freq, layout)], 1)
        assert torch.equal(moved[layer : layer + 1], _moved(alone, keys[layer : layer + 1], 50)), layer


@pytest.mark.parametrize("layers", [[(0, 1)], [(0, 1), (1, 2)], [(0, 1, 2, 3)]])
def test_every_layer_belongs_to_exactly_one_group(layers: list[tuple[int, ...]]) -> None:
    with pytest.raises(ValueError, match="exactly one"):
        Rope([RopeGroup(group, _freq(8), "half") for group in layers], LAYERS)


def test_a_move_writes_into_a_slice_of_a_larger_cache() -> None:
    keys, cache = _keys(5), torch.zeros(LAYERS, HEADS, 20, DIM)
    _rope("half").move(keys, 7, cache[:, :, 3:8])
    assert torch.equal(cache[:, :, 3:8], _moved(_rope("half"), keys, 7))
    assert not cache[:, :, :3].any()
    assert not cache[:, :, 8:].any()


@pytest.mark.parametrize(("layout", "layer"), list(itertools.product(LAYOUTS, range(LAYERS))))
def test_tables_turn_every_token_to_its_own_position_and_back(layout: Layout, layer: int) -> None:
    rope, raw, positions = _rope(layout), _keys(5)[layer], torch.tensor([3, 9, 27, 81, 243])
    cos, sin = rope.tables(layer, positions)
    turned = rope.turn(layer, raw, cos, sin)
    assert torch.allclose(turned, _encoded(raw, positions, layout, 8).float(), atol=1e-5)
    assert torch.allclose(rope.turn(layer, turned, cos, -sin), raw, atol=1e-5)
