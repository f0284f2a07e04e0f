"""The run command: what cannot run is refused in one sentence before any rank is started."""

from __future__ import annotations

import json
import shutil
import socket
from pathlib import Path

import pytest

from tests.runtime.command import Call
from tests.runtime.small_job import edited_job


@pytest.mark.slow
def test_a_model_without_weights_is_refused_by_run(call: Call, job: Path, plan: Path, tmp_path: Path) -> None:
    bare = shutil.copytree(job.parent, tmp_path / "job")
    for path in bare.glob("*/model.safetensors"):
        path.unlink()
    outcome = call("run", plan, bare / job.name, "--steps", "1", "--out", tmp_path / "out")
    assert outcome.code == 2
    assert "holds no weights" in outcome.err


@pytest.mark.slow
def test_a_port_in_use_is_refused_by_run(call: Call, job: Path, plan: Path, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        place = f"127.0.0.1:{taken.getsockname()[1]}"
        outcome = call("run", plan, job, "--steps", "1", "--out", tmp_path / "out", "--rendezvous", place)
    assert outcome.code == 2
    assert f"{place} cannot be used" in outcome.err


def test_a_plan_for_other_devices_is_refused_by_run(call: Call, job: Path, plan: Path, tmp_path: Path) -> None:
    path = tmp_path / "cuda.json"
    larger = edited_job(job, "cluster", device="a100-80gb")
    assert call("plan", larger, "-o", path).code == 0
    refused = call("run", path, job, "--steps", "1", "--out", tmp_path / "out")
    assert (refused.code, refused.out) == (2, "")
    assert "it is for a cuda cluster and the job's cluster is cpu" in refused.err
    outcome = call("run", path, larger, "--steps", "1", "--out", tmp_path / "out")
    assert outcome.code == 2
    assert "CUDA devices per node and this machine has 0" in outcome.err


def test_a_plan_for_one_node_is_not_run_on_two_nor_as_its_second(
    call: Call, job: Path, plan: Path, tmp_path: Path
) -> None:
    outcome = call("run", plan, job, "--steps", "1", "--out", tmp_path / "out", "--nodes", "2")
    assert outcome.code == 2
    assert "--nodes 2: the plan's cluster has 1; give --nodes 1" in outcome.err
    outcome = call("run", plan, job, "--steps", "1", "--out", tmp_path / "out", "--node-rank", "1")
    assert outcome.code == 2
    assert "--node-rank 1 is not a node of the plan; give 0." in outcome.err


def test_models_that_are_elsewhere_are_held_to_the_plan(call: Call, job: Path, plan: Path, tmp_path: Path) -> None:
    """A directory of another model is refused before a rank is started, and so is a role that the job does not have."""
    other = shutil.copytree(job.parent / "actor", tmp_path / "another")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 2}))
    command = ("run", plan, job, "--steps", "1", "--out", tmp_path / "out")
    refused = call(*command, "--model", f"actor={other}")
    assert refused.code == 2
    assert f"models.actor.num_layers is 4 in the plan and 2 in {other}; give the directory of the" in refused.err
    refused = call(*command, "--model", "teacher=x")
    assert refused.code == 2
    assert "the job has no teacher model" in refused.err
    assert not (tmp_path / "out").exists()
