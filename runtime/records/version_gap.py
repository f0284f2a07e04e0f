"""What is recorded of the versions of tokens: names of metrics, and how far two sides say one policy to lie apart."""

from __future__ import annotations

from dataclasses import dataclass

AGE_ROWS, AGE_SCORE = "rows_of_age_", "score_of_age_"
"""Before a number of updates: the responses of a batch that were begun so many before, and their mean score."""


PROB_ERROR, KL_ERROR = "token_mult_prob_error", "gen_kl_error"
"""Metrics of the gap between generator and trainer: the mean of exp|log p - log q|, and KL of the one and the other."""

KL_TO_TEACHERS = "kl_to_teachers_per_token"
"""The metric by which a distillation is told."""


@dataclass(frozen=True, kw_only=True)
class Gap:
    """How far the log-probabilities of the generator lie from the trainer's of the same weights, over tokens."""

    total: float = 0.0
    largest: float = 0.0
    num_tokens: int = 0
    multiplied: float = 0.0
    """Sum of exp|log p - log q|, p the generator and q the trainer."""
    divergence: float = 0.0
    """Sum of q/p - log(q/p) - 1, the k3 estimate of KL(p || q) on tokens that p drew."""

    def __add__(self, other: Gap) -> Gap:
        return Gap(
            total=self.total + other.total,
            largest=max(self.largest, other.largest),
            num_tokens=self.num_tokens + other.num_tokens,
            multiplied=self.multiplied + other.multiplied,
            divergence=self.divergence + other.divergence,
        )

    def metrics(self, name: str) -> dict[str, float]:
        """The mean and the largest; nothing where no token was compared."""
        if not self.num_tokens:
            return {}
        return {name: self.total / self.num_tokens, f"max_{name}": self.largest}

    def mismatch(self) -> dict[str, float]:
        """The same under the names that the field has, each a mean over tokens; nothing where none was compared.

        They are NeMo-RL's (docs/guides/grpo.md, metrics); verl calls the second rollout_corr/k3_kl, and slime the mean
        of `metrics` train_rollout_logprob_abs_diff.
        """
        if not self.num_tokens:
            return {}
        return {PROB_ERROR: self.multiplied / self.num_tokens, KL_ERROR: self.divergence / self.num_tokens}
