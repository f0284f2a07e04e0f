"""What-if: answers are differences by one cost model, rules that break are named, fields are found or refused."""

from __future__ import annotations

from typing import Any

import pytest

from meshwright.cost_models.blended import cost_model
from meshwright.cost_models.protocol import CostModel
from meshwright.planner.analysis.whatif import plan_metrics, whatif
from meshwright.planner.compile import compile_plan
from meshwright.planner.job.job import Facts
from meshwright.planner.job.rewards_and_tools import RewardLoad
from meshwright.planner.job.whatif_settings import parse_settings, with_setting
from meshwright.planner.plan.plan import Plan
from meshwright.planner.solver.result import Limits
from meshwright.profiles.environment.latency import LatencySpec, MeasuredCalls
from meshwright.profiles.errors import BadInput
from meshwright.profiles.lengths import LengthSpec
from tests.planner.jobs import small_facts
from tests.planner.plans import random_plan


def model_of(facts: Facts) -> CostModel:
    return cost_model(facts.cluster, facts.workload, facts.precision)


def facts() -> Facts:
    """Four ranks on two nodes; responses of median 40 and p99 100."""
    found = small_facts(nodes=2, ranks_per_node=2, memory_bytes=2**34)
    workload = found.workload.model_copy(update={"response": LengthSpec(max=128, median=40, p99=100)})
    return found.model_copy(update={"workload": workload})


@pytest.fixture(scope="module")
def plan() -> Plan:
    return random_plan(4, facts(), model_of(facts()))


def test_a_setting_that_changes_nothing_makes_no_difference(plan: Plan) -> None:
    found = whatif(plan, parse_settings(["workload.response.p99=100"]), model_of, price=2.0)
    assert found.answers[0].difference == found.baseline.minus(found.baseline)
    assert found.answers[0].fits
    assert found.notes == ()


def test_shorter_responses_make_shorter_steps_and_ranges_make_rows(plan: Plan) -> None:
    found = whatif(plan, parse_settings(["workload.response.p99=50,75,100"]), model_of)
    seconds = [answer.metrics.step_seconds for answer in found.answers if answer.metrics]
    assert seconds == sorted(seconds)
    assert seconds[0] < found.baseline.step_seconds
    assert [answer.setting for answer in found.answers] == [{"workload.response.p99": n} for n in (50, 75, 100)]


def test_gpu_hours_count_every_rank_of_the_cluster_and_money_is_their_price(plan: Plan) -> None:
    seen = plan_metrics(plan, price=2.0)
    assert seen.gpu_hours == pytest.approx(plan.period_seconds * 4 * 1000 / 3600)
    assert seen.money == pytest.approx(2 * seen.gpu_hours)
    assert plan_metrics(plan).money is None


def test_more_nodes_without_a_new_search_stand_idle(plan: Plan) -> None:
    answer = whatif(plan, parse_settings(["cluster.nodes=4"]), model_of).answers[0]
    assert answer.fits
    assert answer.metrics is not None
    assert answer.difference is not None
    assert answer.metrics.idle_share > 0.5
    assert answer.difference.gpu_hours > 0


def test_a_placement_that_is_no_longer_legal_is_told_the_rule(plan: Plan) -> None:
    answer = whatif(plan, parse_settings(["workload.batch_size=7"]), model_of).answers[0]
    assert not answer.fits
    assert answer.metrics is None
    assert any("does not divide the 7 sequences" in sentence for sentence in answer.violations)


def test_a_sequence_longer_than_the_positions_is_told() -> None:
    plan = random_plan(4, facts(), model_of(facts()))
    answer = whatif(plan, parse_settings(["workload.response.max=1000"]), model_of).answers[0]
    assert answer.violations[0].startswith("prompt.max + response.max = 1064 exceeds the 512 positions of actor")


def test_a_device_that_is_too_small_does_not_fit_and_the_headroom_is_negative(plan: Plan) -> None:
    answer = whatif(plan, parse_settings(["cluster.device.memory_bytes=100000"]), model_of).answers[0]
    assert not answer.fits
    assert answer.metrics is not None
    assert answer.metrics.headroom_bytes < 0
    assert answer.violations[0].startswith("rank 0 needs")


def test_a_quantile_beyond_the_longest_length_is_told_to_be_cut(plan: Plan) -> None:
    answer = whatif(plan, parse_settings(["workload.response.p99=500"]), model_of).answers[0]
    assert answer.notes == (
        "workload.response.p99=500 is limited by workload.response.max=128; set both, or "
        "workload.response.scale, a factor on all lengths.",
    )


def test_a_caveat_of_the_plans_own_job_is_not_repeated_for_a_setting_that_leaves_it(plan: Plan) -> None:
    limited = with_setting(plan.facts, {"workload.response.p99": 500})
    own = plan.model_copy(update={"facts": limited})
    settings = ({"cluster.nodes": 2}, {"workload.response.max": 140})
    elsewhere, raised = whatif(own, settings, model_of).answers
    assert elsewhere.notes == ()
    assert raised.notes[0].startswith("workload.response.p99=500 is limited by workload.response.max=140")


@pytest.mark.parametrize(
    ("lengths", "factor", "scaled"),
    [
        ({"max": 100, "fixed": 50}, 2, {"max": 200, "fixed": 100}),
        ({"max": 100, "median": 20, "p99": 90}, 0.5, {"max": 50, "median": 10, "p99": 45}),
        ({"max": 100, "histogram": ((1, 1.0), (40, 2.0))}, 0.1, {"max": 10, "histogram": ((1, 1.0), (4, 2.0))}),
    ],
)
def test_one_key_scales_the_maximum_and_the_distribution(
    lengths: dict[str, Any], factor: float, scaled: dict[str, Any]
) -> None:
    """Responses twice as long took two keys in one command, and one alone changed little."""
    before = with_setting(facts(), {"workload.response": LengthSpec(**lengths).model_dump()})
    after = with_setting(before, {"workload.response.scale": factor})
    assert after.workload.response == LengthSpec(**scaled)
    assert after.workload.prompt == before.workload.prompt


@pytest.mark.parametrize(
    ("latencies", "scaled"),
    [
        ({"mean": 2.0, "p99": 20.0, "max": 60.0}, {"mean": 5.0, "p99": 50.0, "max": 150.0}),
        ({"median": 1.0, "p99": 3.0}, {"median": 2.5, "p99": 7.5}),
        ({"fixed": 0.1, "assumed": True}, {"fixed": 0.25}),
        ({"histogram": ((0.0, 1.0), (2.0, 3.0))}, {"histogram": ((0.0, 1.0), (5.0, 3.0))}),
    ],
)
def test_one_key_scales_every_call_of_a_reward(latencies: dict[str, Any], scaled: dict[str, Any]) -> None:
    """A judge whose mean alone is raised has a shorter tail, and a shorter step."""
    load = RewardLoad(name="judge", is_remote=True, batch_size=1, latency_seconds=LatencySpec(**latencies))
    before = facts().model_copy(update={"rewards": (load,)})
    after = with_setting(before, {"rewards.0.latency_seconds.scale": 2.5})
    assert after.rewards[0].latency_seconds == LatencySpec(**scaled)
    measured = {"histogram": ((1.0, 2.0),), "measured": MeasuredCalls(num_calls=2, date="2026-11-27")}
    load = load.model_copy(update={"latency_seconds": LatencySpec(**measured)})
    after = with_setting(before.model_copy(update={"rewards": (load,)}), {"rewards.0.latency_seconds.scale": 2.5})
    assert after.rewards[0].latency_seconds == LatencySpec(histogram=((2.5, 2.0),))


@pytest.mark.parametrize("factor", [0, -1, "long", True])
def test_a_scale_that_is_no_factor_is_refused(factor: object) -> None:
    with pytest.raises(BadInput, match=r"workload.prompt.scale=.*: the factor is not a number above 0"):
        with_setting(facts(), {"workload.prompt.scale": factor})


def test_an_unknown_scale_gets_those_that_exist() -> None:
    with pytest.raises(BadInput, match=r"did you mean workload\.prompt\.scale or workload\.response\.scale\?"):
        with_setting(facts(), {"workload.scale": 2})


def test_planning_again_is_never_slower_than_the_same_placements() -> None:
    few = small_facts(ranks_per_node=2, batch_size=4, memory_bytes=2**34)
    plan = compile_plan(few, model_of(few))
    assert isinstance(plan, Plan)
    settings = parse_settings(["workload.response.fixed=64"])
    kept = whatif(plan, settings, model_of).answers[0].metrics
    again = whatif(plan, settings, model_of, replan=True).answers[0].metrics
    assert kept is not None
    assert again is not None
    assert again.step_seconds <= kept.step_seconds * (1 + 1e-9)


def test_a_job_that_no_plan_fits_says_what_binds(plan: Plan) -> None:
    setting = parse_settings(["cluster.device.memory_bytes=1000"])
    answer = whatif(plan, setting, model_of, replan=True).answers[0]
    assert not answer.fits
    assert answer.metrics is None
    assert answer.violations


def test_a_baseline_that_another_model_costs_otherwise_is_told(plan: Plan) -> None:
    other = plan.model_copy(update={"period_seconds": 2 * plan.period_seconds})
    assert "s a step and is evaluated at" in whatif(other, (), model_of).notes[0]


def test_a_search_that_may_stop_short_of_the_best_is_told() -> None:
    asked = parse_settings(["cluster.device.launch_seconds=0"])
    small = small_facts(ranks_per_node=2, batch_size=4)
    plan = compile_plan(small, model_of(small))
    assert isinstance(plan, Plan)
    (note,) = whatif(plan, asked, model_of, replan=True, limits=Limits(gap=0.01)).notes
    assert note == "every new search stopped once it was proven to be within 0.01 of the best."
    assert whatif(plan, asked, model_of, replan=True).notes == (note,)
    assert whatif(plan, asked, model_of, replan=True, limits=Limits(gap=0.0)).notes == ()
