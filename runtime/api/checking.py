"""Whether a plan is what it says: its laws, and every cost that it states."""

from __future__ import annotations

from meshwright.planner.analysis.stated import misstated
from meshwright.planner.plan.plan import Plan
from meshwright.planner.plan.verify import verify as broken_laws
from meshwright.profiles.documents import digest
from meshwright.profiles.table import Table
from meshwright.runtime.api.given import remodel


def verify(plan: Plan, table: Table | None = None) -> tuple[str, ...]:
    """One sentence for each law that the plan breaks and, where it breaks none, for each cost that it states wrongly.

    Costs are asked again of the model that the plan was made with: analytic, or of its measured table, which is to be
    given. Without it the costs of such a plan are not looked at: see `names_table`.
    """
    broken = broken_laws(plan) or _other_table(plan, table)
    if broken or (names_table(plan) and table is None):
        return broken
    return misstated(plan, remodel(table)(plan.facts))


def names_table(plan: Plan) -> bool:
    """Whether the plan was made with a measured table."""
    return "profile" in plan.digests


def _other_table(plan: Plan, table: Table | None) -> tuple[str, ...]:
    if table is None or plan.digests.get("profile") == digest(table):
        return ()
    made = "with another table; give that one" if names_table(plan) else "without a table; give none"
    return (f"the plan was made {made} as --profile, or plan the job again with this one.",)
