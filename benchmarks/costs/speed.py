"""How long one candidate takes to cost: `python -m benchmarks.costs.speed [JOB.yaml] [TABLE.json]`.

Prints CPU microseconds per question, the first time (new) and again (warm): medians over all questions of the quickest
of several models that are asked them all, in the same order.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from meshwright.cost_models.blended import cost_model
from meshwright.cost_models.cost import Cost
from meshwright.cost_models.question import Call, CostModel
from meshwright.planner.job import Facts, read_job, resolve
from meshwright.planner.rules import layout_rules, schedules
from meshwright.profiles.layout import Layout, divisors
from meshwright.profiles.stages import STAGES, Stage
from meshwright.profiles.table import Table, read_table

_MOST_QUESTIONS = 400
_NUM_MODELS = 7


def main(path: Path, table: Table | None) -> None:
    facts = resolve(read_job(path), path.parent)
    for stage in STAGES:
        calls = _calls(facts, stage)
        models = [cost_model(facts.cluster, facts.workload, facts.precision, table) for _ in range(_NUM_MODELS)]
        new, warm = (_microseconds(models, calls) for _ in ("new", "warm"))
        print(f"{stage.name:15} {len(calls):4} questions  new {new:7.1f} us  warm {warm:6.1f} us")


def _calls(facts: Facts, stage: Stage) -> list[Call]:
    ranks = facts.cluster.num_ranks
    layouts = [Layout(tp=tp, pp=pp, dp=ranks // tp // pp) for tp in divisors(ranks) for pp in divisors(ranks // tp)]
    return [
        Call(stage=stage, model=facts.models.spec(stage.role), layout=layout, schedule=schedule)
        for layout in layouts
        if not layout_rules(facts, stage, layout)
        for schedule in schedules(facts, stage, layout)
    ][:_MOST_QUESTIONS]


def _microseconds(models: Sequence[CostModel], calls: Sequence[Call]) -> float:
    tries = zip(*([_seconds(model.seconds, call) for call in calls] for model in models), strict=True)
    return 1e6 * statistics.median(min(seconds) for seconds in tries)


def _seconds(ask: Callable[[Call], Cost], call: Call) -> float:
    start = time.thread_time()
    ask(call)
    return time.thread_time() - start


if __name__ == "__main__":
    job, table = (sys.argv[1:] + [""] * 2)[:2]
    main(Path(job or "examples/7b-16xa100/job.yaml"), read_table(Path(table)) if table else None)
