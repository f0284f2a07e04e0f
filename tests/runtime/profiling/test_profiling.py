"""Profiling: the machine is the job's, the bodies are timed at every point of the grid, and the table plans the job."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.cost_models.blended import cost_model
from meshwright.cost_models.cost import Source
from meshwright.cost_models.protocol import StageQuery
from meshwright.planner.job.job import Facts, read_job, resolve
from meshwright.profiles.algorithms import PPO_GRAPH
from meshwright.profiles.errors import BadInput
from meshwright.profiles.hardware import device_named
from meshwright.profiles.harness import exchanges, points
from meshwright.profiles.layout import Layout
from meshwright.profiles.schedule import Schedule
from meshwright.profiles.table import Table, partial_path, read_table, write_table
from meshwright.runtime.model.kernel_choice import PLAIN
from meshwright.runtime.profiling import profiling
from meshwright.runtime.profiling.profiling import profile_job, require_device
from tests.planner.jobs import small_facts
from tests.runtime.small_job import write_job

MINUTES = 1.0
"""Enough for all measurements of the small job, of which there are some hundreds."""
H200 = "NVIDIA H200"


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


@pytest.mark.check_all
def test_every_point_and_every_collective_is_measured(facts: Facts, table: Table) -> None:
    wanted = points(
        PPO_GRAPH,
        {role: facts.models.spec(role) for role in PPO_GRAPH.roles},
        facts.workload,
        facts.cluster,
        staleness=1,
    )
    assert {m.point for m in table.measurements} == set(wanted)
    assert {c.exchange for c in table.collectives} == set(exchanges(facts.cluster))
    assert all(m.status == "ok" and m.seconds for m in (*table.measurements, *table.collectives))


@pytest.mark.check_all
def test_the_table_says_where_it_comes_from(facts: Facts, table: Table) -> None:
    provenance = table.provenance
    assert provenance.device == facts.cluster.device.name
    assert provenance.num_ranks == 2
    assert set(provenance.libraries) == {"torch", "megatron-core", "numpy"}
    assert len(provenance.commit) >= 7
    assert provenance.kernels == PLAIN.description


@pytest.mark.check_all
def test_a_stage_of_the_job_is_costed_from_the_table(facts: Facts, table: Table) -> None:
    model = cost_model(facts.cluster, facts.workload, facts.precision, table)
    query = StageQuery(
        stage=PPO_GRAPH.by_name["ref_logprob"],
        model=facts.models.ref,
        layout=Layout(dp=2),
        schedule=Schedule(micro_batch_size=4),
    )
    assert model.seconds(query).source in (Source.MEASURED, Source.INTERPOLATED)


@pytest.mark.check_all
def test_a_finished_table_is_not_measured_again(facts: Facts, table: Table, output: Path) -> None:
    assert read_table(output) == table
    assert not partial_path(output).exists()
    assert profile_job(facts, output, minutes=MINUTES) == table


@pytest.mark.check_all
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


def facts_of(name: str) -> Facts:
    facts = small_facts()
    device = device_named(name)[0]
    return facts.model_copy(update={"cluster": facts.cluster.model_copy(update={"device": device})})


@pytest.mark.parametrize(
    ("name", "cuda_name"),
    [
        ("h200", H200),
        ("a100-80gb", "NVIDIA A100-SXM4-80GB"),
        ("h100-pcie", "NVIDIA H100 PCIe"),
        ("gh200", "NVIDIA GH200 480GB"),
        ("rtx-4090", "NVIDIA GeForce RTX 4090"),
        ("rtx-6000-pro", "NVIDIA RTX PRO 6000 Blackwell Server Edition"),
        ("mi300x", "AMD Instinct MI300X"),
    ],
)
def test_a_device_is_known_by_its_model_number(name: str, cuda_name: str) -> None:
    require_device(facts_of(name), None, cuda_name)
    require_device(facts_of(name), "cuda", cuda_name)


@pytest.mark.parametrize(("name", "cuda_name"), [("b200", "NVIDIA GB200"), ("a100-80gb", H200), ("l4", "NVIDIA L40S")])
def test_another_device_than_the_clusters_is_not_timed(name: str, cuda_name: str) -> None:
    with pytest.raises(BadInput, match=f"this machine has '{cuda_name}' and the job's cluster has '{name}'"):
        require_device(facts_of(name), None, cuda_name)


def test_a_typed_device_may_be_called_anything() -> None:
    facts = facts_of("h200")
    device = facts.cluster.device.model_copy(update={"name": "ours"})
    require_device(
        facts.model_copy(update={"cluster": facts.cluster.model_copy(update={"device": device})}), None, H200
    )


def test_a_machine_without_cuda_is_told_in_one_sentence() -> None:
    with pytest.raises(BadInput, match="this machine has no CUDA device and the job's cluster has 'h200'"):
        require_device(facts_of("h200"), "cuda", None)


@pytest.mark.parametrize(("kind", "facts"), [("cpu", facts_of("h200")), ("cuda", small_facts())])
def test_a_kind_of_device_that_the_cluster_does_not_have_is_refused(kind: str, facts: Facts) -> None:
    with pytest.raises(BadInput, match=rf"--device {kind}: the job's cluster has .* leave --device out\."):
        require_device(facts, kind, H200)


def test_a_cpu_is_timed_where_there_is_a_cuda_device_too() -> None:
    require_device(small_facts(), "cpu", H200)


def test_a_profile_does_without_git(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert profiling._commit().startswith("meshwright ")
