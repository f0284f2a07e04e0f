"""The samples that a plan with best of generates and keeps, and the seconds of the stages that see them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from meshwright.cost_models.waves import processes_all_samples
from meshwright.planner.plan.plan import Plan


@dataclass(frozen=True, kw_only=True)
class BestSamples:
    """Best of in one step: samples generated and kept for each prompt, and the predicted seconds of the stages that see
    all samples and of those that see only the kept ones, each a sum over stages."""

    num_prompts: int
    num_drawn: int
    num_kept: int
    all_seconds: float
    kept_seconds: float

    @property
    def sentences(self) -> Iterator[str]:
        """Report lines."""
        generated, kept = self.num_prompts * self.num_drawn, self.num_prompts * self.num_kept
        yield (
            f"{self.num_drawn} samples of each of {self.num_prompts} prompts are generated and scored, and the best "
            f"{self.num_kept} are trained on: {generated} and {kept} a step"
        )
        yield (
            f"stages that see all {generated} take {self.all_seconds:.3f} s, those that see the {kept} "
            f"{self.kept_seconds:.3f} s"
        )


def best_samples(plan: Plan) -> BestSamples | None:
    """Return the samples of a step of a plan with best of, else None."""
    workload = plan.facts.workload
    if not workload.best_of:
        return None
    seconds = {p.stage: p.cost.total for p in plan.placements}
    see_all = [stage.name for stage in plan.graph.stages if processes_all_samples(stage)]
    return BestSamples(
        num_prompts=workload.num_prompts,
        num_drawn=workload.best_of,
        num_kept=workload.group_size,
        all_seconds=math.fsum(seconds[name] for name in see_all),
        kept_seconds=math.fsum(taken for name, taken in seconds.items() if name not in see_all),
    )
