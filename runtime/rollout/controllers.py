"""The controllers of the chunk size and the overcommit in a run: rank 0 sends its observations to the ranks that
generate, which all make the same decisions."""

from __future__ import annotations

from collections.abc import Iterable

from meshwright.planner.plan.plan import Plan
from meshwright.planner.program.controllers import Controllers, ControllerSetting, StepObservation
from meshwright.profiles.stages import GENERATE
from meshwright.runtime.messages.transport import Transport, pack, unpack

_CHANNEL = 1
"""Channel of these messages, separate from the reports to rank 0."""


class RunControllers:
    """The controllers on one rank; `transport` carries nothing else from rank 0."""

    def __init__(
        self, plan: Plan, transport: Transport, periods: range, observations: Iterable[StepObservation] = ()
    ) -> None:
        """`observations` are those of all steps before the first period, if the run is resumed."""
        self._controllers, self._transport, self._periods = Controllers(plan), transport, periods
        self._generating_ranks = plan.pool_of(GENERATE).ranks
        for observation in observations:
            self._controllers.observe(observation)

    @property
    def has_active_controllers(self) -> bool:
        """True if the job asks for controllers and the plan leaves them a choice."""
        return self._controllers.is_active

    def send_observation(self, observation: StepObservation) -> None:
        """Send an observation from rank 0 to the ranks that generate, if a later period depends on it. Does not
        block."""
        if not self.has_active_controllers or observation.step + self._controllers.delay not in self._periods:
            return
        message = pack(observation)
        for rank in self._generating_ranks:
            self._transport.send(message, rank, _CHANNEL)

    def setting(self, period: int) -> ControllerSetting | None:
        """Return the setting of a period, None if nothing is decided about it. Must be called for every period on a
        rank that generates."""
        if not self.has_active_controllers or period not in self._periods:
            return None
        for _ in self._controllers.missing_steps(period):
            self._controllers.observe(unpack(self._transport.receive(0, _CHANNEL)))
        return self._controllers.setting(period)
