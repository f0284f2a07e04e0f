"""Rows rounded by a kernel are those that torch rounds."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from meshwright.runtime.kernels.quantisation import quantise_rows
from tests.runtime.kernels.where import DEVICE

LARGEST, LEAST = 448.0, 1e-12


def by_torch(rows: Tensor, scales: Tensor) -> Tensor:
    """The bits of each number."""
    return (rows / scales).to(torch.float8_e4m3fn).view(torch.uint8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [48, 1200])
def test_each_number_is_the_nearest_over_the_scale_of_its_row(width: int, dtype: torch.dtype) -> None:
    torch.manual_seed(width)
    rows = torch.randn(6, width, device=DEVICE).to(dtype)
    rows[1] = 0.0
    rows[2, 5] = -3e4  # beside it all others are small
    rows[3] *= torch.logspace(-9, 3, width, device=DEVICE).to(dtype)
    values, scales = quantise_rows(rows, LARGEST, LEAST)
    torch.testing.assert_close(scales, rows.float().abs().amax(1, keepdim=True) / LARGEST + LEAST, rtol=1e-6, atol=0.0)
    assert torch.equal(values.view(torch.uint8), by_torch(rows, scales))


def test_every_number_of_8_bits_stays_and_what_lies_between_two_goes_to_the_even_one() -> None:
    of_8_bits = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    between = (of_8_bits[1:] + of_8_bits[:-1]) / 2
    row = torch.cat([of_8_bits, between, -of_8_bits, -between])[None].to(DEVICE)
    values, scales = quantise_rows(row, LARGEST, 0.0)
    assert scales.item() == 1.0
    assert torch.equal(values.view(torch.uint8), by_torch(row, scales))
    assert torch.equal(values[0, : len(of_8_bits)].cpu().float(), of_8_bits)


@pytest.mark.filterwarnings("ignore:invalid value")  # of the interpreter, which divides as NumPy does
@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_is_not_a_number_after_it(wrong: float) -> None:
    rows = torch.ones(2, 32, device=DEVICE)
    rows[1, 7] = wrong
    values = quantise_rows(rows, LARGEST, LEAST)[0].float()
    assert values[0].isfinite().all()
    assert values[1, 7].isnan()


def test_rows_may_lie_apart() -> None:
    rows = torch.randn(8, 64, device=DEVICE)
    values, scales = quantise_rows(rows[::2, :48], LARGEST, LEAST)
    assert torch.equal(values.view(torch.uint8), by_torch(rows[::2, :48], scales))
