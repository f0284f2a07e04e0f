"""The verifier convicts a plan of each rule that it breaks, in a sentence that says what to change."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from meshwright.cost_models.cost import Cost, Term
from meshwright.planner.compile import compile_plan
from meshwright.planner.plan.evaluate import evaluate
from meshwright.planner.plan.plan import Plan
from meshwright.planner.plan.verify import require_valid, verify
from meshwright.profiles.errors import BadInput
from meshwright.profiles.experts import Experts
from meshwright.profiles.layout import Layout
from meshwright.profiles.schedule import Recompute, Schedule
from tests.planner.jobs import ToyModel, small_facts

PINS = (
    "actor_generate.layout=tp1,pp2,dp2",
    "actor_generate.pool=0:4",
    "actor_train.layout=tp2,pp1,dp1",
    "actor_train.pool=0:2",
    "actor_logprob.pool=0:2",
    "actor_logprob.layout=tp2,pp1,dp1",
    "critic_value.pool=2:2",
    "critic_train.pool=2:2",
)


@pytest.fixture(scope="module")
def plan() -> Plan:
    facts = small_facts()
    found = compile_plan(facts, ToyModel(facts), pins=PINS)
    assert isinstance(found, Plan)
    return found.model_copy(update={"pins": ()})


def changed(plan: Plan, stage: str, **update: Any) -> Plan:
    """The plan with one placement changed, and nothing made consistent with it."""
    placements = tuple(p.model_copy(update=update) if p.stage == stage else p for p in plan.placements)
    return plan.model_copy(update={"placements": placements})


def of_experts(plan: Plan) -> Plan:
    """The plan with actor and reference of four experts."""
    experts = Experts(num_experts=4, experts_per_token=2, ffn_size=64)
    roles = {role: replace(getattr(plan.facts.models, role), experts=experts) for role in ("actor", "ref")}
    facts = plan.facts.model_copy(update={"models": plan.facts.models.model_copy(update=roles)})
    return plan.model_copy(update={"facts": facts, "digests": facts.digests()})


def test_pools_that_cross_are_refused() -> None:
    facts = small_facts(nodes=3, ranks_per_node=2)
    found = compile_plan(facts, ToyModel(facts), pins=["actor_train.pool=0:4", "critic_train.pool=4:2"])
    assert isinstance(found, Plan)
    assert verify(found) == ()
    moved = [p.model_copy(update={"first_rank": 2, "num_ranks": 4}) if p.first_rank == 4 else p for p in found.pools]
    broken = verify(found.model_copy(update={"pools": tuple(moved)}))
    assert any("ranks 0-3 and ranks 2-5 overlap in part" in sentence for sentence in broken)


def solved(plan: Plan, **update: object) -> Plan:
    """The plan with another record of its search."""
    return plan.model_copy(update={"solver": plan.solver.model_copy(update=update)})


@pytest.mark.parametrize(
    "update",
    [
        {"status": "feasible", "bound_seconds": 0.0, "gap": 1.0},
        {"status": "pinned", "bound_seconds": 0.0, "gap": 1.0},
        {"status": "feasible"},
    ],
)
def test_a_plan_may_say_less_of_its_search_than_is_known(plan: Plan, update: dict[str, object]) -> None:
    assert verify(solved(plan, **update)) == ()


def test_a_compiled_plan_is_clean(plan: Plan) -> None:
    assert verify(plan) == ()


@pytest.mark.parametrize(
    ("breakage", "sentence"),
    [
        (
            lambda plan: changed(plan, "actor_train", layout=Layout(tp=3)),
            "actor_train: tp=3 does not divide the 4 attention heads of actor; use tp=2.",
        ),
        (
            lambda plan: changed(plan, "actor_train", layout=Layout(tp=4)),
            "actor_train: tp=4 x pp=1 x dp=1 is 4 ranks and its pool has 2; make the product 2.",
        ),
        (
            lambda plan: changed(plan, "actor_generate", layout=Layout(tp=4, sp=True)),
            "actor_generate: sp is on, and a single new token cannot be divided along the sequence; turn sp off.",
        ),
        (
            lambda plan: changed(plan, "ref_logprob", schedule=Schedule(micro_batch_size=3)),
            "ref_logprob: micro_batch_size=3 does not divide the",
        ),
        (
            lambda plan: changed(plan, "ref_logprob", schedule=Schedule(recompute=Recompute.FULL)),
            "ref_logprob: recompute=full is only for a stage that trains; use none.",
        ),
        (
            lambda plan: changed(plan, "actor_generate", schedule=Schedule(generation_slots=3)),
            "actor_generate: generation_slots=3 is not a power of two between pp=2 and the 8 sequences of a "
            "replica, nor that number; use 2.",
        ),
        (
            lambda plan: plan.model_copy(update={"placements": plan.placements[1:]}),
            "actor_generate is placed 0 times; place it once.",
        ),
        (
            lambda plan: changed(plan, "ref_logprob", pool="nowhere"),
            "ref_logprob is placed on pool 'nowhere', which is not defined; define it.",
        ),
        (
            lambda plan: plan.model_copy(update={"edges": plan.edges[1:]}),
            "the edge actor_generate -> reward_score must carry tokens.",
        ),
        (
            lambda plan: plan.model_copy(update={"refits": ()}),
            "actor_generate has its own copy of the weights and no refit; add one.",
        ),
        (
            lambda plan: plan.model_copy(update={"refits": plan.refits * 2}),
            "the refit of actor_generate is not needed; remove it.",
        ),
        (
            lambda plan: changed(plan, "critic_train", start_seconds=0.0),
            "critic_train lasts",
        ),
        (
            lambda plan: plan.model_copy(update={"period_seconds": 2 * plan.period_seconds}),
            "period_seconds is",
        ),
        (
            lambda plan: plan.model_copy(update={"digests": {**plan.digests, "workload": "0"}}),
            "the digest of workload does not match the plan's facts; plan the job again.",
        ),
        (
            lambda plan: plan.model_copy(update={"pins": ("actor_train.recompute=full", "critic_value.pool=0:4")}),
            "the pin 'critic_value.pool=0:4' is not kept: critic_value has pool=2:2.",
        ),
        (
            lambda plan: plan.model_copy(update={"peak_bytes_per_rank": (1,) * 4}),
            "peak_bytes_per_rank is not what the placements add up to; plan the job again.",
        ),
        (
            lambda plan: plan.model_copy(update={"solver": plan.solver.model_copy(update={"bound_seconds": 0.0})}),
            "gap=",
        ),
        (
            lambda plan: solved(plan, status="optimal", bound_seconds=0.0, gap=1.0),
            "status=optimal and gap=1 is above the requested 0.01; a search that ended there is feasible.",
        ),
        (
            lambda plan: solved(plan, status="optimal", bound_seconds=0.0, gap=1.0, requested_gap=1.0),
            "status=optimal and no bound is known; a search without a bound is feasible.",
        ),
        (
            lambda plan: solved(plan, status="optimal", bound_seconds=0.9 * plan.period_seconds, gap=0.1),
            "status=optimal and gap=0.1 is above the requested 0.01; a search that ended there is feasible.",
        ),
        (
            lambda plan: solved(plan, status="pinned"),
            "status=pinned says that nothing was searched, and its bound is",
        ),
        (
            lambda plan: plan.model_copy(update={"digests": {**plan.digests, "job": "mine"}}),
            "the digest of job is 'mine', which is not a SHA-256; plan the job again.",
        ),
        (
            lambda plan: changed(plan, "actor_train", transient=Cost((Term("activations", -1.0),))),
            "actor_train: the cost term 'activations' is -1.0; a cost adds up from 0.",
        ),
        (
            lambda plan: plan.model_copy(update={"staleness": 1}),
            "staleness=1 is not the 0 that follows from actor_generate; plan the job again.",
        ),
        (
            lambda plan: changed(plan, "actor_generate", steps_ahead=1).model_copy(update={"staleness": 1}),
            "staleness=1 exceeds the job's bound of 0; let actor_generate work fewer steps ahead.",
        ),
        (
            lambda plan: changed(plan, "actor_generate", layout=Layout(dp=4, ep=2)),
            "actor_generate: ep=2 spreads experts, and actor has none; use ep=1.",
        ),
        (
            lambda plan: changed(of_experts(plan), "actor_train", layout=Layout(tp=2)),
            "actor_train: tp=2 shards experts, which are trained with sequence parallelism only; turn sp on.",
        ),
        (
            lambda plan: changed(of_experts(plan), "actor_train", layout=Layout(tp=2, ep=2, etp=1)),
            "actor_train: tp=2 distributes experts, which are trained with sequence parallelism only; turn sp on.",
        ),
        (
            lambda plan: changed(plan, "actor_generate", layout=Layout(tp=2, dp=2, ep=2, etp=1)),
            "actor_generate: ep=2 spreads experts, and actor has none; use ep=1.",
        ),
        (
            lambda plan: changed(
                of_experts(plan), "ref_logprob", layout=Layout(dp=2, ep=2), schedule=Schedule(chunk_tokens=128)
            ),
            "ref_logprob: chunk_tokens=128 lets each replica read at its own pace, and the replicas of ep=2",
        ),
        (
            lambda plan: changed(plan, "actor_generate", layout=Layout(pp=5)),
            "actor_generate: pp=5 is more than the 4 layers of actor; use pp=4 at most.",
        ),
        (
            lambda plan: changed(plan, "actor_generate", stage_layers=(3, 1)),
            "actor_generate: stage_layers=3 1, and the 4 layers of actor are split over pp=2 stages as 2 2; use these.",
        ),
        (
            lambda plan: changed(plan, "critic_value", steps_ahead=1),
            "critic_value: steps_ahead=1, and only actor_generate",
        ),
        (
            lambda plan: changed(plan, "reward_score", steps_ahead=1),
            "reward_score has steps_ahead=1 and reads what actor_generate writes with steps_ahead=0; use 0 or less.",
        ),
    ],
)
def test_a_broken_rule_is_told(plan: Plan, breakage: Callable[[Plan], Plan], sentence: str) -> None:
    told = verify(breakage(plan))
    assert any(line.startswith(sentence) for line in told), told


def test_a_plan_is_required_to_be_valid_by_the_first_rule_that_it_breaks(plan: Plan) -> None:
    require_valid(plan)
    broken = changed(plan, "critic_value", steps_ahead=1)
    with pytest.raises(BadInput) as error:
        require_valid(broken)
    assert str(error.value) == f"plan: {verify(broken)[0]}"


def test_stages_at_once_on_one_rank_are_told(plan: Plan) -> None:
    """The critic's value stage is moved onto the ranks of the actor's log-probabilities, at the same time."""
    other = plan.placement("actor_logprob")
    mine = plan.placement("critic_value")
    start = other.start_seconds
    broken = changed(plan, "critic_value", pool=other.pool, start_seconds=start, end_seconds=start + mine.cost.total)
    assert any("both run on rank 0" in line for line in verify(broken))


def test_a_stage_before_its_inputs_is_told(plan: Plan) -> None:
    mine = plan.placement("critic_value")
    broken = changed(plan, "critic_value", start_seconds=0.0, end_seconds=mine.cost.total)
    assert any(
        line.startswith("critic_value starts at 0 s, before actor_generate is ready at") for line in verify(broken)
    )


def test_too_little_memory_is_told_with_the_stages_on_the_rank(plan: Plan) -> None:
    huge = plan.placement("actor_train").resident + Cost((Term("more", float(2**40)),))
    broken = evaluate(changed(plan, "actor_train", resident=huge))
    told = next(line for line in verify(broken) if line.startswith("rank 0 needs"))
    assert "actor_train" in told
    assert "move a stage away or shard it over more ranks" in told


def test_every_random_mutation_of_a_time_is_told(plan: Plan) -> None:
    for placement in plan.placements:
        for shift in (-1e-3, 1e-3):
            moved = changed(plan, placement.stage, start_seconds=max(0.0, placement.start_seconds + shift))
            assert verify(moved), placement.stage


def test_a_rank_that_is_too_full_is_found_whatever_the_plan_says_of_its_peaks(plan: Plan) -> None:
    fullest = max(plan.peak_bytes_per_rank)
    assert min(plan.peak_bytes_per_rank) < fullest
    device = plan.facts.cluster.parts[0].device.model_copy(update={"memory_bytes": fullest - 1})
    facts = plan.facts.model_copy(update={"cluster": plan.facts.cluster.model_copy(update={"device": device})})
    told = tuple(1 if peak == fullest else 2 for peak in plan.peak_bytes_per_rank)
    update = {"facts": facts, "digests": facts.digests(), "peak_bytes_per_rank": told}
    found = verify(plan.model_copy(update=update))
    assert "peak_bytes_per_rank is not what the placements add up to; plan the job again." in found
    assert any("and its device can use" in sentence for sentence in found)
