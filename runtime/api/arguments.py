"""The arguments that calls share: paths, tables, limits and numbers, and the checks of them; and the check that what a
run needs is installed.
"""

from __future__ import annotations

import math
import os
from importlib.util import find_spec
from typing import TypeAlias

from meshwright.planner.plan.cost_queries import CostModelBuilder, cost_model_of
from meshwright.planner.solver.result import Limits
from meshwright.profiles.errors import BadInput
from meshwright.profiles.table import Table

Pathname: TypeAlias = str | os.PathLike[str]

_MAX_GAP = 0.99


def cost_model_builder(table: Table | None) -> CostModelBuilder:
    """The function that gives the cost model of facts, with a measured table where there is one."""
    return lambda facts: cost_model_of(facts, table)


def require_number(name: str, value: float | None, *, minimum: float, maximum: float = math.inf) -> None:
    """Raises BadInput for a number out of its range and for NaN; None, an argument that was not given, passes."""
    if value is not None and not (minimum <= value <= maximum and math.isfinite(value)):
        rule = f"{minimum:g} or more" if maximum == math.inf else f"{minimum:g} to {maximum:g}"
        raise BadInput(f"{name}={value} is out of range; give {rule}.")


def limits_of(limits: Limits | None) -> Limits:
    """The limits of a search, by default those of `Limits()`. Raises BadInput for a gap out of range."""
    checked = limits or Limits()
    require_number("gap", checked.gap, minimum=0, maximum=_MAX_GAP)
    return checked


_RUN_PACKAGES = ("torch", "megatron", "transformers", "tokenizers", "safetensors", "einops")
"""Packages of the extra `run`, by what is imported of them."""


def require_run_packages(what: str) -> None:
    """Raises BadInput if the packages that execute a plan are not installed; `what` needs them."""
    if missing := [name for name in _RUN_PACKAGES if find_spec(name) is None]:
        raise BadInput(
            f"{what} needs packages that are not installed here ({', '.join(missing)}); install them with: pip install "
            "'meshwright[run]'."
        )
