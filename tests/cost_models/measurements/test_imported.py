"""Operators that others measured, added up to a table of bodies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from meshwright.cost_models.blended import BlendedModel
from meshwright.cost_models.communication import ALL_REDUCE, Group, Network
from meshwright.cost_models.compute import AnalyticShard
from meshwright.cost_models.cost import Source
from meshwright.cost_models.imported_operators import BODIES, MeasuredKernels, imported_points, imported_table
from meshwright.cost_models.measured import MeasuredShard
from meshwright.cost_models.protocol import StageQuery
from meshwright.profiles.aiconfigurator import Operators
from meshwright.profiles.algorithms import PPO_GRAPH
from meshwright.profiles.errors import BadInput
from meshwright.profiles.frameworks import engine_named
from meshwright.profiles.hardware import Cluster
from meshwright.profiles.model_shape import ModelSpec
from meshwright.profiles.stages import Role
from meshwright.profiles.table import Exchange, TimedPass
from meshwright.profiles.workload import Workload
from tests.cost_models.measurements.operators import EFFICIENCY


def test_a_table_of_operators_has_no_training_and_is_never_called_measured(
    *,
    operators: Operators,
    llama: ModelSpec,
    query: Callable[..., StageQuery],
    a100s: Callable[[int], Cluster],
    fixed: Workload,
) -> None:
    specs = {role: replace(llama, num_layers=2, scalar_head=role in ("critic", "reward")) for role in Role}
    wanted = imported_points(PPO_GRAPH, [specs], [fixed], a100s(1))
    table = imported_table(operators, wanted, a100s(1), "bf16", "2026-11-21")
    assert {m.point.timed_pass for m in table.measurements} == set(BODIES)
    shard, measured = (
        MeasuredShard(table, specs[Role.ACTOR], 2),
        MeasuredKernels(operators, a100s(1).device, EFFICIENCY),
    )
    passes = engine_named("meshwright-graph").framework_on("cuda")
    law = AnalyticShard(
        specs[Role.ACTOR].shard(2), a100s(1).device, "bf16", EFFICIENCY, 1.0, framework=passes, kernels=measured
    )
    for timed_pass, rows, tokens, context in (
        (TimedPass.FORWARD, 4, 128, 0),
        (TimedPass.PREFILL, 4, 100, 0),
        (TimedPass.DECODE, 16, 1, 127),
    ):
        time = shard.time(timed_pass, rows, tokens, context)
        assert time[:2] == pytest.approx(law.time(timed_pass, rows, tokens, context)[:2])
        assert time.source is Source.INTERPOLATED
    model = BlendedModel(table, a100s(1), fixed, "bf16")
    assert model.seconds(query("actor_train", "tp2", 4, model=specs[Role.ACTOR])).source is Source.ANALYTIC
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


def test_jobs_that_share_points_make_each_once(
    llama: ModelSpec, a100s: Callable[[int], Cluster], fixed: Workload
) -> None:
    specs = {role: replace(llama, num_layers=2) for role in Role}
    once = imported_points(PPO_GRAPH, [specs], [fixed], a100s(1))
    assert imported_points(PPO_GRAPH, [specs, specs], [fixed, fixed], a100s(1)) == once
    assert len(set(once)) == len(once)
    assert {point.timed_pass for point in once} == set(BODIES)
