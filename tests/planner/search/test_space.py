"""The choices of a stage are exactly those that break no rule; a pin that none agrees with is refused helpfully."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace

import pytest

from meshwright.planner.job.job import Facts
from meshwright.planner.plan.layout_and_schedule_rules import layout_rules, schedule_rules
from meshwright.planner.plan.pins import Ranks, forbidden, parse_pins
from meshwright.planner.search.legal_choices import check_pins, legal_choice_table, legal_choices, pools
from meshwright.profiles.algorithms import PPO_GRAPH
from meshwright.profiles.errors import BadInput
from meshwright.profiles.layout import Layout
from meshwright.profiles.schedule import Recompute, Schedule
from meshwright.profiles.stages import Stage
from tests.planner.jobs import mixture_facts, small_facts

FACTS = small_facts(batch_size=12, num_minibatches=3)
UNEVEN = small_facts(batch_size=10, num_minibatches=2)
"""Two and four replicas have different numbers of rows."""


def pools_of(facts: Facts) -> list[str]:
    return [str(ranks) for ranks in pools(facts, PPO_GRAPH.by_name["actor_train"], ())]


@pytest.mark.parametrize("facts", [FACTS, UNEVEN], ids=["even", "uneven"])
@pytest.mark.parametrize("stage", PPO_GRAPH.stages, ids=lambda stage: stage.name)
def test_the_choices_are_those_that_break_no_rule(stage: Stage, facts: Facts) -> None:
    degrees = itertools.product(range(1, 5), repeat=4)
    layouts = [
        Layout(tp, pp, dp, sp, vpp=vpp)
        for tp, pp, dp, vpp in degrees
        for sp in (False, True)
        if not (sp and tp == 1) and not (vpp > 1 and pp == 1)
    ]
    legal = {layout for layout in layouts if layout.num_ranks == 4 and not layout_rules(facts, stage, layout)}
    found = list(legal_choices(facts, stage, 4, ()))
    assert {choice.layout for choice in found} == legal
    for layout in legal:
        schedules = {choice.schedule for choice in found if choice.layout == layout}
        assert schedules == {
            schedule
            for size, recompute, slots in itertools.product(range(1, 13), Recompute, range(13))
            for schedule in [Schedule(micro_batch_size=size, recompute=recompute, generation_slots=slots)]
            if not schedule_rules(facts, stage, layout, schedule) and not (stage.generates and size > 1)
        }


def test_only_experts_are_spread() -> None:
    facts = mixture_facts(FACTS)
    for stage in PPO_GRAPH.stages:
        found = {choice.layout for choice in legal_choices(facts, stage, 4, ())}
        spread = {layout.ep for layout in found if layout.dp == 4}
        assert spread == ({1, 2, 4} if stage.role in ("actor", "ref") else {1})
        for layout in found:
            assert not layout_rules(facts, stage, layout)


def test_experts_are_cut_in_training_under_sequence_parallelism_only() -> None:
    facts = mixture_facts(FACTS)
    for stage in PPO_GRAPH.stages:
        cut = {c.layout.sp for c in legal_choices(facts, stage, 4, ()) if c.layout.tp == 2}
        if stage.trains and stage.role == "actor":
            assert cut == {True}
        else:
            assert cut == ({False} if stage.generates else {False, True})
    with pytest.raises(BadInput, match="tp=2 shards experts, which are trained with sequence parallelism only"):
        check_pins(facts, parse_pins(["actor_train.layout=tp2"], PPO_GRAPH))


def test_whole_experts_are_offered_beside_those_that_are_cut() -> None:
    facts = mixture_facts(FACTS)
    for stage in PPO_GRAPH.stages:
        offered = {str(choice.layout) for choice in legal_choices(facts, stage, 4, ()) if choice.layout.tp == 2}
        sp = "" if stage.generates else ",sp"
        both = {f"tp2,pp1,dp2,ep2{sp}", f"tp2,pp1,dp2,ep4,etp1{sp}", f"tp2,pp1,dp2,ep2,etp1{sp}"}
        assert (both <= offered) is (stage.role in ("actor", "ref"))


def test_fine_grained_experts_are_cut_only_where_that_is_asked_for() -> None:
    facts, stage = mixture_facts(FACTS), PPO_GRAPH.by_name["actor_train"]
    actor = facts.models.actor
    assert actor.experts is not None
    fine = replace(actor, experts=replace(actor.experts, ffn_size=actor.hidden_size // 4))
    facts = facts.model_copy(update={"models": facts.models.model_copy(update={"actor": fine})})

    def cut(*pins: str) -> set[str]:
        found = legal_choices(facts, stage, 4, parse_pins(pins, PPO_GRAPH))
        return {str(choice.layout) for choice in found if choice.layout.tp == 2 and choice.layout.fold_size == 1}

    assert cut() == set()
    assert cut("actor_train.etp=2", "actor_train.pp=1") == {"tp2,pp1,dp2,sp", "tp2,pp1,dp2,ep2,sp"}
    assert cut("actor_train.layout=tp2,dp2,ep2,sp") == {"tp2,pp1,dp2,ep2,sp"}
    check_pins(facts, parse_pins(["actor_train.layout=tp2,dp2,ep2,sp"], PPO_GRAPH))


def test_a_stage_of_spread_experts_may_be_pinned() -> None:
    facts = mixture_facts(FACTS)
    check_pins(facts, parse_pins(["ref_logprob.layout=dp4,ep4"], PPO_GRAPH))
    check_pins(facts, parse_pins(["ref_logprob.layout=tp2,dp2,ep4,etp1"], PPO_GRAPH))
    with pytest.raises(BadInput, match="ep=8 does not divide the 4 experts of actor; use ep=4"):
        check_pins(facts, parse_pins(["actor_train.layout=tp2,dp4,ep8,etp1,sp"], PPO_GRAPH))
    with pytest.raises(BadInput, match="tp=2 distributes experts, which are trained with sequence parallelism only"):
        check_pins(facts, parse_pins(["actor_train.layout=tp2,dp2,ep4,etp1"], PPO_GRAPH))
    with pytest.raises(BadInput, match="ep=2 spreads experts, and critic has none; use ep=1"):
        check_pins(facts, parse_pins(["critic_train.layout=dp4,ep2"], PPO_GRAPH))


def test_what_is_left_out_is_counted_under_its_rule() -> None:
    rejected: Counter[str] = Counter()
    legal_choice_table(FACTS, PPO_GRAPH.by_name["actor_train"], 4, (), rejected)
    assert rejected == Counter()
    facts = small_facts(batch_size=3, num_heads=2)
    legal_choice_table(facts, PPO_GRAPH.by_name["actor_train"], 4, (), rejected)
    assert rejected == {
        "tp=4 does not divide the 2 attention heads of actor; use tp=2.": 2,
        "dp=4 is more than the 3 sequences of a minibatch; use dp=3 at most.": 1,
        "vpp=2 needs equally many sequences on every replica, and dp=2 does not divide the 3 of a minibatch; use "
        "vpp=1.": 1,
        "vpp=2 needs micro-batches in multiples of pp=2, and a replica has 3 sequences of a minibatch; use vpp=1.": 2,
    }


@pytest.mark.parametrize(
    ("pins", "sentence"),
    [
        (["actor_train.pool=0:5"], "5 ranks are more than the 4 of the cluster; use 4 ranks."),
        (["actor_train.pool=4:4"], "ranks 4-7 leave the cluster of 4 ranks; start at rank 0."),
        (["actor_train.tp=3"], "tp=3 does not divide the 4 attention heads of actor; use tp=2."),
        (["actor_train.layout=tp3"], "tp=3 does not divide the 4 attention heads of actor; use tp=2."),
        (
            ["actor_train.micro_batch_size=5"],
            "no legal choice has this value, since micro_batch_size=5 does not divide the 4 sequences of a replica; "
            "the nearest legal value is 4.",
        ),
        (
            ["actor_train.layout=tp2", "actor_train.pool=0:4"],
            "since tp2,pp1,dp1 takes 2 ranks and its pool has 4; the nearest legal value is tp2,pp1,dp2.",
        ),
        (["actor_train.layout=dp4", "actor_train.micro_batch_size=2"], "the nearest legal value is 1."),
        (
            ["actor_generate.generation_slots=5"],
            "since generation_slots=5 is not a power of two between pp=1 and the 12 sequences of a replica, nor that "
            "number; the nearest legal value is 4.",
        ),
        (["actor_train.ep=2"], "since ep=2 spreads experts, and actor has none; the nearest legal value is 1."),
        (["ref_logprob.vpp=2"], "since vpp=2 is only for a stage that trains; the nearest legal value is 1."),
        (
            ["actor_train.vpp=3", "actor_train.pp=2"],
            "since vpp=3 does not divide the 2 layers that actor has on each of pp=2 stages; the nearest",
        ),
        (["actor_train.overcommit=3"], "actor_train does not generate, so it has no overcommit"),
        (
            ["ref_logprob.offload=optimizer"],
            "since offload=optimizer is not for this stage; the nearest legal value is none.",
        ),
        (
            ["actor_train.micro_batch_size!=5"],
            "forbid 'actor_train.micro_batch_size=5': no legal choice has this value, since micro_batch_size=5",
        ),
        (["actor_train.layout!=tp3"], "tp=3 does not divide the 4 attention heads of actor; use tp=2."),
        (
            ["actor_train.recompute!=none", "actor_train.recompute!=selective", "actor_train.recompute!=full"],
            "it leaves actor_train without a legal choice; remove one of its pins.",
        ),
        ([f"actor_train.pool!={pool}" for pool in pools_of(FACTS)], "no pool is left for actor_train"),
    ],
)
def test_an_illegal_pin_names_the_nearest_legal_value(pins: list[str], sentence: str) -> None:
    with pytest.raises(BadInput) as refusal:
        check_pins(FACTS, parse_pins(pins, PPO_GRAPH))
    assert sentence in str(refusal.value)


@pytest.mark.parametrize(
    ("pin", "sentence"),
    [
        ("actor_train.pool=1:2", "a pool of 2 ranks cannot start at rank 1; start at rank 0."),
        ("actor_train.pool=0:3", "3 ranks are neither a power of two within a node nor whole nodes; use 2 ranks."),
        ("actor_train.dp=3", "since tp1,pp1,dp3 takes 3 ranks and its pool has 1, 2, 4 or 8; the nearest legal value"),
    ],
)
def test_an_illegal_pin_on_several_nodes_names_the_nearest_legal_value(pin: str, sentence: str) -> None:
    facts = small_facts(nodes=2, batch_size=12, num_minibatches=3)
    with pytest.raises(BadInput) as refusal:
        check_pins(facts, parse_pins([pin], PPO_GRAPH))
    assert sentence in str(refusal.value)


def test_a_forbidden_value_is_the_only_one_left_out() -> None:
    stage = PPO_GRAPH.by_name["actor_train"]
    every = set(legal_choices(FACTS, stage, 4, ()))
    pins = parse_pins([forbidden("actor_train.recompute = full"), forbidden("actor_train.layout=tp4")], PPO_GRAPH)
    left = set(legal_choices(FACTS, stage, 4, pins))
    assert every - left == {c for c in every if c.schedule.recompute is Recompute.FULL or c.layout == Layout(tp=4)}
    barred = parse_pins([forbidden("actor_train.pool=2:2")], PPO_GRAPH)
    assert set(pools(FACTS, stage, ())) - set(pools(FACTS, stage, barred)) == {Ranks(2, 2)}


def test_a_pinned_pool_is_the_only_one() -> None:
    pins = parse_pins(["actor_train.pool=2:2"], PPO_GRAPH)
    assert pools(FACTS, PPO_GRAPH.by_name["actor_train"], pins) == (Ranks(2, 2),)
    assert len(pools(FACTS, PPO_GRAPH.by_name["critic_train"], pins)) == 10


def test_a_stage_on_all_ranks_does_not_stream() -> None:
    rejected: Counter[str] = Counter()
    facts, scored = small_facts(response=256), PPO_GRAPH.by_name["reward_score"]
    alone = legal_choice_table(facts, scored, 4, (), rejected)
    assert not any(schedule.chunk_tokens for _, schedule in alone)
    assert rejected["a stage on all 4 ranks cannot stream from a generation beside it; use chunk_tokens=0."] > 0
    assert any(choice.schedule.chunk_tokens for choice in legal_choices(facts, scored, 2, ()))


def test_two_pinned_pools_do_not_cross() -> None:
    facts = small_facts(nodes=3, ranks_per_node=2)
    check_pins(facts, parse_pins(["actor_train.pool=0:4", "critic_train.pool=2:2", "ref_logprob.pool=4:2"], PPO_GRAPH))
    with pytest.raises(BadInput, match=r"'critic_train.pool=2:4': ranks 0-3 and ranks 2-5 overlap in part"):
        check_pins(facts, parse_pins(["actor_train.pool=0:4", "critic_train.pool=2:4"], PPO_GRAPH))
