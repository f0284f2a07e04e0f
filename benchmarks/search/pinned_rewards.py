"""Random jobs with rewards on hosts: whether the asked gap is reached, and whether any random pin gives a faster plan.

    python -m benchmarks.search.pinned_rewards [--jobs 30] [--pins 500] [--minutes 10]

Jobs differ in their staleness, batch, cluster and in how slow their rewards are. A pin fixes one choice of one stage
(its pool, or the layout that it has there); a plan with it may not be faster than the bound of the plan without.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, islice

from meshwright.planner.compile import compile_plan
from meshwright.planner.job.job import Facts
from meshwright.planner.job.rewards_and_tools import RewardLoad
from meshwright.planner.plan.cost_queries import cost_model_of
from meshwright.planner.plan.plan import Plan
from meshwright.planner.plan.pool_rules import first_ranks, pool_sizes
from meshwright.profiles.environment.latency import LatencySpec
from meshwright.profiles.lengths import LengthSpec
from tests.planner.jobs import small_facts

_ROUNDING = 1e-6
"""Relative: of a turn in ticks."""


@dataclass(frozen=True, kw_only=True)
class Pinned:
    """One job: the gap of its plan and the one asked, the pins that were tried, and those that gave a faster plan."""

    seed: int
    gap: float
    requested_gap: float
    num_pins: int
    faster: tuple[str, ...]


def facts_of(seed: int, base: Facts) -> Facts:
    """The job of a seed: `base` with rewards, staleness 0 to 2, and lengths with a tail."""
    draw = random.Random(seed)
    rewards = tuple(_reward(draw, f"reward_{index}") for index in range(draw.choice((1, 1, 2))))
    longest = draw.choice((128, 256, 512))
    response = LengthSpec(max=longest, median=longest // 6, p99=longest * 0.8)
    workload = base.workload.model_copy(update={"response": response, "batch_size": draw.choice((16, 32, 64))})
    return base.model_copy(update={"workload": workload, "rewards": rewards, "staleness": seed % 3})


def _reward(draw: random.Random, name: str) -> RewardLoad:
    seconds = 10 ** draw.uniform(-3, 0)
    latency = draw.choice((LatencySpec(fixed=seconds), LatencySpec(mean=seconds, p99=seconds * draw.uniform(2, 12))))
    workers = draw.choice((None, None, 2, 16))
    return RewardLoad(name=name, is_remote=draw.random() < 0.5, workers=workers, batch_size=1, latency_seconds=latency)


def pins_of(seed: int, facts: Facts) -> Iterator[str]:
    """Random pools of random stages, without end."""
    draw = random.Random(seed)
    while True:
        stage, size = draw.choice(facts.graph.names), draw.choice(list(pool_sizes(facts.cluster)))
        yield f"{stage}.pool={draw.choice(list(first_ranks(facts.cluster, size)))}:{size}"


def tried(seed: int, facts: Facts, num_pins: int, until: float) -> Pinned:
    """A job with its pins, as many as there is time for."""
    model = cost_model_of(facts)
    best = compile_plan(facts, model)
    assert isinstance(best, Plan), seed
    faster: list[str] = []
    num_tried = 0
    for pin in islice(pins_of(seed, facts), num_pins):
        num_tried += 1
        found = compile_plan(facts, model, pins=(pin,))
        if isinstance(found, Plan) and found.period_seconds < best.solver.bound_seconds * (1 - _ROUNDING):
            faster.append(f"{pin}: {found.period_seconds:.6g} s, bound {best.solver.bound_seconds:.6g} s")
        if time.monotonic() > until:
            break
    return Pinned(
        seed=seed,
        gap=best.solver.gap,
        requested_gap=best.solver.requested_gap,
        num_pins=num_tried,
        faster=tuple(faster),
    )


def main() -> None:
    """Tries jobs and pins, and prints what was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=30)
    parser.add_argument("--pins", type=int, default=500, help="of all jobs together")
    parser.add_argument("--minutes", type=float, default=10.0)
    asked = parser.parse_args()
    until, each = time.monotonic() + 60 * asked.minutes, -(-asked.pins // asked.jobs)
    found: list[Pinned] = []
    for seed in count():
        if len(found) == asked.jobs or time.monotonic() > until:
            break
        one = tried(seed, facts_of(seed, small_facts(batch_size=64)), each, until)
        found.append(one)
        print(
            f"{seed}: gap {one.gap:.4%} of {one.requested_gap:.1%}, {one.num_pins} pins, faster: {one.faster}",
            flush=True,
        )
    missed = [one.seed for one in found if one.gap > one.requested_gap]
    print(
        f"{len(found)} jobs, {sum(one.num_pins for one in found)} pins; gap missed: {missed}; "
        f"faster: {[one.seed for one in found if one.faster]}"
    )


if __name__ == "__main__":
    main()
