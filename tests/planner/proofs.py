"""A plan of a job is proven, and the proof holds."""

from __future__ import annotations

from meshwright.planner.compile import compile_plan
from meshwright.planner.plan.job import Facts
from meshwright.planner.plan.plan import Plan
from meshwright.planner.proof.checker import refusals
from meshwright.planner.proof.prover import prove
from tests.planner.drawn import model_of


def require_proof(facts: Facts) -> None:
    """Plans a job, proves a bound with few splits, and has it checked."""
    model = model_of(facts)
    plan = compile_plan(facts, model)
    assert isinstance(plan, Plan), plan
    proof = prove(plan, model, most_splits=20)
    assert refusals(proof, plan, model) == ()
    assert 0 < proof.bound_seconds <= plan.period_seconds
