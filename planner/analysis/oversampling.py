"""How many prompts a wave of dynamic sampling has: the plan's choice where the job leaves it open.

Few prompts fill a batch in several waves, each of which decodes its longest response to its end; many draw groups that
are dropped. A plan is searched for waves that fill a batch on average; near its choices other waves are tried, and from
the quickest the search goes on. The bound of a plan is on plans with its own waves.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from meshwright.planner.compile import compile_plan
from meshwright.planner.plan.calls import Remodel
from meshwright.planner.plan.job import Facts
from meshwright.planner.plan.pins import parse_pins
from meshwright.planner.plan.plan import Plan
from meshwright.planner.search.near import near_plan
from meshwright.planner.solver.result import Limits

_SHARES = (0.5, 0.75, 1.0, 1.05, 1.1, 1.2, 1.35, 1.5, 2.0)
"""Of the prompts that fill a batch on average."""


@dataclass(frozen=True)
class DrawnWaves:
    """Of a step of a plan, on average: prompts of a wave, waves, and of the groups drawn those that are trained on."""

    num_prompts: int
    num_waves: float
    trained_share: float

    @property
    def sentences(self) -> tuple[str, ...]:
        """What there is to tell, for people."""
        return (
            f"waves of {self.num_prompts} prompts, {self.num_waves:.2f} a step on average; {self.trained_share:.0%} of "
            "the groups drawn are trained on",
        )


def drawn_waves(plan: Plan) -> DrawnWaves | None:
    """None without dynamic sampling."""
    num_groups, sampling = plan.facts.workload.num_prompts, plan.facts.workload.dynamic_sampling
    if not sampling:
        return None
    size, number = sampling.wave(num_groups), sampling.expected_waves(num_groups)
    return DrawnWaves(size, number, num_groups / (size * number))


def is_open(facts: Facts) -> bool:
    """Whether the size of a wave is the plan's to choose."""
    sampling = facts.workload.dynamic_sampling
    return sampling is not None and sampling.num_prompts is None


def with_wave(facts: Facts, num_prompts: int) -> Facts:
    """The facts with waves of so many prompts."""
    workload = facts.workload
    assert workload.dynamic_sampling
    sampling = workload.dynamic_sampling.model_copy(update={"num_prompts": num_prompts})
    return facts.model_copy(update={"workload": workload.model_copy(update={"dynamic_sampling": sampling})})


def with_first_wave(facts: Facts) -> Facts:
    """The facts with waves that fill a batch on average."""
    assert facts.workload.dynamic_sampling
    return with_wave(facts, facts.workload.dynamic_sampling.wave(facts.workload.num_prompts))


def best_wave(plan: Plan, remodel: Remodel, *, pins: Sequence[str] = (), limits: Limits | None = None) -> Plan:
    """The plan, or one with other waves that is quicker."""
    fixed = parse_pins(pins, plan.graph)
    near = [
        tried
        for facts in (with_wave(plan.facts, size) for size in waves(plan.facts))
        if (tried := near_plan(plan, facts, remodel(facts), limits or Limits(), fixed))
    ]
    start = min((plan, *near), key=lambda one: one.period_seconds)
    if start is plan:
        return plan
    model = remodel(start.facts)
    found = compile_plan(start.facts, model, pins=pins, digests=plan.origins, limits=limits, start=start)
    assert isinstance(found, Plan), found  # there is the one to start from
    return found


def waves(facts: Facts) -> tuple[int, ...]:
    """Sizes that are weighed, in prompts."""
    sampling, num_groups = facts.workload.dynamic_sampling, facts.workload.num_prompts
    assert sampling
    return tuple(sorted({math.ceil(share * num_groups / sampling.mean) for share in _SHARES}))
