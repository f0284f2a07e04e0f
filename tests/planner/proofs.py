"""Jobs whose choices a checker enumerates; and a plan of a job that is proven, and whose proof holds."""

from __future__ import annotations

import math

from meshwright.planner.compile import compile_plan
from meshwright.planner.job.job import Facts
from meshwright.planner.plan.plan import Plan
from meshwright.planner.proof.checker import refusals
from meshwright.planner.proof.prover import prove
from meshwright.planner.proof.space import Enumeration
from meshwright.planner.solver.result import Limits
from tests.planner.drawn import model_of
from tests.planner.jobs import mixed_facts, mixture_facts, small_facts
from tests.planner.plans import long_facts

JOBS = {
    "small": small_facts(),
    "experts": mixture_facts(small_facts()),
    "long": long_facts(),
    "two kinds": mixed_facts(),
    "three nodes": small_facts(nodes=3, ranks_per_node=2, batch_size=12),
}


def enumeration(facts: Facts, most_seconds: float = math.inf) -> Enumeration:
    return Enumeration(facts, model_of(facts), most_seconds)


def require_proof(facts: Facts) -> None:
    """Plans a job, proves a bound with few splits, and has it checked."""
    model = model_of(facts)
    plan = compile_plan(facts, model, limits=Limits(gap=0.05))
    assert isinstance(plan, Plan), plan
    proof = prove(plan, model, max_splits=20)
    assert refusals(proof, plan, model) == ()
    assert 0 < proof.bound_seconds <= plan.period_seconds
