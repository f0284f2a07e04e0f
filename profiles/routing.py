"""Load imbalance of MoE routers: a power law of expert popularity, with constants from `data/routing.yaml`.

Despite load-balancing losses a few experts are popular. With expert parallelism the rank that holds the most popular
ones determines the time of all ranks.
"""

from __future__ import annotations

import math
from functools import cache
from importlib.resources import as_file, files
from statistics import NormalDist

from pydantic import Field

from meshwright.profiles.documents import Document, read_yaml


class Routing(Document):
    """The number x of tokens per expert has a density of x^-exponent, between 1 and `reach` times all tokens."""

    exponent: float = Field(gt=1, lt=2)
    reach: float = Field(gt=0, le=1)
    date: str
    source: str = Field(min_length=1)

    def imbalance(self, num_tokens: float, experts_per_token: int, num_experts: int, ep: int) -> float:
        """Return the load of the busiest of `ep` ranks, which together hold `num_experts` experts, over the mean load.

        Load is counted in token copies. A rank's load is a sum over its experts and approximately normal, so the
        busiest is the expected maximum of `ep` normals (Blom, Statistical Estimates and Transformed Beta-Variables,
        1958). An expert's load varies with its popularity and, for few tokens, by chance. The result is bounded by the
        load of a rank that every token selects as often as it can.
        """
        if ep == 1 or num_tokens <= 0:
            return 1.0
        variance = self.variance(num_tokens) + num_experts / (num_tokens * experts_per_token)
        spread = math.sqrt(variance * (ep - 1) / num_experts)
        upper_bound = ep * min(1, num_experts / ep / experts_per_token)
        return min(1 + _expected_maximum(ep) * spread, upper_bound)

    def variance(self, num_tokens: float) -> float:
        """Return the variance of an expert's popularity over the square of its mean."""
        upper, power = self.reach * num_tokens, 1 - self.exponent
        if upper <= 1:
            return 0.0
        upper_power: float = upper**power
        share, mean, square = (
            (upper_power - 1) / power,
            (upper_power * upper - 1) / (power + 1),
            (upper_power * upper * upper - 1) / (power + 2),
        )
        return max(0.0, square * share / (mean * mean) - 1)


@cache
def routing() -> Routing:
    """Return the routing distribution that the cost models use."""
    with as_file(files("meshwright.profiles") / "data" / "routing.yaml") as path:
        return read_yaml(Routing, path, "routing")


@cache
def _expected_maximum(number: int) -> float:
    """Expected maximum of `number` standard normals (Blom's approximation)."""
    return NormalDist().inv_cdf((number - 0.375) / (number + 0.25))
