"""Several nodes: a plan for two machines does what one machine does, and a node that is lost ends the run on all."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml

from benchmarks.hosts import BIN, LOOPBACK, End, Host, free_port, namespaces_refused, two_namespaces
from meshwright.planner.plan.plan import write_plan
from tests.runtime.small_job import request, write_job

pytestmark = pytest.mark.check_all

PINS = ("actor_train.layout=dp2", "actor_generate.layout=pp2", "critic_train.layout=pp2")
STEPS = 2
PATIENCE = 300.0
TIMES = {"seconds", "tokens_per_second", "overhead"}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A job for two ranks, on one node and on two, each with its plan."""
    directory = tmp_path_factory.mktemp("nodes")
    for nodes in (1, 2):
        job = write_job(directory, num_ranks=2 // nodes, nodes=nodes)
        plan = request(job, directory, *PINS).plan
        job.rename(directory / f"job{nodes}.yaml")
        write_plan(directory / f"plan{nodes}.json", plan)
    return directory


@pytest.fixture(scope="module")
def one_machine(directory: Path) -> list[dict[str, float]]:
    """The losses of two ranks on one node."""
    [end] = ends([LOOPBACK[0]], [run_of(directory, "one", 1)])
    assert end.code == 0, end.err
    return losses(directory / "one")


@pytest.fixture(scope="module")
def namespaces() -> Iterator[tuple[Host, Host]]:
    if why := namespaces_refused():
        pytest.skip(f"this machine makes no network namespaces: {why}")
    with two_namespaces() as hosts:
        yield hosts


def run_of(directory: Path, out: str, nodes: int, *options: object) -> list[object]:
    """The command that runs a plan."""
    files = [directory / f"plan{nodes}.json", directory / f"job{nodes}.yaml"]
    return [BIN / "meshwright", "run", *files, "--steps", STEPS, "--out", directory / out, *options]


def ends(hosts: list[Host], commands: list[list[object]]) -> list[End]:
    agents = [host.start(command) for host, command in zip(hosts, commands, strict=True)]
    return [agent.end(PATIENCE) for agent in agents]


def losses(out: Path) -> list[dict[str, float]]:
    """What a run reports of each step but for how long it took."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) == STEPS
    return [{k: v for k, v in line.items() if k not in TIMES} for line in lines]


def test_two_network_namespaces_train_as_one_machine_does(
    directory: Path, one_machine: list[dict[str, float]], namespaces: tuple[Host, Host]
) -> None:
    place = ["--nodes", 2, "--rendezvous", f"{namespaces[0].address}:{free_port()}"]
    commands = [run_of(directory, "two", 2, *place, "--node-rank", node) for node in (1, 0)]
    first, second = ends(list(namespaces), commands)  # the plan's node 0 is the second host
    assert (first.code, second.code) == (0, 0), first.err + second.err
    assert "tokens/s" in second.out
    assert "tokens/s" not in first.out
    assert losses(directory / "two") == one_machine


@pytest.fixture(scope="module")
def elsewhere(directory: Path) -> list[str]:
    """Options that name copies of the models in another directory."""
    for role in ("actor", "reward"):
        shutil.copytree(directory / role, directory / "elsewhere" / f"my-{role}")
    return [f"--model={role}={directory / 'elsewhere' / f'my-{role}'}" for role in ("actor", "reward")]


def exported(directory: Path, to: str) -> Path:
    """The directory of scripts that launch the plan for two nodes."""
    if (directory / f"my {to}").exists():
        return directory / f"my {to}"
    files = [directory / "plan2.json", directory / "job2.yaml"]
    [end] = ends([LOOPBACK[0]], [[BIN / "meshwright", "export", *files, "--to", to, "-o", directory / f"my {to}"]])
    assert end.code == 0, end.err
    return directory / f"my {to}"


def places(directory: Path) -> dict[str, str]:
    """The variables of a script that say where the files are on this machine."""
    return {"PLAN": str(directory / "plan2.json"), "JOB": str(directory / "job2.yaml")}


def test_the_scripts_for_torchrun_train_as_one_machine_does_with_models_of_one_node_elsewhere(
    directory: Path, one_machine: list[dict[str, float]], elsewhere: list[str]
) -> None:
    options = [f"127.0.0.1:{free_port()}", "--steps", STEPS, "--out", directory / "torchrun"]
    scripts = exported(directory, "torchrun")
    agents = [
        host.start([scripts / f"node{node}.sh", *options, *(elsewhere if node else [])], **places(directory))
        for node, host in enumerate(LOOPBACK)
    ]
    both = [agent.end(PATIENCE) for agent in agents]
    assert [end.code for end in both] == [0, 0], both[0].err + both[1].err
    assert losses(directory / "torchrun") == one_machine


SBATCH = """#!/usr/bin/env bash
# A stand-in for Slurm's: runs a copy of the script, as Slurm does, on the first of two nodes.
while [[ $1 == -* ]]; do shift; done
cp "$1" "$SPOOL/slurm_script"
SLURM_JOB_ID=1 SLURM_JOB_NODELIST=nodes exec bash "$SPOOL/slurm_script" "${@:2}"
"""
SRUN = """#!/usr/bin/env bash
# A stand-in for Slurm's: starts the command on both nodes at once, with the number of the node.
while [[ $1 == -* ]]; do shift; done
for node in 0 1; do SLURM_NODEID=$node "$@" & started+=($!); done
for one in "${started[@]}"; do wait "$one" || code=$?; done
exit "${code:-0}"
"""
SCONTROL = "#!/usr/bin/env bash\nprintf '127.0.0.1\\n127.0.0.1\\n'\n"


def test_the_script_for_slurm_trains_as_one_machine_does(
    directory: Path, one_machine: list[dict[str, float]], tmp_path: Path
) -> None:
    for name, text in {"sbatch": SBATCH, "srun": SRUN, "scontrol": SCONTROL}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    path = f"{tmp_path}:{BIN}:{os.environ['PATH']}"
    command = [exported(directory, "slurm") / "run.sbatch", "--steps", STEPS, "--out", directory / "slurm"]
    environment = {**places(directory), "PATH": path, "SPOOL": str(tmp_path), "PORT": str(free_port())}
    end = LOOPBACK[0].start(command, **environment).end(PATIENCE)
    assert end.code == 0, end.err
    assert "this machine is done" in end.out
    assert losses(directory / "slurm") == one_machine


def test_the_pods_of_a_jobset_train_as_one_machine_does(
    directory: Path, one_machine: list[dict[str, float]], tmp_path: Path
) -> None:
    """Each pod's command runs here, with the number that Kubernetes would give it."""
    command = [exported(directory, "k8s") / "jobset.sh", "--steps", STEPS, "--out", directory / "k8s"]
    printed = LOOPBACK[0].start(command, **places(directory), PORT=str(free_port())).end(PATIENCE)
    _, jobset = yaml.safe_load_all(printed.out)
    [container] = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"]
    [node, host, *arguments] = container["args"]
    assert host == "meshwright-node-0-0.meshwright"
    agents = [
        LOOPBACK[0].start([*container["command"], node, "127.0.0.1", *arguments], JOB_COMPLETION_INDEX=index)
        for index in "01"
    ]
    both = [agent.end(PATIENCE) for agent in agents]
    assert [end.code for end in both] == [0, 0], both[0].err + both[1].err
    assert losses(directory / "k8s") == one_machine


CLUSTER = """
import sys
from ray.cluster_utils import Cluster

arguments = {"num_cpus": 1, "object_store_memory": 2**27}
cluster = Cluster(initialize_head=True, head_node_args={**arguments, "include_dashboard": False})
for _ in range(int(sys.argv[1]) - 1):
    cluster.add_node(wait=False, **arguments)
cluster.wait_for_nodes(timeout=300)
print("address", cluster.address, flush=True)
sys.stdin.read()
cluster.shutdown()
"""


@contextmanager
def ray_cluster(nodes: int) -> Iterator[str]:
    """The address of a cluster of nodes with one processor each, in a process that ends with the test."""
    process = subprocess.Popen(
        [sys.executable, "-c", CLUSTER, str(nodes)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    try:
        yield next(line.split()[1] for line in process.stdout if line.startswith("address "))
    finally:
        process.communicate()


def end_of(directory: Path, script: Path, address: str, *options: object, **environment: str) -> End:
    command = [BIN / "python", script, *options]
    return LOOPBACK[0].start(command, **places(directory), RAY_ADDRESS=address, **environment).end(PATIENCE)


def test_two_nodes_of_ray_train_as_one_machine_does(directory: Path, one_machine: list[dict[str, float]]) -> None:
    script = exported(directory, "ray") / "ray_job.py"
    with ray_cluster(2) as address:
        end = end_of(directory, script, address, "--steps", STEPS, "--out", directory / "ray")
        assert end.code == 0, end.err
        assert losses(directory / "ray") == one_machine
        assert all(f"node {node} ended with exit code 0" in end.err for node in (0, 1))
        assert "tokens/s" in end.out + end.err
        again = end_of(directory, script, address, "--steps", STEPS, "--out", directory / "ray")
        assert again.code == 2
        assert "error: --steps" in again.out + again.err or "continue it with --resume" in again.out + again.err


def test_a_cluster_with_too_few_nodes_is_named_after_the_stated_patience(directory: Path) -> None:
    script = exported(directory, "ray") / "ray_job.py"
    with ray_cluster(1) as address:
        end = end_of(directory, script, address, "--steps", STEPS, "--out", directory / "no", PATIENCE_SECONDS="6")
    assert end.code == 4
    assert end.sentence() == (
        "error: the Ray cluster has 1 of the 2 nodes with 1 CPU that the plan needs, or others use them, after 6 s; "
        "add nodes with `ray start`, or plan the job for fewer."
    )
    assert "waiting until" in end.err
    assert not (directory / "no").exists()


def test_torchrun_with_another_number_of_ranks_is_refused_in_one_sentence(directory: Path) -> None:
    torchrun = [BIN / "torchrun", "--nproc-per-node", 2, "--master-port", free_port(), "--no-python"]
    [end] = ends([LOOPBACK[0]], [[*torchrun, *run_of(directory, "refused", 2)]])
    said = [line for line in end.err.splitlines() if line.startswith("error:")]
    assert said == [
        "error: 2 of 2 ranks were started on this node and the plan has 2 nodes of 1; use torchrun --nnodes 2 "
        "--nproc-per-node 1."
    ]
    assert "exitcode  : 2" in end.err


def node(port: int, rank: object, work: str = "w", what: str = "tell") -> list[object]:
    return [BIN / "python", "-m", "tests.runtime.agent", f"127.0.0.1:{port}", rank, work, what]


def test_the_ranks_of_a_node_are_consecutive_from_its_node_rank_on() -> None:
    port = free_port()
    first, second = ends(list(LOOPBACK), [node(port, 1), node(port, 0)])
    assert json.loads(first.out) == {"2": [2, 0], "3": [3, 1]}
    assert json.loads(second.out) == {"0": [0, 0], "1": [1, 1]}


def test_nodes_meet_at_an_address_of_ipv6() -> None:
    agent, port = [BIN / "python", "-m", "tests.runtime.agent"], free_port()
    first, second = ends(list(LOOPBACK), [[*agent, f"[::1]:{port}", rank, "w", "tell"] for rank in (1, 0)])
    assert json.loads(first.out) == {"2": [2, 0], "3": [3, 1]}
    assert json.loads(second.out) == {"0": [0, 0], "1": [1, 1]}


@pytest.mark.parametrize(
    ("one", "other", "said"),
    [((0, "w"), (0, "w"), "--node-rank are "), ((0, "w"), (1, "x"), "were given different plans, jobs or options")],
)
def test_nodes_that_do_not_belong_together_are_refused_on_every_one(
    one: tuple[int, str], other: tuple[int, str], said: str
) -> None:
    port = free_port()
    both = ends(list(LOOPBACK), [node(port, *one), node(port, *other)])
    assert [end.code for end in both] == [2, 2]
    assert all(said in end.sentence() for end in both)


@pytest.mark.parametrize("lost", [0, 1])
def test_a_node_that_dies_ends_the_run_on_the_other(lost: int) -> None:
    port = free_port()
    agents = [host.start(node(port, rank, what="work")) for rank, host in enumerate(LOOPBACK)]
    for agent in agents:
        assert agent.process.stdout is not None
        assert agent.process.stdout.readline() == "at work\n"
    agents[lost].kill()
    left = agents[1 - lost].end(60.0)
    assert left.code == 4
    assert left.sentence().startswith(("error: rank ", "error: the nodes that met at "))
