"""How much of the time of rewards on hosts a plan hides behind the work of its ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from meshwright.cost_models.cost import Cost
from meshwright.cost_models.waves import WAVE_REWARDS
from meshwright.planner.environment.rewards import HostWorkers
from meshwright.planner.plan.evaluate import evaluate
from meshwright.planner.plan.host_workers import LATENCY, WAITING, host_seconds, reward_tail_of
from meshwright.planner.plan.plan import Edge, Plan
from meshwright.profiles.packing import rows_per_replica
from meshwright.profiles.stages import GENERATE


@dataclass(frozen=True, kw_only=True)
class HostRewards:
    """Predicted seconds of rewards in a step.

    `at_once_seconds` is the time of the same workers if scoring only started after the last response; `tail_seconds` is
    the time from the last response to the last reward as planned; `added_seconds` is the resulting increase of the step
    time.
    """

    workers: tuple[HostWorkers, ...]
    num_replicas: int
    at_once_seconds: float
    tail_seconds: float
    added_seconds: float

    @property
    def hidden_share(self) -> float:
        """The share of `at_once_seconds` that does not add to the step time."""
        return 1 - self.added_seconds / self.at_once_seconds if self.at_once_seconds else 1.0

    @property
    def sentences(self) -> Iterator[str]:
        """Report lines."""
        counts = ", ".join(f"{one.reward} {one.workers}" for one in self.workers)
        yield f"workers for each of {self.num_replicas} replicas: {counts}"
        yield (
            f"the last reward is known {self.tail_seconds:.3f} s after the last response, and "
            f"{self.at_once_seconds:.3f} s if scoring started then; {self.hidden_share:.0%} of that is hidden"
        )


def host_rewards(plan: Plan) -> HostRewards | None:
    """Return the rewards on hosts of a valid plan; None if all rewards are models."""
    if not plan.workers:
        return None
    num_replicas = plan.placement(GENERATE).layout.dp
    rows = np.zeros(rows_per_replica(plan.facts.workload.candidates.batch_size, num_replicas)[0])
    evaluated_without_wait = evaluate(plan.model_copy(update={"edges": tuple(map(_without_host_wait, plan.edges))}))
    wave_wait = plan.placement(GENERATE).cost.amount(WAVE_REWARDS) if plan.facts.workload.best_of else 0.0
    return HostRewards(
        workers=plan.workers,
        num_replicas=num_replicas,
        at_once_seconds=reward_tail_of(plan, rows, [one.workers for one in plan.workers]),
        tail_seconds=max(wave_wait, *map(host_seconds, plan.edges)),
        added_seconds=wave_wait + max(0.0, plan.period_seconds - evaluated_without_wait.period_seconds),
    )


def _without_host_wait(edge: Edge) -> Edge:
    """The transfer without its wait for rewards on hosts."""
    return edge.model_copy(
        update={"cost": Cost(tuple(term for term in edge.cost.terms if term.name not in (LATENCY, WAITING)))}
    )
