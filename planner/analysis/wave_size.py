"""The wave size of dynamic sampling (prompts sampled at once), which the plan chooses if the job does not state it.

Small waves need several waves to fill a batch, each of which decodes its longest response to the end; large waves
sample groups that are dropped. A plan is first searched for waves that fill a batch on average. Other wave sizes are
then tried in the neighbourhood of that plan, and the search continues from the fastest. The bound of a plan
holds for plans with its own wave size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from meshwright.planner.compile import compile_plan
from meshwright.planner.job.job import Facts
from meshwright.planner.plan.cost_queries import CostModelBuilder
from meshwright.planner.plan.pins import parse_pins
from meshwright.planner.plan.plan import Plan
from meshwright.planner.search.neighbourhood import best_plan_nearby
from meshwright.planner.solver.result import Limits

_RELATIVE_SIZES = (0.5, 0.75, 1.0, 1.05, 1.1, 1.2, 1.35, 1.5, 2.0)
"""Wave sizes that are tried, relative to the number of prompts that fill a batch on average."""


@dataclass(frozen=True)
class SampledWaves:
    """Averages for a step: prompts in a wave, number of waves, and the share of sampled groups that are trained on."""

    num_prompts: int
    num_waves: float
    trained_share: float

    @property
    def sentences(self) -> tuple[str, ...]:
        """Report lines."""
        return (
            f"waves of {self.num_prompts} prompts, {self.num_waves:.2f} a step on average; {self.trained_share:.0%} of "
            "the sampled groups are trained on",
        )


def sampled_waves(plan: Plan) -> SampledWaves | None:
    """Return the waves of a plan's step; None without dynamic sampling."""
    num_groups, sampling = plan.facts.workload.num_prompts, plan.facts.workload.dynamic_sampling
    if not sampling:
        return None
    size, number = sampling.wave_size(num_groups), sampling.expected_waves(num_groups)
    return SampledWaves(size, number, num_groups / (size * number))


def plan_chooses_wave(facts: Facts) -> bool:
    """True if the job leaves the wave size to the plan."""
    sampling = facts.workload.dynamic_sampling
    return sampling is not None and sampling.num_prompts is None


def with_wave(facts: Facts, num_prompts: int) -> Facts:
    """Return the facts with waves of `num_prompts` prompts."""
    workload = facts.workload
    assert workload.dynamic_sampling
    sampling = workload.dynamic_sampling.model_copy(update={"num_prompts": num_prompts})
    return facts.model_copy(update={"workload": workload.model_copy(update={"dynamic_sampling": sampling})})


def with_average_wave(facts: Facts) -> Facts:
    """Return the facts with waves that fill a batch on average."""
    assert facts.workload.dynamic_sampling
    return with_wave(facts, facts.workload.dynamic_sampling.wave_size(facts.workload.num_prompts))


def best_wave(
    plan: Plan, rebuild_cost_model: CostModelBuilder, *, pins: Sequence[str] = (), limits: Limits | None = None
) -> Plan:
    """Return the plan, or a faster one with another wave size."""
    fixed = parse_pins(pins, plan.graph)
    nearby_plans = [
        nearby
        for facts in (with_wave(plan.facts, size) for size in candidate_wave_sizes(plan.facts))
        if (nearby := best_plan_nearby(plan, facts, rebuild_cost_model(facts), limits or Limits(), fixed))
    ]
    start = min((plan, *nearby_plans), key=lambda one: one.period_seconds)
    if start is plan:
        return plan
    model = rebuild_cost_model(start.facts)
    searched = compile_plan(start.facts, model, pins=pins, digests=plan.origins, limits=limits, start=start)
    assert isinstance(searched, Plan), searched  # the start is a solution
    return searched


def candidate_wave_sizes(facts: Facts) -> tuple[int, ...]:
    """The wave sizes that are tried, in prompts."""
    sampling, num_groups = facts.workload.dynamic_sampling, facts.workload.num_prompts
    assert sampling
    return tuple(sorted({math.ceil(share * num_groups / sampling.mean) for share in _RELATIVE_SIZES}))
