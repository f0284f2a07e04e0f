"""How evenly rows of drawn lengths are dealt to the replicas of a plan's stages: the most work of one over the mean.

    python -m benchmarks.pipeline.deals PLAN [--steps 8]

By tokens and as many rows each, by work and as many rows each, by work alone, and as the plan's runs do it.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from meshwright.planner.plan.plan import Plan, read_plan
from meshwright.planner.simulation.sampled_durations import sample_lengths
from meshwright.planner.simulation.simulated_generation import Lengths
from meshwright.profiles.packing import assign_to_replicas, row_work


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.pipeline.deals", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("plan", type=Path)
    parser.add_argument("--steps", type=int, default=8, help="of drawn lengths")
    asked = parser.parse_args()
    plan = read_plan(asked.plan)
    print("| stage | layout | rows of a replica | tokens, as many | work, as many | work alone | as planned |")
    print("|---|---|---|---|---|---|---|")
    for placement in plan.placements:
        kind = plan.stage(placement.stage)
        if kind.generates or placement.schedule.chunk_tokens or placement.layout.dp == 1 or placement.schedule.rows:
            continue
        found = " | ".join(f"{over:.2%}" for over in over_mean(plan, placement.stage, asked.steps))
        rows = plan.facts.workload.batch_size / placement.layout.dp
        rows /= plan.facts.workload.num_minibatches if kind.trains else 1
        print(f"| {placement.stage} | {placement.layout} | {rows:g} | {found} |")


def over_mean(plan: Plan, stage: str, steps: int) -> list[float]:
    """By how much the replica with the most work is above the mean of a step, in each of the four ways."""
    planned, workload = plan.row_split_of(stage), plan.facts.workload
    by_number = planned._replace(any_number=False)
    ways: list[Callable[[Sequence[int]], tuple[tuple[int, ...], ...]]] = [
        lambda lengths: assign_to_replicas(lengths, planned.replicas),
        by_number.assign,
        planned._replace(any_number=True).assign,
        planned.assign,
    ]
    updates = [lengths.tolist() for step in range(steps) for lengths in _batches(plan, stage, step)]
    num_batches = workload.num_minibatches if plan.stage(stage).trains else 1
    found = []
    for way in ways:
        most, mean = [], []
        for lengths in updates:
            work = row_work(planned.model, lengths)
            sums = [sum(work[row] for row in rows) for rows in way(lengths)]
            most.append(max(sums))
            mean.append(statistics.fmean(sums))
        of_steps = range(0, len(updates), num_batches)
        ratios = [sum(most[at : at + num_batches]) / sum(mean[at : at + num_batches]) for at in of_steps]
        found.append(statistics.fmean(ratios) - 1)
    return found


def _batches(plan: Plan, stage: str, step: int) -> list[Lengths]:
    """Lengths of the rows that the stage takes at once: of the whole batch, or of each minibatch of one epoch."""
    prompts, responses = sample_lengths(plan.facts.workload, seed=0, step=step)
    lengths = prompts + responses
    if not plan.stage(stage).trains:
        return [lengths]
    return np.split(np.random.default_rng([0, step, 1]).permutation(lengths), plan.facts.workload.num_minibatches)


if __name__ == "__main__":
    main()
