"""The controllers in a run: rank 0 tells the ranks that generate what it observed, and each of them decides alike."""

from __future__ import annotations

from collections.abc import Iterable

from meshwright.planner.plan.plan import Plan
from meshwright.planner.program.controllers import Controllers, Setting, StepObservation
from meshwright.profiles.stages import GENERATE
from meshwright.runtime.messages.transport import Transport, packed, unpacked

_CHANNEL = 1
"""Beside the reports to rank 0."""


class Control:
    """One rank's end; `transport` carries nothing else from rank 0."""

    def __init__(self, plan: Plan, transport: Transport, turns: range, known: Iterable[StepObservation] = ()) -> None:
        """`known` are all steps before the first turn, of a run that is resumed."""
        self._controllers, self._transport, self._turns = Controllers(plan), transport, turns
        self._listeners = plan.pool_of(GENERATE).ranks
        for observation in known:
            self._controllers.observe(observation)

    @property
    def decides(self) -> bool:
        """Whether the job asks for it, and the plan leaves a choice."""
        return self._controllers.decides

    def tell(self, observation: StepObservation) -> None:
        """On rank 0: sends what a turn to come follows from. Does not wait."""
        if not self.decides or observation.step + self._controllers.delay not in self._turns:
            return
        message = packed(observation)
        for rank in self._listeners:
            self._transport.send(message, rank, _CHANNEL)

    def setting(self, turn: int) -> Setting | None:
        """On a rank that generates, for every turn: what it does, None where nothing is decided about it."""
        if not self.decides or turn not in self._turns:
            return None
        for _ in self._controllers.needs(turn):
            self._controllers.observe(unpacked(self._transport.receive(0, _CHANNEL)))
        return self._controllers.setting(turn)
