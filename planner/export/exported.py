"""What an export writes: the plan as a trainer can say it, its keys, and what it cannot say, with the price of that."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from meshwright.planner.export.trainer import ExportInput, KeyValue, OtherTrainer
from meshwright.planner.export.within import Within, within
from meshwright.planner.plan.calls import Remodel
from meshwright.planner.plan.job import Job
from meshwright.planner.plan.plan import Plan
from meshwright.planner.search.recost import recost
from meshwright.planner.solver.result import Limits
from meshwright.profiles.documents import canonical_json


@dataclass(frozen=True, kw_only=True)
class Exported:
    """A plan for another trainer, costed with what that generates with.

    `plan` is what it can say: the one that was given where that is possible, else the best one. `unsaid` has a clause
    for each choice of the given plan that it cannot say, and `lost_seconds` is what a step takes longer without them.
    """

    trainer: str
    way: str
    plan: Plan
    settings: tuple[KeyValue, ...]
    files: Mapping[str, str]
    unsaid: tuple[str, ...]
    lost_seconds: float
    remarks: tuple[str, ...]

    def told(self) -> str:
        """All but the texts, as JSON."""
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


def exported(
    trainer: OtherTrainer,
    plan: Plan,
    remodel: Remodel,
    *,
    job: Job | None = None,
    directory: Path | None = None,
    limits: Limits | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Exported | None:
    """The export; None where no plan of the job is one that the trainer can say.

    The paths of the job start at `directory`. The plan is costed again where the trainer generates with another engine;
    where it is not one that the trainer can say, the best such plan is searched. Raises BadInput for an algorithm whose
    settings are not known for it.
    """
    trainer.require_written(plan.facts)
    plan = _generated_by(trainer, plan, remodel)
    said = next((way for way in trainer.ways_of(plan.facts) if not any(way.broken(plan))), None)
    found = Within(plan=plan, way=said) if said else _searched(trainer, plan, remodel, limits, progress)
    if found is None:
        return None
    origin = ExportInput(plan=found.plan, job=job, directory=directory)
    settings = tuple(trainer.settings(origin))
    unknown = [setting.key for setting in settings if not trainer.keys.knows(setting.key)]
    assert not unknown, unknown
    return Exported(
        trainer=trainer.told,
        way=found.way.name,
        plan=found.plan,
        settings=settings,
        files={**trainer.files(origin, settings), "plan.json": canonical_json(found.plan)},
        unsaid=() if said else tuple(found.way.broken(plan)),
        lost_seconds=found.plan.period_seconds - plan.period_seconds,
        remarks=trainer.remarks,
    )


def _generated_by(trainer: OtherTrainer, plan: Plan, remodel: Remodel) -> Plan:
    """The plan with what the trainer generates with."""
    facts = trainer.generating(plan.facts)
    return plan if facts.engine == plan.facts.engine else recost(plan, facts, remodel(facts))


def _searched(
    trainer: OtherTrainer,
    plan: Plan,
    remodel: Remodel,
    limits: Limits | None,
    progress: Callable[[int, int], None] | None,
) -> Within | None:
    model = remodel(plan.facts)
    return within(trainer, plan.facts, model, limits=limits, digests=plan.origins, progress=progress)
