"""Plans that a run has left have a name each, and are found in the order in which they were left."""

from __future__ import annotations

from pathlib import Path

from meshwright.profiles.run_logs import former_plans, next_former_plan


def test_each_plan_has_a_name_of_its_own_beside_that_of_its_trace(tmp_path: Path) -> None:
    made = []
    for step in (12, 4, *[12] * 10, 1_000_000):
        left = next_former_plan(tmp_path, step)
        assert left not in made
        left.plan.touch()
        left.trace.touch()
        made.append(left)
    assert former_plans(tmp_path) == (made[1], made[0], *made[2:])
    assert made[0].plan.name == "plan-until-000012.json"
    assert (made[2].plan.name, made[2].trace.name) == ("plan-until-000012-2.json", "trace-until-000012-2.jsonl")


def test_other_files_are_no_plans_that_were_left(tmp_path: Path) -> None:
    for name in ("plan.json", "plan-until-000012.json.partial", "plan-until-x.json", "trace-until-000012.jsonl"):
        (tmp_path / name).touch()
    assert former_plans(tmp_path) == ()
