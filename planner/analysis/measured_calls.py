"""Which latencies of a plan were measured, and on what."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from meshwright.planner.plan.job import Facts


@dataclass(frozen=True, kw_only=True)
class MeasuredLatencies:
    """What is told of the latency of each reward, and of the tool."""

    told: Mapping[str, str]

    @property
    def sentences(self) -> Iterator[str]:
        """What there is to tell, for people."""
        for name, latency in self.told.items():
            yield f"a call of {name} takes {latency}"


def measured_latencies(facts: Facts) -> MeasuredLatencies | None:
    """Of rewards and of the tool; None where none was measured."""
    found = {f"reward {load.name}": load.latency_seconds for load in facts.rewards}
    if facts.workload.turns:
        found["the tool"] = facts.workload.turns.latency_seconds
    told = {name: latency.told for name, latency in found.items() if latency.measured}
    return MeasuredLatencies(told=told) if told else None
