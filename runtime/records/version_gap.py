"""What is recorded of the versions of tokens: names of metrics, and how far two sides say one policy to lie apart."""

from __future__ import annotations

from dataclasses import dataclass

AGE_ROWS, AGE_SCORE = "rows_of_age_", "score_of_age_"
"""Before a number of updates: the responses of a batch that were begun so many before, and their mean score."""


@dataclass(frozen=True, kw_only=True)
class Gap:
    """How far the log-probabilities of the generator lie from the trainer's of the same weights, over tokens."""

    total: float = 0.0
    largest: float = 0.0
    num_tokens: int = 0

    def __add__(self, other: Gap) -> Gap:
        return Gap(
            total=self.total + other.total,
            largest=max(self.largest, other.largest),
            num_tokens=self.num_tokens + other.num_tokens,
        )

    def metrics(self, name: str) -> dict[str, float]:
        """The mean and the largest; nothing where no token was compared."""
        if not self.num_tokens:
            return {}
        return {name: self.total / self.num_tokens, f"max_{name}": self.largest}
