"""What calls are given: paths, tables, plans and numbers, and what is wrong with them."""

from __future__ import annotations

import math
import os
from typing import TypeAlias

from meshwright.planner.plan.calls import Remodel, model_of
from meshwright.planner.solver.result import Limits
from meshwright.profiles.errors import BadInput
from meshwright.profiles.table import Table

Pathname: TypeAlias = str | os.PathLike[str]

_MOST_GAP = 0.99


def remodel(table: Table | None) -> Remodel:
    """The cost model of any facts, with a table where there is one."""
    return lambda facts: model_of(facts, table)


def require_number(name: str, value: float | None, *, least: float, most: float = math.inf) -> None:
    """Raises BadInput for a number out of its range, and for one that is none; None was not given."""
    if value is not None and not (least <= value <= most and math.isfinite(value)):
        rule = f"{least:g} or more" if most == math.inf else f"{least:g} to {most:g}"
        raise BadInput(f"{name}={value} is out of range; give {rule}.")


def limits_of(limits: Limits | None) -> Limits:
    """What a search may use, by default until the plan is near the best. Raises BadInput for a gap that is none."""
    found = limits or Limits()
    require_number("gap", found.gap, least=0, most=_MOST_GAP)
    return found
