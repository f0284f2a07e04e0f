"""The results of a rehearsal."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.planner.simulation.simulate import StepTimes
from meshwright.profiles.trace import Span


@dataclass(frozen=True, kw_only=True)
class Rehearsal:
    """The results of a rehearsal. `steps` and `spans` are in seconds of the plan: wall time divided by `speed`.

    `overhead_seconds` is the wall time that the executor itself takes per instruction (median over ranks and steps).
    `processor_seconds` are those of all processes per step; they take at least `processor_seconds / num_processors` of
    wall time, however long the waits are.
    """

    clock: str
    durations: str
    speed: float
    num_processes: int
    ranks_per_process: int
    steps: StepTimes
    simulated: StepTimes
    overhead_seconds: float
    num_instructions: int
    message_bytes: float  # per step, over all ranks
    processor_seconds: float
    num_processors: int
    error: float  # (rehearsed - simulated) / simulated, of the mean step
    excess_seconds: float  # wall time per step beyond the waits: messages, scheduling, other work of this machine
    spans: tuple[Span, ...] = ()

    @property
    def processor_share(self) -> float:
        """The fraction of processor time that was used, 0 to 1; near 1 the processors were the limit."""
        return self.processor_seconds / (self.num_processors * self.steps.mean * self.speed)
