"""The search, from the facts of a job to a plan that verifies: the entry to open first.

frontiers  = for each stage: the legal choices, costed, without those that another beats
problem    = the frontiers on every pool, what waits for what, refits, memory
result     = the best answer to the problem, with a bound that holds for every plan
plan       = the answer, timed by the evaluator and checked by the verifier
no plan    = when nothing fits: what binds, and the smallest changes that would help
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from meshwright.cost_models.question import CostModel
from meshwright.planner.assemble import Origin, Pick, assemble
from meshwright.planner.edges import handovers
from meshwright.planner.frontier import frontiers
from meshwright.planner.job import Facts
from meshwright.planner.pins import parse_pins
from meshwright.planner.plan import Plan, Solver
from meshwright.planner.pose import Posed, pose
from meshwright.planner.refusal import NoPlan, refuse
from meshwright.planner.solver.model import NAME, VERSION
from meshwright.planner.solver.result import Answer, Limits, Result
from meshwright.planner.solver.solve import solve
from meshwright.planner.space import check_pins
from meshwright.planner.verify import verify

Progress = Callable[[float, float], None]
"""Called with the period and the bound, in seconds, of each better plan that the search finds."""

Remodel = Callable[[Facts], CostModel]
"""The cost model of other facts: needed to say which change of the facts would make a job feasible."""


def compile_plan(
    facts: Facts,
    model: CostModel,
    *,
    pins: Sequence[str] = (),
    digests: Mapping[str, str] | None = None,
    limits: Limits | None = None,
    remodel: Remodel | None = None,
    progress: Progress | None = None,
) -> Plan | NoPlan:
    """The fastest plan that fits, or why there is none. Raises BadInput for a pin that is not legal.

    `digests` name inputs other than the facts, such as the measured table behind the model.
    """
    limits = limits or Limits()
    fixed = parse_pins(pins)
    check_pins(facts, fixed)
    found = frontiers(facts, model, fixed, facts.cluster.device.usable_bytes)
    edges = handovers(facts, model)
    posed = pose(facts, model, found, edges)
    result = solve(posed.problem, limits, _in_seconds(progress, posed.tick_seconds))
    if result.answer is None:
        return refuse(facts, model, pins=fixed, status=result.status, limits=limits, remodel=remodel)
    origin = Origin(
        digests={**facts.digests(), **(digests or {})},
        pins=tuple(str(pin) for pin in fixed),
        solver=_record(result, posed.tick_seconds, limits),
    )
    picks, order = _picks(posed, result.answer), _order(posed, result.answer)
    plan = _with_gap(assemble(facts, model, handovers=edges, picks=picks, order=order, origin=origin))
    broken = verify(plan)
    assert not broken, broken
    return plan


def _picks(posed: Posed, answer: Answer) -> dict[str, Pick]:
    return {stage: Pick(*pairs[answer.picked[stage]]) for stage, pairs in posed.behind.items()}


def _order(posed: Posed, answer: Answer) -> tuple[str, ...]:
    """The tasks by their start; those that start together in an order that respects what waits for what."""
    position = {name: index for index, name in enumerate(posed.problem.order)}
    return tuple(sorted(position, key=lambda name: (answer.starts[name], position[name])))


def _record(result: Result, tick_seconds: float, limits: Limits) -> Solver:
    """How the answer was found; objective and gap follow when the plan has been timed."""
    return Solver(
        name=NAME,
        version=VERSION,
        seed=limits.seed,
        num_workers=limits.num_workers,
        max_deterministic_time=limits.max_deterministic_time,
        status="optimal" if result.status == "optimal" else "feasible",
        objective_seconds=0.0,
        bound_seconds=result.bound * tick_seconds,
        gap=0.0,
    )


def _with_gap(plan: Plan) -> Plan:
    period, bound = plan.period_seconds, min(plan.solver.bound_seconds, plan.period_seconds)
    update = {"objective_seconds": period, "bound_seconds": bound, "gap": (period - bound) / period}
    return plan.model_copy(update={"solver": plan.solver.model_copy(update=update)})


def _in_seconds(progress: Progress | None, tick_seconds: float) -> Callable[[int, int], None] | None:
    if progress is None:
        return None
    tell = progress
    return lambda objective, bound: tell(objective * tick_seconds, bound * tick_seconds)
