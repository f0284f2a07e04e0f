"""Simulation of a plan in virtual time, and its rehearsal on real processes that wait instead of computing."""

from __future__ import annotations

from meshwright.planner.plan.plan import Plan
from meshwright.planner.plan.verify import require_valid
from meshwright.planner.program.instruction_durations import Durations, Planned
from meshwright.planner.simulation.sampled import Sampled
from meshwright.planner.simulation.simulate import Simulation
from meshwright.planner.simulation.simulate import simulate as simulation
from meshwright.profiles.table import Table
from meshwright.runtime.api.given import cost_model_builder, require_number
from meshwright.runtime.records.rehearsal import Rehearsal

_MAX_SEED = 2**32 - 1
_MIN_SPEED = 1e-6


def simulate(
    plan: Plan,
    table: Table | None = None,
    *,
    steps: int = 20,
    seed: int = 0,
    sampled: bool = True,
    traced: bool = False,
) -> Simulation:
    """Run the plan's program in virtual time: how long steps take, and what every rank waits for.

    Response lengths are sampled for each step; with `sampled=False` every step takes the time that the plan predicts.
    With `traced=True` the simulation keeps its spans, which `report` and `timeline` draw.
    Raises BadInput for a plan that breaks a rule.

    >>> simulation = api.simulate(plan, steps=2, sampled=False)
    >>> [f"{seconds:.1f} s" for seconds in simulation.steps.seconds]
    ['280.0 s', '280.0 s']
    """
    require_valid(plan)
    require_number("steps", steps, minimum=1)
    return simulation(plan, _durations(plan, table, seed=seed, sampled=sampled), steps=steps, traced=traced)


def rehearse(
    plan: Plan,
    table: Table | None = None,
    *,
    steps: int = 3,
    speed: float | None = None,
    seed: int = 0,
    ranks_per_process: int | None = None,
    sampled: bool = False,
) -> Rehearsal:
    """Run the plan with real processes and messages that wait where a device would compute.

    A wait is the predicted seconds times `speed`, whose default is large enough for waits to dominate; reported times
    are in the plan's seconds. The processes import the program's main module, which therefore needs
    `if __name__ == "__main__":`.
    Raises BadInput for a plan that breaks a rule or has too many ranks for one machine, and RunFailed when one fails.
    """
    require_valid(plan)
    require_number("steps", steps, minimum=1)
    require_number("speed", speed, minimum=_MIN_SPEED, maximum=1 / _MIN_SPEED)
    require_number("ranks_per_process", ranks_per_process, minimum=1)
    from meshwright.runtime.execution.rehearse import rehearse as rehearsal

    durations = _durations(plan, table, seed=seed, sampled=sampled)
    return rehearsal(plan, durations, steps=steps, speed=speed, seed=seed, ranks_per_process=ranks_per_process)


def _durations(plan: Plan, table: Table | None, *, seed: int, sampled: bool) -> Durations:
    require_number("seed", seed, minimum=0, maximum=_MAX_SEED)
    return Sampled(plan, cost_model_builder(table), seed=seed) if sampled else Planned(plan)
