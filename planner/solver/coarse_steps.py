"""The makespan in coarse steps: CP-SAT otherwise improves an answer one tick at a time."""

from __future__ import annotations

from typing import NamedTuple

from ortools.sat.python import cp_model

from meshwright.planner.solver.place_model import Solved


class Steps(NamedTuple):
    """Makespans from `bound` to `target`, in steps of `step` ticks."""

    bound: int
    target: int
    step: int

    @classmethod
    def between(cls, bound: int, target: int, number: int) -> Steps:
        """About this many steps."""
        return cls(bound, target, max(1, -(-(target - bound) // number)))

    def minimise(self, model: cp_model.CpModel, makespan: cp_model.IntVar) -> None:
        """The steps above the bound within which the makespan lies; it is at most the target."""
        steps = model.new_int_var(0, -(-(self.target - self.bound) // self.step), "steps")
        model.add(makespan <= self.bound + self.step * steps)
        model.add(makespan <= self.target)
        model.minimize(steps)

    def proven(self, solved: Solved) -> int:
        """The bound on the makespan that a search has proven."""
        if not solved.is_found and solved.is_proven:
            return self.target + 1
        steps = round(solved.solver.best_objective_bound)
        return self.bound + self.step * (steps - 1) + 1 if steps > 0 else self.bound
