"""Controllers in a simulated run: the setting of each period, and the durations of streaming stages under it.

A simulation does not train, so its rewards are assumed: they rise and level off. A step is assumed to take the period
of the plan with the step's chunk size. Both are functions of the step alone.
"""

from __future__ import annotations

import math
from dataclasses import replace

from meshwright.planner.plan.calls import CostModelBuilder, query_for_placement
from meshwright.planner.plan.evaluate import evaluate
from meshwright.planner.plan.plan import Placement, Plan
from meshwright.planner.program.controllers import Controllers, Setting, StepObservation
from meshwright.profiles.stages import GENERATE

STEPS_TO_LEVEL = 50.0
"""Time constant of the assumed rewards, in steps."""
_RIPPLE = 0.02
"""Amplitude of an oscillation of the assumed rewards, which makes their slope change sign once they are level."""


def assumed_reward(step: int) -> float:
    """Return the assumed mean reward of a step, about 0 to 1."""
    return 1 - math.exp(-step / STEPS_TO_LEVEL) + _RIPPLE * math.sin(step)


class SimulatedControllers:
    """The settings of one simulated run, and the plan under each setting."""

    def __init__(self, plan: Plan, remodel: CostModelBuilder) -> None:
        self._plan, self._remodel = plan, remodel
        self._steps_ahead, self._first = plan.placement(GENERATE).steps_ahead, -max(plan.ahead.values())
        self._controllers = Controllers(plan)
        self._settings: list[Setting] = []
        self._plans: dict[int, Plan] = {}

    def of_step(self, step: int) -> Setting:
        """Return the setting of the period that generates a step."""
        turn = step - self._steps_ahead
        while self._first + len(self._settings) <= turn:
            self._settings.append(self._next())
        return self._settings[turn - self._first]

    def plan_in(self, setting: Setting) -> Plan:
        """Return the plan with chunks no longer than the setting's, re-evaluated; the same plan if nothing changes."""
        size = setting.chunk_tokens
        if size not in self._plans:
            placements = tuple(self._with_chunks(placement, size) for placement in self._plan.placements)
            changed = placements != self._plan.placements
            self._plans[size] = (
                evaluate(self._plan.model_copy(update={"placements": placements})) if changed else self._plan
            )
        return self._plans[size]

    def _next(self) -> Setting:
        turn = self._first + len(self._settings)
        for step in self._controllers.missing_steps(turn):
            seconds = self.plan_in(self._settings[step - self._first]).period_seconds
            self._controllers.observe(
                StepObservation(step=step, seconds=seconds, scores_by_age=((1, assumed_reward(step)),))
            )
        return self._controllers.setting(turn)

    def _with_chunks(self, placement: Placement, size: int) -> Placement:
        """Return the placement with chunks of `size` tokens; its planned seconds are scaled by the cost model."""
        if placement.schedule.chunk_tokens <= size:
            return placement
        model, shorter = self._remodel(self._plan.facts), replace(placement.schedule, chunk_tokens=size)
        current_call, shorter_call = (
            query_for_placement(self._plan, placement),
            replace(query_for_placement(self._plan, placement), schedule=shorter),
        )
        tail = model.tail_seconds(shorter_call) / model.tail_seconds(current_call) * placement.tail_seconds
        cost = placement.cost.scaled(model.seconds(shorter_call).total / model.seconds(current_call).total)
        return placement.model_copy(update={"schedule": shorter, "cost": cost, "tail_seconds": tail})
