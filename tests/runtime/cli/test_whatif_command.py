"""The what-if command: differences against the plan, of fields that there are."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.command import Call


def edited_plan(plan: Path, edit: Callable[[dict[str, Any]], None]) -> Path:
    document = json.loads(plan.read_text())
    edit(document)
    path = plan.with_name("edited.json")
    path.write_text(json.dumps(document))
    return path


def test_a_what_if_is_a_difference_against_the_plan(call: Call, plan: Path) -> None:
    answer = json.loads(call("whatif", plan, "--set", "workload.response.p99=12,24", "--price", "3", "--json").out)
    shorter, same = answer["answers"]
    assert shorter["difference"]["step_seconds"] < 0
    assert shorter["metrics"]["money"] == pytest.approx(3 * shorter["metrics"]["gpu_hours"])
    assert same["difference"]["step_seconds"] == 0
    shown = call("whatif", plan, "--set", "workload.response.p99=12")
    assert shown.code == 0
    assert "the same placements with new costs" in shown.out


def test_a_what_if_of_an_unknown_field_exits_2_with_the_nearest_name(call: Call, plan: Path) -> None:
    outcome = call("whatif", plan, "--set", "cluster.node=4")
    assert outcome.code == 2
    assert "did you mean cluster.nodes" in outcome.err


def test_a_sweep_plans_every_point_and_draws_them(call: Call, job: Path, tmp_path: Path) -> None:
    page = tmp_path / "sweep.html"
    ranges = ("--sweep", "cluster.nodes=0:1", "--sweep", "workload.batch_size=8,16")
    outcome = call("whatif", job, *ranges, "--price", 2, "--gap", 0.5, "--plot", page, "--json")
    assert outcome.code == 0
    found = json.loads(outcome.out)
    settings = [point["setting"] for point in found["points"]]
    assert settings == [{"cluster.nodes": nodes, "workload.batch_size": size} for nodes in (0, 1) for size in (8, 16)]
    assert ["--sweep cluster.nodes=0" in point["violations"][0] for point in found["points"][:2]] == [True, True]
    assert found["points"][2]["plan"]["is_on_front"]
    assert found["points"][2]["plan"]["cost"]["money"] == 2 * found["points"][2]["plan"]["cost"]["gpu_hours"]
    assert found["num_missing"] == 0
    assert page.read_text().count("step time against") == 2
    assert "input should be greater than 0" in page.read_text()


@pytest.mark.parametrize(
    ("arguments", "end"),
    [
        ((), (2, "whatif needs either --set")),
        (("--set", "cluster.nodes=2", "--sweep", "cluster.nodes=2"), (2, "whatif needs either --set")),
        (("--set", "cluster.nodes=2", "--time-limit", "9"), (2, "are options of a sweep; leave them out")),
        (("--set", "cluster.nodes=2", "-o", "new.json"), (2, "are options of a sweep; leave them out")),
        (("--sweep", "cluster.node=1:4"), (2, "did you mean cluster.nodes")),
        (("--sweep", "cluster.nodes=4:1"), (2, "write 1:4")),
        (("--sweep", "cluster.nodes=0"), (3, "")),
    ],
)
def test_a_sweep_that_cannot_be_planned_is_refused(
    call: Call, plan: Path, arguments: tuple[str, ...], end: tuple[int, str]
) -> None:
    outcome = call("whatif", plan, *arguments)
    assert outcome.code == end[0]
    assert end[1] in outcome.err


def test_a_sweep_that_is_out_of_time_says_how_many_points_it_lacks(call: Call, job: Path) -> None:
    outcome = call("whatif", job, "--sweep", "workload.batch_size=8:80:8", "--gap", 0, "--time-limit", 0.1)
    assert "of 10 points are not planned." in outcome.out


def test_a_stopped_sweep_goes_on_from_the_points_of_its_file(call: Call, job: Path, tmp_path: Path) -> None:
    written = tmp_path / "sweep.json"
    command = ("whatif", job, "--sweep", "workload.batch_size=8,16", "--gap", 0.5, "--json", "-o", written)
    whole = json.loads(call(*command).out)
    assert json.loads(written.read_text()) == whole
    first = {**whole["points"][0], "violations": ["kept as it was"]}
    written.write_text(json.dumps({**whole, "points": [first], "num_missing": 1}))
    resumed = json.loads(call(*command).out)
    assert resumed == {**whole, "points": [first, whole["points"][1]]}
    other = call(*command, "--price", 3)
    assert other.code == 2
    assert "the finished points are those of another job, profile, pin, gap, price or --per-steps" in other.err
    written.write_text(json.dumps({**whole, "digest": "0"}))  # as of a program with other sources
    assert "or of another version of this program; sweep with the same ones, or begin a new file." in call(*command).err
    written.write_text('{"points": 3}')
    assert "is not a sweep that `whatif --sweep` wrote; name a new file." in call(*command).err
