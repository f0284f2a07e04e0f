"""The contents of a report, and the names of its runs."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.planner.analysis.plan_summary import RunCost
from meshwright.planner.analysis.predicted_ranges import PredictedRanges
from meshwright.planner.analysis.whatif import WhatIf
from meshwright.planner.plan.plan import Plan
from meshwright.planner.report.training_curves import TrainingCurves
from meshwright.planner.simulation.simulate import Simulation
from meshwright.profiles.trace import Run


@dataclass(frozen=True, kw_only=True)
class Contents:
    """The contents of a report on a plan.

    `simulation` includes its spans; `runs` are measured or rehearsed runs of the plan, each with its own name.
    `training_curves` has the curves of runs. `sizes` has plans of the job on other numbers of ranks; None if not
    requested. `cost` has the GPU-hours and money of a number of steps, and `ranges` the percentiles of the predicted
    numbers.
    """

    plan: Plan
    simulation: Simulation
    runs: tuple[Run, ...] = ()
    training_curves: tuple[TrainingCurves, ...] = ()
    sizes: WhatIf | None = None
    cost: RunCost | None = None
    ranges: PredictedRanges | None = None


_CLOCKS = {"simulated": "SIMULATED", "rehearsed": "REHEARSAL", "measured": "MEASURED"}


def clock_label(run: Run) -> str:
    """The clock of a run as the report labels it: SIMULATED, REHEARSAL or MEASURED."""
    run_clock = run.spans[0].clock
    return _CLOCKS.get(run_clock, run_clock.upper())


def run_label(run: Run) -> str:
    """The clock and the name of a run."""
    return f"{clock_label(run)} {run.name}".strip()
