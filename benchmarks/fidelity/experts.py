"""The experts of a layer on one rank, as measured: whole, cut over tp, or those of the busiest of several ranks."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from benchmarks.fidelity.primitives import kernels_of, latency
from benchmarks.fidelity.rows import Row, Skip, count
from benchmarks.fidelity.score import Answer
from meshwright.cost_models.kernels import Mixture
from meshwright.profiles.efficiency import Efficiency
from meshwright.profiles.experts import Experts, Routing, routing

_BALANCED, _POWER = "balanced", "power_law_"
_LARGE, _MOST_RANKS = 512, 16
_FEWEST, _MOST = 0.01, 2.0
"""Tokens of an expert that the package draws between where there are no more copies than experts."""


class _Load(NamedTuple):
    """Copies of tokens that come to a rank, and to how many of its experts."""

    rows: float
    groups: float


def routed(stem: str, row: Row) -> Answer:
    """Experts as one rank has them, from sorting tokens to adding up what comes back."""
    gpu = measured_device(stem)
    label = (
        "{tokens} tokens of {hidden_size}, {experts_per_token} of {num_experts} x {ffn_size}, tp {tp}, ep {ep}, "
        "{distribution}"
    )
    return Answer(label=f"{gpu}: {label.format(**row)}", measured=latency(row), predicted=experts_seconds(gpu, row))


def measured_device(stem: str) -> str:
    """The GPU of a file of experts."""
    return stem.rsplit("/", maxsplit=1)[-1].split("_", maxsplit=1)[0].upper()


def is_balanced(row: Row) -> bool:
    """Whether every expert is given as many tokens as any other, or as near as can be."""
    return row["distribution"] == _BALANCED


def is_large(row: Row) -> bool:
    return count(row, "tokens") >= _LARGE


def is_whole(row: Row) -> bool:
    """Whether one rank has all experts."""
    return row["ep"] == "1"


def experts_seconds(gpu: str, row: Row, efficiency: Efficiency | None = None) -> float:
    """Seconds for the copies that come to the rank, or to the busiest one; skips more ranks than are judged."""
    picked, number, ep = (count(row, column) for column in ("experts_per_token", "num_experts", "ep"))
    if ep > _MOST_RANKS:
        raise Skip(f"more than {_MOST_RANKS} ranks")
    tokens = count(row, "tokens")
    if is_balanced(row):
        load = _Load(tokens * picked / ep, min(number, tokens * picked) / ep)
    else:
        load = _drawn(float(row["distribution"].removeprefix(_POWER)), tokens, picked, number, ep)
    experts = Experts(num_experts=number, experts_per_token=picked, ffn_size=count(row, "ffn_size") // count(row, "tp"))
    kernels = kernels_of(gpu, efficiency)
    return Mixture(kernels, experts, count(row, "hidden_size"), spread=ep, size=2).seconds_of_rows(*load)


@cache
def _drawn(exponent: float, tokens: int, picked: int, number: int, ep: int) -> _Load:
    """A load as the package draws it: tokens of experts by a power law, rounded; the busiest rank's of them."""
    law: Routing = routing().model_copy(update={"exponent": exponent})
    few, most = (1.0, law.reach * tokens) if tokens * picked > number else (_FEWEST, _MOST)
    power = 1 - exponent
    drawn = [(few**power + (i + 0.5) / number * (most**power - few**power)) ** (1 / power) for i in range(number)]
    copies = tokens * picked
    least = 0.5 * sum(drawn) / copies
    reached = sum(x >= least for x in drawn)
    return _Load(copies / ep * law.imbalance(tokens, picked, number, ep), min(reached, copies) / ep)
