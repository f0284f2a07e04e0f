"""Costs of the choices of a stage: all of them as a table, and one choice after the other.

    python -m benchmarks.search.choice_tables examples/70b-64xh100/job.yaml examples/moe-16384/job.yaml

For each stage that does not generate, on all ranks of the cluster: processor seconds to cost every legal choice as
columns, again with the splits of the batch known, and one choice after the other by the same laws; and the largest
relative difference between the two. Each time is the smallest of three, of this process alone.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from meshwright.cost_models.protocol import CostModel, StageQuery, queries_of
from meshwright.planner.job.job import Facts, read_job, resolve
from meshwright.planner.plan.cost_queries import Choice, cost_model_of, query_for_choice
from meshwright.planner.plan.steps_ahead import max_deferral, search_cases, steps_ahead_patterns
from meshwright.planner.search.legal_choices import legal_choice_table
from meshwright.profiles.choice_table import ChoiceTable
from meshwright.profiles.elementwise import FloatArray

HEADINGS = (
    "job",
    "stage",
    "choices",
    "table, first ms",
    "table ms",
    "one by one ms",
    "us a choice",
    "ratio",
    "differs",
)

_REPEATS = 3


@dataclass(frozen=True, kw_only=True)
class Compared:
    """Processor seconds for the choices of one stage, and the largest relative difference of an amount."""

    job: str
    stage: str
    num_choices: int
    first_seconds: float
    table_seconds: float
    single_seconds: float
    difference: float

    @property
    def cells(self) -> tuple[str, ...]:
        ratio = self.single_seconds / self.table_seconds
        milliseconds = (f"{1000 * s:.1f}" for s in (self.first_seconds, self.table_seconds, self.single_seconds))
        each = f"{1e6 * self.table_seconds / self.num_choices:.2f}"
        return (
            self.job,
            self.stage,
            f"{self.num_choices:,}",
            *milliseconds,
            each,
            f"{ratio:.0f}",
            f"{self.difference:.0e}",
        )


def compared(path: Path) -> Iterator[Compared]:
    """Compare the stages of a job."""
    facts = resolve(read_job(path), path.parent)
    for stage, query, choices in stage_choices(facts):
        first, *again = [timed(columns, cost_model_of(facts), query, choices) for _ in range(_REPEATS + 1)]
        singly = [timed(one_by_one, cost_model_of(facts), query, choices) for _ in range(_REPEATS)]
        expected = singly[0][1]
        difference = np.abs(first[1] - expected) / np.maximum(np.abs(expected), np.finfo(float).tiny)
        yield Compared(
            job=path.parent.name,
            stage=stage,
            num_choices=len(choices),
            first_seconds=first[0],
            table_seconds=min(seconds for seconds, _ in again),
            single_seconds=min(seconds for seconds, _ in singly),
            difference=float(difference.max()),
        )


def stage_choices(facts: Facts) -> Iterator[tuple[str, StageQuery, ChoiceTable]]:
    """Yield the legal choices of each stage that does not generate, on all ranks and in the widest search case."""
    ahead = steps_ahead_patterns(facts.graph, facts.staleness)[-1]
    case, deferral = search_cases(ahead, facts.staleness)[-1], max_deferral(ahead, facts.staleness)
    for stage in facts.graph.stages:
        if not stage.generates:
            choices = legal_choice_table(facts, stage, facts.cluster.num_ranks, (), Counter(), search_case=case)
            if len(choices):
                yield stage.name, query_for_choice(facts, stage, Choice(*choices[0]), deferral=deferral), choices


def columns(model: CostModel, query: StageQuery, choices: ChoiceTable) -> FloatArray:
    """Return seconds, tail seconds and bytes of all choices, [amounts, choices]."""
    return np.stack([*model.seconds_of_choices(query, choices), *model.bytes_of_choices(query, choices)])


def one_by_one(model: CostModel, query: StageQuery, choices: ChoiceTable) -> FloatArray:
    """Return the same amounts from one query after the other, on one layout after the other."""
    rows = []
    for one in queries_of(query, choices):
        costs = model.on_layout(replace(one, max_deferral=query.max_deferral))
        rows.append((costs.seconds(one.schedule), costs.tail_seconds(one.schedule), *costs.bytes(one.schedule)))
    return np.array(rows).T


def timed(
    costed: Callable[[CostModel, StageQuery, ChoiceTable], FloatArray],
    model: CostModel,
    query: StageQuery,
    choices: ChoiceTable,
) -> tuple[float, FloatArray]:
    """Return the processor seconds of costing choices in one of the two ways, and the amounts."""
    start = time.process_time()
    amounts = costed(model, query, choices)
    return time.process_time() - start, amounts


def main() -> None:
    """Print a table with a row for each stage of the jobs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("jobs", nargs="+", type=Path, metavar="JOB", help="job files")
    print("| " + " | ".join(HEADINGS) + " |")
    print("|---" * len(HEADINGS) + "|")
    for path in parser.parse_args().jobs:
        for row in compared(path):
            print("| " + " | ".join(row.cells) + " |", flush=True)


if __name__ == "__main__":
    main()
