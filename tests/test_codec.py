"""Codecs: what is encoded comes back within its bound, at any place, in any slice; loaded from bytes as from RAM."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from kvboost_rag.kv import RequestKV, StoredRun
from kvboost_rag.rope import Layout, Rope, RopeGroup
from kvboost_rag.store import Codec, KVShape, codec_for, codec_of
from kvboost_rag.store.quantise import (
    dequantise,
    least_of,
    pack,
    pack_pairs,
    quantise,
    quantise_about_zero,
    unpack,
    unpack_pairs,
)
from kvboost_rag.store.quantised import FIRST_TOKENS

LAYERS, HEADS, DIM, BASE = 3, 2, 16, 7
NAMES = ("plain", "int8", "int8-int4", "int4")
LOSSY = NAMES[1:]
BITS = {"int8": (8, 8), "int8-int4": (8, 4), "int4": (4, 4)}


def freq(pairs: int) -> torch.Tensor:
    return 1e4 ** (-torch.arange(pairs, dtype=torch.float32) / pairs)


def rope_of(layout: Layout = "half", pairs: int = DIM // 2, layers: int = LAYERS) -> Rope:
    return Rope([RopeGroup(tuple(range(layers)), freq(pairs), layout)], layers)


def kv_of(
    tokens: int, *, base: int = BASE, seed: int = 0, dtype: torch.dtype = torch.float32, shape: Any = None
) -> RequestKV:
    layers, heads, dim, value_dim = shape or (LAYERS, HEADS, DIM, DIM)
    length = base + tokens
    kv = RequestKV(
        layers, heads, dim, value_dim, length=length, capacity=length, dtype=dtype, device=torch.device("cpu")
    )
    draw = torch.Generator().manual_seed(seed)
    kv.keys.copy_(torch.randn(kv.keys.shape, generator=draw))
    kv.values.copy_(torch.randn(kv.values.shape, generator=draw))
    return kv


def like(kv: RequestKV, length: int) -> RequestKV:
    (layers, heads, _, dim), value_dim = kv.keys.shape, kv.values.shape[-1]
    new = RequestKV(
        layers, heads, dim, value_dim, length=length, capacity=length, dtype=kv.keys.dtype, device=torch.device("cpu")
    )
    new.keys.fill_(torch.nan)
    new.values.fill_(torch.nan)
    return new


def placed(
    run: StoredRun, kv: RequestKV, rope: Rope | None, *, at: int = BASE, offset: int = 0, length: int | None = None,
    base: int = BASE,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Keys and values of ``length`` tokens as a request would get them; nothing beside them is written."""
    length = run.tokens - offset if length is None else length
    into = like(kv, at + length + 3)
    run.place(into, at, offset=offset, length=length, delta=at - (base + offset), rope=rope)
    here = slice(at, at + length)
    for block in (into.keys, into.values):
        assert bool(block[:, :, here].isfinite().all())
        assert bool(block[:, :, :at].isnan().all())
        assert bool(block[:, :, at + length :].isnan().all())
    return into.keys[:, :, here], into.values[:, :, here]


def moved(kv: RequestKV, rope: Rope, delta: int, start: int = BASE) -> torch.Tensor:
    keys = kv.keys[:, :, start:]
    out = torch.empty_like(keys)
    rope.move(keys, delta, out)
    return out


def steps(x: torch.Tensor, dim: int, bits: int) -> torch.Tensor:
    """The step of groups along ``dim``, a little more than the finest the bits allow."""
    span = x.amax(dim, keepdim=True).clamp_min(0) - x.amin(dim, keepdim=True).clamp_max(0)
    return 1.02 * span / ((1 << bits) - 1)


@pytest.mark.parametrize("bits", [8, 4])
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_no_number_is_off_by_more_than_half_a_step(bits: int, data: Any) -> None:
    shape = data.draw(st.tuples(st.integers(1, 3), st.integers(1, 9), st.integers(1, 8)))
    scale, shift = 10.0 ** data.draw(st.integers(-3, 3)), 10.0 ** data.draw(st.integers(-3, 2))
    x = torch.randn(shape, generator=torch.Generator().manual_seed(data.draw(st.integers(0, 99)))) * scale
    for dim in (0, 1, 2):
        y = x + shift
        codes, least, span = quantise(y, dim, bits)
        off = (dequantise(codes, least, span, (1 << bits) - 1) - y).abs()
        # The least value is rounded down to float16, which has 11 bits; so much wider the range gets.
        wide = y.amax(dim, keepdim=True) - y.amin(dim, keepdim=True) + y.abs().amax(dim, keepdim=True) * 2**-10
        assert bool((off <= 0.56 * wide / ((1 << bits) - 1) + 2e-7).all())


@pytest.mark.parametrize("bits", [8, 4])
def test_numbers_about_zero_are_within_a_step_and_one_sided_ones_too(bits: int) -> None:
    x = torch.randn((4, 50, 16), generator=torch.Generator().manual_seed(1))
    for y in (x, x.abs() + 0.5, -x.abs() - 0.5, x * 1e5, torch.zeros_like(x)):
        codes, zero, span = quantise_about_zero(y, bits)
        off = (dequantise(codes, least_of(zero, span), span, (1 << bits) - 1) - y).abs()
        assert bool((off <= steps(y, -1, bits) * (1.0 if bits == 8 else 0.55) + 1e-9).all())


@given(width=st.integers(1, 33), seed=st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_packed_codes_come_back(width: int, seed: int) -> None:
    codes = torch.randint(0, 16, (2, 3, width), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    packed = pack(codes, 4)
    assert packed.shape[-1] == (width + 1) // 2
    assert torch.equal(unpack(packed, 4, width), codes)


@given(quarter=st.integers(0, 9), seed=st.integers(0, 99))
@settings(max_examples=20, deadline=None)
def test_codes_of_two_bits_come_back(quarter: int, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 4, (2, 3, 4 * quarter), dtype=torch.uint8, generator=draw)
    packed = pack_pairs(codes)
    assert packed.shape[-1] == quarter
    assert torch.equal(unpack_pairs(packed), codes)


def test_the_channels_that_reach_furthest_get_more_bits_wherever_they_lie() -> None:
    kv, rope = kv_of(100), rope_of("none")
    far = torch.tensor([1, 6, 7, 15])
    kv.keys[..., far] *= 20
    run = codec_of("int4").encode(kv, BASE, BASE + 100, rope)
    assert torch.equal(run.tensors()["keys_wide"][1, 1, 0].long(), far)
    off = (placed(run, kv, rope)[0] - kv.keys[:, :, BASE:])[:, :, FIRST_TOKENS:].abs()
    span = kv.keys[:, :, BASE + FIRST_TOKENS :].amax(2) - kv.keys[:, :, BASE + FIRST_TOKENS :].amin(2)
    steps_off = off.amax(2) / span  # of the whole range
    assert 0.45 / 63 < float(steps_off[..., far].max()) < 0.56 / 63
    near = [channel for channel in range(DIM) if channel not in far.tolist()]
    assert 0.45 / 15 < float(steps_off[..., near].max()) < 0.56 / 15


@pytest.mark.parametrize("layout", ["half", "interleaved", "none"])
@pytest.mark.parametrize("pairs", [8, 4, 2])
def test_turning_back_and_forth_is_the_identity_far_out_too(layout: Layout, pairs: int) -> None:
    rope, keys = rope_of(layout, pairs), kv_of(40).keys
    for start in (0, 5_000, 120_000):
        angles = rope.angles(torch.arange(start, start + keys.shape[2]))
        out = torch.empty_like(keys)
        angles.rotate(angles.unrotate(keys), out)
        assert float((out - keys).abs().max()) < 5e-6


@pytest.mark.parametrize("layout", ["half", "interleaved", "none"])
def test_keys_turned_back_are_those_of_position_zero(layout: Layout) -> None:
    rope = rope_of(layout)
    one = kv_of(1, base=0).keys
    at = torch.empty_like(one)
    rope.move(one, 311, at)
    assert float((rope.angles(torch.tensor([311])).unrotate(at) - one).abs().max()) < 5e-6


def test_layers_with_rotations_of_their_own_are_turned_by_them() -> None:
    groups = [RopeGroup((0, 2), freq(8), "half"), RopeGroup((1,), freq(4), "interleaved")]
    rope, kv = Rope(groups, LAYERS), kv_of(60)
    run = codec_of("int8").encode(kv, BASE, BASE + 60, rope)
    keys, _ = placed(run, kv, rope, at=BASE + 1000)
    assert float((keys - moved(kv, rope, 1000)).abs().max()) < 0.04
    swapped = Rope([RopeGroup((1,), freq(8), "half"), RopeGroup((0, 2), freq(4), "interleaved")], LAYERS)
    assert float((keys - moved(kv, swapped, 1000)).abs().max()) > 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_plain_keeps_every_bit(dtype: torch.dtype) -> None:
    kv = kv_of(50, dtype=dtype)
    run = codec_of("plain").encode(kv, BASE, BASE + 50, rope_of())
    assert {tensor.dtype for tensor in run.tensors().values()} == {dtype}
    keys, values = placed(run, kv, rope_of())
    assert torch.equal(keys, kv.keys[:, :, BASE:])
    assert torch.equal(values, kv.values[:, :, BASE:])
    kv.keys.zero_()
    assert not torch.equal(placed(run, kv, rope_of())[0], kv.keys[:, :, BASE:])  # it is detached


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", LOSSY)
def test_what_comes_back_is_near_at_any_place(name: str, dtype: torch.dtype) -> None:
    kv, rope = kv_of(130, dtype=dtype), rope_of()
    run = codec_of(name).encode(kv, BASE, BASE + 130, rope)
    rounding = {torch.float32: 0.0, torch.float16: 0.004, torch.bfloat16: 0.03}[dtype]
    key_bits, value_bits = BITS[name]
    for at in (BASE, 0, 400):
        keys, values = placed(run, kv, rope, at=at)
        raw = rope.angles(torch.arange(BASE, BASE + 130)).unrotate(kv.keys[:, :, BASE:])
        # A turn mixes the errors of two channels, so both may add up.
        bound = 1.5 * 0.5 * float(steps(raw, 2, key_bits).max()) + rounding
        assert float((keys - moved(kv, rope, at - BASE)).abs().max()) <= bound
        true = kv.values[:, :, BASE:].float()
        off = (values.float() - true).abs()
        assert bool((off <= 0.56 * steps(true, -1, value_bits) * (2 if value_bits == 8 else 1) + rounding).all())


@pytest.mark.parametrize("name", LOSSY)
def test_errors_shrink_with_the_bits_and_are_no_nothing(name: str) -> None:
    kv, rope = kv_of(120), rope_of()
    keys, values = placed(codec_of(name).encode(kv, BASE, BASE + 120, rope), kv, rope)
    key_error = float((keys - kv.keys[:, :, BASE:]).norm() / kv.keys[:, :, BASE:].norm())
    value_error = float((values - kv.values[:, :, BASE:]).norm() / kv.values[:, :, BASE:].norm())
    for error, bits in zip((key_error, value_error), BITS[name], strict=True):
        assert (1e-3 if bits == 8 else 0.02) < error < (0.008 if bits == 8 else 0.12)


@pytest.mark.parametrize("name", LOSSY)
def test_the_first_tokens_keep_their_bits(name: str) -> None:
    kv, rope = kv_of(60, dtype=torch.bfloat16, base=0), rope_of()
    kv.keys[:, :, 0] *= 1000  # an attention sink: no range must stretch for it
    run = codec_of(name).encode(kv, 0, 60, rope)
    keys, values = placed(run, kv, rope, at=0, base=0)
    assert torch.equal(keys[:, :, :FIRST_TOKENS], kv.keys[:, :, :FIRST_TOKENS])
    assert torch.equal(values[:, :, :FIRST_TOKENS], kv.values[:, :, :FIRST_TOKENS])
    assert float((keys[:, :, FIRST_TOKENS:] - kv.keys[:, :, FIRST_TOKENS:]).abs().max()) < 0.6


@pytest.mark.parametrize("name", NAMES)
def test_every_length_and_slice_equals_the_whole(name: str) -> None:
    rope, codec = rope_of(), codec_of(name)
    for tokens in (1, 3, 4, 5, 39, 40, 41, 64, 79, 80, 81, 127, 128, 129, 130, 260):
        kv = kv_of(tokens, seed=tokens)
        run = codec.encode(kv, BASE, BASE + tokens, rope)
        assert run.tokens == tokens
        keys, values = placed(run, kv, rope, at=50)
        for offset, length in _slices(tokens):
            part = placed(run, kv, rope, at=50 + offset, offset=offset, length=length)
            assert torch.allclose(part[0], keys[:, :, offset : offset + length], atol=1e-5)
            assert torch.equal(part[1], values[:, :, offset : offset + length])


def _slices(tokens: int) -> Iterator[tuple[int, int]]:
    cuts = sorted({0, 2, 4, 5, tokens // 2, tokens} & set(range(tokens + 1)))
    for a, b in itertools.combinations(cuts, 2):
        yield a, b - a


@given(
    tokens=st.integers(1, 150),
    layers=st.integers(1, 3),
    heads=st.integers(1, 3),
    dim=st.sampled_from([2, 6, 16, 80]),
    value_dim=st.sampled_from([1, 3, 16, 80, 128]),
    name=st.sampled_from(NAMES),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    data=st.data(),
)
@settings(max_examples=30, deadline=None)
def test_any_shape_has_the_bytes_that_were_announced_and_comes_back(
    tokens: int, layers: int, heads: int, dim: int, value_dim: int, name: str, dtype: torch.dtype, data: Any
) -> None:
    kv = kv_of(tokens, dtype=dtype, shape=(layers, heads, dim, value_dim))
    rope, codec = rope_of(pairs=dim // 2, layers=layers), codec_of(name)
    run = codec.encode(kv, BASE, BASE + tokens, rope)
    assert run.nbytes == codec.nbytes(KVShape(layers, heads, dim, value_dim, dtype), tokens)
    offset = data.draw(st.integers(0, tokens - 1))
    length = data.draw(st.integers(1, tokens - offset))
    at = data.draw(st.integers(0, 300))
    keys, values = placed(run, kv, rope, at=at, offset=offset, length=length)
    expected = moved(kv, rope, at - (BASE + offset), BASE + offset)[:, :, :length]
    assert float((keys.float() - expected.float()).abs().max()) < 0.6
    assert float((values.float() - kv.values[:, :, BASE + offset :][:, :, :length].float()).abs().max()) < 0.5


@pytest.mark.parametrize("name", NAMES)
def test_a_run_is_loaded_from_a_file_and_placed_without_writing_to_it(name: str, tmp_path: Path) -> None:
    kv, rope = kv_of(100), rope_of()
    run = codec_of(name).encode(kv, BASE, BASE + 100, rope)
    save_file({k: v.contiguous() for k, v in run.tensors().items()}, tmp_path / "run.safetensors")
    mapped = load_file(tmp_path / "run.safetensors")
    before = {k: v.clone() for k, v in mapped.items()}
    again = codec_of(run.codec).load(mapped, json.loads(json.dumps(run.metadata())))
    assert (again.codec, again.tokens, again.nbytes) == (name, 100, run.nbytes)
    for mine, own in zip(placed(again, kv, rope, at=300), placed(run, kv, rope, at=300), strict=True):
        assert torch.equal(mine, own)
    assert all(torch.equal(mapped[k], before[k]) for k in mapped)
    assert all(again.tensors()[k].data_ptr() == mapped[k].data_ptr() for k in mapped)  # no copy


@pytest.mark.parametrize("name", NAMES)
def test_tensors_that_do_not_fit_together_are_refused(name: str) -> None:
    kv, rope, codec = kv_of(100), rope_of(), codec_of(name)
    run = codec.encode(kv, BASE, BASE + 100, rope)
    tensors, metadata = run.tensors(), run.metadata()
    for key in tensors:
        with pytest.raises(ValueError, match="expected"):
            codec.load({k: v for k, v in tensors.items() if k != key}, metadata)
        if tensors[key].shape[2] > 1:
            with pytest.raises(ValueError, match=r"expected|of one run"):
                codec.load({**tensors, key: tensors[key][:, :, 1:]}, metadata)
        with pytest.raises(ValueError, match=r"is of|of one run|4 dimensions"):
            codec.load({**tensors, key: tensors[key][0]}, metadata)
    with pytest.raises(ValueError, match="expected"):
        codec.load({**tensors, "more": kv.keys}, metadata)
    if name != "plain":
        with pytest.raises(ValueError, match="keys is of"):
            codec.load({**tensors, "keys": tensors["keys"].to(torch.int16)}, metadata)
        for wrong in ({}, {"head_dim": "x", "value_dim": 16}, {"head_dim": 15, "value_dim": 40}):
            with pytest.raises(ValueError, match=r"head_dim|expected"):
                codec.load(tensors, wrong)


def test_an_unknown_codec_is_named() -> None:
    with pytest.raises(ValueError, match="'int2'; known are int4, int8, int8-int4, plain"):
        codec_of("int2")


@pytest.mark.parametrize("name", LOSSY)
def test_without_a_rotation_nothing_is_encoded_or_placed(name: str) -> None:
    kv, rope = kv_of(30), rope_of()
    with pytest.raises(ValueError, match="without their rotation"):
        codec_of(name).encode(kv, BASE, BASE + 30, None)
    run = codec_of(name).encode(kv, BASE, BASE + 30, rope)
    with pytest.raises(ValueError, match="without their rotation"):
        run.place(like(kv, 60), 0, offset=0, length=30, delta=-BASE, rope=None)


@pytest.mark.parametrize("name", LOSSY)
def test_a_bias_of_thousands_costs_nothing_when_it_is_known(name: str) -> None:
    bias = 3000 * torch.randn((LAYERS, HEADS, 1, DIM), generator=torch.Generator().manual_seed(5))
    plain, rope, known = kv_of(120), rope_of(), rope_of()
    known.bias_from = lambda: bias
    angles = rope.angles(torch.arange(BASE + 120))
    biased = kv_of(120)
    angles.rotate(angles.unrotate(plain.keys) + bias, biased.keys)

    def error(rope: Rope, kv: RequestKV) -> float:
        run = codec_of(name).encode(kv, BASE, BASE + 120, rope)
        return float((placed(run, kv, rope)[0] - kv.keys[:, :, BASE:])[:, :, FIRST_TOKENS:].norm())

    assert error(known, biased) < 1.02 * error(rope, plain) + 0.1
    assert error(rope, biased) > 1.02 * error(rope, plain) + 0.1


@pytest.mark.parametrize("name", LOSSY)
def test_numbers_beyond_float16_come_back(name: str) -> None:
    kv, rope = kv_of(90), rope_of()
    kv.keys *= 1e6
    kv.values *= 1e6
    keys, values = placed(codec_of(name).encode(kv, BASE, BASE + 90, rope), kv, rope)
    assert float((keys - kv.keys[:, :, BASE:]).norm() / kv.keys[:, :, BASE:].norm()) < 0.12
    assert float((values - kv.values[:, :, BASE:]).norm() / kv.values[:, :, BASE:].norm()) < 0.12


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", LOSSY)
def test_encoding_what_was_decoded_in_place_does_not_drift(name: str, dtype: torch.dtype) -> None:
    kv, rope, codec = kv_of(150, dtype=dtype), rope_of(), codec_of(name)
    run, errors = codec.encode(kv, BASE, BASE + 150, rope), []
    for _ in range(8):
        again = like(kv, BASE + 150)
        run.place(again, BASE, offset=0, length=150, delta=0, rope=rope)
        errors.append(
            float((again.keys - kv.keys)[:, :, BASE:].norm() + (again.values - kv.values)[:, :, BASE:].norm())
        )
        run = codec.encode(again, BASE, BASE + 150, rope)
    assert errors[-1] < (1.03 if dtype == torch.float32 else 1.15) * errors[0]


def test_the_bits_choose_the_codec() -> None:
    codecs: list[Codec] = [codec_for(16), codec_for(8), codec_for("8/4"), codec_for(4)]
    assert [codec.name for codec in codecs] == list(NAMES)
    assert [codec.lossless for codec in codecs] == [True, False, False, False]
    shape = KVShape(30, 3, 64, 64, torch.float32)
    half = codecs[0].nbytes(KVShape(30, 3, 64, 64, torch.float16), 215)
    assert [
        codec.nbytes(shape, 215) / half < limit for codec, limit in zip(codecs, (2.01, 0.53, 0.42, 0.30), strict=True)
    ]
