"""What generates for one replica: our `Generator`, or another engine in a process beside the rank.

The generation stage, and with it the program, staleness, admission, rewards and checkpoints, sees this interface alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from meshwright.cost_models.period_ends import AllSequences, DeliveryRule
from meshwright.planner.simulation.flight import Flight
from meshwright.runtime.inference.chunk_streaming import Listener
from meshwright.runtime.inference.in_flight import SequencesInFlight
from meshwright.runtime.inference.slots import PartialResponse, Prompt, Response, ResumedSample
from meshwright.runtime.inference.tool_turns import ToolTurns


@dataclass(frozen=True, kw_only=True)
class Period:
    """A period of generation: the version of the weights, what ends it, and who receives its tokens.

    `min_rounds` makes periods steadier where sequences stay in flight: a period whose responses are complete early goes
    on sampling for later ones (`planner.simulation.pacing`).
    """

    version: int
    delivery: DeliveryRule
    min_rounds: int
    stream: Listener | None


class ReplicaEngine(ABC):
    """Samples responses with one replica's copy of a model; every rank of the replica calls the same methods.

    A token's log-probability is the policy's, softmax(logits / temperature), under the weights that sampled it.
    """

    _flight: Flight[Prompt, Any, Response]
    """The sequences in flight."""
    tool_turns: ToolTurns | None
    """The tool turns of multi-turn rollouts."""

    @property
    @abstractmethod
    def in_flight(self) -> tuple[Prompt, ...]:
        """The prompts that are admitted and not delivered."""

    @abstractmethod
    def snapshot(self) -> SequencesInFlight:
        """Return a snapshot of everything in flight; only valid between two periods."""

    @abstractmethod
    def restore(self, snapshot: SequencesInFlight) -> None:
        """Restore a snapshot of an engine that was made with the same arguments."""

    def generate(self, prompts: Sequence[Prompt], *, version: int = 0) -> tuple[Response, ...]:
        """Return the responses in order of step and row, all sampled by policy `version`, with nothing else in flight.

        Every rank of the replica must call with the same prompts.
        """
        assert not self.in_flight, "a period has left sequences in flight"
        return self.run_period(prompts, version=version, delivery=AllSequences())

    def run_period(
        self,
        admitted: Sequence[Prompt],
        *,
        version: int,
        delivery: DeliveryRule,
        min_rounds: int = 0,
        stream: Listener | None = None,
        resumed: Mapping[int, ResumedSample] | None = None,
    ) -> tuple[Response, ...]:
        """Sample with policy `version` until `delivery` is satisfied, and for at least `min_rounds` decode rounds
        while anything is left to sample. Return what was delivered, in order of step and row.

        The admitted prompts wait for slots, first come first served; what is not delivered stays in flight for the next
        period. `stream` receives tokens as they are sampled. `resumed` maps the sample id of an admitted prompt to what
        was sampled for it before the run was resumed. Every rank of the replica must call with the same arguments, and
        every replica that shares experts with this one must call too, with its own arguments.
        """
        waiting = self._resume_admitted(admitted, resumed or {})
        return self._run(waiting, Period(version=version, delivery=delivery, min_rounds=min_rounds, stream=stream))

    @abstractmethod
    def _run(self, waiting: list[Prompt], period: Period) -> tuple[Response, ...]:
        """Run a period that admits these prompts; return what it delivers."""

    @abstractmethod
    def _pause(self, partial: PartialResponse) -> None:
        """Keep a sequence that has started until there is a slot for it."""

    def _resume_admitted(self, admitted: Sequence[Prompt], sampled_before: Mapping[int, ResumedSample]) -> list[Prompt]:
        """Return the admitted prompts for which nothing has been sampled yet. The responses to the others are queued
        like pre-empted ones, or have ended already. `sampled_before` is by sample id."""
        for prompt in admitted:
            if prompt.sample_id in sampled_before:
                # A resumed sample starts in the period that is about to run.
                resumed = sampled_before[prompt.sample_id].with_prompt(prompt, self._flight.period + 1)
                if isinstance(resumed, Response):
                    self._flight.ended.append(resumed)
                else:
                    self._pause(resumed)
                    self._flight.add_started(resumed)
        return [prompt for prompt in admitted if prompt.sample_id not in sampled_before]
