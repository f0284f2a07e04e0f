"""How uncertain predictions are, read from `data/uncertainty.yaml`, and the range that follows for one prediction.

Errors of a prediction are assumed to be independent and log-normal. The error of an input changes the prediction by the
prediction's elasticity to that input, and the error of a cost model scales the whole prediction.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import cache
from importlib.resources import as_file, files
from typing import NamedTuple

from pydantic import Field

from meshwright.profiles.documents import Document, read_yaml

_PERCENTILE_90 = 1.2815515655446004
"""Standard deviations from the median of a normal distribution to its 90th percentile."""


class Interval(NamedTuple):
    """The 10th and the 90th percentile of a predicted quantity."""

    p10: float
    p90: float

    def times(self, factor: float) -> Interval:
        """Return the percentiles of a quantity that is this one times a positive factor."""
        return Interval(self.p10 * factor, self.p90 * factor)

    def divides(self, amount: float) -> Interval:
        """Return the percentiles of a positive amount per unit of this quantity, such as tokens per second."""
        return Interval(amount / self.p90, amount / self.p10)


class Uncertainty(Document):
    """Relative standard deviations: of the rates of a machine, and of what the cost models themselves leave out."""

    rates: dict[str, float] = Field(description="rates by name; launches of kernels are a time")
    engine_host: float = Field(ge=0, description="time of an engine's host for each round and sequence")
    loader: float = Field(ge=0, description="weights through an engine's loader")
    lengths: float = Field(ge=0, description="a step whose responses differ in length")
    equations: float = Field(ge=0, description="any prediction by equations")
    measured: float = Field(ge=0, description="any prediction by a profile")
    imported: float = Field(ge=0, description="operators that were timed alone, on another machine")
    experts: float = Field(ge=0, description="a step that trains a model with experts")
    experts_generating: float = Field(ge=0, description="generation by a model with experts")
    few_bits: float = Field(ge=0, description="linears in less than 16 bits in training")
    sharded_weights: float = Field(ge=0, description="a trainer that shards weights over replicas")
    other_release: float = Field(ge=0, description="an engine whose release is none that its constants describe")
    other_trainer: float = Field(ge=0, description="a step of another trainer, with what it does between its calls")
    cpu: float = Field(ge=0, description="equations for a CPU")
    unmeasured_device: float = Field(ge=0, description="a device whose constants are those of another")
    measured_devices: tuple[str, ...] = Field(description="devices with constants of their own")
    date: str
    source: str = Field(min_length=1)


@cache
def uncertainty() -> Uncertainty:
    """Return the uncertainties of this project's predictions."""
    with as_file(files("meshwright.profiles") / "data" / "uncertainty.yaml") as path:
        return read_yaml(Uncertainty, path, "uncertainties")


def interval(predicted: float, deviations: Iterable[float]) -> Interval:
    """Return the 10th and 90th percentile of a quantity from its prediction and independent relative deviations."""
    spread = math.exp(_PERCENTILE_90 * math.hypot(*deviations))
    return Interval(predicted / spread, predicted * spread)


def elasticity(predicted: float, shifted: float, factor: float) -> float:
    """Return d log(prediction) / d log(input); an input multiplied by `factor` makes the prediction `shifted`."""
    return math.log(shifted / predicted) / math.log(factor)
