"""Checks a proof without the search that made it: computes the bound again, from the rules and the cost model.

All plans of a scope are one case. A node splits its case in two, so that nothing is left out whatever it says; a case
that is not split has no plan that fits the memory, or a least time (`planner.proof.cases`). The least of these times is
the bound, or the seconds within which plans are looked at: a choice that is in no plan so fast is in no case.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from meshwright.cost_models.question import CostModel
from meshwright.planner.plan.plan import Plan
from meshwright.planner.plan.steps_ahead import Scope, patterns, scopes
from meshwright.planner.proof.cases import Case
from meshwright.planner.proof.document import Closed, Meeting, Node, Proof, Split
from meshwright.planner.proof.enumeration import AMOUNTS, Enumeration, Space
from meshwright.profiles.documents import digest
from meshwright.profiles.errors import BadInput, suggestion

_TOLERANCE = 1e-9
"""Relative: what adding the same numbers in another order may change."""


def refusals(proof: Proof, plan: Plan, model: CostModel) -> tuple[str, ...]:
    """Why the proof does not hold of the facts and the solver's word in a plan, whose costs are the model's; empty if
    it does."""
    try:
        return tuple(_wrong(proof, plan)) or tuple(_not_proven(proof, plan, model))
    except BadInput as error:
        return (f"proof: {error}",)


def every_scope(plan: Plan) -> tuple[Scope, ...]:
    """The scopes that the bound on staleness of a plan's facts allows: together they are all plans."""
    bound = plan.facts.staleness
    return tuple(scope for ahead in patterns(plan.graph, bound) for scope in scopes(ahead, bound))


def proven_seconds(space: Space, nodes: Sequence[Node]) -> float:
    """What no plan of the space is faster than; infinite where there is none.

    Raises BadInput for nodes that are no tree, or do not close a case as they say.
    """
    waiting = [Case.whole(space)]
    least = math.inf
    for number, node in enumerate(nodes):
        if not waiting:
            raise BadInput(f"node {number} follows a tree that is whole; remove it.")
        case = waiting.pop()
        if isinstance(node, Closed):
            least = min(least, _closed(case, node, number, least))
        else:
            waiting += reversed(split(case, node))
    if waiting:
        raise BadInput(f"{len(waiting)} cases are neither split nor closed by the {len(nodes)} nodes; prove it again.")
    return least


def split(case: Case, node: Split | Meeting) -> tuple[Case, Case]:
    """The two cases of a node, which together are the case. Raises BadInput for a stage or an amount that is none."""
    for name in node.meet if isinstance(node, Meeting) else (node.stage,):
        if name not in case.names:
            raise BadInput(f"there is no stage {name!r}; {suggestion(name, case.names)}")
    if isinstance(node, Meeting):
        return case.meeting(*node.meet)
    if node.amount not in AMOUNTS:
        raise BadInput(f"a choice has no {node.amount!r}; {suggestion(node.amount, AMOUNTS)}")
    return case.within(node.stage, node.amount, node.most)


def _closed(case: Case, node: Closed, number: int, most: float) -> float:
    """The seconds of a case that is not split."""
    if node.closed_by == "memory" and not case.is_empty:
        raise BadInput(f"node {number} says that no plan fits the memory, and some may; prove it again.")
    if node.closed_by == "memory":
        return math.inf
    if not case.has_choices:
        raise BadInput(f"node {number} tells the time of plans, and there is none; it is closed by memory.")
    return case.least_seconds(most)


def _wrong(proof: Proof, plan: Plan) -> Iterator[str]:
    """What the proof is about that the plan is not."""
    if proof.facts != digest(plan.facts):
        yield "the proof is of other facts than the plan's; prove this plan again."
    if proof.profile != plan.digests.get("profile"):
        yield "the proof is of costs by another measured table than the plan's; prove this plan again."
    if proof.solver_bound_seconds != plan.solver.bound_seconds:
        yield (
            f"the proof has {proof.solver_bound_seconds:.9g} s as the solver's bound and the plan "
            f"{plan.solver.bound_seconds:.9g} s; prove this plan again."
        )
    told = [(tree.ahead, tree.runs_on) for tree in proof.trees]
    if told != [(dict(scope.ahead), scope.runs_on) for scope in every_scope(plan)]:
        yield "the trees of the proof are not those of all ways to work ahead, each once; prove this plan again."


def _not_proven(proof: Proof, plan: Plan, model: CostModel) -> Iterator[str]:
    most = min(plan.period_seconds, proof.within_seconds)
    spaces = Enumeration(plan.facts, model, most).spaces(every_scope(plan))
    trees = zip(spaces, proof.trees, strict=True)
    found = min(most, *(proven_seconds(space, tree.nodes) for space, tree in trees))
    if abs(found - proof.bound_seconds) > _TOLERANCE * found:
        yield f"the proof states {proof.bound_seconds:.12g} s and its trees prove {found:.12g} s; state that."
