from collections.abc import Callable
from dataclasses import replace

import pytest

from meshwright.cost_models.analytic import AnalyticModel
from meshwright.cost_models.blended import BlendedModel, cost_model
from meshwright.cost_models.compute import AnalyticShard
from meshwright.cost_models.cost import Source
from meshwright.cost_models.interpolation import Curve, Surface
from meshwright.cost_models.measured import MeasuredModel, MeasuredShard
from meshwright.cost_models.question import Call
from meshwright.profiles.cluster import Cluster
from meshwright.profiles.efficiency import efficiency_of
from meshwright.profiles.errors import BadInput
from meshwright.profiles.harness import Sample, exchanges, failure, points, record, record_collective
from meshwright.profiles.lengths import LengthSpec
from meshwright.profiles.model_shape import ModelSpec
from meshwright.profiles.stages import STAGE_BY_NAME, STAGES, Role
from meshwright.profiles.table import Body, Correction, Measurement, Point, Provenance, Table, shape_of
from meshwright.profiles.workload import Workload

PROVENANCE = Provenance(
    device="a100-80gb",
    kind="cuda",
    precision="bf16",
    driver="550",
    libraries={"torch": "2.13.0"},
    commit="0123abc",
    date="2026-11-21",
    threads_per_rank=1,
    num_ranks=1,
    repeats=3,
)


def sample(seconds: float) -> Sample:
    return Sample(median_seconds=seconds, spread_seconds=0.0, repeats=3)


@pytest.fixture
def shallow(llama: ModelSpec) -> dict[Role, ModelSpec]:
    """Two layers of Llama-2 7B, a depth that is measured."""
    scalar = {Role.ACTOR: False, Role.REF: False, Role.CRITIC: True, Role.REWARD: True}
    return {role: replace(llama, num_layers=2, scalar_head=head) for role, head in scalar.items()}


@pytest.fixture
def table(shallow: dict[Role, ModelSpec], fixed: Workload, a100s: Callable[[int], Cluster]) -> Table:
    """Twice what the equations say, at every point."""
    rows = []
    for point in points(shallow, fixed, a100s(1)):
        model = point.shape.model(num_layers=point.num_layers, max_positions=4096)
        shard = AnalyticShard(model, a100s(1).device, "bf16", efficiency_of("cuda", "a100-80gb"), 1.0)
        time = shard.time(point.body, point.rows, point.tokens, point.context)
        rows.append(record(point, sample(2 * (point.num_layers * time.layer + time.ends))))
    collectives = [record_collective(e, sample(1e-3 + e.num_bytes * 1e-10)) for e in exchanges(a100s(1))]
    return Table(provenance=PROVENANCE, measurements=tuple(rows), collectives=tuple(collectives))


def test_a_curve_meets_its_points_and_says_when_it_leaves_them() -> None:
    curve = Curve({10: 1.0, 20: 3.0, 40: 4.0})
    assert curve.at(20) == (3.0, Source.MEASURED)
    assert curve.at(15) == (2.0, Source.INTERPOLATED)
    assert curve.at(60) == (5.0, Source.EXTRAPOLATED)
    assert curve.at(5) == (0.0, Source.EXTRAPOLATED)
    assert curve.at(1) == (0.0, Source.EXTRAPOLATED)
    assert Curve({10: 1.0}).at(30) == (3.0, Source.EXTRAPOLATED)


def test_a_surface_meets_its_points_and_says_when_it_leaves_them() -> None:
    surface = Surface({(1, 10): 1.0, (4, 10): 4.0, (1, 20): 2.0, (4, 20): 8.0})
    assert surface.at(4, 20) == (8.0, Source.MEASURED)
    assert surface.at(2, 10) == (2.0, Source.INTERPOLATED)
    assert surface.at(4, 15) == (6.0, Source.INTERPOLATED)
    assert surface.at(8, 15) == (12.0, Source.EXTRAPOLATED)
    assert surface.at(4, 30) == (12.0, Source.EXTRAPOLATED)


@pytest.mark.parametrize("tp", [1, 4])
def test_a_measured_shard_equals_the_table_at_its_points(table: Table, shallow: dict[Role, ModelSpec], tp: int) -> None:
    actor = shallow[Role.ACTOR]
    shard = MeasuredShard(table, actor, tp)
    found = [m for m in table.measurements if m.point.shape == shape_of(actor, tp)]
    assert {m.point.body for m in found} == set(Body)
    for measurement in found:
        point = measurement.point
        time = shard.time(point.body, point.rows, point.tokens, point.context)
        assert point.num_layers * time.layer + time.ends == pytest.approx(measurement.seconds)
        assert time.source is Source.MEASURED


def test_layers_that_were_not_measured_repeat_the_measured_one(
    table: Table, shallow: dict[Role, ModelSpec], llama: ModelSpec
) -> None:
    two, many = MeasuredShard(table, shallow[Role.ACTOR], 1), MeasuredShard(table, llama, 1)
    assert many.time(Body.TRAIN, 4, 128)[:2] == two.time(Body.TRAIN, 4, 128)[:2]
    assert many.time(Body.TRAIN, 4, 128).source is Source.INTERPOLATED
    assert many.time(Body.TRAIN, 64, 128).source is Source.EXTRAPOLATED


@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.name)
@pytest.mark.parametrize("layout", ["tp1", "tp2,pp2,dp2"])
def test_blended_equals_measured_where_the_table_covers_the_shape(
    *,
    table: Table,
    shallow: dict[Role, ModelSpec],
    call: Callable[..., Call],
    a100s: Callable[[int], Cluster],
    fixed: Workload,
    layout: str,
    stage: object,
) -> None:
    question = call(stage.name, layout, 4, slots=16, model=shallow[stage.role])
    measured = MeasuredModel(table, a100s(1), fixed, "bf16").seconds(question)
    blended = BlendedModel(table, a100s(1), fixed, "bf16").seconds(question)
    assert blended == measured
    assert blended.total > AnalyticModel(a100s(1), fixed, "bf16").seconds(question).total


def test_a_stage_at_measured_points_is_measured(
    table: Table,
    shallow: dict[Role, ModelSpec],
    call: Callable[..., Call],
    a100s: Callable[[int], Cluster],
    fixed: Workload,
) -> None:
    question = call("ref_logprob", "tp1", 4, model=shallow[Role.REF])
    cost = BlendedModel(table, a100s(1), fixed, "bf16").seconds(question)
    assert cost.source is Source.MEASURED
    assert cost.total == pytest.approx(2 * AnalyticModel(a100s(1), fixed, "bf16").seconds(question).total)


def test_leaving_the_measured_range_is_said(
    table: Table,
    shallow: dict[Role, ModelSpec],
    call: Callable[..., Call],
    a100s: Callable[[int], Cluster],
    fixed: Workload,
) -> None:
    question = call("ref_logprob", "tp1", 64, model=shallow[Role.REF])
    assert BlendedModel(table, a100s(1), fixed, "bf16").seconds(question).source is Source.EXTRAPOLATED


def test_what_the_table_lacks_is_analytic_in_the_blend_and_refused_by_the_measured_model(
    table: Table, llama: ModelSpec, call: Callable[..., Call], a100s: Callable[[int], Cluster], fixed: Workload
) -> None:
    question = call("ref_logprob", "tp1", 4, model=replace(llama, ffn_size=1024, num_layers=2))
    blended = BlendedModel(table, a100s(1), fixed, "bf16").seconds(question)
    assert blended == AnalyticModel(a100s(1), fixed, "bf16").seconds(question)
    assert {term.source for term in blended.terms} == {Source.ANALYTIC}
    with pytest.raises(BadInput, match="the table has no forward for the shape of llama-2-7b at tp=1"):
        MeasuredModel(table, a100s(1), fixed, "bf16").seconds(question)


def test_a_failed_point_is_not_a_time(table: Table, shallow: dict[Role, ModelSpec]) -> None:
    def failed(measurement: Measurement) -> Measurement:
        train = measurement.point.body is Body.TRAIN
        return failure(measurement.point, "out of memory") if train else measurement

    without = Table(provenance=PROVENANCE, measurements=tuple(failed(m) for m in table.measurements))
    shard = MeasuredShard(without, shallow[Role.ACTOR], 1)
    assert not shard.covers(Body.TRAIN)
    assert shard.covers(Body.FORWARD)


def test_noise_makes_no_part_negative(shallow: dict[Role, ModelSpec]) -> None:
    shape = shape_of(shallow[Role.ACTOR], 1)

    def shard(one_layer: float, two_layers: float) -> MeasuredShard:
        rows = [
            record(Point(shape=shape, num_layers=n, body=Body.FORWARD, rows=1, tokens=8, context=0), sample(seconds))
            for n, seconds in ((1, one_layer), (2, two_layers))
        ]
        return MeasuredShard(Table(provenance=PROVENANCE, measurements=tuple(rows)), shallow[Role.ACTOR], 1)

    assert shard(1.0, 3.0).time(Body.FORWARD, 1, 8)[:2] == (1.5, 0.0)
    assert shard(2.0, 1.0).time(Body.FORWARD, 1, 8)[:2] == (0.0, 1.0)
    assert shard(2.0, 3.0).time(Body.FORWARD, 1, 8)[:2] == (1.0, 1.0)


def test_measured_collectives_replace_the_ring_within_a_node(
    table: Table,
    shallow: dict[Role, ModelSpec],
    call: Callable[..., Call],
    a100s: Callable[[int], Cluster],
    fixed: Workload,
) -> None:
    def source(layout: str) -> Source:
        cost = BlendedModel(table, a100s(4), fixed, "bf16").seconds(
            call("actor_train", layout, 4, model=shallow[Role.ACTOR])
        )
        return next(term.source for term in cost.terms if term.name == "gradient reduction")

    assert source("dp8") is Source.EXTRAPOLATED  # 1.3 GB of gradients, 16 MiB measured
    assert source("dp16") is Source.ANALYTIC


def test_a_table_of_another_device_or_precision_is_refused(
    table: Table, a100s: Callable[[int], Cluster], fixed: Workload
) -> None:
    other = table.model_copy(update={"provenance": PROVENANCE.model_copy(update={"device": "h200"})})
    with pytest.raises(BadInput, match="the cluster has 'a100-80gb'"):
        cost_model(a100s(1), fixed, "bf16", other)
    with pytest.raises(BadInput, match="the job runs in fp32"):
        cost_model(a100s(1), fixed, "fp32", table)


def test_the_factory_blends_when_there_is_a_table(
    table: Table, a100s: Callable[[int], Cluster], fixed: Workload
) -> None:
    assert isinstance(cost_model(a100s(1), fixed, "bf16", table), BlendedModel)
    assert isinstance(cost_model(a100s(1), fixed, "bf16"), AnalyticModel)


def test_a_long_tail_is_covered_by_the_points_of_its_workload(
    shallow: dict[Role, ModelSpec], call: Callable[..., Call], a100s: Callable[[int], Cluster]
) -> None:
    """The harness chooses the grid: no compute of these stages is extrapolated."""
    workload = Workload(
        batch_size=32, prompt=LengthSpec(max=64, median=20, p99=60), response=LengthSpec(max=256, median=40, p99=250)
    )
    rows = [record(point, sample(1.0 + point.rows)) for point in points(shallow, workload, a100s(1))]
    model = BlendedModel(Table(provenance=PROVENANCE, measurements=tuple(rows)), a100s(1), workload, "bf16")
    for stage in STAGES:
        cost = model.seconds(call(stage.name, "tp1", 8, slots=8, model=shallow[stage.role]))
        extrapolated = {term.name for term in cost.terms if term.source is Source.EXTRAPOLATED}
        assert extrapolated == set(), stage.name


def test_a_correction_multiplies_its_body_of_its_shape_and_is_no_longer_measured(
    table: Table,
    shallow: dict[Role, ModelSpec],
    call: Callable[..., Call],
    a100s: Callable[[int], Cluster],
    fixed: Workload,
) -> None:
    correction = Correction(
        shape=shape_of(shallow[Role.REF], 1),
        body=Body.FORWARD,
        factor=1.5,
        spread=0.0,
        stages=("ref_logprob",),
        plan="a",
        num_steps=3,
        date="2026-11-21",
    )
    twice = table.model_copy(update={"corrections": (correction, correction)})
    for kind in (MeasuredModel, BlendedModel):
        was, now = (kind(t, a100s(1), fixed, "bf16") for t in (table, twice))
        ref = call("ref_logprob", "tp1", 4, model=shallow[Role.REF])
        assert now.seconds(ref).total == pytest.approx(1.5**2 * was.seconds(ref).total)
        assert now.seconds(ref).source is Source.INTERPOLATED
        for other in ("critic_value", "actor_train", "actor_generate"):
            question = call(other, "tp1", 4, slots=16, model=shallow[STAGE_BY_NAME[other].role])
            assert now.seconds(question) == was.seconds(question)
