"""What a step costs that trains on some of what it draws: the stages that see all that is drawn, wave by wave.

Generation and the reward model take a wave's seconds times the expected number of waves, one after the other: the next
wave is drawn when the scores of the last one are known. Rewards on hosts are waited for in every wave, for as long as
the slowest call of it takes if all begin at its end. The other stages see the batch alone. What handing over groups
that dynamic sampling drops takes is left out. Where the best of several samples are kept, the samples of all prompts
are the one wave of a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from meshwright.cost_models.cost import Cost, Memory, Term
from meshwright.cost_models.question import Call, CostModel, LayoutCosts, PassedOn, Summed
from meshwright.profiles.environment.latency import Latencies
from meshwright.profiles.model_shape import ModelSpec
from meshwright.profiles.stages import Role, Stage

WAVE_REWARDS = "rewards of waves"
"""The term of a generation that waits for rewards on hosts before it is known what else to draw."""


def sees_waves(stage: Stage) -> bool:
    """Whether a stage sees all that is drawn, and not only what is trained on."""
    return stage.generates or (stage.role is Role.REWARD and not stage.is_trained)


@dataclass(frozen=True)
class InWaves(PassedOn):
    """A cost model of the batch, with another of a `wave`, the expected number of waves and the seconds for which each
    of them waits for rewards on hosts."""

    wave: CostModel
    num_waves: float
    reward_seconds: float

    def least_seconds(self, stage: Stage, model: ModelSpec, num_ranks: int, part: int) -> float:
        if not sees_waves(stage):
            return super().least_seconds(stage, model, num_ranks, part)
        return self.num_waves * self.wave.least_seconds(stage, model, num_ranks, part)

    def least_generation_seconds(self, call: Call) -> float:
        return self.num_waves * (self.wave.least_generation_seconds(call) + self.reward_seconds)

    def seconds(self, call: Call) -> Cost:
        if not sees_waves(call.stage):
            return super().seconds(call)
        found = self.wave.seconds(call).scaled(self.num_waves)
        if call.stage.generates and self.reward_seconds:
            found += Cost((Term(WAVE_REWARDS, self.num_waves * self.reward_seconds),))
        return found

    def tail_seconds(self, call: Call) -> float:
        return self.seconds(call).total if sees_waves(call.stage) else super().tail_seconds(call)

    def memory(self, call: Call) -> Memory:
        return self.wave.memory(call) if sees_waves(call.stage) else super().memory(call)

    def on_layout(self, call: Call) -> LayoutCosts:
        return Summed(self, call) if sees_waves(call.stage) else super().on_layout(call)


def slowest_seconds(latencies: Sequence[Latencies], num_samples: int) -> float:
    """Expected seconds of the slowest of so many independent calls of each reward."""
    times = np.unique(np.concatenate([[0.0], *(np.array(one.seconds) for one in latencies)]))
    done = np.prod([one.within(times) ** num_samples for one in latencies], axis=0)
    return float(((1 - done[:-1]) * np.diff(times)).sum())
