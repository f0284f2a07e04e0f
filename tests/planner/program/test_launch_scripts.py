"""The scripts that start a plan: what they say, and that a shell reads them as they were meant."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from meshwright.planner.compile import compile_plan
from meshwright.planner.plan.plan import Plan
from meshwright.planner.program.jobset_script import jobset_script
from meshwright.planner.program.launch_scripts import LaunchPaths, slurm_script, torchrun_scripts
from meshwright.planner.program.ray_script import ray_script
from tests.planner.jobs import ToyModel, small_facts

PLAN, JOB, ACTOR = "it's here/plan.json", "$HOME job.yaml", "actor=/data/my actor"
PATHS = LaunchPaths(plan=Path(PLAN), job=Path("/laptop/$HOME job.yaml"), models={"actor": "/data/my actor"})
SAYS = """#!/usr/bin/env bash
printf '%s\\n' "${0##*/}" "$@" "threads=$OMP_NUM_THREADS" "devices=${CUDA_VISIBLE_DEVICES-all}"
"""
SRUN = """#!/usr/bin/env bash
# A stand-in for Slurm's: runs the command once per node, and tells it the node's number.
while [[ $1 == -* ]]; do [[ $1 != --container* ]] || echo "$1"; shift; done
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
    commands = {"torchrun": SAYS, "meshwright": SAYS, "sbatch": SAYS, "srun": SRUN, "scontrol": SCONTROL}
    commands[name] = scripts[name]
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
    scripts = torchrun_scripts(cuda, PATHS)
    assert list(scripts) == ["node0.sh", "node1.sh"]
    words = said(tmp_path, scripts, "node1.sh", "10.0.0.1:29500", "--steps", "5", "--out", "my run")
    assert words[0] == "torchrun"
    assert words[words.index("--nnodes") + 1] == words[words.index("--nproc-per-node") + 1] == "2"
    assert words[words.index("--rdzv-endpoint") + 1] == "10.0.0.1:29500"
    assert words[words.index("--rdzv-conf") + 1] == "is_host=0"
    run = words[words.index("meshwright") :]
    assert "--no-python" in words
    run_words = words[words.index("run", words.index("--no-python")) :]
    options = ["--node-rank", "1", "--model", ACTOR, "--steps", "5", "--out", "my run"]
    assert run_words[:11] == ["run", PLAN, JOB, *options]
    assert run[-2:] == ["threads=1", "devices=0,1"]


def test_only_the_first_node_keeps_the_meeting_point(cpu: Plan, tmp_path: Path) -> None:
    words = said(tmp_path, torchrun_scripts(cpu, PATHS), "node0.sh", "10.0.0.1:29500", LOCAL_ADDR="10.0.0.1")
    assert "is_host=1" in words
    assert words[words.index("--local-addr") + 1] == "10.0.0.1"


def test_a_script_without_a_meeting_point_asks_for_one(cpu: Plan, tmp_path: Path) -> None:
    words = said(tmp_path, torchrun_scripts(cpu, PATHS), "node0.sh")
    assert len(words) == 1
    assert "give HOST:PORT" in words[0]


def test_devices_that_the_user_has_chosen_are_kept_in_their_order(cuda: Plan, tmp_path: Path) -> None:
    words = said(tmp_path, torchrun_scripts(cuda, PATHS), "node0.sh", "a:1", CUDA_VISIBLE_DEVICES="3,1")
    assert words[-1] == "devices=3,1"


def test_a_plan_for_cpus_asks_for_no_devices(cpu: Plan, tmp_path: Path) -> None:
    assert said(tmp_path, torchrun_scripts(cpu, PATHS), "node0.sh", "a:1")[-1] == "devices=all"
    assert "gpus" not in slurm_script(cpu, PATHS)["run.sbatch"]


def test_slurm_starts_one_run_per_node_which_meet_on_the_first(cuda: Plan, tmp_path: Path) -> None:
    scripts = slurm_script(cuda, PATHS)
    words = said(
        tmp_path, scripts, "run.sbatch", "--steps", "5", "--out", "my run", SLURM_JOB_ID="12345", SLURM_JOB_NODELIST="x"
    )
    node = ["meshwright", "run", PLAN, JOB, "--nodes", "2", "--rendezvous", "first:22345", "--node-rank"]
    options = ["--model", ACTOR, "--steps", "5", "--out", "my run", "threads=1", "devices=0,1"]
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


def test_the_batch_script_submits_itself_with_the_variables_of_the_cluster(cuda: Plan, tmp_path: Path) -> None:
    scripts = slurm_script(cuda, PATHS)
    words = said(tmp_path, scripts, "run.sbatch", "--steps", "5", PARTITION="gpu", ACCOUNT="me", TIME_LIMIT="08:00:00")
    script = str(tmp_path / "run.sbatch")
    submitted = ["sbatch", "--partition=gpu", "--account=me", "--time=08:00:00", script, "--steps", "5"]
    assert words[: len(submitted)] == submitted
    assert said(tmp_path, scripts, "run.sbatch", "--steps", "5")[:2] == ["sbatch", script]


def test_slurm_runs_a_container_where_an_image_is_given(cuda: Plan, tmp_path: Path) -> None:
    job = {"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "x", "IMAGE": "my image", "MOUNTS": "/data:/data"}
    words = said(tmp_path, slurm_script(cuda, PATHS), "run.sbatch", **job)
    assert words[:2] == ["--container-image=my image", "--container-mounts=/data:/data"]
    assert words[2].startswith("--container-workdir=/")


def manifests(
    directory: Path, plan: Plan, *arguments: str, **environment: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The Secret and the JobSet that the script prints."""
    lines = said(directory, jobset_script(plan, PATHS), "jobset.sh", *arguments, **environment)
    secret, jobset = yaml.safe_load_all("\n".join(lines))
    return secret, jobset


def test_a_jobset_keeps_the_published_schema(cuda: Plan, cpu: Plan, tmp_path: Path) -> None:
    schema = json.loads(Path(__file__).with_name("jobset_schema.json").read_text())
    for plan, environment in ((cpu, {}), (cuda, {"QUEUE": "team", "TIME_LIMIT": "3600", "NAMESPACE": "ml"})):
        secret, jobset = manifests(tmp_path, plan, "--steps", "5", **environment)
        for kind, manifest in (("V1Secret", secret), ("JobSet", jobset)):
            jsonschema.Draft202012Validator({**schema, "$ref": f"#/$defs/{kind}"}).validate(manifest)
    jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["parallelsim"] = 2
    with pytest.raises(jsonschema.ValidationError, match="parallelsim"):
        jsonschema.Draft202012Validator({**schema, "$ref": "#/$defs/JobSet"}).validate(jobset)


def test_a_jobset_has_a_pod_for_each_node_with_all_its_devices(cuda: Plan, cpu: Plan, tmp_path: Path) -> None:
    for plan, resource in ((cpu, "cpu"), (cuda, "nvidia.com/gpu")):
        _, jobset = manifests(tmp_path, plan)
        job = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]
        assert (job["parallelism"], job["completions"], job["completionMode"]) == (2, 2, "Indexed")
        assert job["template"]["spec"]["containers"][0]["resources"]["limits"] == {resource: "2"}


def test_the_variables_of_a_jobset_are_those_of_the_environment(cuda: Plan, tmp_path: Path) -> None:
    secret, jobset = manifests(
        tmp_path,
        cuda,
        NAME="mine",
        NAMESPACE="ml",
        QUEUE="team",
        IMAGE="my/image",
        CLAIM="disk",
        MOUNT="/m",
        TIME_LIMIT="9",
    )
    pod = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    assert jobset["metadata"] == {"name": "mine", "namespace": "ml", "labels": {"kueue.x-k8s.io/queue-name": "team"}}
    assert jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["activeDeadlineSeconds"] == 9
    assert pod["containers"][0]["image"] == "my/image"
    assert pod["volumes"][0]["persistentVolumeClaim"] == {"claimName": "disk"}
    assert pod["containers"][0]["volumeMounts"][0] == {"name": "shared", "mountPath": "/m"}
    assert pod["containers"][0]["env"][-1]["valueFrom"]["secretKeyRef"]["name"] == secret["metadata"]["name"]
    assert len(secret["stringData"]["token"]) == 32


def test_a_name_that_no_jobset_may_have_is_refused(cuda: Plan, tmp_path: Path) -> None:
    [line] = said(tmp_path, jobset_script(cuda, PATHS), "jobset.sh", NAME="My_Run")
    assert line == "NAME=My_Run is not a name of a JobSet; use at most 40 lower-case letters, digits and hyphens."


@pytest.mark.parametrize("has_checkpoint", [False, True])
def test_a_pod_runs_its_node_and_resumes_where_there_is_a_checkpoint(
    has_checkpoint: bool, cuda: Plan, tmp_path: Path
) -> None:
    out = tmp_path / 'it\'s "my" \\run $HOME'
    out.mkdir()
    if has_checkpoint:
        (out / "latest").touch()
    _, jobset = manifests(tmp_path, cuda, "--steps", "5", "--out", str(out))
    container = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"][0]
    (tmp_path / "getent").write_text(SAYS.replace("printf", "true printf"))
    (tmp_path / "getent").chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "JOB_COMPLETION_INDEX": "1", "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(
        [*container["command"], *container["args"]], env=environment, capture_output=True, text=True, check=True
    )
    node = ["--rendezvous", "meshwright-node-0-0.meshwright:29500", "--node-rank", "1", "--nodes", "2"]
    options = ["--model", ACTOR, "--steps", "5", "--out", str(out), *(["--resume"] if has_checkpoint else [])]
    assert ran.stdout.splitlines()[:-2] == ["meshwright", "run", PLAN, JOB, *node, *options]


def test_the_script_for_ray_names_the_nodes_and_its_files(cuda: Plan) -> None:
    text = ray_script(cuda, PATHS)["ray_job.py"]
    compile(text, "ray_job.py", "exec")
    assert f'os.environ.get("PLAN", {PLAN!r})' in text
    assert "nodes=2," in text
    assert "kind='cuda'," in text


@pytest.mark.parametrize("scripts", [torchrun_scripts, slurm_script, jobset_script, ray_script])
def test_no_path_of_the_machine_that_writes_a_script_is_in_it(
    scripts: Callable[[Plan, LaunchPaths], Mapping[str, str]], cuda: Plan
) -> None:
    assert "/laptop" in str(PATHS.job)
    assert not any("/laptop" in text for text in scripts(cuda, PATHS).values())


def test_the_stages_of_each_rank_and_its_device_are_said(cuda: Plan) -> None:
    scripts = torchrun_scripts(cuda, PATHS)
    lines = {
        name: [line for line in text.splitlines() if line.startswith("#   rank")] for name, text in scripts.items()
    }
    assert [line.split(":")[0] for line in lines["node1.sh"]] == ["#   rank 2, cuda 0", "#   rank 3, cuda 1"]
    assert all("actor_train" in line for each in lines.values() for line in each)
    assert not any("ref_logprob" in line for line in lines["node0.sh"])
    assert any("ref_logprob" in line for line in lines["node1.sh"])
