"""Reward functions that workers of a test's run load."""

from __future__ import annotations

import time
from collections.abc import Sequence

from meshwright.runtime.environment.samples import RewardSample, ToolCall


def third_word(samples: Sequence[RewardSample]) -> list[float]:
    """How often the response has the word w3, of its words."""
    return [one.response.split().count("w3") / max(1, len(one.response.split())) for one in samples]


def is_short(samples: Sequence[RewardSample]) -> list[float]:
    """Whether the response has fewer than six tokens."""
    return [float(len(one.response_ids) < 6) for one in samples]


def indifferent(samples: Sequence[RewardSample]) -> list[float]:
    """One score for all."""
    return [0.5] * len(samples)


def no_seventh(samples: Sequence[RewardSample]) -> list[float]:
    """Raises for a response that has the word w7."""
    for one in samples:
        if "w7" in one.response.split():
            raise ValueError("w7 is not to be said")
    return [1.0] * len(samples)


def echoed_words(calls: Sequence[ToolCall]) -> list[str]:
    """A tool that says the first words of the turn again, and the word that is paid for."""
    return [" ".join([*call.sampled.split()[: call.turn], "w3"]) for call in calls]


def silent_at_seven(calls: Sequence[ToolCall]) -> list[str]:
    """A tool that fails where the turn has the word w7."""
    if any("w7" in call.sampled.split() for call in calls):
        raise ValueError("w7 is not to be asked")
    return ["w1"] * len(calls)


def napping(samples: Sequence[RewardSample]) -> list[float]:
    """Sleeps 0.02 s for each response."""
    time.sleep(0.02 * len(samples))
    return [1.0] * len(samples)


def refusing(samples: Sequence[RewardSample]) -> list[float]:
    """Scores nothing."""
    raise ValueError("no")
