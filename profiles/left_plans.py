"""The names of the plans that a run has left for others, and of the traces of its steps under them.

A plan that was left before step 12 is `plan-until-000012.json` in the run's directory, and its trace
`trace-until-000012.jsonl`, with segments as any. A run that comes to the same step again and leaves another plan there,
for it was killed before its first checkpoint under that one, calls it `plan-until-000012-2.json`, and so on.
"""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import NamedTuple

_PLAN = re.compile(r"plan-until-([0-9]{6,})(?:-([0-9]+))?\.json")


class LeftPlan(NamedTuple):
    """The files of a plan that was left, and of its trace."""

    plan: Path
    trace: Path


def left_plans(directory: Path) -> tuple[LeftPlan, ...]:
    """All of a run, by the step before which they were left, then in the order in which they were."""
    found = ((match, path) for path in directory.iterdir() if (match := _PLAN.fullmatch(path.name)))
    keys = sorted((int(match[1]), int(match[2] or 1)) for match, _ in found)
    return tuple(_named(directory, step, number) for step, number in keys)


def next_left_plan(directory: Path, step: int) -> LeftPlan:
    """The files for the next plan that is left before a step. Its plan is not there yet; files of its trace may be,
    from a start that was cut off while it moved them."""
    every = (_named(directory, step, number) for number in itertools.count(1))
    return next(one for one in every if not one.plan.exists())


def _named(directory: Path, step: int, number: int) -> LeftPlan:
    end = f"{step:06d}" if number == 1 else f"{step:06d}-{number}"
    return LeftPlan(directory / f"plan-until-{end}.json", directory / f"trace-until-{end}.jsonl")
