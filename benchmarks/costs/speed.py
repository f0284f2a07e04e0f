"""How long one candidate takes to cost: `python -m benchmarks.costs.speed [JOB.yaml]`.

Prints CPU microseconds per question, the first time (new) and again (warm), medians over all questions.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

from meshwright.cost_models.blended import cost_model
from meshwright.cost_models.cost import Cost
from meshwright.cost_models.question import Call
from meshwright.planner.job import read_job, resolve
from meshwright.planner.rules import layout_rules, schedules
from meshwright.profiles.layout import Layout, divisors
from meshwright.profiles.stages import STAGES

_MOST_QUESTIONS = 400


def main(path: Path) -> None:
    facts = resolve(read_job(path), path.parent)
    model = cost_model(facts.cluster, facts.workload, facts.precision, None)
    ranks = facts.cluster.num_ranks
    layouts = [Layout(tp=tp, pp=pp, dp=ranks // tp // pp) for tp in divisors(ranks) for pp in divisors(ranks // tp)]
    for stage in STAGES:
        legal = [layout for layout in layouts if not layout_rules(facts, stage, layout)]
        calls = [
            Call(stage=stage, model=facts.models.spec(stage.role), layout=layout, schedule=schedule)
            for layout in legal
            for schedule in schedules(facts, stage, layout)
        ][:_MOST_QUESTIONS]
        figures = [statistics.median(_seconds(model.seconds, call) for call in calls) for _ in ("new", "warm")]
        new, warm = (1e6 * seconds for seconds in figures)
        print(f"{stage.name:15} {len(calls):4} questions  new {new:7.1f} us  warm {warm:6.1f} us")


def _seconds(ask: Callable[[Call], Cost], call: Call) -> float:
    start = time.thread_time()
    ask(call)
    return time.thread_time() - start


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "examples/7b-16xa100/job.yaml"))
