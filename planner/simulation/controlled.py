"""What the controllers make of a simulated run: the setting of each turn, and what stages that stream then take.

A simulation trains nothing, so its rewards are assumed: they rise and level off. A step is taken to last as long as the
plan would with its chunks. Both are functions of the step alone.
"""

from __future__ import annotations

import math
from dataclasses import replace

from meshwright.planner.plan.calls import Remodel, call_in
from meshwright.planner.plan.evaluate import evaluate
from meshwright.planner.plan.plan import Placement, Plan
from meshwright.planner.program.controllers import Controllers, Setting, StepObservation
from meshwright.profiles.stages import GENERATE

STEPS_TO_LEVEL = 50.0
"""Assumed rewards come closer to their level by a factor of e in so many steps."""
_RIPPLE = 0.02
"""Assumed rewards go up and down by this part of their rise, so that the slope changes its sign when they are level."""


def assumed_reward(step: int) -> float:
    """From 0 to 1."""
    return 1 - math.exp(-step / STEPS_TO_LEVEL) + _RIPPLE * math.sin(step)


class Controlled:
    """The settings of one simulated run. `plan` is returned as it is where controllers decide nothing about chunks."""

    def __init__(self, plan: Plan, remodel: Remodel) -> None:
        self._plan, self._remodel = plan, remodel
        self._steps_ahead, self._first = plan.placement(GENERATE).steps_ahead, -max(plan.ahead.values())
        self._controllers = Controllers(plan)
        self._known: list[Setting] = []
        self._plans: dict[int, Plan] = {}

    def of_step(self, step: int) -> Setting:
        """The setting of the turn that generates a step."""
        turn = step - self._steps_ahead
        while self._first + len(self._known) <= turn:
            self._known.append(self._next())
        return self._known[turn - self._first]

    def plan_in(self, setting: Setting) -> Plan:
        """The plan with chunks that are no longer than the setting's, timed again."""
        size = setting.chunk_tokens
        if size not in self._plans:
            placements = tuple(self._shortened(placement, size) for placement in self._plan.placements)
            changed = placements != self._plan.placements
            self._plans[size] = (
                evaluate(self._plan.model_copy(update={"placements": placements})) if changed else self._plan
            )
        return self._plans[size]

    def _next(self) -> Setting:
        turn = self._first + len(self._known)
        for step in self._controllers.needs(turn):
            seconds = self.plan_in(self._known[step - self._first]).period_seconds
            self._controllers.observe(StepObservation(step=step, seconds=seconds, begun=((1, assumed_reward(step)),)))
        return self._controllers.setting(turn)

    def _shortened(self, placement: Placement, size: int) -> Placement:
        """Seconds are the plan's, times what the model says that shorter chunks make of them."""
        if placement.schedule.chunk_tokens <= size:
            return placement
        model, shorter = self._remodel(self._plan.facts), replace(placement.schedule, chunk_tokens=size)
        now, then = call_in(self._plan, placement), replace(call_in(self._plan, placement), schedule=shorter)
        tail = model.tail_seconds(then) / model.tail_seconds(now) * placement.tail_seconds
        cost = placement.cost.scaled(model.seconds(then).total / model.seconds(now).total)
        return placement.model_copy(update={"schedule": shorter, "cost": cost, "tail_seconds": tail})
