"""What is explored: a state written as a job has the facts of the state, and what a job cannot state is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from meshwright.profiles.errors import BadInput
from meshwright.runtime.api.files import read_job, resolve
from meshwright.runtime.explorer.controls import controls_of, grid_fields_of
from meshwright.runtime.explorer.source import read_source
from meshwright.runtime.explorer.state import State, state_of

EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.mark.parametrize(
    "settings",
    [
        [],
        ["cluster.nodes=4", "cluster.device=H200", "cluster.inter_node=ndr"],
        ["cluster.device=b200"],
        ["workload.response.scale=0.5", "workload.prompt.scale=2", "staleness=1"],
        ["workload.batch_size=512", "workload.group_size=16"],
        ["engine=vllm", "rewards.1.latency_seconds.scale=2.5"],
    ],
)
def test_a_state_saved_as_a_job_is_the_same_job(settings: list[str], tmp_path: Path) -> None:
    path = EXAMPLES / "grpo-judge-8xh100" / "job.yaml"
    source, state = read_source(path), state_of(settings, ())
    (tmp_path / "job.yaml").write_text(source.job_text(state))
    assert resolve(read_job(tmp_path / "job.yaml"), path.parent) == source.facts_of(state)


def test_a_job_that_names_a_device_alone_gets_keys_for_its_cluster(job: Path, tmp_path: Path) -> None:
    text = yaml.safe_load(job.read_text()) | {"cluster": "local"}
    path = job.with_name("named.yaml")
    path.write_text(yaml.safe_dump(text))
    source, state = read_source(path), state_of(["cluster.ranks_per_node=1", "workload.batch_size=8"], ())
    with pytest.raises(BadInput, match=r"a job has no keys for named\.yaml with cluster\.ranks_per_node=1"):
        source.job_text(state)  # a local job with one rank gives it all processors
    assert "batch_size: 8" in source.job_text(state_of(["workload.batch_size=8"], ()))


def test_the_engine_and_the_seconds_of_a_judge_have_controls() -> None:
    source = read_source(EXAMPLES / "grpo-judge-8xh100" / "job.yaml")
    state = state_of(["engine=vllm"], (), grid=["staleness=0,1", "precision=bf16"])
    controls = {control.name: control for control in controls_of(source.facts, state)}
    assert controls["engine"].value == "vllm"
    assert controls["engine"].given in controls["engine"].options
    assert controls["rewards.0.latency_seconds.scale"].label == "latency of maths × (given: mean 0.005 s)"
    assert controls["rewards.1.latency_seconds.scale"].label == "latency of judge × (given: mean 2 s)"
    fields = {field.name: field.value for field in grid_fields_of(source.facts, state)}
    assert fields == {"cluster.nodes": "", "staleness": "0,1", "cluster.device": "", "precision": "bf16"}
    assert {field.name: field.value for field in grid_fields_of(source.facts, State())}["cluster.nodes"] == "1,2,4"


def test_what_only_facts_have_is_not_saved_as_a_job() -> None:
    source = read_source(EXAMPLES / "grpo-7b-8xh100" / "job.yaml")
    with pytest.raises(BadInput, match="did you mean"):
        source.job_text(state_of(["workload.batch_sise=3"], ()))


def test_a_plan_has_its_facts_and_pins_and_no_job(plan: Path) -> None:
    source = read_source(plan)
    assert source.plan is not None
    assert (source.facts, source.pins) == (source.plan.facts, source.plan.pins)
    with pytest.raises(BadInput, match="is a plan, which does not have the keys of its job; explore the job"):
        source.job_text(state_of([], ()))
