"""More memory, bandwidth, ranks or staleness never gives a slower plan, on drawn jobs."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from meshwright.cost_models.blended import cost_model
from meshwright.planner.compile import best_plan
from meshwright.planner.job.job import Facts
from meshwright.planner.job.whatif_settings import Setting, with_setting
from meshwright.planner.plan.pins import Pin
from meshwright.planner.plan.plan import Plan
from meshwright.planner.solver.result import Limits
from meshwright.profiles.layout import Layout
from tests.planner.jobs import small_facts

MIB = 2**20
ROUNDING = 1 + 1e-4
LIMITS = Limits(max_deterministic_time=5.0, gap=0.0)
FIXED = (
    *(Pin(name, "layout", Layout()) for name in ("reward_score", "ref_logprob", "critic_value", "actor_logprob")),
    *(Pin(name, "micro_batch_size", 1) for name in ("reward_score", "ref_logprob", "critic_value", "critic_train")),
)
"""They keep the problems small; a law of the whole space is one of a part of it."""

_KNOWN: dict[str, float] = {}


@dataclass(frozen=True)
class Drawn:
    """A job, and one of its inputs made better."""

    facts: Facts
    better: Setting


@st.composite
def jobs(draw: st.DrawFn) -> Drawn:
    ranks = draw(st.sampled_from((1, 1, 2)))
    facts = small_facts(
        ranks_per_node=ranks,
        memory_bytes=draw(st.sampled_from((20, 24, 32, 64))) * MIB,
        batch_size=draw(st.sampled_from((2, 4))),
        response=draw(st.sampled_from((16, 128))),
    )
    stale = draw(st.sampled_from((0, 0, 1)))
    device = facts.cluster.device
    better: Setting = draw(
        st.sampled_from(
            (
                {"cluster.device.memory_bytes": 2 * device.memory_bytes},
                {"cluster.device.memory_bytes_per_second": 2 * device.memory_bytes_per_second},
                {"cluster.intra_node.bytes_per_second": 2 * facts.cluster.intra_node.bytes_per_second},
                {"cluster.host.bytes_per_second": 2 * facts.cluster.host.bytes_per_second},
                {"cluster.ranks_per_node": 2 * ranks},
                {"staleness": stale + 1},
            )
        )
    )
    return Drawn(with_setting(facts, {"staleness": stale}), better)


def period(facts: Facts) -> float:
    """Infinite when nothing fits; the same facts are searched once."""
    key = facts.model_dump_json()
    if key not in _KNOWN:
        _KNOWN[key] = _period(facts)
    return _KNOWN[key]


def _period(facts: Facts) -> float:
    model = cost_model(facts.cluster, facts.workload, facts.precision)
    plan = best_plan(facts, model, pins=FIXED, limits=LIMITS)
    if not isinstance(plan, Plan):
        return float("inf")
    assert plan.solver.status == "optimal"
    return plan.period_seconds


@pytest.mark.check_all
@settings(max_examples=200, suppress_health_check=[HealthCheck.too_slow])
@given(jobs())
def test_a_better_input_never_gives_a_slower_plan(drawn: Drawn) -> None:
    assert period(with_setting(drawn.facts, drawn.better)) <= period(drawn.facts) * ROUNDING
