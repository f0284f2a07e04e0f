"""What a plan that trains on the best of several samples draws and keeps, and which of its seconds are whose."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from meshwright.cost_models.waves import sees_waves
from meshwright.planner.plan.plan import Plan


@dataclass(frozen=True, kw_only=True)
class BestSamples:
    """Of a step: samples of each of its prompts that are drawn, those of them that are kept, and the predicted seconds
    of the stages that see all and of those that see the kept ones, each stage's added up."""

    num_prompts: int
    num_drawn: int
    num_kept: int
    all_seconds: float
    kept_seconds: float

    @property
    def sentences(self) -> Iterator[str]:
        """What there is to tell, for people."""
        drawn, kept = self.num_prompts * self.num_drawn, self.num_prompts * self.num_kept
        yield (
            f"{self.num_drawn} samples of each of {self.num_prompts} prompts are drawn and scored, and the best "
            f"{self.num_kept} are trained on: {drawn} and {kept} a step"
        )
        yield (
            f"stages that see all {drawn} take {self.all_seconds:.3f} s, those that see the {kept} "
            f"{self.kept_seconds:.3f} s"
        )


def best_samples(plan: Plan) -> BestSamples | None:
    """None where all that is drawn is trained on, and with dynamic sampling."""
    workload = plan.facts.workload
    if not workload.best_of:
        return None
    seconds = {p.stage: p.cost.total for p in plan.placements}
    seeing = [stage.name for stage in plan.graph.stages if sees_waves(stage)]
    return BestSamples(
        num_prompts=workload.num_prompts,
        num_drawn=workload.best_of,
        num_kept=workload.group_size,
        all_seconds=math.fsum(seconds[name] for name in seeing),
        kept_seconds=math.fsum(taken for name, taken in seconds.items() if name not in seeing),
    )
