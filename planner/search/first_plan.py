"""A first plan, found quickly among a few default choices per stage; its period prunes slower choices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module

from meshwright.planner.plan.edges import StageTransfer
from meshwright.planner.plan.steps_ahead import SearchCase
from meshwright.planner.search.costing import NO_TIME_LIMIT
from meshwright.planner.search.formulate import formulate
from meshwright.planner.search.frontier import Frontier
from meshwright.planner.search.searched import SolvedCase
from meshwright.planner.search.stage_costs import StageCosts
from meshwright.planner.solver.result import Effort, Limits
from meshwright.profiles.errors import nearest
from meshwright.profiles.stages import Stage

_PARTS = (1, 2, 4)
"""Divisors of the number of ranks; a first plan uses pools of about these sizes."""


def default_frontiers(costs: StageCosts, case: SearchCase, *, begun: Callable[[int], None]) -> list[Frontier]:
    """Cost the default choices of every stage on about all, half or a quarter of the ranks.

    `begun` is called with the position of each stage when its costing starts.
    """
    num_ranks = costs.facts.cluster.num_ranks

    def cost(stage: Stage) -> Frontier:
        kinds = costs.kinds[stage.name]
        sizes = {nearest(num_ranks // part, [kind.num_ranks for kind in kinds]) for part in _PARTS}
        large = {kind: NO_TIME_LIMIT for kind in kinds if kind.num_ranks in sizes}
        return costs.frontier(stage, case, large, is_plain=True)

    return costs.in_parallel(cost, costs.facts.graph.stages, prepare=load_solver, on_start=begun)


def first_plan(
    costs: StageCosts,
    case: SearchCase,
    frontiers: Sequence[Frontier],
    *,
    edges: tuple[StageTransfer, ...],
    limits: Limits,
    effort: Effort,
) -> SolvedCase | None:
    """Return the best plan of these choices, one frontier per stage; None if the solver does not find one at once."""
    if not all(any(frontier.candidates.values()) for frontier in frontiers):
        return None
    formulation = formulate(costs.facts, costs.model, frontiers, edges, case.ahead)
    from meshwright.planner.solver.solve import first_answer  # already loaded by `load_solver`

    result = first_answer(formulation.problem, limits, effort)
    if result is None:
        return None
    return SolvedCase(search_case=case, edges=edges, formulation=formulation, result=result)


def load_solver() -> None:
    """Import the solver.

    OR-Tools takes about as long to import as a stage to cost, and the second process works in the meantime.
    """
    import_module("meshwright.planner.solver.solve")
