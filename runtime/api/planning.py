"""The best plan of a job."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias, TypedDict

from meshwright.cost_models.protocol import CostModel
from meshwright.planner.analysis.wave_size import best_wave, plan_chooses_wave, with_average_wave
from meshwright.planner.compile import compile_plan
from meshwright.planner.job.job import Facts, Job
from meshwright.planner.plan.pins import forbidden, parse_pins
from meshwright.planner.plan.plan import Plan
from meshwright.planner.search.no_plan import NoPlan
from meshwright.planner.search.re_evaluate import re_evaluated_or_violation
from meshwright.planner.search.search_control import ProgressCallback as SearchProgress
from meshwright.planner.solver.result import Limits
from meshwright.profiles.documents import digest
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
    progress: SearchProgress | None = None,
) -> Plan | NoPlan:
    """The fastest plan that fits, with a proven bound; or a `NoPlan` that says why there is none.

    A table gives measured costs in place of analytic ones. `pins` fix choices and `forbid` excludes some, each as
    `stage.key=value`. The search ends at the gap that `limits` give, by default 1 % up to 1,024 ranks and 3 % above.
    The plan keeps digests of the documents it was made from, including the `job` if it is given. `start` is a plan of a
    similar job: where these facts allow its placements, the search looks only for plans that are better by more than
    the gap. `observed` are the lengths of a trace, which replace those that the facts expect, up to the facts' maximum.
    `progress` is called whenever the state of the search changes.
    Raises BadInput for a pin that is not legal and a table of another device or precision.

    >>> pinned = api.plan(facts, pins=["actor_train.layout=tp2,pp1,dp4"], limits=api.Limits(gap=0.3))
    >>> str(pinned.placement("actor_train").layout)
    'tp2,pp1,dp4'
    """
    constraints = SearchConstraints(job=job, pins=tuple(pins), forbid=tuple(forbid), start=start, observed=observed)
    return plan_and_model(facts, table, constraints, limits=limits, progress=progress)[0]


def plan_and_model(
    facts: Facts,
    table: Table | None,
    constraints: SearchConstraints,
    *,
    limits: Limits | None = None,
    progress: SearchProgress | None = None,
) -> tuple[Plan | NoPlan, CostModel]:
    """The answer of `plan`, and the cost model of its facts, which remembers what it costed.

    Raises BadInput as `plan` does.
    """
    start, observed = constraints["start"], constraints["observed"]
    facts, model_of = facts if observed is None else with_observed_lengths(facts, observed), cost_model_builder(table)
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
