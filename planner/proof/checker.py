"""Checks a proof without the search that made it: computes the bound again from the rules and the cost model.

All plans of a search case are one case of the proof. A node splits its case into two that together are the whole, so
that nothing can be left out. A case that is not split has no plan that fits in memory, or has a lower bound on its
period (`planner.proof.cases`). The smallest of these bounds is the bound of the proof. It is at most the proof's
`cutoff_seconds`, because the cases leave out choices that are in no plan with a period that short.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from meshwright.cost_models.protocol import CostModel
from meshwright.planner.plan.plan import Plan
from meshwright.planner.plan.steps_ahead import SearchCase, search_cases, steps_ahead_patterns
from meshwright.planner.proof.cases import Case
from meshwright.planner.proof.document import Closed, Node, Overlap, Proof, Split
from meshwright.planner.proof.space import AMOUNTS, Enumeration, Space
from meshwright.profiles.documents import digest
from meshwright.profiles.errors import BadInput, suggestion

_TOLERANCE = 1e-9
"""Relative difference that adding the same numbers in another order may cause."""


def refusals(proof: Proof, plan: Plan, model: CostModel) -> tuple[str, ...]:
    """Return the reasons why the proof does not prove the bound of the plan; an empty tuple if it does.

    `model` is the cost model that the plan was made with.
    """
    try:
        return tuple(_differences(proof, plan)) or tuple(_not_proven(proof, plan, model))
    except BadInput as error:
        return (f"proof: {error}",)


def all_search_cases(plan: Plan) -> tuple[SearchCase, ...]:
    """Return all search cases that the staleness bound of the plan's facts allows."""
    bound = plan.facts.staleness
    return tuple(case for ahead in steps_ahead_patterns(plan.graph, bound) for case in search_cases(ahead, bound))


def proven_seconds(space: Space, nodes: Sequence[Node]) -> float:
    """Return the proven lower bound on the period of every plan of the space; infinite if there is no plan.

    Raises BadInput for nodes that are not a tree, or do not close a case as they state.
    """
    open_cases = [Case.whole(space)]
    least = math.inf
    for number, node in enumerate(nodes):
        if not open_cases:
            raise BadInput(f"node {number} follows a tree that is complete; remove it.")
        case = open_cases.pop()
        if isinstance(node, Closed):
            least = min(least, _closed_seconds(case, node, number, least))
        else:
            open_cases += reversed(split(case, node))
    if open_cases:
        raise BadInput(
            f"{len(open_cases)} cases are neither split nor closed by the {len(nodes)} nodes; prove it again."
        )
    return least


def split(case: Case, node: Split | Overlap) -> tuple[Case, Case]:
    """Return the two cases of a node, which together are the case. Raises BadInput for an unknown stage or amount."""
    for name in node.overlap if isinstance(node, Overlap) else (node.stage,):
        if name not in case.names:
            raise BadInput(f"there is no stage {name!r}; {suggestion(name, case.names)}")
    if isinstance(node, Overlap):
        return case.split_by_overlap(*node.overlap)
    if node.amount not in AMOUNTS:
        raise BadInput(f"a choice has no {node.amount!r}; {suggestion(node.amount, AMOUNTS)}")
    return case.split_by_amount(node.stage, node.amount, node.upper_bound)


def _closed_seconds(case: Case, node: Closed, number: int, max_seconds: float) -> float:
    """Return the lower bound in seconds of a case that is not split."""
    if node.closed_by == "memory" and not case.is_empty:
        raise BadInput(f"node {number} says that no plan fits in memory, but some may; prove it again.")
    if node.closed_by == "memory":
        return math.inf
    if not case.has_choices:
        raise BadInput(f"node {number} is closed by time, but its case has no plan; close it by memory.")
    return case.least_seconds(max_seconds)


def _differences(proof: Proof, plan: Plan) -> Iterator[str]:
    """Yield a sentence for each input of the proof that differs from that of the plan."""
    if proof.facts != digest(plan.facts):
        yield "the proof is for other facts than the plan's; prove this plan again."
    if proof.profile != plan.digests.get("profile"):
        yield "the proof uses another measured table than the plan's; prove this plan again."
    if proof.solver_bound_seconds != plan.solver.bound_seconds:
        yield (
            f"the proof has {proof.solver_bound_seconds:.9g} s as the solver's bound and the plan "
            f"{plan.solver.bound_seconds:.9g} s; prove this plan again."
        )
    proof_cases = [(tree.steps_ahead, tree.keeps_in_flight) for tree in proof.trees]
    if proof_cases != [(dict(case.ahead), case.keeps_in_flight) for case in all_search_cases(plan)]:
        yield "the proof does not have exactly one tree for each search case; prove this plan again."


def _not_proven(proof: Proof, plan: Plan, model: CostModel) -> Iterator[str]:
    max_seconds = min(plan.period_seconds, proof.cutoff_seconds)
    spaces = Enumeration(plan.facts, model, max_seconds).spaces(all_search_cases(plan))
    trees = zip(spaces, proof.trees, strict=True)
    proven = min(max_seconds, *(proven_seconds(space, tree.nodes) for space, tree in trees))
    if abs(proven - proof.bound_seconds) > _TOLERANCE * proven:
        yield f"the proof states {proof.bound_seconds:.12g} s and its trees prove {proven:.12g} s; state that."
