"""Other trainers: the best plan that one can express, export to its configuration, and import from it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from meshwright.planner.analysis.plan_structures import Ranked
from meshwright.planner.job.job import Facts, Job
from meshwright.planner.job.model_paths import with_model_paths
from meshwright.planner.plan.pins import Pin, forbidden, parse_pins
from meshwright.planner.plan.plan import Plan
from meshwright.planner.plan.verify import require_valid
from meshwright.planner.search.legal_choices import check_pins
from meshwright.planner.search.no_plan import Limit, NoPlan
from meshwright.planner.solver.result import Limits
from meshwright.planner.trainers.config_keys import read_changes
from meshwright.planner.trainers.exporter import Exported, best_expressible_plan, export
from meshwright.planner.trainers.importer import Imported, JobSource, evaluate_config
from meshwright.planner.trainers.registry import READERS, TRAINERS
from meshwright.planner.trainers.trainer import OtherTrainer
from meshwright.profiles.documents import digest, write_atomically
from meshwright.profiles.errors import BadInput, suggestion
from meshwright.profiles.table import Table
from meshwright.profiles.workload import ObservedLengths
from meshwright.runtime.api.analyses import structures_by
from meshwright.runtime.api.arguments import Pathname, cost_model_builder, limits_of, require_number
from meshwright.runtime.api.planning import with_observed_lengths
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
    observed: ObservedLengths | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Plan | NoPlan:
    """The fastest plan that another trainer can express, costed with the trainer's generation engine.

    `trainer` is verl, nemo-rl, openrlhf, slime, skyrl or areal. `pins` fix choices and `forbid` excludes some, each as
    `stage.key=value`. The plan's gap is to a bound on all plans that the trainer can express. `start` is a plan of a
    similar job: where the trainer can express its placements under these facts, the search looks only for plans that
    are better by more than the gap, and the plan's digests name the start. `observed` are the lengths of a trace, in
    place of those that the facts expect. `progress` is called with the number of the trainer's deployment modes that
    are done, and the number of all.

    Raises BadInput for a trainer that is not known, a pin that is not legal, and a feature that the export does not
    support (such as judges, multi-turn rollouts or adapters).
    """
    other_trainer = _trainer(trainer)
    other_trainer.require_expressible(facts)
    facts = other_trainer.with_engine(facts if observed is None else with_observed_lengths(facts, observed))
    all_pins = parse_pins((*pins, *map(forbidden, forbid)), facts.graph)
    check_pins(facts, all_pins)
    origins = {"job": job, "profile": table, "trace": observed}
    best = best_expressible_plan(
        other_trainer,
        facts,
        cost_model_builder(table)(facts),
        pins=all_pins,
        limits=limits_of(limits),
        digests={name: digest(document) for name, document in origins.items() if document is not None},
        start=start,
        progress=progress,
    )
    return best.plan if best else _no_plan(other_trainer, all_pins)


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
    """The `count` best plans that a trainer can express and that differ in some stage's layout, `best` among them.

    `best` is the result of `plan_for` with the same pins. Each further plan takes a search of all the trainer's
    deployment modes for every stage. Raises BadInput for a trainer that is not known and a plan that breaks a rule.
    """
    other_trainer, model_of = _trainer(trainer), cost_model_builder(table)
    model, search_limits = model_of(best.facts), limits_of(limits)

    def search(search_pins: tuple[Pin, ...]) -> Plan | None:
        trainer_plan = best_expressible_plan(
            other_trainer, best.facts, model, pins=search_pins, limits=search_limits, digests=best.origins
        )
        return trainer_plan.plan if trainer_plan else None

    all_pins = parse_pins((*pins, *map(forbidden, forbid)), best.graph)
    return structures_by(search, best, model_of, pins=all_pins, count=count, progress=progress)


def export_plan(
    plan: Plan,
    output: Pathname,
    *,
    to: str,
    job: Job | None = None,
    directory: Pathname = ".",
    models: Mapping[str, Pathname] = MappingProxyType({}),
    table: Table | None = None,
    limits: Limits | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Exported | NoPlan:
    """Write a plan as the configuration of another trainer into a new directory, with the choices it cannot express.

    Where the trainer cannot express the plan, the best plan that it can express is searched for and written. The job
    gives the algorithm's settings and the models' paths, which are relative to `directory`; `models` are written in
    their place, by role. The table is the one that the plan was made with. Raises BadInput for a trainer that is not
    known, a plan that breaks a rule, a plan made with a measured table that is not given, and an `output` that exists.
    """
    other_trainer, target = _trainer(to), Path(output)
    require_valid(plan)
    if models and job is None:
        raise BadInput("--model names directories of the job's models; give the job too.")
    if "profile" in plan.digests and table is None:
        raise BadInput(
            "the plan was made with a measured table; give it as --profile, to cost what the trainer cannot express."
        )
    if os.path.lexists(target):
        raise BadInput(f"{target} exists already; export overwrites nothing, so name another directory.")
    require_directory("-o", target)
    result = export(
        other_trainer,
        plan,
        cost_model_builder(table),
        job=with_model_paths(job, models, Path(directory)) if job else None,
        directory=Path(directory),
        limits=limits_of(limits),
        progress=progress,
    )
    if result is None:
        return _no_plan(other_trainer)
    target.mkdir(parents=True)
    for name, text in {**result.files, "export.json": result.to_json() + "\n"}.items():
        write_atomically(target / name, text)
    (target / "run.sh").chmod(0o755)
    return result


def import_configuration(
    path: Pathname,
    directory: Pathname = ".",
    *,
    trainer: str,
    device: str,
    network: str | None = None,
    shapes: Mapping[str, Path] | None = None,
    changed: Iterable[str] = (),
    table: Table | None = None,
    limits: Limits | None = None,
    search_seconds: float | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> tuple[str, Imported]:
    """Read a trainer's configuration as the YAML of a job for `directory`, with its cost and faster plans.

    `shapes` are Hugging Face directories or config.json files by role, or under an empty name for all models that
    are not at the configuration's paths; `changed` are `key=value` texts that override the configuration's own. Each
    search takes at most `search_seconds`, if given. Raises BadInput for a file that is no configuration of the trainer,
    a key that a job cannot express, a model without a config.json on this machine, and a device that is not known.
    """
    require_number("search_seconds", search_seconds, minimum=0.1, maximum=1e6)
    reader = READERS[_trainer(trainer).name]
    configured = reader.read(Path(path), read_changes(changed))
    source = JobSource(
        path=Path(path),
        trainer=reader.trainer.label,
        engine=reader.trainer.engine,
        device=device,
        network=network,
        shapes=shapes or {},
    )
    facts = source.facts(configured, Path(directory))
    costed = evaluate_config(
        reader,
        configured,
        facts,
        cost_model_builder(table),
        limits=limits_of(limits),
        search_seconds=search_seconds,
        progress=progress,
    )
    return source.text(configured, Path(directory)), costed


def _trainer(name: str) -> OtherTrainer:
    if name not in TRAINERS:
        raise BadInput(f"there is no trainer {name!r}; {suggestion(name, TRAINERS)}")
    return TRAINERS[name]


def _no_plan(trainer: OtherTrainer, pins: Sequence[Pin] = ()) -> NoPlan:
    with_pins = f" with {', '.join(map(str, pins))}" if pins else ""
    sentence = (
        f"no plan that {trainer.label} can express was found{with_pins}; plan without --for to see what the job needs."
    )
    return NoPlan(status="infeasible", limits=(Limit(stage=None, sentence=sentence),), changes=(), rejected={})
