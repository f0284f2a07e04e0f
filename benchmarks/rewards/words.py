"""A reward that can be verified: which part of a response is lower-case letters."""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.runtime.environment.samples import RewardSample


def share_of_letters(samples: Sequence[RewardSample]) -> list[float]:
    """Of the characters of each response, those between a and z."""
    return [sum("a" <= one <= "z" for one in sample.response) / max(1, len(sample.response)) for sample in samples]
