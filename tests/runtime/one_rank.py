"""What a rank holds of the small job where it is the only one: plan, prompts and copies, without a run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch.distributed as dist

from meshwright.planner.job.job import Job, read_job, resolve
from meshwright.planner.plan.plan import Plan
from meshwright.profiles.schedule import Schedule
from meshwright.runtime.execution.megatron_device import StageRunner
from meshwright.runtime.messages.streaming import Streaming
from meshwright.runtime.messages.transport import Transport
from meshwright.runtime.model.kernel_choice import PLAIN
from meshwright.runtime.rollout.controllers import RunControllers
from meshwright.runtime.rollout.prompts import PromptData, read_data
from meshwright.runtime.rollout.stage import GenerationStage
from meshwright.runtime.training.offload import OffloadedStages
from meshwright.runtime.training.weight_copies import WeightCopy, build_copies
from tests.runtime.plans_by_hand import Where, plan_by_hand


@dataclass(frozen=True)
class OneRank:
    """Plan, job, prompts and copies."""

    plan: Plan
    job: Job
    data: PromptData
    copies: dict[str, WeightCopy]

    def generating(self, steps: range) -> GenerationStage:
        """Its part of the generation stage, with nothing in flight."""
        copy = self.copies[self.plan.copy_of("actor_generate")]
        return GenerationStage(
            self.plan, self.job, self.data, copy, steps=steps, streaming=Streaming(self.plan, _alone())
        )

    def actions(self, steps: range, out: Path = Path("run")) -> StageRunner:
        """Its part of every stage, in a run in the directory `out`."""
        return StageRunner(
            self.plan,
            self.job,
            self.data,
            self.copies,
            steps=steps,
            streaming=Streaming(self.plan, _alone()),
            host_memory=OffloadedStages(self.plan, self.copies),
            control=RunControllers(self.plan, _alone(), steps),
            out=out,
        )


def one_rank(path: Path, *, staleness: int = 0, **generation: int) -> OneRank:
    """Of a job for one rank, whose sequences stay in flight as the schedule of generation says. Called on that rank."""
    job = read_job(path)
    facts = resolve(job, path.parent).model_copy(update={"staleness": staleness})
    schedule = Schedule(**{"generation_slots": 8, **generation})  # type: ignore[arg-type]
    scored = Schedule(micro_batch_size=4)
    plan = plan_by_hand(
        facts, {"other": Where("0:1", schedule=scored), "actor_generate": Where("0:1", schedule=schedule)}
    )
    data = read_data(job, path.parent)
    return OneRank(plan, job, data, build_copies(plan, job, path.parent, data.num_tokens, PLAIN))


def _alone() -> Transport:
    return Transport(cast(dist.ProcessGroup, None), rank=0)
