"""The export of a plan: the trainer's keys and files, and the choices it cannot express with their cost in seconds."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from meshwright.planner.export.trainer import ExportInput, KeyValue, OtherTrainer
from meshwright.planner.export.within import TrainerPlan, best_expressible_plan
from meshwright.planner.plan.calls import CostModelBuilder
from meshwright.planner.plan.job import Job
from meshwright.planner.plan.plan import Plan
from meshwright.planner.search.recost import re_evaluate
from meshwright.planner.solver.result import Limits
from meshwright.profiles.documents import canonical_json


@dataclass(frozen=True, kw_only=True)
class Exported:
    """A plan for another trainer, costed with that trainer's generation engine.

    `plan` is the given plan where the trainer can express it, else the best plan that it can express. `unsaid` has a
    clause for each choice of the given plan that it cannot express, and `lost_seconds` is how much longer a step takes
    without those choices. `way` names the trainer's deployment mode.
    """

    trainer: str
    way: str
    plan: Plan
    settings: tuple[KeyValue, ...]
    files: Mapping[str, str]
    unsaid: tuple[str, ...]
    lost_seconds: float
    remarks: tuple[str, ...]

    def to_json(self) -> str:
        """Everything but the files, as JSON."""
        return json.dumps(
            {
                "trainer": self.trainer,
                "way": self.way,
                "engine": self.plan.facts.engine,
                "step_seconds": self.plan.period_seconds,
                "unsaid": self.unsaid,
                "lost_seconds": self.lost_seconds,
                "remarks": self.remarks,
                "settings": [asdict(setting) for setting in self.settings],
            },
            indent=2,
        )


def export(
    trainer: OtherTrainer,
    plan: Plan,
    rebuild_cost_model: CostModelBuilder,
    *,
    job: Job | None = None,
    directory: Path | None = None,
    limits: Limits | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Exported | None:
    """Export a plan; None where no plan of the job can be expressed by the trainer.

    The paths of the job are relative to `directory`. The plan is costed again where the trainer generates with another
    engine. Where the trainer cannot express it, the best plan that it can express is searched for. Raises BadInput for
    an algorithm whose settings are not known for the trainer.
    """
    trainer.require_exportable(plan.facts)
    plan = _with_engine_of(trainer, plan, rebuild_cost_model)
    exact_mode = next((way for way in trainer.modes_for(plan.facts) if not any(way.inexpressible(plan))), None)
    best = (
        TrainerPlan(plan=plan, mode=exact_mode)
        if exact_mode
        else _search(trainer, plan, rebuild_cost_model, limits, progress)
    )
    if best is None:
        return None
    source = ExportInput(plan=best.plan, job=job, directory=directory)
    settings = tuple(trainer.settings(source))
    unknown = [setting.key for setting in settings if not trainer.keys.knows(setting.key)]
    assert not unknown, unknown
    return Exported(
        trainer=trainer.label,
        way=best.mode.name,
        plan=best.plan,
        settings=settings,
        files={**trainer.files(source, settings), "plan.json": canonical_json(best.plan)},
        unsaid=() if exact_mode else tuple(best.mode.inexpressible(plan)),
        lost_seconds=best.plan.period_seconds - plan.period_seconds,
        remarks=trainer.remarks,
    )


def _with_engine_of(trainer: OtherTrainer, plan: Plan, remodel: CostModelBuilder) -> Plan:
    """The plan, costed with the generation engine of the trainer."""
    facts = trainer.with_engine(plan.facts)
    return plan if facts.engine == plan.facts.engine else re_evaluate(plan, facts, remodel(facts))


def _search(
    trainer: OtherTrainer,
    plan: Plan,
    remodel: CostModelBuilder,
    limits: Limits | None,
    progress: Callable[[int, int], None] | None,
) -> TrainerPlan | None:
    model = remodel(plan.facts)
    return best_expressible_plan(trainer, plan.facts, model, limits=limits, digests=plan.origins, progress=progress)
