"""Export of a plan to another trainer, and the search for the best plan that the trainer can express.

A deployment mode of the trainer has pins, which the search keeps, and equal choices: choices that the trainer sets by
one key for several stages. The search does not know equal choices, so a relaxed search without them gives a bound for
every plan of the mode. The choices are then made equal one after the other, each at the best of the values that its
stages have in the plan so far. The gap of the resulting plan is to the lowest bound of all modes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path

from meshwright.cost_models.protocol import CostModel
from meshwright.planner.compile import Missing, best_plan
from meshwright.planner.job.job import SETTINGS_KEYS, Facts, Job
from meshwright.planner.plan.cost_queries import CostModelBuilder
from meshwright.planner.plan.pins import Pin, Value, parse_pins
from meshwright.planner.plan.plan import Plan
from meshwright.planner.search.re_evaluate import re_evaluate, re_evaluated_or_violation
from meshwright.planner.search.search_case import with_gap
from meshwright.planner.solver.result import Limits
from meshwright.planner.trainers.deployment_modes import DeploymentMode, pin_value
from meshwright.planner.trainers.trainer import ConfigValue, ExportInput, KeyValue, OtherTrainer
from meshwright.profiles.documents import canonical_json, digest
from meshwright.profiles.layout import Layout


@dataclass(frozen=True, kw_only=True)
class TrainerPlan:
    """The best plan that was found, and the deployment mode that it belongs to."""

    plan: Plan
    mode: DeploymentMode


def best_expressible_plan(
    trainer: OtherTrainer,
    facts: Facts,
    model: CostModel,
    *,
    pins: Sequence[Pin] = (),
    limits: Limits | None = None,
    digests: Mapping[str, str] | None = None,
    start: Plan | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> TrainerPlan | None:
    """Search for the best plan of a job that a trainer can express and that keeps the pins; None where none fits.

    The plan's bound holds for all such plans. Stages may work ahead as far as the job's staleness allows. `start` is a
    plan of a similar job: where a mode allows its placements, each search looks only for plans that are better by more
    than the gap, and the digests name the start. `progress` is called with the number of modes that are done, and the
    number of all modes.
    """
    search = _ModeSearch(facts=facts, model=model, pins=tuple(pins), limits=limits or Limits(), digests=digests)
    modes = [mode for mode in trainer.modes_for(facts) if mode.steps_ahead <= facts.staleness]
    started = search.from_start(start, modes) if start else None
    if start and started:
        search = replace(search, digests={**(digests or {}), "start": digest(start)}, start=started.plan)
        modes = [started.mode, *(mode for mode in modes if mode != started.mode)]
    best, bound = None, float("inf")
    for done, mode in enumerate(modes):
        if progress:
            progress(done, len(modes))
        relaxed = search.relaxed_plan(mode)
        if not isinstance(relaxed, Plan):
            bound = 0.0 if relaxed == "out_of_limit" else bound
            continue
        bound = min(bound, relaxed.solver.bound_seconds)
        if started and best is None:
            best = TrainerPlan(plan=_as_search_result(relaxed, started.plan), mode=started.mode)
        if started and relaxed.placements == started.plan.placements:
            continue
        if best and relaxed.solver.bound_seconds >= best.plan.period_seconds:
            continue
        plan = search.with_equal_choices(mode, relaxed)
        if plan and (best is None or plan.period_seconds < best.plan.period_seconds):
            best = TrainerPlan(plan=plan, mode=mode)
    return best and TrainerPlan(plan=_with_bound(best.plan, bound), mode=best.mode)


@dataclass(frozen=True, kw_only=True)
class _ModeSearch:
    """The searches of one job, each in one deployment mode."""

    facts: Facts
    model: CostModel
    pins: tuple[Pin, ...]
    limits: Limits
    digests: Mapping[str, str] | None
    start: Plan | None = None

    def from_start(self, start: Plan, modes: Iterable[DeploymentMode]) -> TrainerPlan | None:
        """A plan's placements under these facts, in the first mode that allows them; None where none does."""
        for mode in modes:
            plan = re_evaluated_or_violation(start, self.facts, self.model, self._pins(mode))
            if isinstance(plan, Plan) and not any(mode.inexpressible(plan)):
                return TrainerPlan(plan=plan, mode=mode)
        return None

    def relaxed_plan(self, mode: DeploymentMode) -> Plan | Missing:
        """The best plan under the pins of a mode and of the user, without the equal choices.

        It is the start where no plan is better by more than the gap.
        """
        return self._search(mode, (), self.start)

    def _search(self, mode: DeploymentMode, chosen: Iterable[str], start: Plan | None = None) -> Plan | Missing:
        return best_plan(
            self.facts,
            self.model,
            pins=self._pins(mode, chosen),
            ahead=(mode.ahead(self.facts.graph),),
            limits=self.limits,
            digests=self.digests,
            start=start,
        )

    def _pins(self, mode: DeploymentMode, chosen: Iterable[str] = ()) -> tuple[Pin, ...]:
        """The pins of a mode, those of the choices made so far, and the user's."""
        return tuple(dict.fromkeys((*parse_pins({*mode.pins, *chosen}, self.facts.graph), *self.pins)))

    def with_equal_choices(self, mode: DeploymentMode, plan: Plan) -> Plan | None:
        """The best plan with the choices made equal one after the other; None where a choice leaves no plan."""
        chosen: tuple[str, ...] = ()
        for (leader, key), stages in _equal_groups(mode).items():
            values = list(dict.fromkeys(mode.expressible_value(stage, plan.choice(stage, key)) for stage in stages))
            if values != [plan.choice(leader, key)]:
                fastest = self._fastest(mode, chosen, stages, key, values)
                fastest = fastest or self._fastest(
                    mode, chosen, stages, key, _further_values(plan, leader, key, values)
                )
                if fastest is None:
                    return None
                plan = fastest
            chosen = (*chosen, *_pins_of_choice(key, plan.choice(leader, key), stages))
        return plan

    def _fastest(
        self, mode: DeploymentMode, chosen: tuple[str, ...], stages: Sequence[str], key: str, values: Iterable[Value]
    ) -> Plan | None:
        """The fastest plan that gives some stages one of these values."""
        results = (self._search(mode, (*chosen, *_pins_of_choice(key, value, stages))) for value in values)
        plans = [plan for plan in results if isinstance(plan, Plan)]
        return min(plans, key=lambda plan: plan.period_seconds, default=None)


def _pins_of_choice(key: str, value: Value, stages: Sequence[str]) -> tuple[str, ...]:
    """Pins that give stages one value; a micro-batch size of 0 means a token budget."""
    if key == "micro_batch_size" and not value:
        return tuple(f"{stage}.micro_batch_tokens!=0" for stage in stages)
    return pin_value(key, value, stages)


def _equal_groups(mode: DeploymentMode) -> dict[tuple[str, str], list[str]]:
    """Stages whose choices must be equal, by (leader, key of the choice); the leader is the first of them."""
    groups: dict[tuple[str, str], list[str]] = {}
    for choice in mode.equal_choices:
        groups.setdefault((choice.leader, choice.key), [choice.leader]).append(choice.stage)
    return groups


def _further_values(plan: Plan, leader: str, key: str, tried: Sequence[Value]) -> Iterator[Value]:
    """Further values where those tried leave no plan: one row per micro-batch, and layouts of powers of two."""
    if key == "micro_batch_size" and 1 not in tried:
        yield 1
    if key == "layout":
        num_ranks = plan.placement(leader).layout.num_ranks
        powers = [2**k for k in range(num_ranks.bit_length()) if num_ranks % 2**k == 0]
        for tp, pp in product(powers, powers):
            if num_ranks % (tp * pp) == 0:
                layout = Layout(tp=tp, pp=pp, dp=num_ranks // (tp * pp), sp=tp > 1)
                if layout not in tried:
                    yield layout


def _as_search_result(searched: Plan, start: Plan) -> Plan:
    """The start as the result of a search: with the digests and the solver record of that search."""
    return with_gap(start.model_copy(update={"digests": searched.digests, "solver": searched.solver}))


def _with_bound(plan: Plan, bound: float) -> Plan:
    """The plan with a bound on all plans that the trainer can express."""
    period = plan.period_seconds
    lower_bound = min(bound, period)
    update = {"status": "feasible", "bound_seconds": lower_bound, "gap": (period - lower_bound) / period}
    return plan.model_copy(update={"solver": plan.solver.model_copy(update=update)})


@dataclass(frozen=True, kw_only=True)
class Exported:
    """A plan for another trainer, costed with that trainer's generation engine.

    `plan` is the given plan where the trainer can express it, else the best plan that it can express. `inexpressible`
    has a clause for each choice of the given plan that it cannot express, and `lost_seconds` is how much longer a step
    takes without those choices. `mode` names the trainer's deployment mode.
    """

    trainer: str
    mode: str
    plan: Plan
    settings: tuple[KeyValue, ...]
    files: Mapping[str, str]
    inexpressible: tuple[str, ...]
    lost_seconds: float
    remarks: tuple[str, ...]

    def to_json(self) -> str:
        """Everything but the files, as JSON."""
        return json.dumps(
            {
                "trainer": self.trainer,
                "mode": self.mode,
                "engine": self.plan.facts.engine,
                "step_seconds": self.plan.period_seconds,
                "inexpressible": self.inexpressible,
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
    exact_mode = next((mode for mode in trainer.modes_for(plan.facts) if not any(mode.inexpressible(plan))), None)
    best = (
        TrainerPlan(plan=plan, mode=exact_mode)
        if exact_mode
        else _search(trainer, plan, rebuild_cost_model, limits, progress)
    )
    if best is None:
        return None
    source = ExportInput(plan=best.plan, job=job, directory=directory)
    settings = tuple(trainer.settings(source))
    unknown = [setting.key for setting in settings if not trainer.knows(setting.key)]
    assert not unknown, unknown
    return Exported(
        trainer=trainer.label,
        mode=best.mode.name,
        plan=best.plan,
        settings=settings,
        files={**trainer.files(source, settings), "plan.json": canonical_json(best.plan)},
        inexpressible=() if exact_mode else tuple(best.mode.inexpressible(plan)),
        lost_seconds=best.plan.period_seconds - plan.period_seconds,
        remarks=(*trainer.remarks, *_unwritten_settings(trainer, source)),
    )


def _unwritten_settings(trainer: OtherTrainer, source: ExportInput) -> Iterator[str]:
    """Yield a sentence for each setting of the job's algorithm that is not its default and changes nothing in what is
    written."""
    if source.job is None:
        return
    key, written = SETTINGS_KEYS[source.algorithm], _written(trainer, source)
    for name, field in type(source.settings).model_fields.items():
        value = getattr(source.settings, name)
        if value == field.default:
            continue
        without = source.settings.model_copy(update={name: field.default})
        if _written(trainer, replace(source, job=source.job.model_copy(update={key: without}))) == written:
            yield (
                f"{key}.{name}={value} is not written, because no key of {trainer.label} for it is known; set it there "
                "by hand if it has one."
            )


def _written(trainer: OtherTrainer, source: ExportInput) -> tuple[Mapping[str, ConfigValue], Mapping[str, str]]:
    """Return the values by key and the files that an export writes."""
    settings = tuple(trainer.settings(source))
    return {setting.key: setting.value for setting in settings}, trainer.files(source, settings)


def _with_engine_of(trainer: OtherTrainer, plan: Plan, rebuild_cost_model: CostModelBuilder) -> Plan:
    """The plan, costed with the generation engine of the trainer."""
    facts = trainer.with_engine(plan.facts)
    return plan if facts.engine == plan.facts.engine else re_evaluate(plan, facts, rebuild_cost_model(facts))


def _search(
    trainer: OtherTrainer,
    plan: Plan,
    rebuild_cost_model: CostModelBuilder,
    limits: Limits | None,
    progress: Callable[[int, int], None] | None,
) -> TrainerPlan | None:
    model = rebuild_cost_model(plan.facts)
    return best_expressible_plan(trainer, plan.facts, model, limits=limits, digests=plan.origins, progress=progress)
