"""Plans for other trainers, from Python."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from meshwright import api
from tests.planner.jobs import small_facts

LIMITS = api.Limits(gap=0.3)


@pytest.fixture(scope="module")
def facts() -> api.Facts:
    return small_facts(memory_bytes=2**34)


@pytest.fixture(scope="module")
def plan(facts: api.Facts) -> api.Plan:
    found = api.plan_for("openrlhf", facts, limits=LIMITS)
    assert isinstance(found, api.Plan)
    return found


def test_a_plan_for_a_trainer_is_exported_as_it_is(plan: api.Plan, tmp_path: Path) -> None:
    found = api.export_plan(plan, tmp_path / "out", to="openrlhf")
    assert isinstance(found, api.Exported)
    assert found.inexpressible == ()
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"run.sh", "plan.json", "export.json"}
    assert api.read_plan(tmp_path / "out" / "plan.json") == plan
    assert json.loads((tmp_path / "out" / "export.json").read_text())["step_seconds"] == plan.period_seconds
    assert (tmp_path / "out" / "run.sh").stat().st_mode & 0o111


def test_what_cannot_be_exported_is_refused_in_a_sentence(plan: api.Plan, facts: api.Facts, tmp_path: Path) -> None:
    with pytest.raises(api.BadInput, match="there is no trainer 'verll'; did you mean 'verl'"):
        api.plan_for("verll", facts)
    with pytest.raises(api.BadInput, match="overwrites nothing"):
        api.export_plan(plan, tmp_path, to="verl")
    measured = plan.model_copy(update={"digests": {**plan.digests, "profile": "0" * 64}})
    with pytest.raises(api.BadInput, match="made with a measured table; give it as --profile"):
        api.export_plan(measured, tmp_path / "out", to="verl")


def test_where_no_plan_can_be_said_the_answer_says_so() -> None:
    found = api.plan_for("slime", small_facts(memory_bytes=2**10))
    assert isinstance(found, api.NoPlan)
    assert "no plan that slime" in found.limits[0].sentence
