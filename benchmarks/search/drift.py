"""What planning again gives when a job changes under its plan: other lengths, or a node fewer.

    python -m benchmarks.search.drift examples/long-tail-64/job.yaml --staleness 0 4

Each row is SIMULATED: 20 steps with lengths that are drawn, under the plan as it was and under the one near it that is
best for what has changed, beside what was predicted of each. `from scratch` is what the latter takes, as predicted,
over what a whole search finds. Seconds of planning are of this process's processor time, warm.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.search.proofs import timed
from meshwright import api
from meshwright.planner.analysis.replan import replan, without_nodes
from meshwright.planner.plan.cost_queries import cost_model_of
from meshwright.planner.search.re_evaluate import re_evaluate
from meshwright.planner.simulation.sampled_durations import Sampled
from meshwright.planner.simulation.simulate import simulate

HEADINGS = (
    *("staleness", "what changed", "as it was, step s", "predicted", "replanned, step s", "predicted", "less"),
    *("predicted", "moving s", "from scratch", "replan s"),
)


def changes(facts: api.Facts, times: Sequence[float]) -> Iterator[tuple[str, api.Facts]]:
    """The facts after each change, and how it is called."""
    response = facts.workload.response
    for factor in times:
        longer = response.with_mean(facts.workload.response_lengths.mean * factor)
        workload = facts.workload.model_copy(update={"response": longer})
        yield f"responses x{factor:g}", facts.model_copy(update={"workload": workload})
    yield "a node lost", without_nodes(facts, 1)


def cells(plan: api.Plan, changed: api.Facts) -> Iterator[str]:
    """What is told of one change; a process that has planned again for what was meets it for the first time."""
    replan(plan, plan.facts, cost_model_of(plan.facts))
    found, seconds = timed(lambda: replan(plan, changed, cost_model_of(changed)))
    model = cost_model_of(changed)
    after = simulated(found.plan)
    kept, new = found.old_plan_seconds, found.plan.period_seconds
    before = simulated(re_evaluate(plan, changed, model)) if kept else None
    scratch = api.plan(changed)
    assert isinstance(scratch, api.Plan)
    yield from (f"{before:.2f}", f"{kept:.2f}") if before and kept else (found.reason_not_kept.rstrip("."), "-")
    yield from (f"{after:.2f}", f"{new:.2f}")
    yield from (f"{1 - after / before:.1%}", f"{1 - new / kept:.1%}") if before and kept else ("-", "-")
    yield f"{found.moving_seconds:.2f}"
    yield f"{new / scratch.period_seconds - 1:+.1%}"
    yield f"{seconds:.2f}"


def simulated(plan: api.Plan) -> float:
    """Mean seconds of a step."""
    return simulate(plan, Sampled(plan, cost_model_of, seed=0), steps=20).steps.mean


def main() -> None:
    """Prints a table, a row for each change."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("job", type=Path, metavar="JOB.yaml")
    parser.add_argument("--staleness", type=int, nargs="+", default=[0])
    parser.add_argument("--times", type=float, nargs="+", default=[1 / 3, 3.0], help="how much longer responses get")
    asked = parser.parse_args()
    given = api.resolve(api.read_job(asked.job), asked.job.parent)
    print(f"| {' | '.join(HEADINGS)} |", f"|{'---|' * len(HEADINGS)}", sep="\n", flush=True)
    for staleness in asked.staleness:
        facts = api.with_setting(given, {"staleness": staleness})
        plan = api.plan(facts)
        assert isinstance(plan, api.Plan)
        for told, changed in changes(facts, asked.times):
            print(f"| {' | '.join((str(staleness), told, *cells(plan, changed)))} |", flush=True)


if __name__ == "__main__":
    main()
