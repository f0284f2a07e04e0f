"""Our search beside the plans and the searches of other systems, on one cost model and in one space.

    python -m benchmarks.search.baselines                       every reference job but the largest
    python -m benchmarks.search.baselines 7b-16xa100 --json

Each baseline gives a plan that our evaluator times and our verifier checks. ReaL's random walk gets ten times the time
that our search took. No baseline may find a better plan than ours: the last column of a row that does says so.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from benchmarks.arguments import one_of
from benchmarks.search import by_hand
from benchmarks.search.brute_force import best_makespan
from benchmarks.search.mapping import auto_mapping
from benchmarks.search.mcmc import walk
from benchmarks.search.unproven import unproven
from meshwright.cost_models.protocol import CostModel
from meshwright.planner.compile import best_plan
from meshwright.planner.job.job import Facts, RoleModels, read_job, resolve
from meshwright.planner.plan.cost_queries import cost_model_of, stage_transfers
from meshwright.planner.plan.plan import Plan
from meshwright.planner.plan.steps_ahead import StepsAhead, search_cases, steps_ahead_patterns
from meshwright.planner.search.assemble import Pick
from meshwright.planner.search.formulate import Formulation, formulate
from meshwright.planner.search.frontiers import frontiers
from meshwright.planner.solver.greedy_schedule import Greedy
from meshwright.planner.solver.result import Limits

EXAMPLES = Path(__file__).parents[2] / "examples"

JOBS = (
    "one-layer-2",
    "7b-8xa100-40gb",
    "7b-8xa100-80gb",
    "7b-16xa100",
    "10b-16xa100",
    "70b-64xh100",
    "long-tail-64",
    "13b-70b-128",
)
ONE_LAYER = "one-layer-2"
"""One layer of each 7B model and one prompt, on two devices: little enough to try everything."""

TIMES_OUR_TIME = 10
SEEDS = (1, 2)
MOST_CHOICES = 100_000
"""Brute force tries every choice of options, with every order: at most so many."""

ROUNDING = 1e-4
"""Relative: what costs in ticks may hide; a baseline that is better by more has found a better plan."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One search on one job. Without `objective_seconds` it found no plan that fits."""

    job: str
    search: str
    objective_seconds: float | None
    bound_seconds: float | None
    search_seconds: float
    speedup: float | None  # over the best plan of a single layout
    is_better_than_ours: bool
    notes: str = ""


@dataclass(frozen=True, kw_only=True)
class Found:
    """What a search answered, before it is compared."""

    search: str
    plan: Plan | None
    seconds: float
    notes: str = ""


BY_HAND: dict[str, Callable[[Facts, CostModel], Plan | None]] = {
    "single layout (DeepSpeed-Chat)": by_hand.single_layout,
    "split pools (OpenRLHF)": by_hand.split,
    "co-located (verl)": by_hand.co_located,
    "by hand (ReaL, Megatron's rules)": by_hand.heuristic,
    "auto-mapping (HybridFlow)": auto_mapping,
}


def main() -> None:
    arguments = _arguments()
    rows: list[Row] = []
    for name in arguments.jobs or JOBS:
        limits = Limits(max_deterministic_time=arguments.time_limit, gap=0.0)
        found = compare(name, facts_of(name), limits, staleness=arguments.staleness, walk_times=arguments.walk_times)
        rows += found
        print("\n".join(json.dumps(asdict(row)) for row in found) if arguments.json else table(found), flush=True)
    if any(row.is_better_than_ours for row in rows):
        raise SystemExit("a baseline found a better plan than ours.")


def facts_of(name: str) -> Facts:
    """The facts of a reference job, or of the one that is made here."""
    path = EXAMPLES / (name if name != ONE_LAYER else "7b-8xa100-80gb") / "job.yaml"
    facts = resolve(read_job(path), path.parent)
    if name != ONE_LAYER:
        return facts
    return facts.model_copy(
        update={
            "models": RoleModels(**{role: replace(spec, num_layers=1) for role, spec in facts.models.by_name.items()}),
            "cluster": facts.cluster.model_copy(update={"ranks_per_node": 2}),
            "workload": facts.workload.model_copy(update={"batch_size": 1, "num_minibatches": 1}),
        }
    )


def compare(
    job: str, facts: Facts, limits: Limits, *, staleness: int | None = None, walk_times: float = TIMES_OUR_TIME
) -> list[Row]:
    """Our plan first, then every baseline; and ours again where the job may be stale by `staleness`.

    A random walk gets `walk_times` the time that our search took.
    """
    model = cost_model_of(facts)
    ours = _ours("ours", facts, model, limits)
    found = [ours, *(_timed(name, partial(search, facts, model)) for name, search in BY_HAND.items())]
    found += [_random_walk(facts, model, ours.seconds * walk_times, seed) for seed in SEEDS]
    single = next(one for one in found if one.search in BY_HAND)
    rows = [*(_row(job, one, ours, single) for one in found), *_brute_force(job, facts, model, ours)]
    if staleness:
        stale = facts.model_copy(update={"staleness": staleness})
        rows.append(_row(job, _ours(f"ours, staleness {staleness}", stale, model, limits), None, single))
    return rows


def table(rows: Sequence[Row]) -> str:
    """The rows as a table in Markdown."""
    lines = ["| job | search | step s | bound s | search s | speed-up | |", "|---|---|---|---|---|---|---|"]
    for row in rows:
        numbers = (row.objective_seconds, row.bound_seconds, row.search_seconds, row.speedup)
        step, bound, seconds, speedup = ("-" if n is None else f"{n:.3f}" for n in numbers)
        notes = "**better than ours** " * row.is_better_than_ours + row.notes
        lines.append(f"| {row.job} | {row.search} | {step} | {bound} | {seconds} | {speedup} | {notes} |")
    return "\n".join(lines) + "\n"


def _timed(name: str, search: Callable[[], Plan | None]) -> Found:
    began = time.perf_counter()
    plan = search()
    return Found(search=name, plan=plan, seconds=time.perf_counter() - began)


def _ours(name: str, facts: Facts, model: CostModel, limits: Limits) -> Found:
    found = _timed(name, lambda: _plan(best_plan(facts, model, limits=limits)))
    status = f"{found.plan.solver.status}, gap {found.plan.solver.gap:.2%}" if found.plan else ""
    return Found(search=name, plan=found.plan, seconds=found.seconds, notes=status)


def _plan(found: object) -> Plan | None:
    return found if isinstance(found, Plan) else None


def _random_walk(facts: Facts, model: CostModel, seconds: float, seed: int) -> Found:
    """The time is shared by the patterns of steps ahead, as each is a problem of its own."""
    began, allowed = time.perf_counter(), steps_ahead_patterns(facts.graph, facts.staleness)
    best: Plan | None = None
    num_steps = 0
    for ahead in allowed:
        formulation = _formulation(facts, model, ahead)
        walked = walk(formulation.problem, seconds=seconds / len(allowed), seed=seed)
        num_steps += walked.num_steps
        if walked.picks is not None:
            plan = _of_walk(facts, model, formulation, walked.picks, ahead)
            best = min((plan, best or plan), key=lambda one: one.period_seconds)
    notes = f"{num_steps:,} steps"
    return Found(search=f"random walk (ReaL), seed {seed}", plan=best, seconds=time.perf_counter() - began, notes=notes)


def _formulation(facts: Facts, model: CostModel, ahead: StepsAhead) -> Formulation:
    """The whole space of one pattern of steps ahead, with options of its own for every pool."""
    scope = search_cases(ahead, facts.staleness)[-1]
    found = frontiers(facts, model, (), search_case=scope)
    return formulate(facts, model, found, stage_transfers(facts, model), ahead, by_pool=True)


def _of_walk(
    facts: Facts, model: CostModel, formulation: Formulation, picked: Sequence[int], ahead: StepsAhead
) -> Plan:
    starts = Greedy(formulation.problem).timed_period(picked).starts
    position = {name: index for index, name in enumerate(formulation.problem.order)}
    order = sorted(position, key=lambda name: (starts[name], position[name]))
    chosen = zip(formulation.option_choices.items(), picked, strict=True)
    picks = {stage: Pick(*pairs[index]) for (stage, pairs), index in chosen}
    return unproven(facts, model, name="random walk", picks=picks, order=order, ahead=ahead)


def _brute_force(job: str, facts: Facts, model: CostModel, ours: Found) -> Iterator[Row]:
    """The optimum by trying everything, where that is little enough."""
    formulation = [_formulation(facts, model, ahead) for ahead in steps_ahead_patterns(facts.graph, facts.staleness)]
    if sum(math.prod(len(call.modes) for call in one.problem.tasks) for one in formulation) > MOST_CHOICES:
        return
    began = time.perf_counter()
    found = [(best_makespan(one.problem), one.tick_seconds) for one in formulation]
    objective = min((ticks * tick for ticks, tick in found if ticks is not None), default=None)
    yield Row(
        job=job,
        search="brute force",
        objective_seconds=objective,
        bound_seconds=objective,
        search_seconds=time.perf_counter() - began,
        speedup=None,
        is_better_than_ours=_is_better(objective, ours),
    )


def _row(job: str, found: Found, ours: Found | None, single: Found) -> Row:
    objective = found.plan.period_seconds if found.plan else None
    proven = found.plan if found.search.startswith("ours") else None
    return Row(
        job=job,
        search=found.search,
        objective_seconds=objective,
        bound_seconds=proven.solver.bound_seconds if proven else None,
        search_seconds=found.seconds,
        speedup=single.plan.period_seconds / objective if single.plan and objective else None,
        is_better_than_ours=ours is not None and _is_better(objective, ours),
        notes=found.notes,
    )


def _is_better(objective: float | None, ours: Found) -> bool:
    if objective is None:
        return False
    return ours.plan is None or objective < ours.plan.period_seconds * (1 - ROUNDING)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("jobs", nargs="*", type=one_of(JOBS), help=f"of {', '.join(JOBS)}; all without any")
    parser.add_argument("--json", action="store_true", help="one JSON object a line instead of a table")
    parser.add_argument("--staleness", type=int, help="also plan with this bound on the staleness")
    parser.add_argument("--walk-times", type=float, default=TIMES_OUR_TIME, help="time of a random walk in our times")
    parser.add_argument("--time-limit", type=float, default=60.0, help="deterministic seconds of our search")
    return parser.parse_args()


if __name__ == "__main__":
    main()
