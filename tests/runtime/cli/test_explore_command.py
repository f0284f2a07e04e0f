"""The explore command: one state is answered without a page, and a mistake gets a sentence before a port is taken."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from meshwright.planner.plan.plan import read_plan
from tests.runtime.command import Call


def test_one_state_is_answered_without_a_page(call: Call, job: Path, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    outcome = call("explore", job, "--set", "workload.batch_size=8", "--price", 2, "--gap", 0.3, "-o", path)
    assert outcome.code == 0
    assert read_plan(path).facts.workload.batch_size == 8
    assert "next best layouts" in outcome.out
    assert "at 2 a GPU-hour" in outcome.out
    assert "8 of 10 such predictions are met by a step of" in outcome.out


def test_the_best_plan_is_compared_with_one_beside_it(call: Call, job: Path, plan: Path, tmp_path: Path) -> None:
    path = tmp_path / "best.json"
    outcome = call("explore", job, "--beside", plan, "--gap", 0.3, "-o", path)
    assert outcome.code == 0
    assert "the step of best is " in outcome.out
    assert any(line.startswith("actor_") and " instead of " in line for line in outcome.out.splitlines())
    assert call("explore", job, "--beside", plan, "-o", plan).code == 2, "an input is not overwritten"
    pins = tmp_path / "pins.txt"
    pins.write_text("actor_train.tp=3\n")
    refused = call("explore", job, "--beside", pins, "--gap", 0.3, "-o", path)
    assert refused.code == 2
    assert "tp=3 does not divide the 4 attention heads" in refused.err


@pytest.mark.check_all
def test_a_grid_keeps_what_is_set_and_is_labelled_by_its_own_fields(call: Call, job: Path, tmp_path: Path) -> None:
    path, options = tmp_path / "grid.json", ("--set", "workload.batch_size=8", "--gap", 0.5)
    outcome = call("explore", job, *options, "--grid", "cluster.nodes=1,2", "-o", path)
    assert outcome.code == 0
    points = json.loads(path.read_text())["points"]
    assert [point["setting"] for point in points] == [{"cluster.nodes": 1}, {"cluster.nodes": 2}]
    alone = call("whatif", job, "--sweep", "workload.batch_size=8", "--gap", 0.5, "--json")
    assert json.loads(alone.out)["points"][0]["plan"]["step_seconds"] == points[0]["plan"]["step_seconds"]
    assert call("explore", job, *options, "--grid", "cluster.device.memory_bytes=10000", "-o", path).code == 3


@pytest.mark.parametrize(
    ("arguments", "end"),
    [
        (("--set", "workload.batch_sise=8"), (2, "did you mean workload.batch_size, ")),
        (("--set", "workload.batch_size=8,16"), (2, "--grid takes more")),
        (("--grid", "workload.batch_sise=8,16", "-o", "PLAN"), (2, "did you mean workload.batch_size, ")),
        (("--grid", "workload.batch_size=", "-o", "PLAN"), (2, "is not of the form field=value,value")),
        (("--pin", "actor_train.tp=3", "-o", "PLAN"), (2, "tp=3 does not divide the 4 attention heads")),
        (("--set", "cluster.device.memory_bytes=100000", "-o", "PLAN"), (3, "no plan fits")),
    ],
)
def test_a_state_without_a_plan_is_refused(
    call: Call, job: Path, tmp_path: Path, arguments: tuple[str, ...], end: tuple[int, str]
) -> None:
    path = tmp_path / "plan.json"
    outcome = call("explore", job, *(str(path) if word == "PLAN" else word for word in arguments))
    assert outcome.code == end[0]
    assert end[1] in outcome.err
    assert not path.exists()


@pytest.mark.check_all
@pytest.mark.slow
def test_the_page_is_served_until_ctrl_c(plan: Path) -> None:
    command = [sys.executable, "-m", "meshwright", "explore", str(plan)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, bufsize=1) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        address = next(word for word in line.split() if word.startswith("http://127.0.0.1:"))
        with urllib.request.urlopen(address, timeout=60) as page:
            assert b"Explore plan.json" in page.read()
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
