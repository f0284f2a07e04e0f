from pathlib import Path

import pytest

from meshwright.profiles.algorithms import PPO_GRAPH
from meshwright.profiles.errors import BadInput
from meshwright.profiles.hardware import Cluster
from meshwright.profiles.harness import TimingResult, exchanges, failed_measurement, points, record, record_collective
from meshwright.profiles.model_shape import ModelSpec
from meshwright.profiles.stages import Role
from meshwright.profiles.table import (
    PartialTable,
    Point,
    Provenance,
    Table,
    missing_keys,
    partial_path,
    read_table,
    resume_table,
    write_table,
)
from meshwright.profiles.workload import Workload

SAMPLE = TimingResult(median_seconds=0.5, spread_seconds=0.1, repeats=3)
PROVENANCE = Provenance(
    device="toy",
    kind="cpu",
    precision="fp32",
    driver="Linux 6.1",
    libraries={"torch": "2.13.0", "numpy": "2.3.0"},
    commit="0123abc",
    date="2026-11-20",
    threads_per_rank=1,
    num_ranks=2,
    repeats=3,
    kernels="attention sdpa",
)


@pytest.fixture
def wanted(specs: dict[Role, ModelSpec], workload: Workload, cluster: Cluster) -> tuple[Point, ...]:
    return points(PPO_GRAPH, specs, workload, cluster)


@pytest.fixture
def table(wanted: tuple[Point, ...]) -> Table:
    return Table(
        provenance=PROVENANCE, measurements=(record(wanted[0], SAMPLE), failed_measurement(wanted[1], "out of memory"))
    )


def test_a_first_call_begins_with_nothing(tmp_path: Path) -> None:
    assert resume_table(tmp_path / "table.json", PROVENANCE, fresh=False) == Table(provenance=PROVENANCE)


def test_a_call_that_was_cut_off_is_continued_on_another_day(table: Table, tmp_path: Path) -> None:
    write_table(partial_path(tmp_path / "table.json"), table)
    tomorrow = PROVENANCE.model_copy(update={"date": "2026-11-21"})
    assert resume_table(tmp_path / "table.json", tomorrow, fresh=False) == table
    assert resume_table(tmp_path / "table.json", tomorrow, fresh=True) == Table(provenance=tomorrow)


def test_a_partial_table_knows_more_than_the_finished_one_beside_it(table: Table, tmp_path: Path) -> None:
    write_table(tmp_path / "table.json", Table(provenance=PROVENANCE))
    assert resume_table(tmp_path / "table.json", PROVENANCE, fresh=False).measurements == ()
    write_table(partial_path(tmp_path / "table.json"), table)
    assert resume_table(tmp_path / "table.json", PROVENANCE, fresh=False) == table


@pytest.mark.parametrize("name", ["table.json", "table.partial.json"])
@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"device": "h200"}, "device h200 and this call has toy"),
        ({"precision": "bf16"}, "precision bf16 and this call has fp32"),
        ({"libraries": {"torch": "2.12.0"}}, "libraries torch 2.12.0 and this call has numpy 2.3.0, torch 2.13.0"),
        ({"commit": "456def0"}, "commit 456def0 and this call has 0123abc"),
        ({"num_ranks": 4}, "num_ranks 4 and this call has 2"),
        ({"kernels": "attention varlen"}, "kernels attention varlen and this call has attention sdpa"),
        ({"kernels": None}, "kernels that were not recorded and this call has attention sdpa"),
    ],
)
def test_what_was_measured_otherwise_is_refused_with_the_reason(
    table: Table, tmp_path: Path, name: str, change: dict[str, object], said: str
) -> None:
    other = PROVENANCE.model_copy(update=change)
    write_table(tmp_path / name, table.model_copy(update={"provenance": other}))
    with pytest.raises(BadInput) as error:
        resume_table(tmp_path / "table.json", PROVENANCE, fresh=False)
    assert str(error.value) == (
        f"{tmp_path / name} was measured with {said}; name another output, or start over with --fresh."
    )
    assert resume_table(tmp_path / "table.json", PROVENANCE, fresh=True) == Table(provenance=PROVENANCE)


def test_a_failure_is_not_tried_again(table: Table, wanted: tuple[Point, ...], cluster: Cluster) -> None:
    assert missing_keys(table, wanted) == wanted[2:]
    assert missing_keys(table, exchanges(cluster)) == exchanges(cluster)
    one = table.model_copy(update={"collectives": (record_collective(exchanges(cluster)[0], SAMPLE),)})
    assert missing_keys(one, exchanges(cluster)) == exchanges(cluster)[1:]


def test_a_growing_table_is_written_every_few_seconds_and_keeps_what_it_began_with(
    table: Table, wanted: tuple[Point, ...], cluster: Cluster, tmp_path: Path
) -> None:
    path = partial_path(tmp_path / "table.json")
    times = iter([0.0, 1.0, 3.0, 3.0, 4.0])
    growing = PartialTable(table, path, clock=lambda: next(times))
    growing.add(record(wanted[2], SAMPLE))
    assert not path.exists()
    growing.add(record_collective(exchanges(cluster)[0], SAMPLE))
    written = read_table(path)
    assert written == growing.table()
    assert (len(written.measurements), len(written.collectives)) == (3, 1)
    growing.add(record(wanted[3], SAMPLE))
    assert read_table(path) == written
    assert missing_keys(growing.table(), wanted) == wanted[4:]


def test_a_table_without_a_path_grows_unwritten(table: Table, wanted: tuple[Point, ...], tmp_path: Path) -> None:
    times = iter([0.0, 9.0])
    growing = PartialTable(table, None, clock=lambda: next(times))
    growing.add(record(wanted[2], SAMPLE))
    assert len(growing.table().measurements) == 3
    assert list(tmp_path.iterdir()) == []
