"""Other trainers: the best plan that one can say, a plan as its configuration, and a configuration as a plan."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from meshwright.planner.analysis.structures import Ranked
from meshwright.planner.export.exported import Exported, exported
from meshwright.planner.export.trainer import OtherTrainer
from meshwright.planner.export.trainers import TRAINERS
from meshwright.planner.export.within import within
from meshwright.planner.imports.costed import Imported, imported
from meshwright.planner.imports.given_keys import read_changes
from meshwright.planner.imports.job_text import JobSource
from meshwright.planner.imports.readers import READERS
from meshwright.planner.plan.job import Facts, Job, resolve
from meshwright.planner.plan.pins import Pin, forbidden, parse_pins
from meshwright.planner.plan.plan import Plan
from meshwright.planner.plan.verify import require_valid
from meshwright.planner.search.refusal import Limit, NoPlan
from meshwright.planner.search.space import check_pins
from meshwright.planner.solver.result import Limits
from meshwright.profiles.documents import digest, write_atomically
from meshwright.profiles.environment.seen_lengths import SeenLengths
from meshwright.profiles.errors import BadInput, suggestion
from meshwright.profiles.table import Table
from meshwright.runtime.api.given import Pathname, limits_of, remodel, require_number
from meshwright.runtime.api.planning import as_seen, structures_by
from meshwright.runtime.records.outputs import require_directory


def plan_for(
    trainer: str,
    facts: Facts,
    table: Table | None = None,
    *,
    job: Job | None = None,
    pins: Iterable[str] = (),
    forbid: Iterable[str] = (),
    limits: Limits | None = None,
    start: Plan | None = None,
    seen: SeenLengths | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Plan | NoPlan:
    """The fastest plan that another trainer can say, with what that generates with: verl, nemo-rl, openrlhf or slime.

    `pins` fix choices and `forbid` leaves some out, each as `stage.key=value`. Its gap is to a bound on all such plans.
    `start` is a plan of a job that differs little: where the trainer can say its placements under these facts, only
    what is better by more than the gap is searched for, and the plan's digests name it. `seen` are the lengths of a
    trace, in place of those that the facts expect. `progress` is told how many of the trainer's ways are done, and of
    how many. Raises BadInput for a trainer that is not known, a pin that is not
    legal, and what no trainer is told (rewards on hosts, turns, adapters).
    """
    known = _trainer(trainer)
    known.require_sayable(facts)
    facts = known.generating(facts if seen is None else as_seen(facts, seen))
    asked = parse_pins((*pins, *map(forbidden, forbid)), facts.graph)
    check_pins(facts, asked)
    origins = {"job": job, "profile": table, "trace": seen}
    found = within(
        known,
        facts,
        remodel(table)(facts),
        pins=asked,
        limits=limits_of(limits),
        digests={name: digest(document) for name, document in origins.items() if document is not None},
        start=start,
        progress=progress,
    )
    return found.plan if found else _no_plan(known, asked)


def structures_for(
    trainer: str,
    best: Plan,
    table: Table | None = None,
    *,
    count: int,
    pins: Iterable[str] = (),
    forbid: Iterable[str] = (),
    limits: Limits | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> tuple[Ranked, ...]:
    """As `structures`, of the plans that a trainer can say: `best` is what `plan_for` answered with the same pins.

    Each takes a search of all the trainer's ways for every stage. Raises BadInput for a trainer that is not known and
    a plan that breaks a rule.
    """
    known, model_of = _trainer(trainer), remodel(table)
    model, limited = model_of(best.facts), limits_of(limits)

    def search(part: tuple[Pin, ...]) -> Plan | None:
        found = within(known, best.facts, model, pins=part, limits=limited, digests=best.origins)
        return found.plan if found else None

    asked = parse_pins((*pins, *map(forbidden, forbid)), best.graph)
    return structures_by(search, best, model_of, asked=asked, count=count, progress=progress)


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


def import_configuration(
    path: Pathname,
    directory: Pathname = ".",
    *,
    trainer: str,
    device: str,
    network: str = "ib-hdr-200",
    shapes: Mapping[str, Path] | None = None,
    changed: Iterable[str] = (),
    table: Table | None = None,
    limits: Limits | None = None,
    search_seconds: float | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> tuple[str, Imported]:
    """A trainer's configuration as the YAML of a job for `directory`, costed as it is, and what would be faster.

    `shapes` are Hugging Face directories or config.json files by role, or under an empty name for all models that are
    not where the configuration says; `changed` are `key=value` texts that stand above the
    configuration's own. Each of the searches takes `search_seconds` at most, if they are given. Raises
    BadInput for what is no configuration of the trainer, a key that has no place in a job, a model that is not here and
    a device that is not known.
    """
    require_number("search_seconds", search_seconds, least=0.1, most=1e6)
    reader = READERS[_trainer(trainer).name]
    configured = reader.read(Path(path), read_changes(changed))
    source = JobSource(
        path=Path(path),
        trainer=reader.trainer.told,
        engine=reader.trainer.engine,
        device=device,
        network=network,
        shapes=shapes or {},
    )
    facts = resolve(source.job(configured, Path(directory)), Path(directory))
    found = imported(
        reader,
        configured,
        facts,
        remodel(table),
        limits=limits_of(limits),
        search_seconds=search_seconds,
        progress=progress,
    )
    return source.text(configured, Path(directory)), found


def _trainer(name: str) -> OtherTrainer:
    if name not in TRAINERS:
        raise BadInput(f"there is no trainer {name!r}; {suggestion(name, TRAINERS)}")
    return TRAINERS[name]


def _no_plan(trainer: OtherTrainer, pins: Sequence[Pin] = ()) -> NoPlan:
    kept = f" with {', '.join(map(str, pins))}" if pins else ""
    sentence = f"no plan that {trainer.told} can say was found{kept}; plan without --for to see what the job needs."
    return NoPlan(status="infeasible", limits=(Limit(stage=None, sentence=sentence),), changes=(), rejected={})
