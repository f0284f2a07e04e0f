"""The scripts that start a plan: what they say, and that a shell reads them as they were meant."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from meshwright.planner.compile import compile_plan
from meshwright.planner.plan.plan import Plan
from meshwright.planner.program.launch_scripts import slurm_script, torchrun_scripts
from tests.planner.jobs import ToyModel, small_facts

PLAN, JOB = Path("/data/it's here/plan.json"), Path("/data/$HOME job.yaml")
SAYS = """#!/usr/bin/env bash
printf '%s\\n' "${0##*/}" "$@" "threads=$OMP_NUM_THREADS" "devices=${CUDA_VISIBLE_DEVICES-all}"
"""
SRUN = """#!/usr/bin/env bash
# A stand-in for Slurm's: runs the command once per node, and tells it the node's number.
while [[ $1 == -* ]]; do shift; done
for node in 0 1; do SLURM_NODEID=$node "$@"; done
"""
SCONTROL = "#!/usr/bin/env bash\nprintf 'first\\nsecond\\n'\n"


def plan_of(kind: str) -> Plan:
    """Two nodes of two ranks."""
    facts = small_facts(nodes=2, ranks_per_node=2)
    device = facts.cluster.device.model_copy(update={"kind": kind})
    facts = facts.model_copy(update={"cluster": facts.cluster.model_copy(update={"device": device})})
    plan = compile_plan(facts, ToyModel(facts), pins=("actor_train.layout=dp4", "ref_logprob.pool=2:2"))
    assert isinstance(plan, Plan)
    return plan


@pytest.fixture(scope="module")
def cpu() -> Plan:
    return plan_of("cpu")


@pytest.fixture(scope="module")
def cuda() -> Plan:
    return plan_of("cuda")


def said(directory: Path, scripts: Mapping[str, str], name: str, *arguments: str, **environment: str) -> list[str]:
    """What the commands at the end of a script were told, by stand-ins that repeat it."""
    commands = {"torchrun": SAYS, "meshwright": SAYS, "srun": SRUN, "scontrol": SCONTROL, name: scripts[name]}
    for command, text in commands.items():
        (directory / command).write_text(text)
        (directory / command).chmod(0o755)
    path = f"{directory}:{os.environ['PATH']}"
    clean = {key: value for key, value in os.environ.items() if key != "CUDA_VISIBLE_DEVICES"}
    environment = {**clean, "PATH": path, **environment}
    outcome = subprocess.run(
        [directory / name, *arguments], env=environment, capture_output=True, text=True, check=False
    )
    return [*outcome.stdout.splitlines(), *outcome.stderr.splitlines()]


def test_each_node_has_a_script_that_names_its_place_and_passes_options_on(cuda: Plan, tmp_path: Path) -> None:
    scripts = torchrun_scripts(cuda, PLAN, JOB)
    assert list(scripts) == ["node0.sh", "node1.sh"]
    words = said(tmp_path, scripts, "node1.sh", "10.0.0.1:29500", "--steps", "5", "--out", "my run")
    assert words[0] == "torchrun"
    assert words[words.index("--nnodes") + 1] == words[words.index("--nproc-per-node") + 1] == "2"
    assert words[words.index("--rdzv-endpoint") + 1] == "10.0.0.1:29500"
    assert words[words.index("--rdzv-conf") + 1] == "is_host=0"
    run = words[words.index("meshwright") :]
    assert "--no-python" in words
    run_words = words[words.index("run", words.index("--no-python")) :]
    assert run_words[:9] == ["run", str(PLAN), str(JOB), "--node-rank", "1", "--steps", "5", "--out", "my run"]
    assert run[-2:] == ["threads=1", "devices=0,1"]


def test_only_the_first_node_keeps_the_meeting_point(cpu: Plan, tmp_path: Path) -> None:
    words = said(tmp_path, torchrun_scripts(cpu, PLAN, JOB), "node0.sh", "10.0.0.1:29500", LOCAL_ADDR="10.0.0.1")
    assert "is_host=1" in words
    assert words[words.index("--local-addr") + 1] == "10.0.0.1"


def test_a_script_without_a_meeting_point_asks_for_one(cpu: Plan, tmp_path: Path) -> None:
    words = said(tmp_path, torchrun_scripts(cpu, PLAN, JOB), "node0.sh")
    assert len(words) == 1
    assert "give HOST:PORT" in words[0]


def test_devices_that_the_user_has_chosen_are_kept_in_their_order(cuda: Plan, tmp_path: Path) -> None:
    words = said(tmp_path, torchrun_scripts(cuda, PLAN, JOB), "node0.sh", "a:1", CUDA_VISIBLE_DEVICES="3,1")
    assert words[-1] == "devices=3,1"


def test_a_plan_for_cpus_asks_for_no_devices(cpu: Plan, tmp_path: Path) -> None:
    assert said(tmp_path, torchrun_scripts(cpu, PLAN, JOB), "node0.sh", "a:1")[-1] == "devices=all"
    assert "gpus" not in slurm_script(cpu, PLAN, JOB)["run.sbatch"]


def test_slurm_starts_one_run_per_node_which_meet_on_the_first(cuda: Plan, tmp_path: Path) -> None:
    scripts = slurm_script(cuda, PLAN, JOB)
    words = said(
        tmp_path, scripts, "run.sbatch", "--steps", "5", "--out", "my run", SLURM_JOB_ID="12345", SLURM_JOB_NODELIST="x"
    )
    node = ["meshwright", "run", str(PLAN), str(JOB), "--nodes", "2", "--rendezvous", "first:22345", "--node-rank"]
    options = ["--steps", "5", "--out", "my run", "threads=1", "devices=0,1"]
    assert words == [*node, "0", *options, *node, "1", *options]
    asked = re.findall(r"^#SBATCH --(\S+)", scripts["run.sbatch"], flags=re.MULTILINE)
    assert asked == [
        "job-name=meshwright",
        "nodes=2",
        "ntasks-per-node=1",
        "cpus-per-task=2",
        "signal=USR1@300",
        "gpus-per-node=2",
    ]


def test_the_stages_of_each_rank_and_its_device_are_said(cuda: Plan) -> None:
    scripts = torchrun_scripts(cuda, PLAN, JOB)
    lines = {
        name: [line for line in text.splitlines() if line.startswith("#   rank")] for name, text in scripts.items()
    }
    assert [line.split(":")[0] for line in lines["node1.sh"]] == ["#   rank 2, cuda 0", "#   rank 3, cuda 1"]
    assert all("actor_train" in line for each in lines.values() for line in each)
    assert not any("ref_logprob" in line for line in lines["node0.sh"])
    assert any("ref_logprob" in line for line in lines["node1.sh"])
