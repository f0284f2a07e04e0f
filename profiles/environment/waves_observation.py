"""Lengths and numbers of all sequences sampled in waves, trained on or not, as observed in a run's trace."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from meshwright.profiles.trace import NUM_PROMPT_TOKENS, NUM_SAMPLED_TOKENS, NUM_SAMPLES, Span


class WavesObservation(NamedTuple):
    """Mean sequences sampled per step, and mean tokens of their responses and prompts."""

    rows_per_step: float
    response_tokens: float
    prompt_tokens: float

    @property
    def sequence_tokens(self) -> float:
        """Mean tokens of prompt and response together."""
        return self.prompt_tokens + self.response_tokens


def observe_waves(spans: Sequence[Span], ranks_per_replica: int, num_steps: int) -> WavesObservation | None:
    """Return the observation from a generation's spans on all of its ranks; None if they record no waves.

    Every rank of a replica records the samples of the whole replica.
    """
    if not any(NUM_PROMPT_TOKENS in span.facts for span in spans):
        return None
    rows, responses, prompts = (
        math.fsum(span.facts.get(name, 0.0) for span in spans)
        for name in (NUM_SAMPLES, NUM_SAMPLED_TOKENS, NUM_PROMPT_TOKENS)
    )
    return WavesObservation(rows / ranks_per_replica / num_steps, responses / rows, prompts / rows)
