"""Profiling: the runtime's own bodies are timed at every point of the grid, and the table plans the job."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.cost_models.blended import cost_model
from meshwright.cost_models.cost import Source
from meshwright.cost_models.question import Call
from meshwright.planner.plan.job import Facts, read_job, resolve
from meshwright.profiles.harness import exchanges, points
from meshwright.profiles.layout import Layout
from meshwright.profiles.partial import partial_path
from meshwright.profiles.schedule import Schedule
from meshwright.profiles.stages import STAGE_BY_NAME, Role
from meshwright.profiles.table import Table, read_table, write_table
from meshwright.runtime.profiling.profiling import profile_job
from tests.runtime.small_job import write_job

pytestmark = pytest.mark.slow

MINUTES = 1.0
"""Enough for all measurements of the small job, of which there are some hundreds."""


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> Facts:
    path = write_job(tmp_path_factory.mktemp("job"), num_ranks=2)
    return resolve(read_job(path), path.parent).model_copy(update={"staleness": 1})


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("table") / "table.json"


@pytest.fixture(scope="module")
def table(facts: Facts, output: Path) -> Table:
    return profile_job(facts, output, minutes=MINUTES)


def test_every_point_and_every_collective_is_measured(facts: Facts, table: Table) -> None:
    wanted = points({role: facts.models.spec(role) for role in Role}, facts.workload, facts.cluster, staleness=1)
    assert {m.point for m in table.measurements} == set(wanted)
    assert {c.exchange for c in table.collectives} == set(exchanges(facts.cluster))
    assert all(m.status == "ok" and m.seconds for m in (*table.measurements, *table.collectives))


def test_the_table_says_where_it_comes_from(facts: Facts, table: Table) -> None:
    provenance = table.provenance
    assert provenance.device == facts.cluster.device.name
    assert provenance.num_ranks == 2
    assert set(provenance.libraries) == {"torch", "megatron-core", "numpy"}
    assert len(provenance.commit) >= 7


def test_a_stage_of_the_job_is_costed_from_the_table(facts: Facts, table: Table) -> None:
    model = cost_model(facts.cluster, facts.workload, facts.precision, table)
    call = Call(
        stage=STAGE_BY_NAME["ref_logprob"],
        model=facts.models.ref,
        layout=Layout(dp=2),
        schedule=Schedule(micro_batch_size=4),
    )
    assert model.seconds(call).source in (Source.MEASURED, Source.INTERPOLATED)


def test_a_finished_table_is_not_measured_again(facts: Facts, table: Table, output: Path) -> None:
    assert read_table(output) == table
    assert not partial_path(output).exists()
    assert profile_job(facts, output, minutes=MINUTES) == table


def test_a_profile_that_was_cut_off_measures_only_what_is_left(facts: Facts, table: Table, tmp_path: Path) -> None:
    output = tmp_path / "table.json"
    update = {"measurements": table.measurements[3:], "collectives": table.collectives[1:]}
    write_table(partial_path(output), table.model_copy(update=update))
    found = profile_job(facts, output, minutes=MINUTES)
    assert {m.point for m in found.measurements} == {m.point for m in table.measurements}
    assert {c.exchange for c in found.collectives} == {c.exchange for c in table.collectives}
    assert set(found.measurements) >= set(table.measurements[3:])
    assert read_table(output) == found
    assert not partial_path(output).exists()
