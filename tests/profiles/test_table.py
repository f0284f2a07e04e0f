from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from meshwright.profiles.algorithms import PPO_GRAPH
from meshwright.profiles.documents import canonical_json, parse
from meshwright.profiles.environment.latency import CallKey, TimedCalls
from meshwright.profiles.errors import BadInput
from meshwright.profiles.hardware import Cluster
from meshwright.profiles.harness import TimingResult, failed_measurement, points, record, record_collective
from meshwright.profiles.model_shape import ModelSpec
from meshwright.profiles.stages import Role
from meshwright.profiles.table import (
    Collective,
    Exchange,
    Measurement,
    Point,
    Provenance,
    Table,
    TimedPass,
    read_table,
    shape_of,
    write_table,
)
from meshwright.profiles.workload import Workload

with as_file(files("meshwright.profiles")) as _package:
    STORED = sorted(_package.glob("data/*/*.json"))
    """Tables that were measured elsewhere and are kept."""

SAMPLE = TimingResult(median_seconds=0.5, spread_seconds=0.1, repeats=3)


@pytest.fixture
def table(specs: dict[Role, ModelSpec], workload: Workload, cluster: Cluster) -> Table:
    found = points(PPO_GRAPH, specs, workload, cluster)
    return Table(
        provenance=Provenance(
            device=cluster.device.name,
            kind="cpu",
            precision="fp32",
            driver="Linux 6.1",
            libraries={"torch": "2.13.0"},
            commit="0123abc",
            date="2026-11-21",
            threads_per_rank=1,
            num_ranks=2,
            repeats=3,
        ),
        measurements=(
            failed_measurement(found[0], "out of memory"),
            *(record(point, SAMPLE, 1024) for point in found[1:9]),
        ),
        collectives=(
            record_collective(Exchange(operation="all_reduce", num_ranks=2, num_bytes=4096), SAMPLE),
            record_collective(Exchange(operation="all_gather", num_ranks=2, num_bytes=4096), SAMPLE),
        ),
    )


def test_a_table_is_read_back_equal_and_written_again_with_the_same_bytes(table: Table, tmp_path: Path) -> None:
    write_table(tmp_path / "t.json", table)
    again = read_table(tmp_path / "t.json")
    assert again == table
    assert canonical_json(again).encode() == (tmp_path / "t.json").read_bytes()


def test_calls_take_the_place_of_those_of_the_same(table: Table) -> None:
    def timed(target: str, seconds: float) -> TimedCalls:
        return TimedCalls(called=CallKey(kind="reward", target=target), seconds=(seconds,), date="2026-11-25")

    found = table.with_calls([timed("mine:b", 1.0), timed("mine:a", 2.0)]).with_calls([timed("mine:b", 3.0)])
    assert found.calls == (timed("mine:a", 2.0), timed("mine:b", 3.0))
    assert found.measurements == table.measurements
    with pytest.raises(ValidationError, match="the calls of a function or judge are listed twice"):
        Table.model_validate({**dict(table), "calls": (timed("mine:a", 1.0), timed("mine:a", 2.0))})


def test_a_table_has_the_kernels_that_it_was_measured_with_if_they_are_known(table: Table) -> None:
    assert '"kernels"' not in canonical_json(table)
    told = table.provenance.model_copy(update={"kernels": "attention sdpa"})
    assert parse(Provenance, canonical_json(told), "provenance") == told


def test_the_order_of_measurements_carries_no_meaning(table: Table) -> None:
    backwards = Table(
        provenance=table.provenance, measurements=table.measurements[::-1], collectives=table.collectives[::-1]
    )
    assert canonical_json(backwards) == canonical_json(table)


def test_the_key_is_the_shape_and_not_the_name(specs: dict[Role, ModelSpec]) -> None:
    assert shape_of(specs[Role.ACTOR], 2) == shape_of(specs[Role.REF], 2)
    assert shape_of(specs[Role.ACTOR], 1) != shape_of(specs[Role.ACTOR], 2)
    assert shape_of(specs[Role.ACTOR], 1) != shape_of(specs[Role.CRITIC], 1)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("role", [Role.ACTOR, Role.CRITIC])
def test_the_model_built_for_a_shape_has_that_shape_and_its_parameters(
    specs: dict[Role, ModelSpec], tp: int, role: Role
) -> None:
    shape = shape_of(specs[role], tp)
    built = shape.model(num_layers=4, max_positions=112)
    assert shape_of(built, 1) == shape
    assert built.num_params == specs[role].shard(tp).num_params


def test_a_table_is_refused_for_another_device_or_precision(table: Table, cluster: Cluster) -> None:
    table.require(cluster, "fp32")
    other = cluster.model_copy(update={"device": cluster.device.model_copy(update={"name": "h200"})})
    with pytest.raises(BadInput, match=r"the cluster has 'h200'; profile that device, or plan without a table\."):
        table.require(other, "fp32")
    with pytest.raises(BadInput, match="measured in fp32 and the job runs in bf16"):
        table.require(cluster, "bf16")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"seconds": -1.0}, "seconds is -1.0"),
        ({"seconds": None}, "needs seconds"),
        ({"repeats": 0}, "repeats of 1 or more"),
        ({"status": "failed"}, "a failed measurement needs a reason and has no seconds"),
        ({"status": "skipped"}, "status is 'skipped'"),
    ],
)
def test_a_measurement_that_is_no_measurement_is_refused(table: Table, change: dict[str, Any], says: str) -> None:
    good = next(m for m in table.measurements if m.status == "ok")
    text = canonical_json(good.model_copy(update=change))
    with pytest.raises(BadInput) as error:
        parse(Measurement, text, "measurement")
    assert says in str(error.value)


def test_a_point_measured_twice_is_refused(table: Table) -> None:
    with pytest.raises(ValueError, match="a point is measured twice"):
        Table(provenance=table.provenance, measurements=table.measurements * 2)
    with pytest.raises(ValueError, match="a collective is measured twice"):
        Table(provenance=table.provenance, collectives=table.collectives * 2)


def test_a_table_without_provenance_is_refused() -> None:
    with pytest.raises(BadInput, match="missing key 'provenance'"):
        parse(Table, '{"schema_version": 3}', "table")


def test_a_failed_measurement_is_recorded_with_its_reason(table: Table) -> None:
    failed = [m for m in table.measurements if m.status == "failed"]
    assert [(m.reason, m.seconds) for m in failed] == [("out of memory", None)]


def test_the_spread_of_a_table_is_that_of_its_median_measurement(table: Table) -> None:
    assert table.spread == pytest.approx(0.1 / 0.5)
    assert table.model_copy(update={"measurements": ()}).spread == 0.0


def test_a_collective_needs_a_group() -> None:
    with pytest.raises(BadInput, match=r"exchange\.num_ranks is 1"):
        parse(
            Collective,
            '{"exchange": {"operation": "all_reduce", "num_ranks": 1, "num_bytes": 8}, "seconds": 1.0,'
            ' "spread_seconds": 0.0, "repeats": 1}',
            "collective",
        )


def test_points_are_keys(specs: dict[Role, ModelSpec]) -> None:
    shape = shape_of(specs[Role.ACTOR], 1)
    key = {"shape": shape, "num_layers": 1, "timed_pass": TimedPass.DECODE, "rows": 4, "tokens": 1, "context": 9}
    assert len({Point(**key), Point(**key), Point(**key | {"context": 8})}) == 2


def test_there_are_stored_tables() -> None:
    assert STORED


@pytest.mark.parametrize("path", STORED, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_a_stored_table_is_of_its_folders_device_and_holds_no_failure(path: Path) -> None:
    table = read_table(path)
    assert table.provenance.device == path.parent.name
    assert table.measurements
    assert all(measurement.seconds for measurement in table.measurements)
