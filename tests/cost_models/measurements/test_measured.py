import pytest

from meshwright.cost_models.cost import Source
from meshwright.cost_models.measured import MeasuredShard
from meshwright.profiles.harness import failed_measurement, record
from meshwright.profiles.model_shape import ModelSpec
from meshwright.profiles.stages import Role
from meshwright.profiles.table import Measurement, Point, Table, TimedPass, shape_of
from tests.cost_models.tables import PROVENANCE, sample


@pytest.mark.parametrize("tp", [1, 4])
def test_a_measured_shard_equals_the_table_at_its_points(table: Table, shallow: dict[Role, ModelSpec], tp: int) -> None:
    actor = shallow[Role.ACTOR]
    shard = MeasuredShard(table, actor, tp)
    found = [m for m in table.measurements if m.point.shape == shape_of(actor, tp)]
    assert {m.point.timed_pass for m in found} == set(TimedPass)
    for measurement in found:
        point = measurement.point
        time = shard.time(point.timed_pass, point.rows, point.tokens, point.context)
        assert point.num_layers * time.layer + time.ends == pytest.approx(measurement.seconds)
        as_deep = any(m.point.num_layers == actor.num_layers for m in found if m.point.timed_pass is point.timed_pass)
        assert time.source is (Source.MEASURED if as_deep else Source.INTERPOLATED)


def test_layers_that_were_not_measured_repeat_the_measured_one(
    table: Table, shallow: dict[Role, ModelSpec], llama: ModelSpec
) -> None:
    two, many = MeasuredShard(table, shallow[Role.ACTOR], 1), MeasuredShard(table, llama, 1)
    assert many.time(TimedPass.TRAIN, 4, 128)[:2] == two.time(TimedPass.TRAIN, 4, 128)[:2]
    assert many.time(TimedPass.TRAIN, 4, 128).source is Source.INTERPOLATED
    assert many.time(TimedPass.TRAIN, 512, 128).source is Source.EXTRAPOLATED


def test_a_failed_point_is_not_a_time(table: Table, shallow: dict[Role, ModelSpec]) -> None:
    def failed(measurement: Measurement) -> Measurement:
        train = measurement.point.timed_pass is TimedPass.TRAIN
        return failed_measurement(measurement.point, "out of memory") if train else measurement

    without = Table(provenance=PROVENANCE, measurements=tuple(failed(m) for m in table.measurements))
    shard = MeasuredShard(without, shallow[Role.ACTOR], 1)
    assert not shard.covers(TimedPass.TRAIN)
    assert shard.covers(TimedPass.FORWARD)


def test_noise_makes_no_part_negative(shallow: dict[Role, ModelSpec]) -> None:
    shape = shape_of(shallow[Role.ACTOR], 1)

    def shard(one_layer: float, two_layers: float) -> MeasuredShard:
        rows = [
            record(
                Point(shape=shape, num_layers=n, timed_pass=TimedPass.FORWARD, rows=1, tokens=8, context=0),
                sample(seconds),
            )
            for n, seconds in ((1, one_layer), (2, two_layers))
        ]
        return MeasuredShard(Table(provenance=PROVENANCE, measurements=tuple(rows)), shallow[Role.ACTOR], 1)

    assert shard(1.0, 3.0).time(TimedPass.FORWARD, 1, 8)[:2] == (1.5, 0.0)
    assert shard(2.0, 1.0).time(TimedPass.FORWARD, 1, 8)[:2] == (0.0, 1.0)
    assert shard(2.0, 3.0).time(TimedPass.FORWARD, 1, 8)[:2] == (1.0, 1.0)
