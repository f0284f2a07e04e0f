"""The rehearse command: it says what it is, and shows the simulated clock beside."""

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


@pytest.mark.check_all
def test_a_rehearsal_says_so_and_shows_the_simulated_clock_beside(call: Call, plan: Path, tmp_path: Path) -> None:
    timeline = tmp_path / "timeline.json"
    outcome = call("rehearse", plan, "--steps", "1", "--speed", "0.5", "--trace", timeline)
    assert outcome.code == 0
    assert outcome.out.startswith("REHEARSAL of 1 steps with planned durations at speed 0.5: 2 processes")
    events = json.loads(timeline.read_text())["traceEvents"]
    assert [e["args"]["name"] for e in events if e["name"] == "process_name"] == ["SIMULATED", "REHEARSED"]
