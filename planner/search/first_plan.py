"""Finds a first plan quickly among a few choices per stage; its period prunes slower choices from the search.

The first attempt uses plain choices only. A second one uses all choices of generation, which takes most of a period,
with the plain choices of the other stages.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module

from meshwright.planner.plan.edges import Handover
from meshwright.planner.plan.steps_ahead import Scope
from meshwright.planner.search.costing import ANY_TIME
from meshwright.planner.search.formulate import formulate
from meshwright.planner.search.frontier import Frontier
from meshwright.planner.search.searched import Searched
from meshwright.planner.search.stage_costs import StageCosts
from meshwright.planner.solver.result import Effort, Limits
from meshwright.profiles.errors import nearest
from meshwright.profiles.stages import Stage

_PARTS = (1, 2, 4)
"""Divisors of the number of ranks; a first plan uses pools of about these sizes."""


@dataclass(frozen=True, kw_only=True)
class FirstPlans:
    """Searches first plans of one search case; `begun` is called with the position of each stage that is costed."""

    costs: StageCosts
    scope: Scope
    edges: tuple[Handover, ...]
    limits: Limits
    effort: Effort
    begun: Callable[[int], None]

    def best(self, *costed: Frontier) -> Searched | None:
        """Return the best plan from all choices of the `costed` stages and plain choices of the others, or None.

        None also means that no plan is found at once.
        """
        by_stage = {frontier.stage.name: frontier for frontier in costed}
        frontiers = [by_stage.get(plain.stage.name, plain) for plain in self.plain]
        if not all(any(frontier.candidates.values()) for frontier in frontiers):
            return None
        formulation = formulate(self.costs.facts, self.costs.model, frontiers, self.edges, self.scope.ahead)
        from meshwright.planner.solver.solve import first_answer  # already loaded by `load_solver`

        result = first_answer(formulation.problem, self.limits, self.effort)
        if result is None:
            return None
        return Searched(scope=self.scope, edges=self.edges, formulation=formulation, result=result)

    @cached_property
    def plain(self) -> list[Frontier]:
        """The plain choices of every stage, on about all, half and a quarter of the ranks."""
        num_ranks = self.costs.facts.cluster.num_ranks

        def plain_frontier(stage: Stage) -> Frontier:
            kinds = self.costs.kinds[stage.name]
            sizes = {nearest(num_ranks // part, [kind.num_ranks for kind in kinds]) for part in _PARTS}
            large = {kind: ANY_TIME for kind in kinds if kind.num_ranks in sizes}
            return self.costs.frontier(stage, self.scope, large, is_plain=True)

        return self.costs.side_by_side(
            plain_frontier, self.costs.facts.graph.stages, prepare=load_solver, begun=self.begun
        )


def load_solver() -> None:
    """Import the solver.

    OR-Tools takes about as long to import as a stage to cost, and the second process works in the meantime.
    """
    import_module("meshwright.planner.solver.solve")
