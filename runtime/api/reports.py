"""Reports, plots and timelines: a plan with its simulation and runs, a what-if, several traces side by side."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

from meshwright.planner.analysis.cluster_sizing import Fit
from meshwright.planner.analysis.plan_summary import DEFAULT_NUM_STEPS, run_cost
from meshwright.planner.analysis.predicted_ranges import predicted_ranges
from meshwright.planner.analysis.sweep import Sweep
from meshwright.planner.analysis.whatif import WhatIf
from meshwright.planner.plan.plan import Plan
from meshwright.planner.plan.verify import require_valid
from meshwright.planner.report.contents import Contents
from meshwright.planner.report.report import report as drawn
from meshwright.planner.report.training_curves import TrainingCurves
from meshwright.planner.report.whatif_pages import fit_page, planned_sweep, sweep
from meshwright.planner.simulation.simulate import Simulation
from meshwright.profiles.errors import BadInput
from meshwright.profiles.table import Table
from meshwright.profiles.trace import Run, chrome_trace
from meshwright.runtime.api.analyses import step_interval
from meshwright.runtime.api.arguments import require_number
from meshwright.runtime.records.results import Rehearsal

SpanSource: TypeAlias = Run | Rehearsal | Simulation
"""A run, a rehearsal or a simulation of a plan, whose spans can be drawn."""


def report(
    plan: Plan,
    simulation: Simulation,
    *,
    runs: Iterable[Run | Rehearsal] = (),
    training_curves: Iterable[TrainingCurves] = (),
    sizes: WhatIf | None = None,
    table: Table | None = None,
    price: float | None = None,
    num_steps: int = DEFAULT_NUM_STEPS,
) -> str:
    """A plan, its simulation and its runs as the text of one HTML file that needs no network.

    `training_curves` are the runs' curves and samples from `read_training_curves`, and `sizes` are what-if answers for
    other numbers of ranks. The page has the GPU-hours of `num_steps` steps and, with the `price` of a GPU-hour, their
    money. The ranges of its predictions are by the table that the plan was made with.
    Raises BadInput for a plan that breaks a rule and for a simulation that was not traced.

    >>> api.report(plan, api.simulate(plan, steps=1, traced=True)).splitlines()[0]
    '<!doctype html>'
    """
    require_valid(plan)
    require_number("price", price, minimum=0)
    require_number("num_steps", num_steps, minimum=1)
    _run(plan, simulation)
    drawn_runs = tuple(_run(plan, run) for run in runs)
    cost = run_cost(plan, price, num_steps)
    return drawn(
        Contents(
            plan=plan,
            simulation=simulation,
            runs=drawn_runs,
            training_curves=tuple(training_curves),
            sizes=sizes,
            cost=cost,
            ranges=predicted_ranges(plan, step_interval(plan, table), cost),
        )
    )


def plot(answers: WhatIf | Sweep) -> str:
    """Step time and tokens/s against the first field that has several values, as the text of an HTML file.

    A sweep has step time against GPUs and against cost instead, and a table of its points.
    Raises BadInput where every field of a what-if has one value.

    >>> batches = [{"workload.batch_size": 512}, {"workload.batch_size": 1024}]
    >>> api.plot(api.whatif(plan, batches)).count("<circle")
    4
    """
    return planned_sweep(answers) if isinstance(answers, Sweep) else sweep(answers)


def fit_plot(fit: Fit) -> str:
    """Step time against the number of devices, as the text of an HTML file.

    Raises BadInput where no plan fits on any number.
    """
    if fit.answers is None or fit.min_ranks is None:
        raise BadInput(f"no plan fits on up to {fit.max_ranks} devices, so there is nothing to draw; ask for more.")
    return fit_page(fit.answers, fit.min_ranks)


def timeline(plan: Plan, *sources: SpanSource) -> str:
    """Simulations, rehearsals and runs of a plan side by side, as JSON that Perfetto opens.

    Raises BadInput for a simulation that was not traced.

    >>> api.timeline(plan, api.simulate(plan, steps=1, traced=True))[:16]
    '{"traceEvents": '
    """
    return chrome_trace([_run(plan, source) for source in sources])


def _run(plan: Plan, source: SpanSource) -> Run:
    if isinstance(source, Run):
        return source
    if not source.spans:
        raise BadInput("the simulation has no spans to draw; simulate with traced=True.")
    return Run(spans=source.spans, pools={pool.name: pool.ranks for pool in plan.pools})
