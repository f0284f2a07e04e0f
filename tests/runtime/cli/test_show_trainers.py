"""An export on a terminal: the step, the price of what cannot be said, and where it lies."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from meshwright.planner.trainers.exporter import export
from meshwright.planner.trainers.registry import TRAINERS
from meshwright.runtime.cli import view_trainers
from tests.planner.drawn import model_of
from tests.planner.trainers.plans import best


def test_what_cannot_be_said_is_told_with_its_price_and_the_rest_is_counted(capsys: pytest.CaptureFixture[str]) -> None:
    found = export(TRAINERS["verl"], best("verl").plan, model_of)
    assert found is not None
    view_trainers.print_export(found, Path("out"))
    text = capsys.readouterr().out
    assert "has no setting for" not in text
    assert "out/run.sh\nout/plan.json\nout/export.json\n" in text
    clauses = tuple(f"clause {number}" for number in range(20))
    step = found.plan.period_seconds
    view_trainers.print_export(replace(found, inexpressible=clauses, lost_seconds=step / 2), Path("out"))
    text = capsys.readouterr().out
    assert "has no setting for 20 of the plan's choices" in text
    assert "+100.0%" in text
    assert "- and 8 more; export.json has them all" in text
