"""What each kind of overlap gains: from the best synchronous plan of one layout to the whole space, row by row.

    python -m benchmarks.pipeline.ablation                      every job, one after another
    python -m benchmarks.pipeline.ablation long-tail-64 --json --plans DIR

Every row is the best plan of a space that holds that of the row before. Periods are PREDICTED by the cost model, mean
steps are SIMULATED with drawn lengths. The job of OPPO's shape (arXiv:2509.25762) has rows with streaming and
overcommit alone besides. Without `--json` the report is Markdown.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.arguments import one_of
from benchmarks.pipeline.jobs import JOBS, OPPO, STEPS, facts_of
from benchmarks.search.by_hand import WHOLE_BATCHES, single_layout
from meshwright.planner.compile import best_plan
from meshwright.planner.job.job import Facts
from meshwright.planner.plan.cost_queries import cost_model_of
from meshwright.planner.plan.pins import Pin
from meshwright.planner.plan.plan import Plan, write_plan
from meshwright.planner.plan.steps_ahead import synchronous
from meshwright.planner.simulation.sampled_durations import Sampled
from meshwright.planner.simulation.simulate import Simulation, simulate
from meshwright.planner.solver.result import Limits
from meshwright.profiles.algorithms import PPO_GRAPH
from meshwright.profiles.stages import GENERATE

GAP = 0.01

ONE_BATCH, NO_OVERCOMMIT = Pin(GENERATE, "batches_in_flight", 1), Pin(GENERATE, "overcommit", 0)


@dataclass(frozen=True, kw_only=True)
class Space:
    """What a row may choose from. `ahead` says whether stages may work ahead of the training."""

    name: str
    pins: tuple[Pin, ...] = ()
    staleness: int = 0
    ahead: bool = False
    adds: bool = True  # to the space of the row before


SPACES = (
    Space(name="per-stage layouts", pins=WHOLE_BATCHES),
    Space(name="+ streaming"),
    Space(name="+ batches in flight", pins=(NO_OVERCOMMIT,), staleness=1),
    Space(name="+ overcommit", staleness=1),
    *(Space(name=f"+ asynchronous, staleness {bound}", staleness=bound, ahead=True) for bound in (1, 2, 4, 8)),
)

ALONE = tuple(
    Space(name=f"streaming and overcommit alone, staleness {bound}", pins=(ONE_BATCH,), staleness=bound, adds=False)
    for bound in (1, 2, 4)
)
"""What OPPO has; of the job of its shape only."""

SINGLE = Space(name="single layout, synchronous", adds=False)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One plan. Gains are ratios of simulated means."""

    job: str
    space: str
    predicted_seconds: float
    simulated_seconds: float
    gain: float  # over the single layout
    gain_over_before: float | None
    search_seconds: float
    solver_gap: float
    generation: str
    streams: str
    staleness: str  # shares of tokens by staleness
    idle: str


def main() -> None:
    arguments = _arguments()
    for job in arguments.jobs or JOBS:
        if not arguments.json:
            print(f"\n## {job}\n\n{_HEADINGS}")
        spaces = (*SPACES, *ALONE) if job == OPPO else SPACES
        for row in ablate(job, facts_of(job), arguments.plans, spaces):
            print(json.dumps(asdict(row)) if arguments.json else in_markdown(row), flush=True)


def ablate(job: str, facts: Facts, plans: Path | None = None, spaces: Sequence[Space] = SPACES) -> Iterator[Row]:
    """The rows of a job, as they are found; their plans are written to the folder `plans` if there is one."""
    first = before = 0.0
    for number, space in enumerate((SINGLE, *spaces)):
        began = time.perf_counter()
        plan = _best(facts, space)
        seconds = time.perf_counter() - began
        if plan is None:
            print(f"{job}: {space.name}: no plan fits", file=sys.stderr)
            continue
        if plans:
            plans.mkdir(parents=True, exist_ok=True)
            write_plan(plans / f"{job}-{number}.json", plan)
        simulated = simulate(plan, Sampled(plan, cost_model_of, seed=0), steps=STEPS)
        mean = simulated.steps.mean
        first = first or mean
        yield Row(
            job=job,
            space=space.name,
            predicted_seconds=plan.period_seconds,
            simulated_seconds=mean,
            gain=first / mean,
            gain_over_before=before / mean if space.adds else None,
            search_seconds=seconds,
            solver_gap=plan.solver.gap,
            generation=_generation(plan),
            streams=_streams(plan),
            staleness=", ".join(f"{one.staleness}: {one.share:.0%}" for one in simulated.staleness),
            idle=_idle(simulated),
        )
        before = mean


def in_markdown(row: Row) -> str:
    cells = (
        row.space,
        f"{row.predicted_seconds:.2f}",
        f"{row.simulated_seconds:.2f}",
        f"{row.gain:.2f}x",
        f"{row.gain_over_before:.2f}x" if row.gain_over_before else "",
        row.generation,
        row.streams,
        row.staleness,
        row.idle,
        f"{row.search_seconds:.0f}",
    )
    return f"| {' | '.join(cells)} |"


_HEADINGS = (
    "| space | PREDICTED period s | SIMULATED step s | gain | over the row before | generation | streams | "
    "SIMULATED staleness of tokens | SIMULATED idle | search s |\n|---|---|---|---|---|---|---|---|---|---|"
)


def _best(facts: Facts, space: Space) -> Plan | None:
    model = cost_model_of(facts)
    if space is SINGLE:
        return single_layout(facts, model)
    allowed = facts.model_copy(update={"staleness": space.staleness})
    ahead = None if space.ahead else (synchronous(PPO_GRAPH),)
    found = best_plan(allowed, model, pins=space.pins, limits=Limits(gap=GAP), ahead=ahead)
    return found if isinstance(found, Plan) else None


def _generation(plan: Plan) -> str:
    placement = plan.placement(GENERATE)
    schedule = placement.schedule
    told = [f"{placement.layout} on {plan.pool_of(GENERATE).num_ranks}", f"{schedule.generation_slots} slots"]
    told += [f"{schedule.batches_in_flight} batches"] * (schedule.batches_in_flight > 1)
    told += [f"overcommit {schedule.overcommit}"] * (schedule.overcommit > 0)
    told += [f"ahead {placement.steps_ahead}"] * (placement.steps_ahead > 0)
    told += [f"{placement.cost.total:.1f} s"]
    return ", ".join(told)


def _streams(plan: Plan) -> str:
    chunks = {p.stage: p.schedule.chunk_tokens for p in plan.placements if p.schedule.chunk_tokens}
    return ", ".join(f"{stage} by {tokens}" for stage, tokens in chunks.items())


def _idle(simulated: Simulation) -> str:
    """The share of all ranks' time, and what most of it waits for."""
    use = simulated.cluster
    worst = f", {use.waits[0].share:.0%} for {use.waits[0].what}" if use.waits else ""
    return f"{use.idle_share:.0%}{worst}"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("jobs", nargs="*", type=one_of(JOBS), help=f"of {', '.join(JOBS)}; all without any")
    parser.add_argument("--json", action="store_true", help="one JSON object a line instead of Markdown")
    parser.add_argument("--plans", type=Path, help="folder for the plans, which can then be rehearsed")
    return parser.parse_args()


if __name__ == "__main__":
    main()
