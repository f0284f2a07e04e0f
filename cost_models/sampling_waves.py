"""Costs of dynamic sampling and best-of-n: generation and rewards see more samples than the batch that is trained on.

Generation and the reward model take a wave's seconds times the expected number of waves, one after the other: the next
wave is sampled once the scores of the last one are known. Every wave waits for its host rewards, as long as the
slowest call takes if all calls start at the end of generation. An engine in its own process takes new weights once a
step, in the first wave. The other stages see only the batch. The transfer of groups that dynamic sampling drops is not
costed. With best-of-n, a step has one wave: the samples of all prompts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from meshwright.cost_models.cost import Cost, Memory, Term
from meshwright.cost_models.generation_cost import ENGINE_LOAD
from meshwright.cost_models.protocol import (
    BytesColumns,
    CostModel,
    DelegatingCostModel,
    LayoutCosts,
    QueriedLayoutCosts,
    SecondsColumns,
    StageQuery,
    queries_of,
)
from meshwright.profiles.choice_table import ChoiceTable
from meshwright.profiles.environment.latency import Latencies
from meshwright.profiles.model_shape import ModelSpec
from meshwright.profiles.stages import Role, Stage

WAVE_REWARDS = "rewards of waves"
"""Name of the term for waiting for host rewards at the end of each wave of a generation."""


def processes_all_samples(stage: Stage) -> bool:
    """Return True if a stage processes all samples, not only those that are trained on."""
    return stage.generates or (stage.role is Role.REWARD and not stage.is_trained)


@dataclass(frozen=True)
class WavesModel(DelegatingCostModel):
    """The cost model of a step with waves: that of a `wave` for stages that process all samples, that of the batch for
    other stages.

    `num_waves` is the expected number of waves, `reward_seconds` how long each waits for host rewards.
    """

    wave: CostModel
    num_waves: float
    reward_seconds: float

    def lower_bound_seconds(self, stage: Stage, model: ModelSpec, num_ranks: int, part: int) -> float:
        if not processes_all_samples(stage):
            return super().lower_bound_seconds(stage, model, num_ranks, part)
        return self.num_waves * self.wave.lower_bound_seconds(stage, model, num_ranks, part)

    def generation_lower_bound(self, query: StageQuery) -> float:
        return self.num_waves * (self.wave.generation_lower_bound(query) + self.reward_seconds)

    def seconds(self, query: StageQuery) -> Cost:
        if not processes_all_samples(query.stage):
            return super().seconds(query)
        cost = _cost_of_waves(self.wave.seconds(query), self.num_waves)
        if query.stage.generates and self.reward_seconds:
            cost += Cost((Term(WAVE_REWARDS, self.num_waves * self.reward_seconds),))
        return cost

    def tail_seconds(self, query: StageQuery) -> float:
        return self.seconds(query).total if processes_all_samples(query.stage) else super().tail_seconds(query)

    def memory(self, query: StageQuery) -> Memory:
        return self.wave.memory(query) if processes_all_samples(query.stage) else super().memory(query)

    def seconds_of_choices(self, query: StageQuery, choices: ChoiceTable) -> SecondsColumns:
        if not processes_all_samples(query.stage):
            return super().seconds_of_choices(query, choices)
        if query.stage.generates:
            seconds = np.array([self.seconds(one).total for one in queries_of(query, choices)], dtype=np.float64)
        else:
            seconds = self.num_waves * self.wave.seconds_of_choices(query, choices).seconds
        return SecondsColumns(seconds, seconds)

    def bytes_of_choices(self, query: StageQuery, choices: ChoiceTable) -> BytesColumns:
        if not processes_all_samples(query.stage):
            return super().bytes_of_choices(query, choices)
        return self.wave.bytes_of_choices(query, choices)

    def on_layout(self, query: StageQuery) -> LayoutCosts:
        return QueriedLayoutCosts(self, query) if processes_all_samples(query.stage) else super().on_layout(query)


def _cost_of_waves(wave_cost: Cost, num_waves: float) -> Cost:
    """Return the cost of a step's waves from the cost of one; an engine in its own process takes new weights once a
    step."""
    return Cost(tuple(term if term.name == ENGINE_LOAD else term.scaled(num_waves) for term in wave_cost.terms))


def slowest_seconds(latencies: Sequence[Latencies], num_samples: int) -> float:
    """Return the expected seconds of the slowest of `num_samples` independent calls of each reward."""
    times = np.unique(np.concatenate([[0.0], *(np.array(latency.seconds) for latency in latencies)]))
    probabilities = np.prod([latency.cdf(times) ** num_samples for latency in latencies], axis=0)
    return float(((1 - probabilities[:-1]) * np.diff(times)).sum())
