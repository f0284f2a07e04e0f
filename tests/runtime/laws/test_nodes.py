"""Several nodes: a plan for two machines does what one machine does, and a node that is lost ends the run on all."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

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


def test_the_exported_scripts_train_as_one_machine_does(directory: Path, one_machine: list[dict[str, float]]) -> None:
    files = [directory / "plan2.json", directory / "job2.yaml"]
    [exported] = ends(
        [LOOPBACK[0]], [[BIN / "meshwright", "export", *files, "--to", "torchrun", "-o", directory / "my scripts"]]
    )
    assert exported.code == 0, exported.err
    meeting = f"127.0.0.1:{free_port()}"
    options = [meeting, "--steps", STEPS, "--out", directory / "exported"]
    both = ends(list(LOOPBACK), [[directory / "my scripts" / f"node{node}.sh", *options] for node in (0, 1)])
    assert [end.code for end in both] == [0, 0], both[0].err + both[1].err
    assert losses(directory / "exported") == one_machine


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
