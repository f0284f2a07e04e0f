"""How much of the solver's bound a proof by cases reaches, and what it takes to make one and to check it.

    python -m benchmarks.search.proofs examples/7b-8xa100-80gb/job.yaml examples/long-tail-64/job.yaml

Seconds are of this process's processor time, the plan's included.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from meshwright import api

T = TypeVar("T")


def rows(job: Path, gap: float) -> Iterator[str]:
    """What is told of one job, cell by cell."""
    facts = api.resolve(api.read_job(job), job.parent)
    plan, planning = timed(lambda: api.plan(facts, limits=api.Limits(gap=gap)))
    assert isinstance(plan, api.Plan)
    proof, proving = timed(lambda: api.prove(plan))
    refused, checking = timed(lambda: api.verify(plan, proof=proof))
    assert not refused, refused
    yield job.parent.name
    yield f"{plan.period_seconds:.5g}"
    yield f"{plan.solver.bound_seconds:.5g}"
    yield f"{proof.bound_seconds:.5g}"
    yield f"{proof.bound_seconds / plan.solver.bound_seconds:.1%}"
    yield from (f"{seconds:.1f}" for seconds in (planning, proving, checking))
    yield str(sum(len(tree.nodes) for tree in proof.trees))


def timed(work: Callable[[], T]) -> tuple[T, float]:
    """What work returned, and its seconds."""
    began = time.process_time()
    found = work()
    return found, time.process_time() - began


def main() -> None:
    """Prints a table, a row for each job."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("jobs", nargs="+", type=Path, metavar="JOB.yaml")
    parser.add_argument("--gap", type=float, default=0.0, help="of the plan")
    asked = parser.parse_args()
    print("| job | step s | solver's bound s | proven s | of the solver's | plan s | prove s | check s | nodes |")
    print("|---|---|---|---|---|---|---|---|---|")
    for job in asked.jobs:
        print(f"| {' | '.join(rows(job, asked.gap))} |", flush=True)


if __name__ == "__main__":
    main()
