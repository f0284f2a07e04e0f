"""The range of a prediction of a row: the row is asked again with each uncertain input changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from meshwright.profiles.frameworks import Framework
from meshwright.profiles.hardware import Cluster
from meshwright.profiles.uncertainty import Interval, elasticity, interval, uncertainty

_FACTOR = 1.05
_HOST = "host of an engine"
_LAUNCHES = "time to launch a kernel"
_LINKS = {"bandwidth in a node": "intra_node", "bandwidth between nodes": "inter_node"}


@dataclass(frozen=True)
class Shift:
    """One input multiplied by a factor; without an input nothing changes."""

    name: str = ""
    factor: float = 1.0

    def cluster(self, cluster: Cluster) -> Cluster:
        """The cluster with the input changed."""
        device, factor = cluster.device, self.factor
        if self.name in _LINKS:
            link = getattr(cluster, _LINKS[self.name])
            faster = link.model_copy(update={"bytes_per_second": link.bytes_per_second * factor})
            return cluster.model_copy(update={_LINKS[self.name]: faster})
        changed = {
            "compute peak": {
                "flops_per_second": {name: factor * peak for name, peak in device.flops_per_second.items()}
            },
            "memory bandwidth": {"memory_bytes_per_second": factor * device.memory_bytes_per_second},
            _LAUNCHES: {"launch_seconds": factor * device.launch_seconds},
        }.get(self.name)
        return cluster.model_copy(update={"device": device.model_copy(update=changed)}) if changed else cluster

    def framework(self, framework: Framework) -> Framework:
        """The framework with the input changed."""
        names = {
            _LAUNCHES: ("launch_seconds", "forward_launch_seconds"),
            _HOST: ("round_seconds", "row_seconds", "call_seconds"),
        }.get(self.name, ())
        values = {name: getattr(framework, name) for name in names}
        return framework.model_copy(
            update={name: self.factor * value for name, value in values.items() if value is not None}
        )


UNSHIFTED = Shift()


@dataclass(frozen=True, kw_only=True)
class Doubt:
    """What makes a row's prediction uncertain besides the rates of the machine."""

    device: str
    has_experts: bool = False
    only_generates: bool = False
    has_few_bits: bool = False
    lengths_differ: bool = False
    shards_weights: bool = False
    is_imported: bool = False
    is_of_other_release: bool = False
    is_of_other_trainer: bool = False
    launch_deviation: float | None = None

    def inputs(self) -> dict[str, float]:
        """Relative standard deviations of what the prediction is asked again with."""
        known = uncertainty()
        inputs = {**known.rates, _HOST: known.engine_host}
        return inputs if self.launch_deviation is None else {**inputs, _LAUNCHES: self.launch_deviation}

    def deviations(self) -> Iterator[float]:
        """Relative standard deviations of laws."""
        known = uncertainty()
        yield known.equations
        if self.has_experts:
            yield known.experts_generating if self.only_generates else known.experts
        if self.has_few_bits:
            yield known.few_bits
        if self.lengths_differ:
            yield known.lengths
        if self.shards_weights:
            yield known.sharded_weights
        if self.is_imported:
            yield known.imported
        if self.is_of_other_release:
            yield known.other_release
        if self.is_of_other_trainer:
            yield known.other_trainer
        if self.device not in known.measured_devices:
            yield known.unmeasured_device


def range_of(ask: Callable[[Shift], float], doubt: Doubt) -> Interval:
    """The 10th and the 90th percentile of what a row asks."""
    inputs, predicted = doubt.inputs(), ask(UNSHIFTED)
    moved = {name: elasticity(predicted, ask(Shift(name, _FACTOR)), _FACTOR) for name in inputs}
    return interval(predicted, [*(moved[name] * deviation for name, deviation in inputs.items()), *doubt.deviations()])
