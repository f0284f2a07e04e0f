"""Operators that others measured: met at their points, near the law between them, and added up to bodies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from meshwright.cost_models.blended import BlendedModel
from meshwright.cost_models.collectives import ALL_REDUCE, Group, Network
from meshwright.cost_models.compute import AnalyticShard
from meshwright.cost_models.cost import Source
from meshwright.cost_models.imported import BODIES, imported_points, imported_table
from meshwright.cost_models.kernels import Heads, Kernels
from meshwright.cost_models.measured import MeasuredShard
from meshwright.cost_models.operators import MeasuredKernels
from meshwright.cost_models.question import Call
from meshwright.profiles.aiconfigurator import Attention, Gemm, HeadCounts, Message, Operators
from meshwright.profiles.cluster import Cluster
from meshwright.profiles.efficiency import efficiency_of
from meshwright.profiles.errors import BadInput
from meshwright.profiles.model_shape import ModelSpec
from meshwright.profiles.stages import Role
from meshwright.profiles.table import Body, Exchange
from meshwright.profiles.workload import Workload

EFFICIENCY = efficiency_of("cuda", "a100-80gb")
HEADS = HeadCounts(32, 32, 128)
SIZES = (128, 1024, 4096, 16384)


@pytest.fixture
def laws(a100s: Callable[[int], Cluster]) -> Kernels:
    device = a100s(1).device
    return Kernels(device, EFFICIENCY, flops_per_second=device.flops_per_second["bf16"], weight_bytes=2, size=2)


@pytest.fixture
def operators(laws: Kernels) -> Operators:
    """GEMMs take twice what the laws say, prompts three times, decoding half."""
    return Operators(
        device="a100-80gb",
        system="a100_sxm",
        precision="bf16",
        versions={"aiconfigurator-core": "0.12.0", "vllm": "0.14.0", "nccl": "2.27.3"},
        gemms={Gemm(m, k, n): 2 * laws.gemm(m, k, n) for m in SIZES for k in SIZES for n in SIZES if m * n < 2**27},
        prompts={HEADS: {Attention(r, t): 3 * prompt(laws, r, t) for r in (1, 8) for t in SIZES if r * t < 65536}},
        decoding={HEADS: {Attention(r, t): 0.5 * decode(laws, r, t) for r in (1, 8, 64) for t in SIZES}},
        collectives={Message("all_reduce", 8, n): 1e-4 * n / 2**20 for n in (2**20, 2**24)},
    )


def prompt(kernels: Kernels, rows: float, tokens: float) -> float:
    return kernels.attention(rows, tokens, 0, Heads(*HEADS), cache_bytes=2)


def decode(kernels: Kernels, rows: float, context: float) -> float:
    return kernels.attention(rows, 1, context, Heads(*HEADS), cache_bytes=2)


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
    measured = operators.decoding[HEADS][Attention(8, 16384)]
    assert fp8.attention(8, 1, 16384, Heads(*HEADS), cache_bytes=1) == pytest.approx(measured)
    assert decoded < law.attention(8, 1, 16384, Heads(*HEADS), cache_bytes=2)


def test_a_table_of_operators_has_no_training_and_is_never_called_measured(
    *,
    operators: Operators,
    measured: MeasuredKernels,
    llama: ModelSpec,
    call: Callable[..., Call],
    a100s: Callable[[int], Cluster],
    fixed: Workload,
) -> None:
    specs = {role: replace(llama, num_layers=2, scalar_head=role in ("critic", "reward")) for role in Role}
    wanted = imported_points([specs], [fixed], a100s(1))
    table = imported_table(operators, wanted, a100s(1), "bf16", "2026-11-21")
    assert {m.point.body for m in table.measurements} == set(BODIES)
    shard = MeasuredShard(table, specs[Role.ACTOR], 2)
    law = AnalyticShard(specs[Role.ACTOR].shard(2), a100s(1).device, "bf16", EFFICIENCY, 1.0, kernels=measured)
    for body, rows, tokens, context in (
        (Body.FORWARD, 4, 128, 0),
        (Body.PREFILL, 4, 100, 0),
        (Body.DECODE, 16, 1, 127),
    ):
        time = shard.time(body, rows, tokens, context)
        assert time[:2] == pytest.approx(law.time(body, rows, tokens, context)[:2])
        assert time.source is Source.INTERPOLATED
    model = BlendedModel(table, a100s(1), fixed, "bf16")
    assert model.seconds(call("actor_train", "tp2", 4, model=specs[Role.ACTOR])).source is Source.ANALYTIC
    origin = table.provenance.origin or ""
    for said in ("aiconfigurator-core 0.12.0", "system a100_sxm", "vllm 0.14.0", "nccl 2.27.3"):
        assert said in origin
    assert table.provenance.date == "2026-11-21"


def test_imported_collectives_answer_for_their_group(operators: Operators, a100s: Callable[[int], Cluster]) -> None:
    table = imported_table(operators, (), a100s(1), "bf16", "2026-11-21")
    assert table.collectives[0].exchange == Exchange(operation="all_reduce", num_ranks=8, num_bytes=2**20)
    network = Network(a100s(1), EFFICIENCY, table.collectives)
    assert network.seconds(ALL_REDUCE, Group(8, 8), 2**20) == (1e-4, Source.MEASURED)
    assert network.seconds(ALL_REDUCE, Group(4, 4), 2**20)[1] is Source.ANALYTIC


def test_a_job_in_another_precision_is_refused(operators: Operators, a100s: Callable[[int], Cluster]) -> None:
    with pytest.raises(BadInput, match="are in bf16 and the job runs in fp32"):
        imported_table(operators, (), a100s(1), "fp32", "2026-11-21")
