"""A first answer, found soon: the best of a few plain choices per stage. What is slower need not be looked at."""

from __future__ import annotations

import math
from collections.abc import Callable
from importlib import import_module

from meshwright.planner.plan.edges import Handover
from meshwright.planner.plan.steps_ahead import Scope
from meshwright.planner.search.formulate import formulate
from meshwright.planner.search.frontier import Frontier
from meshwright.planner.search.searched import Searched
from meshwright.planner.search.stage_costs import StageCosts
from meshwright.planner.solver.result import Effort, Limits
from meshwright.profiles.errors import nearest
from meshwright.profiles.stages import Stage

_PARTS = (1, 2, 4)
"""A first plan has pools of about these parts of all ranks."""


def first_plan(
    costs: StageCosts,
    *,
    scope: Scope,
    edges: tuple[Handover, ...],
    limits: Limits,
    effort: Effort,
    begun: Callable[[int], None],
) -> Searched | None:
    """The best of a few plain choices, on all ranks, a half or a quarter; None where it is not found at once.

    `begun` is told the position of each stage that is costed.
    """
    num_ranks = costs.facts.cluster.num_ranks

    def plain(stage: Stage) -> Frontier:
        kinds = costs.kinds[stage.name]
        parts = {nearest(num_ranks // part, [kind.num_ranks for kind in kinds]) for part in _PARTS}
        large = {kind: math.inf for kind in kinds if kind.num_ranks in parts}
        return costs.frontier(stage, scope, large, is_plain=True)

    frontiers = costs.side_by_side(plain, costs.facts.graph.stages, prepare=load_solver, begun=begun)
    if not all(any(one.candidates.values()) for one in frontiers):
        return None
    formulation = formulate(costs.facts, costs.model, frontiers, edges, scope.ahead)
    from meshwright.planner.solver.solve import first_answer  # loaded by now, see `load_solver`

    result = first_answer(formulation.problem, limits, effort)
    return None if result is None else Searched(scope=scope, edges=edges, formulation=formulation, result=result)


def load_solver() -> None:
    """OR-Tools takes as long to load as a stage to cost, which a second process may do meanwhile."""
    import_module("meshwright.planner.solver.solve")
