"""A first answer, found soon: the best of a few choices per stage. What is slower need not be looked at.

Plain choices give one; all choices of generation, which decides most of a turn, beside the plain ones of the others
give a better one.
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
"""A first plan has pools of about these parts of all ranks."""


@dataclass(frozen=True, kw_only=True)
class FirstPlans:
    """The best of a few choices of one scope; `begun` is told the position of each stage that is costed."""

    costs: StageCosts
    scope: Scope
    edges: tuple[Handover, ...]
    limits: Limits
    effort: Effort
    begun: Callable[[int], None]

    def best(self, *costed: Frontier) -> Searched | None:
        """That of all choices of some stages beside the plain ones of the others; None where it is not found at
        once."""
        known = {one.stage.name: one for one in costed}
        frontiers = [known.get(plain.stage.name, plain) for plain in self.plain]
        if not all(any(one.candidates.values()) for one in frontiers):
            return None
        formulation = formulate(self.costs.facts, self.costs.model, frontiers, self.edges, self.scope.ahead)
        from meshwright.planner.solver.solve import first_answer  # loaded by now, see `load_solver`

        result = first_answer(formulation.problem, self.limits, self.effort)
        if result is None:
            return None
        return Searched(scope=self.scope, edges=self.edges, formulation=formulation, result=result)

    @cached_property
    def plain(self) -> list[Frontier]:
        """The plain choices of every stage, on all ranks, a half or a quarter."""
        num_ranks = self.costs.facts.cluster.num_ranks

        def plain(stage: Stage) -> Frontier:
            kinds = self.costs.kinds[stage.name]
            parts = {nearest(num_ranks // part, [kind.num_ranks for kind in kinds]) for part in _PARTS}
            large = {kind: ANY_TIME for kind in kinds if kind.num_ranks in parts}
            return self.costs.frontier(stage, self.scope, large, is_plain=True)

        return self.costs.side_by_side(plain, self.costs.facts.graph.stages, prepare=load_solver, begun=self.begun)


def load_solver() -> None:
    """OR-Tools takes as long to load as a stage to cost, which a second process may do meanwhile."""
    import_module("meshwright.planner.solver.solve")
