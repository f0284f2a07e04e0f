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
