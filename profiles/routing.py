"""How unevenly a router loads experts: a power law of their popularity, from `data/routing.yaml`, sourced there.

Routers are trained to balance, and do not: a few experts are popular, and where experts are spread over ranks the rank
that holds the most popular ones decides when all are done.
"""

from __future__ import annotations

import math
from functools import cache
from importlib.resources import as_file, files
from statistics import NormalDist

from pydantic import Field

from meshwright.profiles.documents import Document, read_yaml


class Routing(Document):
    """Tokens of an expert are distributed as x^-exponent, between one token and `reach` times all of them."""

    exponent: float = Field(gt=1, lt=2)
    reach: float = Field(gt=0, le=1)
    date: str
    source: str = Field(min_length=1)

    def busiest(self, num_tokens: float, experts_per_token: int, num_experts: int, ep: int) -> float:
        """Copies that come to the busiest of `ep` ranks, which hold `num_experts` together, over the mean of them all.

        A rank's load is a sum over its experts, near enough to normal, and the busiest is the greatest of `ep` of those
        (Blom, Statistical Estimates and Transformed Beta-Variables, 1958). An expert's load varies with its popularity
        and, where tokens are few, with which of them pick it. No rank gets more than every token's copies.
        """
        if ep == 1 or num_tokens <= 0:
            return 1.0
        variance = self.variance(num_tokens) + num_experts / (num_tokens * experts_per_token)
        spread = math.sqrt(variance * (ep - 1) / num_experts)
        most = ep * min(1, num_experts / ep / experts_per_token)
        return min(1 + _greatest(ep) * spread, most)

    def variance(self, num_tokens: float) -> float:
        """Of the popularity of an expert, relative to the square of its mean."""
        most, power = self.reach * num_tokens, 1 - self.exponent
        if most <= 1:
            return 0.0
        low: float = most**power
        share, mean, square = (low - 1) / power, (low * most - 1) / (power + 1), (low * most * most - 1) / (power + 2)
        return max(0.0, square * share / (mean * mean) - 1)


@cache
def routing() -> Routing:
    """The distribution that costs are counted with."""
    with as_file(files("meshwright.profiles") / "data" / "routing.yaml") as path:
        return read_yaml(Routing, path, "routing")


@cache
def _greatest(number: int) -> float:
    """The expected greatest of so many standard normals."""
    return NormalDist().inv_cdf((number - 0.375) / (number + 0.25))
