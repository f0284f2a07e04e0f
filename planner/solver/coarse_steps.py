"""Divides the makespan into coarse steps, because CP-SAT otherwise improves an answer one tick at a time."""

from __future__ import annotations

from typing import NamedTuple

from ortools.sat.python import cp_model

from meshwright.planner.solver.place_model import Solved


class Steps(NamedTuple):
    """The makespans from `bound` to `target`, in steps of `step` ticks."""

    bound: int
    target: int
    step: int

    @classmethod
    def between(cls, bound: int, target: int, number: int) -> Steps:
        """Divide the range into about `number` steps."""
        return cls(bound, target, max(1, -(-(target - bound) // number)))

    def minimise(self, model: cp_model.CpModel, makespan: cp_model.IntVar) -> None:
        """Add the objective: the fewest steps above the bound that reach the makespan, which is at most the target."""
        steps = model.new_int_var(0, -(-(self.target - self.bound) // self.step), "steps")
        model.add(makespan <= self.bound + self.step * steps)
        model.add(makespan <= self.target)
        model.minimize(steps)

    def proven(self, solved: Solved) -> int:
        """Return the lower bound on the makespan that a search has proven."""
        if not solved.is_found and solved.is_proven:
            return self.target + 1
        steps = round(solved.solver.best_objective_bound)
        return self.bound + self.step * (steps - 1) + 1 if steps > 0 else self.bound
