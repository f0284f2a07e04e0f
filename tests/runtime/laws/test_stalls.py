"""A network that stalls and a disk that is full or closed end a run in time and in a sentence, and nothing is lost."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.hosts import BIN, LOOPBACK, Agent, Host, free_port, namespaces_refused, two_namespaces
from meshwright.planner.plan.plan import write_plan
from tests.runtime.small_job import OF_TIME, request, write_job

pytestmark = pytest.mark.slow

STEPS, MOST_SECONDS = 60, 150.0
"""A node is lost after 40 s without a sign of life, and those that meet again wait for 20 s."""


@pytest.fixture
def namespaces() -> Iterator[tuple[Host, Host]]:
    if why := namespaces_refused():
        pytest.skip(f"this machine makes no network namespaces: {why}")
    with two_namespaces() as hosts:
        yield hosts


def command(job: Path, out: Path, *options: object) -> list[object]:
    files = [job.with_name("plan.json"), job]
    return [BIN / "meshwright", "run", *files, "--steps", STEPS, "--out", out, *options]


def planned(directory: Path, nodes: int) -> Path:
    """The job of a rank on each of so many nodes, with its plan beside it."""
    job = write_job(directory, num_ranks=1, nodes=nodes)
    pins = ("actor_train.layout=dp2",) if nodes > 1 else ()
    write_plan(directory / "plan.json", request(job, directory, *pins).plan)
    return job


def steps(out: Path) -> list[int]:
    path = out / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line)["step"] for line in lines if line.endswith("}")]


def learned(out: Path) -> list[dict[str, float]]:
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name not in OF_TIME} for line in lines]


def wait_for_steps(out: Path, number: int, agents: list[Agent]) -> None:
    deadline = time.monotonic() + 300
    while len(steps(out)) < number:
        assert time.monotonic() < deadline
        assert all(agent.process.poll() is None for agent in agents), [agent.end(5.0).err for agent in agents]
        time.sleep(0.1)


def pull(host: Host, state: str) -> None:
    """Takes the cable between the hosts down or up: packets are dropped, and nobody is told."""
    subprocess.run([*host.inside, "ip", "link", "set", "cable", state], check=True)


@pytest.mark.check_all
def test_a_network_that_stalls_is_named_on_both_nodes_and_no_checkpoint_is_lost(
    tmp_path: Path, namespaces: tuple[Host, Host]
) -> None:
    job, out = planned(tmp_path, 2), tmp_path / "run"
    place = ["--nodes", 2, "--rendezvous", f"{namespaces[0].address}:{free_port()}", "--checkpoint-every", 1]
    agents = [host.start(command(job, out, *place, "--node-rank", n)) for n, host in enumerate(namespaces)]
    wait_for_steps(out, 3, agents)
    pull(namespaces[1], "down")
    began = time.monotonic()
    ended = [agent.end(MOST_SECONDS) for agent in agents]
    assert time.monotonic() - began < MOST_SECONDS
    assert [end.code for end in ended] == [4, 4], [end.err for end in ended]
    assert "no sign of life for 40 s from node 1" in ended[0].sentence()
    assert "this node has lost the others that met at" in ended[1].sentence()
    assert (out / "latest").read_text().startswith("checkpoints/step-")


@pytest.mark.check_all
def test_a_network_that_stalls_for_a_while_and_loses_packets_changes_nothing(
    tmp_path: Path, namespaces: tuple[Host, Host]
) -> None:
    """A token bucket takes the place of netem, which few kernels have: what is more than it lets through is lost."""
    job, few = planned(tmp_path, 2), 6
    for name, is_bad in (("good", False), ("bad", True)):
        out = tmp_path / name
        place = ["--nodes", 2, "--rendezvous", f"{namespaces[0].address}:{free_port()}", "--steps", few]
        agents = [host.start(command(job, out, *place, "--node-rank", n)) for n, host in enumerate(namespaces)]
        if is_bad:
            wait_for_steps(out, 1, agents)
            shape = ("tbf", "rate", "20mbit", "burst", "16kb", "latency", "5ms")
            subprocess.run([*namespaces[1].inside, "tc", "qdisc", "add", "dev", "cable", "root", *shape], check=True)
            wait_for_steps(out, 2, agents)
            pull(namespaces[1], "down")
            time.sleep(10.0)
            pull(namespaces[1], "up")
        ended = [agent.end(MOST_SECONDS) for agent in agents]
        assert [end.code for end in ended] == [0, 0], [end.err for end in ended]
    good, bad = (learned(tmp_path / name) for name in ("good", "bad"))
    assert len(good) == few
    assert bad == good


@pytest.mark.check_all
def test_a_disk_that_is_full_is_named_and_the_checkpoint_before_stays(tmp_path: Path) -> None:
    job, disk = planned(tmp_path, 1), tmp_path / "disk"
    disk.mkdir()
    mounted = ["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(disk)]
    if tried := subprocess.run(mounted, capture_output=True, text=True, check=False).stderr:
        pytest.skip(f"this machine mounts no small disk: {tried}")
    try:
        agent = LOOPBACK[0].start(command(job, disk / "run", "--checkpoint-every", 1, "--keep", 50))
        ended = agent.end(300.0)
        assert ended.code == 4, ended.err
        assert "cannot be written" in ended.sentence() or "No space left" in ended.sentence()
        saved = sorted((disk / "run" / "checkpoints").glob("step-??????"))
        assert saved
        assert (disk / "run" / "latest").read_text().strip() == f"checkpoints/{saved[-1].name}"
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


@pytest.mark.check_all
def test_an_output_that_may_not_be_written_and_one_that_another_run_holds_are_refused(tmp_path: Path) -> None:
    job, closed = planned(tmp_path, 1), tmp_path / "closed"
    closed.mkdir()
    if not subprocess.run(["mount", "--bind", closed, closed], capture_output=True, check=False).returncode:
        try:
            subprocess.run(["mount", "-o", "remount,ro,bind", closed], check=True)
            ended = LOOPBACK[0].start(command(job, closed / "run")).end(120.0)
            assert ended.code == 2, ended.err
            assert "cannot be written; name a file in a directory that you may write to" in ended.sentence()
        finally:
            subprocess.run(["umount", "-l", str(closed)], check=True)
    first = LOOPBACK[0].start(command(job, tmp_path / "run", "--steps", 100 * STEPS))
    try:
        wait_for_steps(tmp_path / "run", 1, [first])
        second = LOOPBACK[0].start(command(job, tmp_path / "run", "--resume")).end(120.0)
        assert second.code == 2, second.err
        assert "is in use by a run that has not ended" in second.sentence()
        assert first.process.poll() is None
    finally:
        first.kill()
    assert not os.path.lexists(tmp_path / "run" / "summary.json")
    shutil.rmtree(tmp_path / "run")
