"""What a run's trace says of the turns of its rollouts: how many there were, and what their tool told."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from meshwright.profiles.environment.latency import LatencySpec
from meshwright.profiles.environment.turns import ToolTurns
from meshwright.profiles.trace import CALL_SECONDS, NUM_CALLS, NUM_TOLD_TOKENS, Span


class TurnsObservation(NamedTuple):
    """Of a rollout on average: calls of its tool, tokens that it was told, and seconds until it was answered."""

    num_calls: float
    told_tokens: float
    call_seconds: float

    @property
    def num_turns(self) -> float:
        """One more than calls, each of which another turn follows."""
        return 1 + self.num_calls

    def met(self, turns: ToolTurns) -> ToolTurns:
        """The turns with the means that were seen; of a tool that was never called nothing was."""
        update: dict[str, object] = {"number": turns.number.with_mean(self.num_turns)}
        if self.num_calls:
            mean = self.call_seconds / self.num_calls
            update["result"] = turns.result.with_mean(max(1.0, self.told_tokens / self.num_calls))
            update["latency_seconds"] = _with_mean(turns.latency_seconds, mean)
        return turns.model_copy(update=update)


def observe_turns(spans: Sequence[Span], ranks_per_replica: int, num_rollouts: float) -> TurnsObservation | None:
    """Of the spans of a generation on all of its ranks; None where they tell of no turns.

    Every rank of a replica says what it was told, and the one that calls the tool how often it did and for how long.
    """
    if not any(NUM_TOLD_TOKENS in span.facts for span in spans):
        return None
    told, calls, seconds = (
        math.fsum(span.facts.get(name, 0.0) for span in spans) for name in (NUM_TOLD_TOKENS, NUM_CALLS, CALL_SECONDS)
    )
    return TurnsObservation(calls / num_rollouts, told / ranks_per_replica / num_rollouts, seconds / num_rollouts)


def _with_mean(latency: LatencySpec, mean: float) -> LatencySpec:
    """The latencies times one factor; where every call took no time, every call takes the mean."""
    known = latency.resolve()
    if not known.mean:
        return LatencySpec(fixed=mean)
    scaled = ((s * mean / known.mean, p) for s, p in zip(known.seconds, known.probabilities, strict=True))
    return LatencySpec(histogram=tuple(scaled))
