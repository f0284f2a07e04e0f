"""Verification of plans: their rules, their costs, and proofs of their bounds, which are also read and written here."""

from __future__ import annotations

from pathlib import Path

from meshwright.planner.analysis.recorded_costs import mismatched_costs
from meshwright.planner.plan.plan import Plan
from meshwright.planner.plan.verify import verify as broken_rules
from meshwright.planner.proof.checker import refusals
from meshwright.planner.proof.document import Proof
from meshwright.planner.proof.document import read_proof as read_proof_file
from meshwright.planner.proof.document import write_proof as write_proof_file
from meshwright.planner.proof.prover import prove as proof_of
from meshwright.profiles.documents import digest
from meshwright.profiles.errors import require_none
from meshwright.profiles.table import Table
from meshwright.runtime.api.arguments import Pathname, cost_model_builder


def verify(plan: Plan, table: Table | None = None, proof: Proof | None = None) -> tuple[str, ...]:
    """One sentence for each rule that the plan breaks; an empty tuple for a valid plan.

    If no rule is broken, one sentence for each recorded cost that is wrong; if no cost is wrong, one for each reason
    why the proof does not prove the bound.

    Costs are recomputed with the cost model that the plan was made with: equations alone, or the measured table, which
    has to be given. Without it, the costs of a plan made with a table are not checked, and a proof is refused.
    """
    violations = broken_rules(plan) or _other_table(plan, table)
    if violations:
        return violations
    if names_table(plan) and table is None:
        return ("the proof is for costs from a measured table; give the table as --profile.",) if proof else ()
    model = cost_model_builder(table)(plan.facts)
    return mismatched_costs(plan, model) or (refusals(proof, plan, model) if proof else ())


def prove(plan: Plan, table: Table | None = None) -> Proof:
    """Prove a lower bound on the period of every plan of the same facts; `verify` checks the proof without a search.

    The proof ignores pins, so it holds whatever is pinned. Its bound may be lower than the solver's. The table is the
    one that the plan was made with. Raises BadInput for a plan that `verify` finds something wrong with, for one with
    paces measured in a run, and if the table is missing.
    """
    require_none((*_unknown_costs(plan, table), *verify(plan, table)), "plan")
    return proof_of(plan, cost_model_builder(table)(plan.facts))


def names_table(plan: Plan) -> bool:
    """True if the plan was made with a measured table."""
    return "profile" in plan.digests


def unchecked(plan: Plan, table: Table | None = None, proof: Proof | None = None) -> tuple[str, ...]:
    """One sentence for each part of a valid plan that `verify` cannot check, with what the check needs."""
    sentences = []
    if names_table(plan) and table is None:
        sentences.append("its costs come from a measured table and were not checked: give the table as --profile.")
    if slow := [placement.stage for placement in plan.placements if placement.pace != 1]:
        sentences.append(
            f"the paces of {', '.join(slow)} come from a run and were not checked: compare the plan with that run."
        )
    if proof is None and plan.solver.bound_seconds > 0:
        sentences.append(
            f"its bound of {plan.solver.bound_seconds:.6g} s is the solver's claim and was not checked: give a proof "
            "of it as --proof (plan --proof writes one)."
        )
    return tuple(sentences)


def _unknown_costs(plan: Plan, table: Table | None) -> tuple[str, ...]:
    if names_table(plan) and table is None:
        return ("it was made with a measured table; give the table as --profile.",)
    if any(placement.pace != 1 for placement in plan.placements):
        return (
            "a run measured the paces of its stages, and no bound is proven for measured paces; plan the job again.",
        )
    return ()


def _other_table(plan: Plan, table: Table | None) -> tuple[str, ...]:
    if table is None or plan.digests.get("profile") == digest(table):
        return ()
    origin = "with another table; give that one" if names_table(plan) else "without a table; give none"
    return (f"the plan was made {origin} as --profile, or plan the job again with this one.",)


def read_proof(path: Pathname) -> Proof:
    """The proof in a JSON file; `verify` checks it. Raises BadInput for anything malformed."""
    return read_proof_file(Path(path))


def write_proof(path: Pathname, proof: Proof) -> None:
    """Writes the proof's one canonical text, whole or not at all. Raises BadInput where the file cannot be written."""
    write_proof_file(Path(path), proof)
