"""How long one candidate takes to cost: `python -m benchmarks.costs.speed [JOB.yaml] [TABLE.json]`.

A model is asked what the search asks one that it has just made, in the same order: of each stage, on pools of each
size, the choices of each layout, bytes first and seconds of what fits. Most candidates are so the next schedule of a
layout whose facts are known, and some the first of a layout or of a number of rows; no candidate was asked before.
Prints CPU microseconds over all candidates: the median and the mean of the seconds, each the quickest of several models
that are asked the same; the median of the bytes; and the median when a question is asked again (warm).
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from meshwright.cost_models.cost import Memory
from meshwright.cost_models.protocol import CostModel, StageQuery
from meshwright.planner.job.job import Facts, read_job, resolve
from meshwright.planner.plan.cost_queries import cost_model_of
from meshwright.planner.plan.pool_rules import pool_sizes
from meshwright.planner.search.legal_choices import legal_choices
from meshwright.profiles.algorithms import PPO_GRAPH
from meshwright.profiles.stages import Stage
from meshwright.profiles.table import Table, read_table

T = TypeVar("T")

_NUM_MODELS = 5


def main(path: Path, table: Table | None) -> None:
    facts = resolve(read_job(path), path.parent)
    models = [cost_model_of(facts, table) for _ in range(_NUM_MODELS)]
    for stage in PPO_GRAPH.stages:
        calls = _calls(facts, stage)
        asked = [_microseconds(facts, model, calls) for model in models]
        new, held = ([min(tries) for tries in zip(*kind, strict=True)] for kind in zip(*asked, strict=True))
        warm = [_timed(models[0].seconds, query)[1] for query in calls if _fits(facts, models[0].memory(query))]
        seconds = f"seconds: median {statistics.median(new):5.1f} us, mean {statistics.mean(new):5.1f} us"
        others = f"bytes {statistics.median(held):5.1f} us, warm {statistics.median(warm):4.1f} us"
        print(f"{stage.name:15} {len(new):5} of {len(calls):5} candidates fit; {seconds}; {others}")


def _calls(facts: Facts, stage: Stage) -> list[StageQuery]:
    model = facts.models.spec(stage.role)
    return [
        StageQuery(stage=stage, model=model, layout=choice.layout, schedule=choice.schedule)
        for size in pool_sizes(facts.cluster)
        for choice in legal_choices(facts, stage, size, ())
    ]


def _microseconds(facts: Facts, model: CostModel, calls: Sequence[StageQuery]) -> tuple[list[float], list[float]]:
    """Of the seconds of each candidate that fits, and of the bytes of each."""
    new, held = [], []
    for query in calls:
        memory, taken = _timed(model.memory, query)
        held.append(taken)
        if _fits(facts, memory):
            new.append(_timed(model.seconds, query)[1])
    return new, held


def _fits(facts: Facts, memory: Memory) -> bool:
    return memory.peak_bytes <= facts.cluster.device.usable_bytes


def _timed(ask: Callable[[StageQuery], T], query: StageQuery) -> tuple[T, float]:
    start = time.thread_time()
    answer = ask(query)
    return answer, 1e6 * (time.thread_time() - start)


if __name__ == "__main__":
    job, table = (sys.argv[1:] + [""] * 2)[:2]
    main(Path(job or "examples/7b-16xa100/job.yaml"), read_table(Path(table)) if table else None)
