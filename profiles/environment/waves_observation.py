"""What a run's trace says of the waves of dynamic sampling: all that was drawn, and not only what was trained on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from meshwright.profiles.trace import NUM_DRAWN, NUM_DRAWN_TOKENS, NUM_PROMPT_TOKENS, Span


class WavesObservation(NamedTuple):
    """Means over all sequences that were drawn, in tokens, and how many of them a step has drawn on average."""

    rows_per_step: float
    response_tokens: float
    prompt_tokens: float

    @property
    def sequence_tokens(self) -> float:
        """Prompt and response together."""
        return self.prompt_tokens + self.response_tokens


def observe_waves(spans: Sequence[Span], ranks_per_replica: int, num_steps: int) -> WavesObservation | None:
    """Of the spans of a generation on all of its ranks; None where they tell of no waves. Every rank of a replica tells
    what the replica has drawn."""
    if not any(NUM_PROMPT_TOKENS in span.facts for span in spans):
        return None
    rows, drawn, prompts = (
        math.fsum(span.facts.get(name, 0.0) for span in spans)
        for name in (NUM_DRAWN, NUM_DRAWN_TOKENS, NUM_PROMPT_TOKENS)
    )
    return WavesObservation(rows / ranks_per_replica / num_steps, drawn / rows, prompts / rows)
