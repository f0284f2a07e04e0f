"""Turns, tool tokens and tool latencies of multi-turn rollouts, as observed in a run's trace."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from meshwright.profiles.environment.latency import LatencySpec
from meshwright.profiles.environment.turns import ToolTurns
from meshwright.profiles.trace import CALL_SECONDS, NUM_CALLS, NUM_TOOL_TOKENS, Span


class TurnsObservation(NamedTuple):
    """Means per rollout: tool calls, tool tokens, and the sum of tool latencies in seconds."""

    num_calls: float
    tool_tokens: float
    call_seconds: float

    @property
    def num_turns(self) -> float:
        """Mean number of turns: one more than calls, because a turn follows each call."""
        return 1 + self.num_calls

    def scale(self, turns: ToolTurns) -> ToolTurns:
        """Return the turns scaled to the observed means; result and latency stay if the tool was never called."""
        update: dict[str, object] = {"number": turns.number.with_mean(self.num_turns)}
        if self.num_calls:
            mean = self.call_seconds / self.num_calls
            update["result"] = turns.result.with_mean(max(1.0, self.tool_tokens / self.num_calls))
            update["latency_seconds"] = _with_mean(turns.latency_seconds, mean)
        return turns.model_copy(update=update)


def observe_turns(spans: Sequence[Span], ranks_per_replica: int, num_rollouts: float) -> TurnsObservation | None:
    """Return the observation from a generation's spans on all of its ranks; None if they record no turns.

    Every rank of a replica records the tool tokens; only the rank that calls the tool records calls and their
    latencies.
    """
    if not any(NUM_TOOL_TOKENS in span.facts for span in spans):
        return None
    tool_tokens, calls, seconds = (
        math.fsum(span.facts.get(name, 0.0) for span in spans) for name in (NUM_TOOL_TOKENS, NUM_CALLS, CALL_SECONDS)
    )
    return TurnsObservation(
        calls / num_rollouts, tool_tokens / ranks_per_replica / num_rollouts, seconds / num_rollouts
    )


def _with_mean(latency: LatencySpec, mean: float) -> LatencySpec:
    """The latencies scaled to this mean; if all were 0, every call takes the mean."""
    latencies = latency.resolve()
    if not latencies.mean:
        return LatencySpec(fixed=mean)
    scaled = ((s * mean / latencies.mean, p) for s, p in zip(latencies.seconds, latencies.probabilities, strict=True))
    return LatencySpec(histogram=tuple(scaled))
