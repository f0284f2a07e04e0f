"""Metrics of weight versions: names of metrics, and the gap between log-probabilities of generator and trainer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Self

AGE_ROWS, AGE_SCORE = "rows_of_age_", "score_of_age_"
"""Prefixes, followed by an age in updates: the number of a batch's responses that were started with weights of that
age, and their mean score."""


PROB_ERROR, KL_ERROR = "token_mult_prob_error", "gen_kl_error"
"""Metrics of the gap between generator p and trainer q: the mean of exp|log p - log q|, and KL(p || q)."""

KL_TO_TEACHERS = "kl_to_teachers_per_token"
"""The main metric of a distillation."""


GAP = "gap."
"""Prefix of the sums of a gap among the metrics of an update."""


@dataclass(frozen=True, kw_only=True)
class Gap:
    """Sums over tokens of the gap between log-probabilities of generator and trainer with the same weights."""

    abs_difference_sum: float = 0.0
    largest: float = 0.0
    num_tokens: int = 0
    ratio_sum: float = 0.0
    """Sum of exp|log p - log q|, p the generator and q the trainer."""
    kl_sum: float = 0.0
    """Sum of q/p - log(q/p) - 1, the k3 estimate of KL(p || q) on tokens sampled from p."""

    @classmethod
    def split(cls, metrics: Mapping[str, float]) -> tuple[Self, dict[str, float]]:
        """The gap among the metrics of an update, and the other metrics; no token is compared if it has none."""
        keys = {one.name: f"{'max_' if one.name == 'largest' else ''}{GAP}{one.name}" for one in fields(cls)}
        found = {name: metrics.get(key, 0.0) for name, key in keys.items()}
        gap = cls(
            abs_difference_sum=found["abs_difference_sum"],
            largest=found["largest"],
            num_tokens=int(found["num_tokens"]),
            ratio_sum=found["ratio_sum"],
            kl_sum=found["kl_sum"],
        )
        return gap, {key: value for key, value in metrics.items() if key not in keys.values()}

    def __add__(self, other: Gap) -> Gap:
        return Gap(
            abs_difference_sum=self.abs_difference_sum + other.abs_difference_sum,
            largest=max(self.largest, other.largest),
            num_tokens=self.num_tokens + other.num_tokens,
            ratio_sum=self.ratio_sum + other.ratio_sum,
            kl_sum=self.kl_sum + other.kl_sum,
        )

    def metrics(self, name: str) -> dict[str, float]:
        """Return the mean and the largest absolute difference under `name`; empty if no token was compared."""
        if not self.num_tokens:
            return {}
        return {name: self.abs_difference_sum / self.num_tokens, f"max_{name}": self.largest}

    def mismatch(self) -> dict[str, float]:
        """Return `PROB_ERROR` and `KL_ERROR`, each a mean over tokens; empty if no token was compared.

        The names are NeMo-RL's (docs/guides/grpo.md, metrics). verl calls the second one rollout_corr/k3_kl, and slime
        calls the mean of `metrics` train_rollout_logprob_abs_diff.
        """
        if not self.num_tokens:
            return {}
        return {PROB_ERROR: self.ratio_sum / self.num_tokens, KL_ERROR: self.kl_sum / self.num_tokens}
