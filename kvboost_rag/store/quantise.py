"""Numbers in few bits: asymmetric, each group of neighbours with a least value and a step of its own. Approximate.

Source: KIVI (arXiv 2402.02750) §3: keys keep their outliers in few channels, so a group is a stretch of tokens of one
channel; values have none, so a group is a stretch of channels of one token.
"""

from __future__ import annotations

import torch

ZEROS = 255
LEEWAY = 2**-13  # of a span: a 32nd of a step of 8 bits


def compact(x: torch.Tensor) -> torch.Tensor:
    """``x`` as float16 where that holds every number, else float32."""
    small = x.to(torch.float16)
    return small if bool(torch.isfinite(small).all()) else x.to(torch.float32)


def quantise(x: torch.Tensor, dim: int, bits: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes, least values and spans of groups that reach along ``dim`` of ``x`` (float32).

    Returns:
        codes: uint8 like ``x``, 0 to 2^bits − 1.
        least, span: size 1 along ``dim``, float16 (float32 where that overflows); see `dequantise`. The span of all
            codes is kept, and not the step of one, because float16 has fewer digits for small numbers.
    """
    low, high = x.amin(dim, keepdim=True), x.amax(dim, keepdim=True)
    # Without the leeway, what is decoded and encoded again would sink by a step of float16 each time.
    least = compact(_rounded_down(low + (high - low) * LEEWAY))
    span = compact(high - least.to(torch.float32))
    return codes_of(x, least, span, bits), least, span


def codes_of(x: torch.Tensor, least: torch.Tensor, span: torch.Tensor, bits: int) -> torch.Tensor:
    """The nearest codes, uint8, of numbers in groups whose least values and spans are known."""
    levels = (1 << bits) - 1
    codes = (x - least.to(torch.float32)).mul_(_codes_per_unit(span, levels)).round_().clamp_(0, levels)
    return codes.to(torch.uint8)


def quantise_about_zero(x: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`quantise` along the last dimension for numbers of both signs, with a byte for where in its range zero lies.

    Returns:
        codes: uint8 like ``x``.
        zero: uint8, size 1 along the last dimension, in 255ths of the range; see `least_of`.
        span: likewise, float16 (float32 where that overflows).
    """
    low, high = x.amin(-1, keepdim=True).clamp_max_(0), x.amax(-1, keepdim=True).clamp_min_(0)
    span = compact(high - low)
    zero = (low * _codes_per_unit(span, -ZEROS)).round_().clamp_(0, ZEROS).to(torch.uint8)
    return codes_of(x, least_of(zero, span), span, bits), zero, span


def least_of(zero: torch.Tensor, span: torch.Tensor) -> torch.Tensor:
    """The least values of groups of `quantise_about_zero`, float32."""
    return span.to(torch.float32) * zero.to(torch.float32).mul_(-1 / ZEROS)


def dequantise(
    codes: torch.Tensor, least: torch.Tensor, span: torch.Tensor, levels: float | torch.Tensor
) -> torch.Tensor:
    """The numbers, float32: ``least + codes · span / levels``; all broadcast against ``codes``."""
    out = torch.empty(codes.shape, dtype=torch.float32, device=codes.device)
    return torch.addcmul(least.to(torch.float32), codes.to(torch.float32), span.to(torch.float32) / levels, out=out)


def pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes of 4 bits two to a byte along the last dimension: its second half lies in the high bits of the first."""
    if bits == 8:
        return codes
    half = (codes.shape[-1] + 1) // 2
    packed = codes[..., :half].clone()
    packed[..., : codes.shape[-1] - half] |= codes[..., half:] << 4
    return packed


def unpack(packed: torch.Tensor, bits: int, width: int) -> torch.Tensor:
    """Codes ``(…, width)`` out of `pack`; may share memory with ``packed``."""
    if bits == 8:
        return packed
    half = packed.shape[-1]
    codes = packed.new_empty((*packed.shape[:-1], width))
    torch.bitwise_and(packed, 15, out=codes[..., :half])
    torch.bitwise_right_shift(packed[..., : width - half], 4, out=codes[..., half:])
    return codes


def pack_pairs(codes: torch.Tensor) -> torch.Tensor:
    """Codes of 2 bits four to a byte along the last dimension, whose width is a multiple of 4."""
    quarters = codes.view(*codes.shape[:-1], 4, codes.shape[-1] // 4)
    return quarters[..., 0, :] | quarters[..., 1, :] << 2 | quarters[..., 2, :] << 4 | quarters[..., 3, :] << 6


def unpack_pairs(packed: torch.Tensor) -> torch.Tensor:
    """Codes out of `pack_pairs`."""
    return torch.cat([packed & 3, packed >> 2 & 3, packed >> 4 & 3, packed >> 6], -1)


def packed_width(width: int, bits: int) -> int:
    """Bytes of ``width`` codes."""
    return width if bits == 8 else (width + 1) // 2


def _codes_per_unit(span: torch.Tensor, levels: int) -> torch.Tensor:
    # A group of equal numbers, or one narrower than float16 can tell, has no span: all of it is its least value.
    wide = span.to(torch.float32)
    return torch.where(wide > 0, levels / wide, torch.zeros_like(wide))


def _rounded_down(x: torch.Tensor) -> torch.Tensor:
    """``x`` to the next float16 below: no number of a group may lie under its least value. Beyond float16, ``x``."""
    near = x.to(torch.float16)
    below = torch.nextafter(near, torch.full_like(near, -torch.inf))
    lower = torch.where(near.to(torch.float32) > x, below, near).to(torch.float32)
    return torch.where(torch.isfinite(lower), lower, x)
