"""Whether a plan is what it says: its laws, and every cost that it states."""

from __future__ import annotations

from meshwright.planner.analysis.stated import misstated
from meshwright.planner.plan.plan import Plan
from meshwright.planner.plan.verify import verify as broken_laws
from meshwright.planner.proof.checker import refusals
from meshwright.planner.proof.document import Proof
from meshwright.planner.proof.prover import prove as proof_of
from meshwright.profiles.documents import digest
from meshwright.profiles.errors import require_none
from meshwright.profiles.table import Table
from meshwright.runtime.api.given import remodel


def verify(plan: Plan, table: Table | None = None, proof: Proof | None = None) -> tuple[str, ...]:
    """One sentence for each law that the plan breaks.

    Where it breaks none, one for each cost that it states wrongly, and then for what a proof of its bound does not
    prove.

    Costs are asked again of the model that the plan was made with: analytic, or of its measured table, which is to be
    given. Without it the costs of such a plan are not looked at, and no proof can be.
    """
    broken = broken_laws(plan) or _other_table(plan, table)
    if broken:
        return broken
    if names_table(plan) and table is None:
        return ("the proof is of costs by a measured table; give the table as --profile.",) if proof else ()
    model = remodel(table)(plan.facts)
    return misstated(plan, model) or (refusals(proof, plan, model) if proof else ())


def prove(plan: Plan, table: Table | None = None) -> Proof:
    """A proof of what no plan of the same facts is faster than, which `verify` checks without a search.

    Pins are not looked at: it holds whatever is pinned. It may prove less than the solver says. The table is the one
    that the plan was made with. Raises BadInput for a plan that `verify` finds something wrong with.
    """
    require_none((*_unknown_costs(plan, table), *verify(plan, table)), "plan")
    return proof_of(plan, remodel(table)(plan.facts))


def names_table(plan: Plan) -> bool:
    """Whether the plan was made with a measured table."""
    return "profile" in plan.digests


def unchecked(plan: Plan, table: Table | None = None, proof: Proof | None = None) -> tuple[str, ...]:
    """What `verify` cannot look at in a plan that it finds nothing wrong with: one sentence each, with what it would
    take."""
    found = []
    if names_table(plan) and table is None:
        found.append("its costs are of a measured table and were not checked: give the table as --profile.")
    if slow := [placement.stage for placement in plan.placements if placement.pace != 1]:
        found.append(
            f"the paces of {', '.join(slow)} are of a run and were not checked: compare the plan with that run."
        )
    if proof is None and plan.solver.bound_seconds > 0:
        found.append(
            f"its bound of {plan.solver.bound_seconds:.6g} s is the solver's word and was not checked: give a proof of "
            "it as --proof (plan --proof writes one)."
        )
    return tuple(found)


def _unknown_costs(plan: Plan, table: Table | None) -> tuple[str, ...]:
    if names_table(plan) and table is None:
        return ("it was made with a measured table; give the table as --profile.",)
    if any(placement.pace != 1 for placement in plan.placements):
        return ("its stages are as slow as a run has shown them, of which no bound is proven; plan the job again.",)
    return ()


def _other_table(plan: Plan, table: Table | None) -> tuple[str, ...]:
    if table is None or plan.digests.get("profile") == digest(table):
        return ()
    made = "with another table; give that one" if names_table(plan) else "without a table; give none"
    return (f"the plan was made {made} as --profile, or plan the job again with this one.",)
