"""What a report is made of, and how it names the runs in it."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.planner.analysis.whatif import WhatIf
from meshwright.planner.plan.plan import Plan
from meshwright.planner.report.learned_chart import Learned
from meshwright.planner.simulation.simulate import Simulation
from meshwright.profiles.trace import Run


@dataclass(frozen=True, kw_only=True)
class Contents:
    """`simulation` has its spans; `runs` are measured or rehearsed runs of this plan, each with a name of its own.

    `learned` is what runs learned. `sizes` are plans of the same job on other numbers of ranks, None when they were not
    asked for.
    """

    plan: Plan
    simulation: Simulation
    runs: tuple[Run, ...] = ()
    learned: tuple[Learned, ...] = ()
    sizes: WhatIf | None = None


_CLOCKS = {"simulated": "SIMULATED", "rehearsed": "REHEARSAL", "measured": "MEASURED"}


def clock(run: Run) -> str:
    """Whose time the run's is, as the report says it everywhere."""
    told = run.spans[0].clock
    return _CLOCKS.get(told, told.upper())


def named(run: Run) -> str:
    """The clock and the name of the run."""
    return f"{clock(run)} {run.name}".strip()
