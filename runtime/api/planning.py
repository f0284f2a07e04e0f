"""The best plan of a job."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TypeAlias, TypedDict

from meshwright.cost_models.cost import least_trusted
from meshwright.cost_models.generation_cost import ENGINE_SLEEP, ENGINE_WAKE
from meshwright.cost_models.protocol import CostModel
from meshwright.planner.analysis.wave_size import best_wave, plan_chooses_wave, with_average_wave
from meshwright.planner.compile import compile_plan
from meshwright.planner.job.engine_limits import engine_violations, engines_of
from meshwright.planner.job.job import Facts, Job
from meshwright.planner.plan.cost_queries import CostModelBuilder
from meshwright.planner.plan.pins import forbidden, parse_pins
from meshwright.planner.plan.plan import EngineOption, Plan
from meshwright.planner.search.no_plan import NoPlan
from meshwright.planner.search.re_evaluate import re_evaluated_or_violation
from meshwright.planner.search.search_control import ProgressCallback as SearchProgress
from meshwright.planner.solver.result import Limits
from meshwright.profiles.documents import digest
from meshwright.profiles.errors import BadInput
from meshwright.profiles.frameworks import NOT_RUN, EngineName
from meshwright.profiles.stages import GENERATE
from meshwright.profiles.table import Table
from meshwright.profiles.workload import ObservedLengths, workload_with_lengths
from meshwright.runtime.api.arguments import cost_model_builder, limits_of
from meshwright.runtime.device.garbage_collection import no_garbage_collection

Progress: TypeAlias = Callable[[str, int, int], None]
"""Called with a description of the searches, the number that are done, and their total."""


class SearchConstraints(TypedDict):
    """The constraints of a search: pinned and forbidden choices, the plan to start from, and the lengths of a trace.

    The plan records the digest of `job`.
    """

    job: Job | None
    pins: Sequence[str]
    forbid: Sequence[str]
    start: Plan | None
    observed: ObservedLengths | None


def plan(
    facts: Facts,
    table: Table | None = None,
    *,
    pins: Iterable[str] = (),
    forbid: Iterable[str] = (),
    limits: Limits | None = None,
    job: Job | None = None,
    start: Plan | None = None,
    observed: ObservedLengths | None = None,
    engines: Sequence[EngineName] = (),
    progress: SearchProgress | None = None,
) -> Plan | NoPlan:
    """The fastest plan that fits, with a proven bound; or a `NoPlan` that says why there is none.

    A table gives measured costs in place of analytic ones. `pins` fix choices and `forbid` excludes some, each as
    `stage.key=value`. The search ends at the gap that `limits` give, by default 1 % up to 1,024 ranks and 3 % above.
    The plan keeps digests of the documents it was made from, including the `job` if it is given. `start` is a plan of a
    similar job: where these facts allow its placements, the search looks only for plans that are better by more than
    the gap. `observed` are the lengths of a trace, which replace those that the facts expect, up to the facts' maximum.
    Of several `engines` the plan has the one with the shortest step, and records the others; by default it has the
    engine of the facts or, if the `job` has engine=auto, one of those that it allows. `progress` is called whenever the
    state of the search changes.
    Raises BadInput for a pin that is not legal and a table of another device or precision.

    >>> pinned = api.plan(facts, pins=["actor_train.layout=tp2,pp1,dp4"], limits=api.Limits(gap=0.3))
    >>> str(pinned.placement("actor_train").layout)
    'tp2,pp1,dp4'
    """
    constraints = SearchConstraints(job=job, pins=tuple(pins), forbid=tuple(forbid), start=start, observed=observed)
    return plan_and_model(facts, table, constraints, limits=limits, engines=engines, progress=progress)[0]


def plan_and_model(
    facts: Facts,
    table: Table | None,
    constraints: SearchConstraints,
    *,
    limits: Limits | None = None,
    engines: Sequence[EngineName] = (),
    progress: SearchProgress | None = None,
    model_of: CostModelBuilder | None = None,
) -> tuple[Plan | NoPlan, CostModel]:
    """The answer of `plan`, and the cost model of its facts, which remembers what it costed.

    `model_of` builds the cost models of the table; by default each is new. Raises BadInput as `plan` does.
    """
    build = model_of or cost_model_builder(table)
    job = constraints["job"]
    candidates = engines or (engines_of(job, facts) if job else ())
    if len(candidates) > 1:
        return _fastest_engine(facts, table, candidates, constraints, build, limits=limits, progress=progress)
    return _plan_and_model(facts, table, constraints, build, limits=limits, progress=progress)


def _fastest_engine(
    facts: Facts,
    table: Table | None,
    engines: Sequence[EngineName],
    constraints: SearchConstraints,
    model_of: CostModelBuilder,
    *,
    limits: Limits | None,
    progress: SearchProgress | None,
) -> tuple[Plan | NoPlan, CostModel]:
    """Return the plan with the shortest step over all engines, or the first engine's answer if none has a plan."""
    answers: list[tuple[Plan | NoPlan, CostModel]] = []
    options: list[EngineOption] = []
    for index, engine in enumerate(engines):
        with_engine = facts.model_copy(update={"engine": engine})
        never_run = [f"{NOT_RUN[engine]}; name it as engine to plan with it."] if engine in NOT_RUN else []
        if violations := [*engine_violations(with_engine), *never_run]:
            options.append(EngineOption(engine=engine, reason=violations[0]))
            continue
        of_engine = _share_of_time(limits, len(engines) - index)
        try:
            answers.append(
                _plan_and_model(with_engine, table, constraints, model_of, limits=of_engine, progress=progress)
            )
        except BadInput as error:
            if engine == engines[0]:
                raise
            options.append(EngineOption(engine=engine, reason=str(error)))
        else:
            options.append(_option(engine, answers[-1][0]))
    plans = [(answer, model) for answer, model in answers if isinstance(answer, Plan)]
    if not answers:
        raise BadInput(f"engine {options[0].engine}: {options[0].reason}")
    if not plans:
        return answers[0]
    best, model = min(plans, key=lambda found: found[0].period_seconds)
    return best.model_copy(update={"engine_options": tuple(options)}), model


def _share_of_time(limits: Limits | None, num_searches: int) -> Limits | None:
    """Return the limits of the first of several searches that share the time until a deadline."""
    if limits is None or limits.deadline is None:
        return limits
    now = time.monotonic()
    return replace(limits, deadline=now + (limits.deadline - now) / num_searches)


def _option(engine: EngineName, answer: Plan | NoPlan) -> EngineOption:
    if isinstance(answer, Plan):
        terms = answer.placement(GENERATE).cost.terms
        source = least_trusted(term.source for term in terms if term.name not in (ENGINE_WAKE, ENGINE_SLEEP))
        return EngineOption(engine=engine, period_seconds=answer.period_seconds, source=source)
    sentences = " ".join(limit.sentence for limit in answer.limits)
    return EngineOption(engine=engine, reason=sentences or "no plan was found within the limits of the search.")


def _plan_and_model(
    facts: Facts,
    table: Table | None,
    constraints: SearchConstraints,
    model_of: CostModelBuilder,
    *,
    limits: Limits | None,
    progress: SearchProgress | None,
) -> tuple[Plan | NoPlan, CostModel]:
    """Return the fastest plan with the engine of the facts, and the cost model."""
    start, observed = constraints["start"], constraints["observed"]
    facts = facts if observed is None else with_observed_lengths(facts, observed)
    chooses_wave = plan_chooses_wave(facts)
    facts = with_average_wave(facts) if chooses_wave else facts
    all_pins, model = (*constraints["pins"], *map(forbidden, constraints["forbid"])), model_of(facts)
    warm_start = re_evaluated_or_violation(start, facts, model, parse_pins(all_pins, facts.graph)) if start else None
    usable_start = warm_start if isinstance(warm_start, Plan) else None
    origins = {"job": constraints["job"], "profile": table, "start": start if usable_start else None, "trace": observed}
    with no_garbage_collection():
        answer = compile_plan(
            facts,
            model,
            pins=all_pins,
            digests={name: digest(document) for name, document in origins.items() if document is not None},
            limits=limits_of(limits),
            rebuild_cost_model=model_of,
            progress=progress,
            start=usable_start,
        )
        if isinstance(answer, Plan) and chooses_wave:
            best = best_wave(answer, model_of, pins=all_pins, limits=limits_of(limits))
            return best, model_of(best.facts)
        return answer, model


def with_observed_lengths(facts: Facts, observed: ObservedLengths) -> Facts:
    """The facts with the lengths of a trace, up to their own maximum.

    Raises BadInput where only one of the two has multi-turn rollouts.
    """
    return facts.model_copy(update={"workload": workload_with_lengths(facts.workload, observed)})
