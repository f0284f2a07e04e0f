"""The compare command: the same answer as a table and as data."""

from __future__ import annotations

import json
from pathlib import Path

from tests.runtime.command import Call


def test_a_plan_beside_itself_differs_in_nothing(call: Call, plan: Path) -> None:
    found = json.loads(call("compare", plan, plan, "--json").out)
    assert found["difference"]["step_seconds"] == 0
    assert found["facts"] == []
    told = call("compare", plan, plan)
    assert told.code == 0
    assert "actor_generate" in told.out


def test_a_plan_that_is_not_there_is_named(call: Call, plan: Path) -> None:
    outcome = call("compare", plan, "nowhere.json")
    assert outcome.code == 2
    assert "plan nowhere.json does not exist" in outcome.err
