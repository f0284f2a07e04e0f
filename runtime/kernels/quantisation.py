"""Quantisation of rows to 8-bit floats with a scale per row, in one pass: the inputs of an 8-bit matrix product."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_ELEMENTS_PER_WARP = 512
"""Elements of a row per warp: 16 for each of its threads."""


def quantise_rows(rows: Tensor, max_code: float, epsilon: float) -> tuple[Tensor, Tensor]:
    """Return rows [N, K] divided by their scales and rounded to the nearest float8_e4m3fn, and the scales [N, 1] in
    fp32. A row's scale is its largest magnitude divided by `max_code`, plus `epsilon`."""
    num_rows, width = rows.shape
    codes = torch.empty(num_rows, width, dtype=torch.uint8, device=rows.device)
    scales = torch.empty(num_rows, 1, dtype=torch.float32, device=rows.device)
    tile = triton.next_power_of_2(width)
    num_warps = min(max(tile // _ELEMENTS_PER_WARP, 4), 32)
    _round_row[(num_rows,)](rows.contiguous(), codes, scales, width, max_code, epsilon, WIDTH=tile, num_warps=num_warps)
    return codes.view(torch.float8_e4m3fn), scales


@triton.jit
def _round_row(rows, codes, scales, width, largest, least, WIDTH: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH)
    is_column = column < width
    values = tl.load(rows + row * width + column, mask=is_column, other=0.0).to(tl.float32)
    scale = tl.div_rn(tl.max(tl.abs(values), 0), largest) + least
    tl.store(scales + row, scale)
    tl.store(codes + row * width + column, _float8_bits(tl.div_rn(values, scale)).to(tl.uint8), mask=is_column)


@triton.jit
def _float8_bits(number):
    """Return the bits of the nearest float8_e4m3fn, ties to even: a sign, 4 bits of exponent from 2^-6 up, 3 of
    fraction. Uses integers, since devices before Ada have no such type.

    Numbers below 2^-6 are multiples of 2^-9, which is the last bit of an fp32 number from 2^14 up.
    """
    size = tl.abs(number)
    bits = size.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - ((127 - 7) << 3)
    subnormal = (size + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(bits < 0x3C800000, subnormal, normal)
    code = tl.where(bits < 0x43F00000, code, 0x7F)  # NaN, and numbers from 480 up, which have no code
    return code | ((number.to(tl.int32, bitcast=True) >> 24) & 0x80)
