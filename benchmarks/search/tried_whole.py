"""Random jobs with graphs of their own, solved and tried whole: both must find the same least turn.

    python -m benchmarks.search.tried_whole [--jobs 300] [--groups 64] [--best 0] [--nodes 0]
        [--first 0] [--report REPORT.md]

Of each job every scope (how far stages work ahead, what is offloaded) is one problem: the solver answers it as the
search does, brute force tries every choice of options on every pool and every order. Then the whole search plans the
job, and its plan must be valid, its program sound, and its bound and its turn on either side of the least one.
"""

from __future__ import annotations

import argparse
import math
import os
import platform
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from benchmarks.search.brute_force import best_makespan
from benchmarks.search.random_graphs import RandomJob, random_job
from meshwright.cost_models.protocol import CostModel
from meshwright.planner.compile import compile_plan
from meshwright.planner.plan.cost_queries import cost_model_of, stage_transfers
from meshwright.planner.plan.pins import parse_pins
from meshwright.planner.plan.plan import Plan
from meshwright.planner.plan.steps_ahead import SearchCase, search_cases, steps_ahead_patterns
from meshwright.planner.plan.verify import verify
from meshwright.planner.program.check_program import check_program
from meshwright.planner.program.program import lower
from meshwright.planner.search.formulate import Formulation, formulate
from meshwright.planner.search.frontiers import frontiers
from meshwright.planner.solver.result import Limits
from meshwright.planner.solver.solve import solve

GROUP_SIZES = (2, 4)
KEPT_OF = ((1, 3), (2, 6), (4, 8))
"""Samples of a prompt that are trained on, and how many they are the best of."""

_EXACT = Limits(gap=0.0)

_OF_REWARDS = 0.005
"""Of a turn: what the wait for rewards is rounded down by, and fewer workers may add."""


@dataclass(frozen=True, kw_only=True)
class Tried:
    """One job: how many choices its scopes had, and what disagreed; `least_seconds` are of its shortest turn, None
    where nothing fits."""

    job: RandomJob
    num_scopes: int
    num_choices: int
    least_seconds: float | None
    disagreements: tuple[str, ...]
    solver_seconds: float
    brute_force_seconds: float


def tried(job: RandomJob, oracle: CostModel | None = None) -> Tried:
    """A job that was solved and tried whole. The `oracle` is the cost model by which it is tried, by default that by
    which it is solved."""
    model = cost_model_of(job.facts)
    said: list[str] = []
    least: list[float] = []
    num_choices, in_solver, in_brute_force = 0, 0.0, 0.0
    every = [
        scope
        for ahead in steps_ahead_patterns(job.facts.graph, job.facts.staleness)
        for scope in search_cases(ahead, job.facts.staleness)
    ]
    for scope in every:
        blocks = _formulation(job, model, scope, by_pool=False)
        pools = _formulation(job, oracle or model, scope, by_pool=True)
        began = time.perf_counter()
        found = solve(blocks.problem, _EXACT).objective
        solved = time.perf_counter()
        best = best_makespan(pools.problem)
        in_solver, in_brute_force = in_solver + solved - began, in_brute_force + time.perf_counter() - solved
        num_choices += math.prod(len(call.modes) for call in pools.problem.tasks)
        if found != best:
            said.append(f"seed {job.seed}, {scope.ahead}: the solver finds {found} ticks and brute force {best}")
        if best is not None:
            least.append(best * pools.tick_seconds)
    shortest = min(least, default=None)
    return Tried(
        job=job,
        num_scopes=len(every),
        num_choices=num_choices,
        least_seconds=shortest,
        disagreements=(*said, *_planned(job, model, shortest)),
        solver_seconds=in_solver,
        brute_force_seconds=in_brute_force,
    )


def _formulation(job: RandomJob, model: CostModel, scope: SearchCase, *, by_pool: bool) -> Formulation:
    facts = job.facts
    found = frontiers(facts, model, parse_pins(job.pins, facts.graph), search_case=scope)
    return formulate(facts, model, found, stage_transfers(facts, model), scope.ahead, by_pool=by_pool)


def _planned(job: RandomJob, model: CostModel, least: float | None) -> Iterator[str]:
    """What is wrong with the plan of the whole search. Its turn may only be longer than the least one by what the wait
    for rewards on hosts is rounded down by."""
    plan = compile_plan(job.facts, model, pins=job.pins, limits=_EXACT)
    if not isinstance(plan, Plan):
        if least is not None:
            yield f"seed {job.seed}: the search finds no plan and brute force one of {least:.6g} s"
        return
    if least is None:
        yield f"seed {job.seed}: the search finds a plan of {plan.period_seconds:.6g} s and brute force none"
        return
    yield from (f"seed {job.seed}: {broken}" for broken in (*verify(plan), *check_program(lower(plan), plan.graph)))
    rounding = least * 1e-4
    if plan.solver.bound_seconds > least + rounding:
        yield f"seed {job.seed}: the bound is {plan.solver.bound_seconds:.6g} s and brute force takes {least:.6g} s"
    turn = plan.period_seconds
    if turn < least - rounding or turn > least + rounding + _OF_REWARDS * least * bool(job.facts.rewards):
        yield f"seed {job.seed}: the turn of the plan takes {turn:.6g} s and that of brute force {least:.6g} s"


def report(groups: Mapping[str, Sequence[Tried]], command: str) -> str:
    """Groups of jobs by what is said of them, as a report in Markdown."""
    every = [one for found in groups.values() for one in found]
    text = [
        f"# The solver against brute force on random graphs of stages, {date.today()}\n",
        f"`{command}` on {_processor()}, {os.cpu_count()} cores.",
        "Graphs of the job's own, of 3 to 9 stages, on two ranks or three nodes of one; a disagreement is a difference",
        "of one tick (about a millionth of a step) in any scope, or a plan that is not valid, not sound, or not as",
        "short.\n",
        "| jobs | agree | without a plan | scopes | choices | solver s | brute force s |",
        "|---|---:|---:|---:|---:|---:|---:|",
        *(_row(name, found) for name, found in groups.items() if found),
        "",
        f"Stages: {_counts(every, _num_stages)}.",
        f"Roles that train: {_counts(every, lambda one: len(one.job.facts.graph.train_stage))}.",
        f"With a stage on hosts: {sum(bool(one.job.facts.rewards) for one in every)}; "
        f"with a staleness of 1: {sum(one.job.facts.staleness for one in every)}.",
    ]
    told = [f"- {sentence}" for one in every for sentence in one.disagreements]
    return "\n".join([*text, *(["", *told] if told else [])]) + "\n"


def _row(name: str, found: Sequence[Tried]) -> str:
    agree = sum(not one.disagreements for one in found)
    infeasible = sum(one.least_seconds is None for one in found)
    sums = f"{sum(one.num_scopes for one in found):,} | {sum(one.num_choices for one in found):,}"
    seconds = f"{sum(one.solver_seconds for one in found):.0f} | {sum(one.brute_force_seconds for one in found):.0f}"
    return f"| {len(found)} of {name} | {agree} | {infeasible} | {sums} | {seconds} |"


def _num_stages(found: Tried) -> int:
    return len(found.job.facts.graph.stages) + len(found.job.facts.graph.host_stages)


def _counts(every: Iterable[Tried], of: Callable[[Tried], int]) -> str:
    found = Counter(of(one) for one in every)
    return ", ".join(f"{number} in {found[number]} jobs" for number in sorted(found))


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.machine())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=300, help="of one sample a prompt")
    parser.add_argument("--groups", type=int, default=64, help="jobs of several samples a prompt")
    parser.add_argument("--best", type=int, default=0, help="jobs that train on the best of several samples")
    parser.add_argument("--nodes", type=int, default=0, help="jobs on three nodes, of models that they cut unevenly")
    parser.add_argument("--first", type=int, default=0, help="seed of the first job")
    parser.add_argument("--report", type=Path, help="where to write the report")
    asked = parser.parse_args()
    groups = {name: [_told(job) for job in jobs] for name, jobs in _groups(asked).items()}
    command = f"python -m benchmarks.search.tried_whole --jobs {asked.jobs} --groups {asked.groups}"
    rare = ((name, getattr(asked, name)) for name in ("best", "nodes", "first"))
    text = report(groups, command + "".join(f" --{name} {number}" for name, number in rare if number))
    print(text)
    if asked.report:
        asked.report.write_text(text, encoding="utf-8")
    if any(one.disagreements for found in groups.values() for one in found):
        raise SystemExit("the solver and brute force disagree.")


def _groups(asked: argparse.Namespace) -> dict[str, Iterator[RandomJob]]:
    """The jobs that are asked for, by what is said of them."""
    sizes = [GROUP_SIZES[number % len(GROUP_SIZES)] for number in range(asked.groups)]
    sets = [KEPT_OF[number % len(KEPT_OF)] for number in range(asked.best)]
    first = asked.first
    return {
        "one sample a prompt": (random_job(first + number) for number in range(asked.jobs)),
        "2 or 4 samples a prompt": (random_job(first + n, group_size=size) for n, size in enumerate(sizes)),
        "the best 1, 2 or 4 of 3, 6 or 8 samples": (
            random_job(first + number, group_size=kept, best_of=drawn) for number, (kept, drawn) in enumerate(sets)
        ),
        "one sample a prompt on three nodes": (random_job(first + n, num_nodes=3) for n in range(asked.nodes)),
    }


def _told(job: RandomJob) -> Tried:
    found = tried(job)
    if found.disagreements or found.brute_force_seconds > 10:
        print(f"{job.seed}: {found.brute_force_seconds:.1f} s; {'; '.join(found.disagreements)}", flush=True)
    return found


if __name__ == "__main__":
    main()
