"""Why not: the rule, the limit or the cost of a pin, whichever there is."""

from __future__ import annotations

from meshwright.planner.plan.plan import Plan
from meshwright.planner.search.no_plan import Limit, NoPlan
from meshwright.runtime.explorer.searches import Answer, Outcome, Refusal
from meshwright.runtime.explorer.why_not import why_not
from tests.planner.jobs import small_facts
from tests.runtime.plans_by_hand import Where, plan_by_hand

PINS = ("actor_train.layout=tp2",)


def plan_with(layout: str) -> Plan:
    facts = small_facts(ranks_per_node=2, batch_size=32, memory_bytes=2**40)
    return plan_by_hand(facts, {"other": Where("0:2", "dp2"), "actor_train": Where("0:2", layout)})


def answer(outcome: Outcome) -> Answer:
    return Answer(outcome=outcome, seconds=1.0)


def test_a_broken_rule_is_the_reason() -> None:
    assert why_not(PINS, answer(Refusal("tp=3 divides nothing.")), None) == ("tp=3 divides nothing.",)


def test_the_binding_limits_are_the_reason_where_nothing_fits() -> None:
    none = NoPlan(status="infeasible", limits=(Limit(stage=None, sentence="it lacks 3 GiB."),), changes=(), rejected={})
    assert why_not(PINS, answer(none), answer(plan_with("dp2"))) == (
        "No plan has actor_train.layout=tp2.",
        "it lacks 3 GiB.",
    )


def test_the_longer_step_and_the_term_that_grows_are_the_reason() -> None:
    free, pinned = plan_with("dp2"), plan_with("tp2")
    first, *others = why_not(PINS, answer(pinned), answer(free))
    longer = pinned.period_seconds - free.period_seconds
    assert first.startswith(f"With actor_train.layout=tp2 a step takes {pinned.period_seconds:.3f} s instead of ")
    assert f"({longer:+.3f} s, " in first
    (stage,) = [sentence for sentence in others if sentence.startswith("actor_train: ")]
    assert "tp2,pp1,dp1 instead of tp1,pp1,dp2" in stage
    assert "mostly " in stage
    assert not [sentence for sentence in others if sentence.startswith("ref_logprob")]


def test_without_a_plan_to_compare_with_the_pin_is_all_that_is_said() -> None:
    (sentence,) = why_not(PINS, answer(plan_with("tp2")), answer(Refusal("no.")))
    assert sentence == "The plan has actor_train.layout=tp2; without it there is none to compare with."
