"""What pays responses of random tokens: a function that takes no time and scores no two of them alike."""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.runtime.environment.samples import RewardSample


def share_of_even(samples: Sequence[RewardSample]) -> list[float]:
    """Of a response's tokens, those with even numbers."""
    return [sum(1 - token % 2 for token in one.response_ids) / max(1, len(one.response_ids)) for one in samples]
