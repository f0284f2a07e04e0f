"""The simulated steady state against the solver's objective, on every reference job.

    python -m benchmarks.pipeline.law                       every job under examples/, with its own bound on staleness
    python -m benchmarks.pipeline.law 7b-16xa100 --staleness 2 --json

Each job is planned and simulated four times: with planned seconds, with drawn lengths, with drawn lengths for
generation alone, and with the mean of those in every turn. So a difference has a name: `no barrier` is what turns gain
by running into each other, `tail` what the drawn longest responses and the slowest of the replicas make of generation
on average, `bursts` what it costs that its turns differ, `padding` what drawn lengths make of the other stages.
PREDICTED and SIMULATED throughout.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace

from benchmarks.arguments import one_of
from benchmarks.pipeline.jobs import EXAMPLES, STEPS, facts_of
from meshwright.planner.compile import best_plan
from meshwright.planner.plan.cost_queries import cost_model_of
from meshwright.planner.plan.plan import Plan
from meshwright.planner.program.durations import Durations, Planned, StepWork
from meshwright.planner.simulation.sampled_durations import Sampled
from meshwright.planner.simulation.simulate import first_step, simulate
from meshwright.planner.solver.result import Limits
from meshwright.profiles.errors import BadInput
from meshwright.profiles.stages import GENERATE

GAP = 0.01
BAR = 0.1


@dataclass(frozen=True, kw_only=True)
class Row:
    """One job. The differences are parts of the objective and add up to that of the simulated mean."""

    job: str
    staleness: int
    objective_seconds: float
    simulated_seconds: float
    difference: float
    no_barrier: float
    tail: float
    bursts: float
    padding: float

    @property
    def is_within(self) -> bool:
        return abs(self.difference) <= BAR

    @property
    def largest_term(self) -> str:
        terms = {
            "no barrier": self.no_barrier,
            "tail": self.tail,
            "bursts": self.bursts,
            "padding": self.padding,
        }
        return max(terms, key=lambda name: abs(terms[name]))


class DrawnGeneration:
    """Planned seconds, but for generation and what it delivers."""

    name = "planned, generation sampled"

    def __init__(self, plan: Plan, drawn: Durations) -> None:
        self._planned, self._drawn = Planned(plan), drawn

    def of_step(self, step: int, /) -> StepWork:
        drawn, planned = self._drawn.of_step(step), self._planned.of_step(step)
        return replace(drawn, seconds={**planned.seconds, GENERATE: drawn.seconds[GENERATE]})


class EvenGeneration:
    """Planned seconds, but for generation: in every step what the slowest replica takes on average."""

    name = "planned, generation even"

    def __init__(self, plan: Plan, drawn: Durations) -> None:
        first = first_step(plan)
        slowest = [max(drawn.of_step(step).seconds[GENERATE]) for step in range(first, first + STEPS)]
        work = Planned(plan).of_step(0)
        self._work = replace(work, seconds={**work.seconds, GENERATE: (statistics.fmean(slowest),)})

    def of_step(self, _step: int, /) -> StepWork:
        return self._work


def main() -> None:
    arguments = _arguments()
    if not arguments.json:
        print("| job | staleness | objective s | SIMULATED s | difference | no barrier | tail | bursts | padding | |")
        print("|---|---|---|---|---|---|---|---|---|---|")
    for row in rows(arguments.jobs or reference_jobs(), arguments.staleness):
        print(json.dumps(asdict(row)) if arguments.json else in_markdown(row), flush=True)


def reference_jobs() -> tuple[str, ...]:
    return tuple(sorted(path.parent.name for path in EXAMPLES.glob("*/job.yaml")))


def rows(jobs: tuple[str, ...], staleness: int | None) -> Iterator[Row]:
    """One row for each job that can be read and planned; why not is said of the others."""
    for job in jobs:
        try:
            facts = facts_of(job)
        except BadInput as error:
            print(f"{job}: {error}")
            continue
        if staleness is not None:
            facts = facts.model_copy(update={"staleness": staleness})
        plan = best_plan(facts, cost_model_of(facts), limits=Limits(gap=GAP))
        if isinstance(plan, Plan):
            yield compare(job, plan)
        else:
            print(f"{job}: {plan}")


def compare(job: str, plan: Plan) -> Row:
    """The differences as parts of the plan's objective."""
    objective, drawn = plan.solver.objective_seconds, Sampled(plan, cost_model_of, seed=0)
    planned, even, generated, simulated = (
        simulate(plan, durations, steps=STEPS).steps.mean
        for durations in (Planned(plan), EvenGeneration(plan, drawn), DrawnGeneration(plan, drawn), drawn)
    )
    return Row(
        job=job,
        staleness=plan.staleness,
        objective_seconds=objective,
        simulated_seconds=simulated,
        difference=simulated / objective - 1,
        no_barrier=planned / objective - 1,
        tail=(even - planned) / objective,
        bursts=(generated - even) / objective,
        padding=(simulated - generated) / objective,
    )


def in_markdown(row: Row) -> str:
    parts = (row.difference, row.no_barrier, row.tail, row.bursts, row.padding)
    verdict = "within 10 %" if row.is_within else f"above 10 %: {row.largest_term}"
    cells = (
        row.job,
        str(row.staleness),
        f"{row.objective_seconds:.2f}",
        f"{row.simulated_seconds:.2f}",
        *(f"{part:+.1%}" for part in parts),
        verdict,
    )
    return f"| {' | '.join(cells)} |"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "jobs", nargs="*", type=one_of(reference_jobs()), help="names of folders under examples/; all without any"
    )
    parser.add_argument("--staleness", type=int, help="plan with this bound on the staleness instead of the job's")
    parser.add_argument("--json", action="store_true", help="one JSON object a line instead of a table")
    return parser.parse_args()


if __name__ == "__main__":
    main()
