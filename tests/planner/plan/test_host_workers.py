"""A plan gives rewards on hosts as few workers as keep the training waiting no longer, and counts what it waits."""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
import pytest

from meshwright.cost_models.blended import cost_model
from meshwright.cost_models.cost import Source
from meshwright.cost_models.protocol import CostModel
from meshwright.planner.analysis.recorded_costs import mismatched_costs
from meshwright.planner.compile import compile_plan
from meshwright.planner.job.job import Facts
from meshwright.planner.job.rewards_and_tools import HostWorkers, RewardLoad
from meshwright.planner.plan.evaluate import evaluate
from meshwright.planner.plan.plan import Plan, read_plan, write_plan
from meshwright.planner.plan.reward_workers import (
    MAX_JUDGE_CALLS,
    extra_reward_wait_bound,
    extra_reward_wait_seconds,
    host_seconds,
    max_workers_of,
    min_reward_wait,
    with_workers,
)
from meshwright.planner.plan.verify import verify
from meshwright.planner.program.program import Receive, Send, lower
from meshwright.planner.simulation.sampled_durations import Sampled
from meshwright.planner.simulation.simulate import simulate
from meshwright.planner.solver.result import Limits
from meshwright.profiles.environment.latency import CallKey, LatencySpec, TimedCalls
from meshwright.profiles.lengths import LengthSpec
from meshwright.profiles.stages import ENVIRONMENT, GENERATE
from tests.planner.jobs import small_facts
from tests.seeds import cases


def load(name: str, seconds: float, *, is_remote: bool = True, workers: int | None = None) -> RewardLoad:
    latency = LatencySpec(mean=seconds, p99=10 * seconds)
    return RewardLoad(name=name, is_remote=is_remote, workers=workers, batch_size=1, latency_seconds=latency)


def facts_with(*rewards: RewardLoad, staleness: int = 0) -> Facts:
    facts = small_facts(batch_size=64)
    workload = facts.workload.model_copy(update={"response": LengthSpec(max=256, median=40, p99=200)})
    return facts.model_copy(update={"workload": workload, "rewards": rewards, "staleness": staleness})


def planned(facts: Facts, gap: float | None = None) -> Plan:
    model = cost_model(facts.cluster, facts.workload, facts.precision, None)
    found = compile_plan(facts, model, limits=Limits(gap=gap))
    assert isinstance(found, Plan)
    return found


@pytest.fixture(scope="module")
def slow() -> Plan:
    """The judge takes about as long as all else."""
    return planned(facts_with(load("judge", 0.05), load("maths", 0.001, is_remote=False)))


@pytest.fixture(scope="module")
def without() -> Plan:
    """Without rewards on hosts."""
    return planned(facts_with())


def waits(plan: Plan) -> dict[str, float]:
    return {edge.consumer: host_seconds(edge) for edge in plan.edges if host_seconds(edge)}


@pytest.mark.parametrize("num_measured", [0, 1, 2])
def test_what_is_waited_at_least_is_measured_where_all_latencies_are(num_measured: int) -> None:
    calls = TimedCalls(called=CallKey(kind="reward", target="mine:style"), seconds=(0.1, 0.3), date="2026-11-25")
    of_table, of_job = load("style", 0.2).model_copy(update={"latency_seconds": calls.latency}), load("judge", 0.1)
    facts = facts_with(*[of_table, of_table][:num_measured], *[of_job, of_job][num_measured:])
    [term] = min_reward_wait(facts, "actor_train").terms
    assert term.amount == pytest.approx(0.2 if num_measured else 0.1, rel=0.02)
    assert term.source == (Source.MEASURED if num_measured == 2 else Source.ANALYTIC)


def test_a_plan_without_rewards_on_hosts_has_no_workers(without: Plan) -> None:
    assert with_workers(without) is without
    assert waits(without) == {}
    assert without.workers == ()
    assert not min_reward_wait(without.facts, "actor_train").terms


def test_a_plan_verifies_states_its_costs_and_reads_as_it_was_written(slow: Plan, tmp_path: Path) -> None:
    assert verify(slow) == ()
    assert mismatched_costs(slow, cost_model(slow.facts.cluster, slow.facts.workload, slow.facts.precision, None)) == ()
    path = tmp_path / "plan.json"
    write_plan(path, slow)
    assert read_plan(path) == slow


def test_training_waits_for_rewards_and_a_bound_counts_what_it_waits_at_least(slow: Plan) -> None:
    assert set(waits(slow)) == {"actor_train", "critic_train"}
    ready = slow.placement(GENERATE).end_seconds + waits(slow)["actor_train"]
    assert min(slow.placement(name).start_seconds for name in waits(slow)) >= ready * (1 - 1e-9)
    least = min_reward_wait(slow.facts, "actor_train").total
    assert least == pytest.approx(0.05, rel=0.02)
    assert waits(slow)["actor_train"] > least
    assert slow.solver.bound_seconds <= slow.period_seconds


def test_the_fewest_workers_are_chosen_that_keep_training_waiting_no_longer(slow: Plan) -> None:
    judge = slow.workers[0].workers
    assert 1 < judge < MAX_JUDGE_CALLS
    half = slow.facts.rewards[0].model_copy(update={"workers": judge // 2})
    fewer = planned(slow.facts.model_copy(update={"rewards": (half, slow.facts.rewards[1])}))
    assert fewer.workers[0].workers == judge // 2
    assert fewer.period_seconds > slow.period_seconds


def test_functions_share_the_processors_of_a_host(slow: Plan) -> None:
    judge, maths = slow.facts.rewards
    assert max_workers_of(slow, judge) == MAX_JUDGE_CALLS
    assert max_workers_of(slow, maths) == slow.facts.cluster.parts[0].cpus // slow.placement(GENERATE).layout.dp


def test_a_quick_reward_costs_nothing_for_other_stages_run_meanwhile(without: Plan) -> None:
    quick = planned(facts_with(load("maths", 0.001, is_remote=False)))
    assert quick.period_seconds == pytest.approx(without.period_seconds, rel=0.01)


def test_generation_that_works_ahead_hides_a_slow_judge() -> None:
    """What is waited behind the generation lies beside the next one."""
    judge = load("judge", 0.02)
    ahead, whole = planned(facts_with(judge, staleness=1), gap=0.05), planned(facts_with(judge), gap=0.05)
    quick = planned(facts_with(staleness=1), gap=0.05)
    assert ahead.period_seconds - quick.period_seconds < 0.5 * (whole.period_seconds - quick.period_seconds)


def test_a_judge_slower_than_a_turn_moves_training_to_the_end_of_the_next(slow: Plan) -> None:
    """Of two turns the generation, the wait and the training take all: g + w + t = 2 p where nothing else binds."""
    plan = planned(facts_with(load("judge", 0.05), staleness=1), gap=0.05)
    assert plan.ahead[GENERATE] == 1
    assert verify(plan) == ()
    assert evaluate(plan) == plan
    last = max(placement.end_seconds for placement in plan.placements)
    assert last == pytest.approx(plan.period_seconds, rel=1e-6)
    assert simulate(plan, steps=40).steps.mean == pytest.approx(plan.period_seconds, rel=0.02)
    assert plan.period_seconds < slow.period_seconds


def test_the_program_sends_scores_behind_the_generation_and_training_waits_for_them(slow: Plan) -> None:
    order = lower(slow).instructions
    sent = [i for i in order if isinstance(i, Send) and i.producer == ENVIRONMENT]
    received = [i for i in order if isinstance(i, Receive) and i.producer == ENVIRONMENT]
    assert {i.consumer for i in received} == {i.consumer for i in sent}
    for one in received:
        consumer = next(n for n, i in enumerate(order) if i.name == one.consumer)
        assert order.index(one) < consumer


def test_the_simulation_waits_as_long_as_the_plan_says(slow: Plan) -> None:
    assert simulate(slow).steps.mean == pytest.approx(slow.period_seconds, rel=1e-6)


def test_workers_that_break_a_rule_are_told(slow: Plan) -> None:
    def told(*workers: HostWorkers) -> str:
        return verify(evaluate(slow.model_copy(update={"workers": workers})))[0]

    judge, maths = slow.workers
    assert "the reward maths has 0 entries of workers; give it one" in told(judge)
    assert "'math', which is not a reward" in told(judge, maths, maths.model_copy(update={"reward": "math"}))
    assert "has 99 workers for each replica" in told(judge, maths.model_copy(update={"workers": 99}))
    asked = slow.facts.model_copy(update={"rewards": (load("judge", 0.05, workers=3), slow.facts.rewards[1])})
    changed = slow.model_copy(update={"facts": asked, "digests": asked.digests()})
    assert "and the job says 3" in "".join(verify(changed))


def test_a_simulation_that_draws_lengths_draws_calls_too(slow: Plan) -> None:
    """Some steps wait longer than the plan expects and some less; on average about as long."""

    def remodel(facts: Facts) -> CostModel:
        return cost_model(facts.cluster, facts.workload, facts.precision, None)

    sampled = Sampled(slow, remodel, seed=0)
    drawn = [sampled.of_step(step).host_seconds or 0.0 for step in range(60)]
    assert min(drawn) < waits(slow)["actor_train"] < max(drawn)
    assert np.mean(drawn) == pytest.approx(waits(slow)["actor_train"], rel=0.3)
    assert sampled.of_step(7) == Sampled(slow, remodel, seed=0).of_step(7)
    found = simulate(slow, sampled, steps=40).steps
    assert found.p90 > found.p50 > 0
    assert found.mean == pytest.approx(slow.period_seconds, rel=0.2)


@functools.cache
def behind_a_slow_judge(staleness: int) -> Plan:
    return planned(facts_with(load("judge", 0.05), staleness=staleness))


@cases("staleness", [1, 2, 0], few=1)
@cases(
    "pin",
    ["actor_train.pool=0:1", "actor_generate.pool=0:2", "actor_train.pool=1:1", "ref_logprob.pool=0:2"],
    few=2,
)
def test_no_pinned_plan_is_faster_where_a_judge_is_slow(pin: str, staleness: int) -> None:
    """A plan that let generation and training wait for each other's rewards was called the best: the bound knew of the
    mean of a call alone, and nothing of what is handed to a later turn."""
    best = behind_a_slow_judge(staleness)
    model = cost_model(best.facts.cluster, best.facts.workload, best.facts.precision, None)
    assert best.solver.gap <= best.solver.requested_gap
    pinned = compile_plan(best.facts, model, pins=(pin,))
    if isinstance(pinned, Plan):
        assert pinned.period_seconds >= best.solver.bound_seconds


def test_what_a_generation_keeps_waiting_is_at_least_what_is_searched_with(slow: Plan) -> None:
    facts, chosen = slow.facts, slow.placement(GENERATE)
    least = min_reward_wait(facts, "actor_train").total
    found = extra_reward_wait_seconds(facts, 0, chosen.layout, chosen.schedule, chosen.cost.total)
    most = waits(with_workers(slow, wait_tolerance=0.0))["actor_train"]
    assert 0.98 * most <= least + found <= most
    assert extra_reward_wait_bound(facts)(chosen.cost.total) <= found * (1 + 1e-9)
