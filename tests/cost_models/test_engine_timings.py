"""An engine in its own process that was timed costs what was measured; equations cost the others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from pydantic import ValidationError

from meshwright.cost_models.blended import BlendedModel
from meshwright.cost_models.cost import Source
from meshwright.cost_models.generation_cost import ENGINE_LOAD, SCHEDULING
from meshwright.cost_models.memory_cost import ENGINE_PROCESS
from meshwright.cost_models.protocol import PlacedLayout, RefitQuery, RefitTable, StageQuery
from meshwright.cost_models.steady_state import Overlap, SteadyState
from meshwright.profiles.frameworks import EAGER, VLLM, engine_named
from meshwright.profiles.hardware import Cluster, local_cluster
from meshwright.profiles.harness import generation_points, record
from meshwright.profiles.layout import Layout
from meshwright.profiles.lengths import LengthSpec
from meshwright.profiles.model_shape import ModelSpec
from meshwright.profiles.stages import GENERATE, Role
from meshwright.profiles.table import Correction, EngineTimings, Table, TimedPass, WeightLoad, shape_of
from meshwright.profiles.workload import Workload
from tests.cost_models.tables import sample

LOAD = {1: 0.3, 2: 0.5}
"""Seconds of a load of weights by number of layers."""


def timings_of(model: ModelSpec, workload: Workload, factor: float = 1.0, tp: int = 1) -> EngineTimings:
    """Rounds that take 3 ms a layer and 1 ms, whatever their rows and context."""
    rows = [
        record(point, sample(factor * (3e-3 * point.num_layers + 1e-3)))
        for point in generation_points(shape_of(model, tp), tuple(LOAD), workload, "cuda")
    ]
    loads = [
        WeightLoad(shape=shape_of(model, tp), num_layers=layers, seconds=seconds, spread_seconds=0.0, repeats=3)
        for layers, seconds in LOAD.items()
    ]
    return EngineTimings(
        engine=VLLM, version="0.32.0", kernels="AVX512", date="2026-11-27", measurements=tuple(rows), loads=tuple(loads)
    )


@pytest.fixture
def actor(shallow: dict[Role, ModelSpec]) -> ModelSpec:
    return shallow[Role.ACTOR]


@pytest.fixture
def timed(table: Table, actor: ModelSpec, fixed: Workload) -> Table:
    return table.with_timings(timings_of(actor, fixed))


@pytest.fixture
def model(a100s: Callable[[int], Cluster], fixed: Workload) -> Callable[..., BlendedModel]:
    """The cost model of a table, with vLLM or another engine."""
    return lambda table, engine=VLLM, workload=fixed: BlendedModel(table, a100s(1), workload, "bf16", engine)


@pytest.fixture
def cpu_query(query: Callable[..., StageQuery], actor: ModelSpec) -> StageQuery:
    return query(GENERATE, slots=16, model=actor)


@pytest.fixture
def uneven(fixed: Workload) -> Workload:
    """Responses of several lengths, which leave their slots one by one."""
    return fixed.model_copy(update={"response": LengthSpec(max=64, median=20, p99=60)})


def test_rounds_and_prefills_cost_what_was_measured_and_the_host_nothing_more(
    timed: Table, actor: ModelSpec, query: Callable[..., StageQuery], model: Callable[..., BlendedModel]
) -> None:
    cost = model(timed).seconds(query(GENERATE, slots=64, model=actor))
    assert cost.source is Source.INTERPOLATED  # between contexts
    assert cost.amount(SCHEDULING) == 0.0
    assert cost.amount(ENGINE_LOAD) == LOAD[2]
    # 28 tokens for each of 64 sequences that decode together: a prefill and 27 decode steps
    assert cost.total == pytest.approx(28 * (2 * 3e-3 + 1e-3) + LOAD[2])


def test_a_round_that_refills_slots_is_one_round(
    timed: Table,
    actor: ModelSpec,
    query: Callable[..., StageQuery],
    model: Callable[..., BlendedModel],
    uneven: Workload,
) -> None:
    """Every round takes 7 ms, whatever it does."""
    cost = model(timed, workload=uneven).seconds(query(GENERATE, slots=16, model=actor))
    rounds = SteadyState(uneven).rounds(64, 16, Overlap())
    assert rounds.num_shared > 10
    assert cost.total == pytest.approx(7e-3 * rounds.num_rounds + LOAD[2], rel=2e-3)


def test_rounds_that_ranks_share_are_timed_with_their_collectives(
    table: Table,
    actor: ModelSpec,
    fixed: Workload,
    query: Callable[..., StageQuery],
    model: Callable[..., BlendedModel],
) -> None:
    timed = table.with_timings(timings_of(actor, fixed, tp=2))
    cost = model(timed).seconds(query(GENERATE, "tp2", slots=64, model=actor))
    assert cost.total == pytest.approx(28 * (2 * 3e-3 + 1e-3) + LOAD[2])
    assert {term.name.split(" ")[0] for term in cost.terms if term.amount} == {"prefill", "decode", "weights"}


def test_layouts_that_were_not_timed_are_analytic_with_the_host(
    timed: Table,
    table: Table,
    actor: ModelSpec,
    query: Callable[..., StageQuery],
    model: Callable[..., BlendedModel],
) -> None:
    question = query(GENERATE, "tp2", slots=64, model=actor)
    cost = model(timed).seconds(question)
    assert cost == model(table).seconds(question)
    assert cost.amount(SCHEDULING) > 0.0


def test_the_memory_of_the_process_is_what_was_measured(timed: Table, cpu_query: StageQuery, uneven: Workload) -> None:
    cluster = local_cluster(1)
    provenance = timed.provenance.model_copy(
        update={"device": cluster.device.name, "kind": "cpu", "precision": "fp32", "engine": EAGER}
    )
    table = Table(provenance=provenance)
    assert timed.engines
    [engine] = timed.engines
    found = [
        BlendedModel(with_times, cluster, uneven, "fp32", VLLM).memory(cpu_query).resident.amount(ENGINE_PROCESS)
        for with_times in (
            table,
            table.with_timings(engine),
            table.with_timings(engine.model_copy(update={"process_bytes": 7e8})),
        )
    ]
    assert found == [engine_named(VLLM).process_bytes, engine_named(VLLM).process_bytes, 7e8]


def test_our_own_engine_is_not_changed_by_the_times_of_another(
    timed: Table,
    table: Table,
    actor: ModelSpec,
    query: Callable[..., StageQuery],
    model: Callable[..., BlendedModel],
) -> None:
    question = query(GENERATE, slots=64, model=actor)
    one, other = (model(found, None).seconds(question) for found in (timed, table))
    assert one == other


def test_a_refit_is_one_of_the_ranks_copy_and_the_load_is_in_generation(
    timed: Table, actor: ModelSpec, query: Callable[..., StageQuery], model: Callable[..., BlendedModel]
) -> None:
    move = RefitQuery(
        model=actor, source=Layout.parse("tp2,dp4"), target=Layout.parse("dp8"), overlap=8, generates=True
    )
    assert model(timed).refit_seconds(move) == model(timed).refit_seconds(replace(move, generates=False))
    deeper = query(GENERATE, slots=64, model=replace(actor, num_layers=12))
    assert model(timed).seconds(deeper).amount(ENGINE_LOAD) == pytest.approx(0.3 + 11 * 0.2)


def test_refits_in_a_table_cost_what_single_ones_do(
    timed: Table, actor: ModelSpec, model: Callable[..., BlendedModel]
) -> None:
    refits = RefitTable(
        model=actor,
        sources=(PlacedLayout(0, Layout.parse("tp2,dp4")),),
        targets=tuple(PlacedLayout(0, Layout.parse(text)) for text in ("dp8", "tp2,dp4", "dp4")),
        source_index=np.zeros(3, dtype=np.int64),
        target_index=np.arange(3),
        overlap=np.array([8, 8, 4]),
        generates=True,
    )
    single = [model(timed).refit_seconds(one).total for one in refits]
    assert model(timed).seconds_of_refits(refits) == pytest.approx(single)


def test_a_correction_from_a_run_with_an_engine_is_for_that_engine_alone(
    timed: Table,
    actor: ModelSpec,
    query: Callable[..., StageQuery],
    model: Callable[..., BlendedModel],
) -> None:
    correction = Correction(
        shape=shape_of(actor, 1),
        timed_pass=TimedPass.DECODE,
        factor=2.0,
        spread=0.0,
        stages=(GENERATE,),
        plan="0" * 64,
        num_steps=3,
        date="2026-11-27",
        engine=VLLM,
    )
    corrected, question = (
        timed.model_copy(update={"corrections": (correction,)}),
        query(GENERATE, slots=64, model=actor),
    )
    assert model(corrected).seconds(question).total == pytest.approx((1 + 27 * 2) * 7e-3 + LOAD[2])
    ours = [model(found, None).seconds(question) for found in (timed, corrected)]
    assert ours[0] == ours[1]


def test_an_engine_is_listed_once(table: Table, actor: ModelSpec, fixed: Workload) -> None:
    one, other = timings_of(actor, fixed), timings_of(actor, fixed, factor=2.0)
    assert table.with_timings(one).with_timings(other).timings_of(VLLM) == other
    with pytest.raises(ValidationError, match="listed twice"):
        Table.model_validate({**dict(table), "engines": (one, other)})
