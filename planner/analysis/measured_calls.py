"""The measured latencies of a plan's rewards and tool."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from meshwright.planner.plan.job import Facts


@dataclass(frozen=True, kw_only=True)
class MeasuredLatencies:
    """A description of each measured latency, by name of the reward or the tool."""

    told: Mapping[str, str]

    @property
    def sentences(self) -> Iterator[str]:
        """Report lines."""
        for name, latency in self.told.items():
            yield f"a call of {name} takes {latency}"


def measured_latencies(facts: Facts) -> MeasuredLatencies | None:
    """Return the measured latencies of rewards and of the tool; None if none was measured."""
    latencies = {f"reward {load.name}": load.latency_seconds for load in facts.rewards}
    if facts.workload.turns:
        latencies["the tool"] = facts.workload.turns.latency_seconds
    told = {name: latency.description for name, latency in latencies.items() if latency.measured}
    return MeasuredLatencies(told=told) if told else None
