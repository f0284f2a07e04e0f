"""Rows rounded to 8-bit floats by a scale of their own, in one pass: the inputs of a product of 8-bit numbers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_NUMBERS_OF_WARP = 512
"""16 for each of its threads."""


def round_rows(rows: Tensor, largest: float, least: float) -> tuple[Tensor, Tensor]:
    """Rows [N, K] over their scales, to the nearest float8_e4m3fn, and the scales [N, 1] in fp32: a row's largest
    magnitude over `largest`, and `least` more."""
    num_rows, width = rows.shape
    codes = torch.empty(num_rows, width, dtype=torch.uint8, device=rows.device)
    scales = torch.empty(num_rows, 1, dtype=torch.float32, device=rows.device)
    tile = triton.next_power_of_2(width)
    num_warps = min(max(tile // _NUMBERS_OF_WARP, 4), 32)
    _round_row[(num_rows,)](rows.contiguous(), codes, scales, width, largest, least, WIDTH=tile, num_warps=num_warps)
    return codes.view(torch.float8_e4m3fn), scales


@triton.jit
def _round_row(rows, codes, scales, width, largest, least, WIDTH: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH)
    is_held = column < width
    held = tl.load(rows + row * width + column, mask=is_held, other=0.0).to(tl.float32)
    scale = tl.div_rn(tl.max(tl.abs(held), 0), largest) + least
    tl.store(scales + row, scale)
    tl.store(codes + row * width + column, _code(tl.div_rn(held, scale)).to(tl.uint8), mask=is_held)


@triton.jit
def _code(number):
    """The bits of the nearest float8_e4m3fn, of two that are as near the even one: a sign, 4 bits of the exponent from
    2^-6 up, 3 of the fraction. In integers, since devices before Ada have no such type.

    Below 2^-6 all are multiples of 2^-9, which is the last bit of an fp32 number from 2^14 up.
    """
    size = tl.abs(number)
    bits = size.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - ((127 - 7) << 3)
    small = (size + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(bits < 0x3C800000, small, normal)
    code = tl.where(bits < 0x43F00000, code, 0x7F)  # from 480 up there is none, nor of what is not a number
    return code | ((number.to(tl.int32, bitcast=True) >> 24) & 0x80)
