"""Operators that others measured: met at their points, and near the law between them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from meshwright.cost_models.imported_operators import MeasuredKernels
from meshwright.cost_models.kernels import Heads, Kernels
from meshwright.profiles.aiconfigurator import Attention, Gemm, Operators
from meshwright.profiles.hardware import Cluster
from tests.cost_models.measurements.operators import EFFICIENCY, HEADS, decode, prompt


@pytest.fixture
def measured(operators: Operators, a100s: Callable[[int], Cluster]) -> MeasuredKernels:
    return MeasuredKernels(operators, a100s(1).device, EFFICIENCY)


@pytest.mark.parametrize(
    "sizes", [(1024, 4096, 4096), (700, 3000, 5120), (16, 64, 100), (16384, 16384, 16384), (1e5,) * 3]
)
def test_a_gemm_is_as_far_from_the_law_as_its_measured_neighbours(
    measured: MeasuredKernels, laws: Kernels, sizes: tuple[float, float, float]
) -> None:
    """On the grid, between, below, at a corner that was not measured, and beyond."""
    assert measured.gemm(*sizes) == pytest.approx(2 * laws.gemm(*sizes))


@pytest.mark.parametrize(("rows", "length"), [(1, 1024), (3, 500), (8, 16384), (500, 3)])
def test_attention_is_as_far_from_the_law_as_its_measured_neighbours(
    measured: MeasuredKernels, laws: Kernels, rows: float, length: float
) -> None:
    assert prompt(measured, rows, length) == pytest.approx(3 * prompt(laws, rows, length))
    assert decode(measured, rows, length) == pytest.approx(0.5 * decode(laws, rows, length))


def test_heads_that_were_not_measured_take_the_ratio_of_the_most_alike(
    measured: MeasuredKernels, laws: Kernels
) -> None:
    shard = Heads(6, 6, 96)
    found = measured.attention(8, 1024, 0, shard, cache_bytes=2)
    assert found == pytest.approx(3 * laws.attention(8, 1024, 0, shard, cache_bytes=2))


def test_a_measured_size_is_met_whatever_lies_around_it(operators: Operators, a100s: Callable[[int], Cluster]) -> None:
    odd = Gemm(1024, 4096, 1024)
    changed = replace(operators, gemms={**operators.gemms, odd: 7.0})
    assert MeasuredKernels(changed, a100s(1).device, EFFICIENCY).gemm(*odd) == pytest.approx(7.0)


def test_operators_in_fp8_are_held_against_the_law_of_fp8(
    operators: Operators, a100s: Callable[[int], Cluster]
) -> None:
    """With a cache of one byte an element."""
    device = a100s(1).device.model_copy(update={"flops_per_second": {"bf16": 312e12, "fp8": 624e12}})
    law = Kernels(device, EFFICIENCY, flops_per_second=624e12, weight_bytes=1, size=2)
    fp8 = MeasuredKernels(replace(operators, precision="fp8"), device, EFFICIENCY)
    between = (700, 3000, 5120)
    corners = [operators.gemms[Gemm(m, 4096, 4096)] / law.gemm(m, 4096, 4096) for m in (128, 1024)]
    found = fp8.gemm(500, 4096, 4096) / law.gemm(500, 4096, 4096)
    assert min(corners) < found < max(corners)
    assert fp8.gemm(*between) < 2 * Kernels.gemm(fp8, *between) * max(corners)
    decoded = law.attention(8, 1, 16384, Heads(*HEADS), cache_bytes=1)
    measured = operators.decode_attention[HEADS][Attention(8, 16384)]
    assert fp8.attention(8, 1, 16384, Heads(*HEADS), cache_bytes=1) == pytest.approx(measured)
    assert decoded < law.attention(8, 1, 16384, Heads(*HEADS), cache_bytes=2)


def test_between_two_measured_sizes_the_ratio_lies_as_far_as_their_logarithms_do(
    operators: Operators, laws: Kernels, a100s: Callable[[int], Cluster]
) -> None:
    """2048 rows are midway between 1024, which take twice the law, and 4096, which take four times."""
    larger = Gemm(4096, 4096, 4096)
    slower = replace(operators, gemms={**operators.gemms, larger: 4 * laws.gemm(*larger)})
    found = MeasuredKernels(slower, a100s(1).device, EFFICIENCY).gemm(2048, 4096, 4096)
    assert found == pytest.approx(3 * laws.gemm(2048, 4096, 4096))
