"""How well a plan hides the rewards that run on hosts behind what its ranks do."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from meshwright.cost_models.cost import Cost
from meshwright.cost_models.waves import WAVE_REWARDS
from meshwright.planner.environment.rewards import HostWorkers
from meshwright.planner.plan.evaluate import evaluate
from meshwright.planner.plan.host_workers import LATENCY, WAITING, host_seconds, tail
from meshwright.planner.plan.plan import Edge, Plan
from meshwright.profiles.packing import rows_of_replicas
from meshwright.profiles.stages import GENERATE


@dataclass(frozen=True, kw_only=True)
class HostRewards:
    """Predicted seconds of a step. `at_once_seconds` is what the same workers take for all responses of it where none
    is handed over before the last has ended; `tail_seconds` what they take behind the last one as it is; and
    `added_seconds` by how much that makes the step longer."""

    workers: tuple[HostWorkers, ...]
    num_replicas: int
    at_once_seconds: float
    tail_seconds: float
    added_seconds: float

    @property
    def hidden_share(self) -> float:
        """Of what all would take at once, the part that the step is not longer by."""
        return 1 - self.added_seconds / self.at_once_seconds if self.at_once_seconds else 1.0

    @property
    def sentences(self) -> Iterator[str]:
        """What there is to tell, for people."""
        told = ", ".join(f"{one.reward} {one.workers}" for one in self.workers)
        yield f"workers for each of {self.num_replicas} replicas: {told}"
        yield (
            f"rewards are all there {self.tail_seconds:.3f} s after the last response, and {self.at_once_seconds:.3f} s"
            f" if they began then; {self.hidden_share:.0%} of that is hidden"
        )


def host_rewards(plan: Plan) -> HostRewards | None:
    """Of a valid plan; None where all rewards are models."""
    if not plan.workers:
        return None
    num_replicas = plan.placement(GENERATE).layout.dp
    rows = np.zeros(rows_of_replicas(plan.facts.workload.candidates.batch_size, num_replicas)[0])
    without = evaluate(plan.model_copy(update={"edges": tuple(map(_without, plan.edges))}))
    waited = plan.placement(GENERATE).cost.amount(WAVE_REWARDS) if plan.facts.workload.best_of else 0.0
    return HostRewards(
        workers=plan.workers,
        num_replicas=num_replicas,
        at_once_seconds=tail(plan, rows, [one.workers for one in plan.workers]),
        tail_seconds=max(waited, *map(host_seconds, plan.edges)),
        added_seconds=waited + max(0.0, plan.period_seconds - without.period_seconds),
    )


def _without(edge: Edge) -> Edge:
    """The hand-over, with nothing to wait for on hosts."""
    return edge.model_copy(
        update={"cost": Cost(tuple(term for term in edge.cost.terms if term.name not in (LATENCY, WAITING)))}
    )
