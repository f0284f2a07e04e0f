"""Plans for other trainers: the best one that a trainer can say, and a plan as its configuration."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from meshwright.planner.export.exported import Exported, exported
from meshwright.planner.export.trainer import OtherTrainer
from meshwright.planner.export.trainers import TRAINERS
from meshwright.planner.export.within import within
from meshwright.planner.plan.job import Facts, Job
from meshwright.planner.plan.plan import Plan
from meshwright.planner.plan.verify import require_valid
from meshwright.planner.search.refusal import Limit, NoPlan
from meshwright.planner.solver.result import Limits
from meshwright.profiles.documents import digest, write_atomically
from meshwright.profiles.errors import BadInput, suggestion
from meshwright.profiles.table import Table
from meshwright.runtime.api.given import Pathname, limits_of, remodel
from meshwright.runtime.records.outputs import require_directory


def plan_for(
    trainer: str,
    facts: Facts,
    table: Table | None = None,
    *,
    limits: Limits | None = None,
    job: Job | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Plan | NoPlan:
    """The fastest plan that another trainer can say: verl, nemo-rl, openrlhf or slime.

    Its gap is to a bound on all such plans. `progress` is told how many of the trainer's ways are done, and of how
    many. Raises BadInput for a trainer that is not known.
    """
    known = _trainer(trainer)
    origins = {"job": job, "profile": table}
    found = within(
        known,
        facts,
        remodel(table)(facts),
        limits=limits_of(limits),
        digests={name: digest(document) for name, document in origins.items() if document is not None},
        progress=progress,
    )
    return found.plan if found else _no_plan(known)


def export_plan(
    plan: Plan,
    output: Pathname,
    *,
    to: str,
    job: Job | None = None,
    directory: Pathname = ".",
    table: Table | None = None,
    limits: Limits | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Exported | NoPlan:
    """Writes a plan as the configuration of another trainer into a new directory, with what it cannot say.

    Where the trainer cannot say the plan, the best one that it can say is searched and written. The job gives settings
    of the algorithm and paths of models, which start at `directory`; the table is the one that the plan was made with.
    Raises BadInput for a trainer that is not known, a plan that breaks a rule, one that was measured and comes without
    its table, and an `output` that exists.
    """
    known, target = _trainer(to), Path(output)
    require_valid(plan)
    if "profile" in plan.digests and table is None:
        raise BadInput("the plan was made with a measured table; give it as --profile, to price what is left out.")
    if os.path.lexists(target):
        raise BadInput(f"{target} exists already; export overwrites nothing, so name another directory.")
    require_directory("-o", target)
    found = exported(
        known, plan, remodel(table), job=job, directory=Path(directory), limits=limits_of(limits), progress=progress
    )
    if found is None:
        return _no_plan(known)
    target.mkdir(parents=True)
    for name, text in {**found.files, "export.json": found.told() + "\n"}.items():
        write_atomically(target / name, text)
    (target / "run.sh").chmod(0o755)
    return found


def _trainer(name: str) -> OtherTrainer:
    if name not in TRAINERS:
        raise BadInput(f"there is no trainer {name!r}; {suggestion(name, TRAINERS)}")
    return TRAINERS[name]


def _no_plan(trainer: OtherTrainer) -> NoPlan:
    sentence = f"no plan that {trainer.told} can say fits; plan without --for to see what is needed."
    return NoPlan(status="infeasible", limits=(Limit(stage=None, sentence=sentence),), changes=(), rejected={})
