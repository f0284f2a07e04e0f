"""A proof is accepted for what it proves and nothing else, whoever changed it."""

from __future__ import annotations

import functools
import json
import random
from pathlib import Path

import pytest

from meshwright.cost_models.blended import cost_model
from meshwright.cost_models.protocol import CostModel
from meshwright.planner.compile import compile_plan
from meshwright.planner.job.job import Facts
from meshwright.planner.plan.plan import Plan
from meshwright.planner.proof.checker import all_search_cases, refusals
from meshwright.planner.proof.document import Closed, Proof, read_proof
from meshwright.planner.proof.prover import prove
from meshwright.planner.proof.space import AMOUNTS
from meshwright.planner.solver.result import Limits
from meshwright.profiles.algorithms import PPO_GRAPH
from meshwright.profiles.documents import canonical_json
from meshwright.profiles.errors import BadInput
from tests.planner.jobs import RandomModel, small_facts
from tests.planner.mutations import mutate
from tests.seeds import cases

NAMES = (*PPO_GRAPH.by_name, *AMOUNTS, "memory", "time", "nobody")


@functools.cache
def proven() -> tuple[Plan, CostModel, Proof]:
    """A plan on two ranks that may work one step ahead, its model and a proof of a few splits."""
    facts = small_facts(ranks_per_node=2, batch_size=4, memory_bytes=10 * 2**20).model_copy(update={"staleness": 1})
    return proven_of(facts, cost_model(facts.cluster, facts.workload, facts.precision), most_splits=12)


def proven_of(facts: Facts, model: CostModel, most_splits: int) -> tuple[Plan, CostModel, Proof]:
    plan = compile_plan(facts, model, limits=Limits(gap=0.0))
    assert isinstance(plan, Plan)
    return plan, model, prove(plan, model, max_splits=most_splits)


def changed(**update: object) -> tuple[str, ...]:
    """What is said of the proof with something changed."""
    plan, model, proof = proven()
    return refusals(proof.model_copy(update=update), plan, model)


def test_a_proof_of_every_scope_is_accepted_and_bounds_the_plan() -> None:
    plan, model, proof = proven()
    assert refusals(proof, plan, model) == ()
    assert 0 < proof.bound_seconds <= plan.period_seconds
    assert len(proof.trees) == len(all_search_cases(plan)) > 1


def test_another_bound_than_what_is_proven_is_refused_even_a_smaller_one() -> None:
    _, _, proof = proven()
    for factor in (0.5, 1 - 1e-6, 1 + 1e-6, 2.0):
        (sentence,) = changed(bound_seconds=proof.bound_seconds * factor)
        assert sentence.startswith(f"the proof states {proof.bound_seconds * factor:.12g} s and its trees prove")


def test_a_proof_of_other_facts_a_table_or_another_word_of_the_solver_is_refused() -> None:
    assert changed(facts="0") == ("the proof is for other facts than the plan's; prove this plan again.",)
    assert changed(profile="0") == ("the proof uses another measured table than the plan's; prove this plan again.",)
    assert "as the solver's bound" in changed(solver_bound_seconds=1.0)[0]


def test_a_tree_of_every_scope_is_needed_whole() -> None:
    _, _, proof = proven()
    assert "exactly one tree for each search case" in changed(trees=proof.trees[:1])[0]
    first, *others = proof.trees
    cut = first.model_copy(update={"nodes": first.nodes[:-1]})
    assert "1 cases are neither split nor closed" in changed(trees=(cut, *others))[0]
    long = first.model_copy(update={"nodes": (*first.nodes, Closed(closed_by="time"))})
    assert "follows a tree that is complete; remove it" in changed(trees=(long, *others))[0]


def test_a_case_with_plans_that_fit_is_not_closed_by_memory() -> None:
    _, _, proof = proven()
    trees = tuple(tree.model_copy(update={"nodes": (Closed(closed_by="memory"),)}) for tree in proof.trees)
    assert changed(trees=trees) == ("proof: node 0 says that no plan fits in memory, but some may; prove it again.",)


def test_a_single_case_proves_its_own_bound_and_no_more() -> None:
    plan, model, proof = proven()
    weak = prove(plan, model, max_splits=0)
    assert refusals(weak, plan, model) == ()
    assert weak.bound_seconds <= proof.bound_seconds


@pytest.mark.slow
@cases(("seed", "staleness"), [(seed, staleness) for staleness in range(3) for seed in range(2)], few=[(0, 0), (1, 1)])
def test_no_proof_is_above_the_best_plan(seed: int, staleness: int) -> None:
    """The search proves its plans optimal, by other means."""
    facts = small_facts(ranks_per_node=2 if staleness else 4, batch_size=8, memory_bytes=2**30).model_copy(
        update={"staleness": staleness}
    )
    plan, model, proof = proven_of(facts, RandomModel(seed, memory_scale=2.0**28), most_splits=60)
    assert refusals(proof, plan, model) == ()
    assert proof.bound_seconds <= plan.solver.bound_seconds * (1 + 1e-5)
    assert plan.solver.status == "optimal"


@pytest.mark.slow
@cases("num_mutations", [150, 500], few=1)
def test_every_change_of_a_proof_is_refused_or_proves_what_it_states(num_mutations: int, tmp_path: Path) -> None:
    """Trees that prove the same are several: nothing but a tree may be changed."""
    plan, model, proof = proven()
    draw, path, num_refused = random.Random(0), tmp_path / "proof.json", 0
    document = json.loads(canonical_json(proof))
    for _ in range(num_mutations):
        mutation = mutate(draw, document, NAMES)
        path.write_text(json.dumps(mutation.document))
        try:
            found_proof = read_proof(path)
            found = refusals(found_proof, plan, model)
        except BadInput as error:
            found = (str(error),)
        else:
            assert found or found_proof.bound_seconds == proof.bound_seconds, str(mutation)
        num_refused += bool(found)
        assert all(sentence.endswith((".", "?")) and "\n" not in sentence for sentence in found), (str(mutation), found)
        may_be = mutation.path[0] in ("trees", "cutoff_seconds")  # what is looked at, and more, may prove as much
        assert found or may_be or found_proof == proof, str(mutation)
    assert num_refused > num_mutations / 2
