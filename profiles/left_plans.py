"""File names of the former plans of a run that was re-planned, and of the traces recorded under them.

A plan that was replaced before step 12 is `plan-until-000012.json` in the run's directory, and its trace is
`trace-until-000012.jsonl`, with segments like any trace. If a run replaces a plan at the same step again, because it
was killed before its first checkpoint under the new plan, the name is `plan-until-000012-2.json`, and so on.
"""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import NamedTuple

_PLAN = re.compile(r"plan-until-([0-9]{6,})(?:-([0-9]+))?\.json")


class FormerPlan(NamedTuple):
    """The files of a former plan and of its trace."""

    plan: Path
    trace: Path


def former_plans(directory: Path) -> tuple[FormerPlan, ...]:
    """Return all former plans of a run, in the order in which they were replaced."""
    matches = ((match, path) for path in directory.iterdir() if (match := _PLAN.fullmatch(path.name)))
    keys = sorted((int(match[1]), int(match[2] or 1)) for match, _ in matches)
    return tuple(_files_of(directory, step, number) for step, number in keys)


def next_former_plan(directory: Path, step: int) -> FormerPlan:
    """Return the files for the plan that is replaced before this step.

    The plan file does not exist yet; trace files may, if an earlier start was interrupted while moving them.
    """
    candidates = (_files_of(directory, step, number) for number in itertools.count(1))
    return next(one for one in candidates if not one.plan.exists())


def _files_of(directory: Path, step: int, number: int) -> FormerPlan:
    end = f"{step:06d}" if number == 1 else f"{step:06d}-{number}"
    return FormerPlan(directory / f"plan-until-{end}.json", directory / f"trace-until-{end}.jsonl")
