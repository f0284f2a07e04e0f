"""Virtual time: planned durations give the plan's own times, and every idle second has a cause."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.planner.analysis.explain import explain
from meshwright.planner.plan.evaluate import items
from meshwright.planner.plan.plan import Plan
from meshwright.planner.program.durations import Planned, StepWork
from meshwright.planner.simulation.simulate import Simulation, simulate
from tests.planner.jobs import small_facts
from tests.planner.plans import long_facts, random_plan
from tests.seeds import seeds

TOLERANCE = 1e-9


class Slower:
    """The planned work, with some stages taking other times on each replica."""

    name = "slower"

    def __init__(self, plan: Plan, seconds: Mapping[str, tuple[float, ...]]) -> None:
        self._planned, self._seconds = Planned(plan), seconds

    def of_step(self, step: int) -> StepWork:
        work = self._planned.of_step(step)
        return StepWork(seconds={**work.seconds, **self._seconds}, num_tokens=work.num_tokens)


@settings(max_examples=150)
@given(st.integers(0, 10**6))
def test_a_simulated_step_takes_the_plans_period(seed: int) -> None:
    plan = random_plan(seed)
    simulated = simulate(plan, steps=3)
    assert simulated.steps.seconds == pytest.approx([plan.period_seconds] * 3, rel=TOLERANCE)


@settings(max_examples=50)
@given(st.integers(0, 10**6))
def test_stages_and_refits_run_when_the_plan_says(seed: int) -> None:
    plan = random_plan(seed)
    spans = simulate(plan, steps=1, warm_up=0, traced=True).spans
    starts = {span.instruction: span.start_seconds for span in spans if span.kind in ("stage", "refit")}
    for placement in plan.placements:
        assert starts[placement.stage] == pytest.approx(placement.start_seconds, rel=TOLERANCE, abs=1e-12)
    for refit in plan.refits:
        if refit.cost.total:
            assert starts[f"refit {refit.source} -> {refit.target}"] == pytest.approx(refit.start_seconds, abs=1e-12)


@settings(max_examples=150)
@given(st.integers(0, 10**6))
def test_a_simulated_step_that_streams_takes_the_plans_period_and_ends_as_planned(seed: int) -> None:
    plan = random_plan(seed, long_facts())
    simulated = simulate(plan, steps=2, traced=True)
    assert simulated.steps.seconds == pytest.approx([plan.period_seconds] * 2, rel=TOLERANCE)
    ends = {span.instruction: span.end_seconds for span in simulated.spans if span.kind == "stage" and span.step == 1}
    for placement in plan.placements:
        assert ends[placement.stage] - plan.period_seconds == pytest.approx(placement.end_seconds, rel=TOLERANCE)


def streaming_beside() -> Plan:
    """A random plan whose scores stream to free ranks, and end when the last token has been read."""
    return next(
        plan for plan in (random_plan(seed, long_facts()) for seed in itertools.count()) if streams_beside(plan)
    )


def streams_beside(plan: Plan) -> bool:
    generate, score = plan.placement("actor_generate"), plan.placement("reward_score")
    end = generate.end_seconds + lag_of(plan) + score.tail_seconds
    return generate.start_seconds < score.start_seconds < generate.end_seconds and math.isclose(score.end_seconds, end)


def lag_of(plan: Plan) -> float:
    """Seconds from the end of generation until the responses are where they are scored."""
    return next(e.cost.total for e in plan.edges if (e.producer, e.consumer) == ("actor_generate", "reward_score"))


def test_a_stage_that_streams_runs_beside_its_producer_and_ends_its_tail_after_it() -> None:
    plan = streaming_beside()
    simulated = simulate(plan, steps=1, warm_up=0, traced=True)
    spans = {span.instruction: span for span in simulated.spans if span.kind == "stage"}
    score, generate = spans["reward_score"], spans["actor_generate"]
    assert generate.start_seconds <= score.start_seconds < generate.end_seconds
    tail = plan.placement("reward_score").tail_seconds
    assert score.end_seconds == pytest.approx(generate.end_seconds + lag_of(plan) + tail)


def test_a_stage_that_streams_waits_for_its_producer_while_it_has_nothing_to_read() -> None:
    plan = streaming_beside()
    simulated = simulate(plan, steps=1, warm_up=0, traced=True)
    score = next(span for span in simulated.spans if span.instruction == "reward_score")
    use = simulated.ranks[plan.pool_of("reward_score").first_rank]
    busy = next(share.share for share in use.busy if share.what == "reward_score")
    waited = next(share.share for share in use.waits if share.what == "actor_generate")
    seconds = plan.placement("reward_score").cost.total
    assert busy * simulated.steps.mean == pytest.approx(seconds)
    starved = score.end_seconds - score.start_seconds - seconds
    assert starved > 0
    assert waited * simulated.steps.mean >= starved * (1 - TOLERANCE)


def test_a_slow_reader_goes_on_after_its_producer_has_ended() -> None:
    plan = streaming_beside()
    slow = 3 * plan.placement("actor_generate").cost.total
    simulated = simulate(plan, Slower(plan, {"reward_score": (slow,)}), steps=1, warm_up=0, traced=True)
    spans = {span.instruction: span for span in simulated.spans if span.kind == "stage"}
    score = spans["reward_score"]
    assert score.end_seconds - score.start_seconds == pytest.approx(slow)


def test_one_rank_takes_the_sum_of_all_that_it_does() -> None:
    plan = on_one_rank()
    simulated = simulate(plan, steps=1)
    transfers = 1 - sum(share.share for share in simulated.ranks[0].busy)
    total = math.fsum(item.cost.total for item in items(plan))
    assert simulated.steps.mean * (1 - transfers) == pytest.approx(total, rel=TOLERANCE)


def on_one_rank() -> Plan:
    """A plan for a machine of one rank."""
    return random_plan(0, small_facts(ranks_per_node=1, memory_bytes=2**50))


@seeds(4, all=20)
def test_a_step_is_never_shorter_than_its_critical_path(seed: int) -> None:
    plan = random_plan(seed)
    draws = {p.stage: tuple(p.cost.total * (1 + 0.1 * i) for i in range(p.layout.dp)) for p in plan.placements}
    simulated = simulate(plan, Slower(plan, draws), steps=2)
    path = math.fsum(wait.seconds for wait in explain(plan).critical_path)
    assert simulated.steps.mean >= path * (1 - TOLERANCE)


@seeds(3, all=10)
def test_busy_and_waiting_shares_of_a_rank_fill_the_step(seed: int) -> None:
    whole, streamed = simulate(random_plan(seed), steps=2), simulate(random_plan(seed, long_facts()), steps=2)
    for use in (*whole.ranks, *whole.pools, *streamed.ranks, *streamed.pools):
        assert sum(share.share for share in (*use.busy, *use.waits)) == pytest.approx(1)
        assert use.idle_share == pytest.approx(sum(wait.share for wait in use.waits))


def test_the_use_of_all_ranks_is_the_mean_of_theirs() -> None:
    simulated = simulate(random_plan(5), steps=2)
    ranks = simulated.ranks
    assert simulated.cluster.ranks == tuple(range(len(ranks)))
    for part in ("busy", "waits"):
        of_ranks = [{share.what: share.share for share in getattr(use, part)} for use in ranks]
        found = {share.what: share.share for share in getattr(simulated.cluster, part)}
        assert found.keys() == set().union(*of_ranks)
        for what, share in found.items():
            assert share == pytest.approx(sum(of.get(what, 0.0) for of in of_ranks) / len(ranks))


def test_idle_shares_agree_with_the_explanation_of_the_plan() -> None:
    plan = random_plan(3)
    for use, expected in zip(simulate(plan, steps=1).ranks, explain(plan).ranks, strict=True):
        assert use.idle_share == pytest.approx(expected.idle_share, abs=1e-9)


def with_replicas(stage: str) -> Plan:
    """A random plan in which the stage has two replicas or more."""
    return next(plan for plan in map(random_plan, itertools.count()) if plan.placement(stage).layout.dp > 1)


def test_a_replica_that_ends_early_waits_for_the_slowest_one() -> None:
    plan = with_replicas("actor_generate")
    planned = simulate(plan, steps=1)
    dp = plan.placement("actor_generate").layout.dp
    once = plan.placement("actor_generate").cost.total
    slow = simulate(plan, Slower(plan, {"actor_generate": (*(once,) * (dp - 1), 3 * once)}), steps=1)
    first = plan.pool_of("actor_generate").first_rank
    assert slow.steps.mean == pytest.approx(planned.steps.mean + 2 * once)
    assert waited(slow, first) >= waited(planned, first) + 2 * once - TOLERANCE


def waited(simulated: Simulation, rank: int) -> float:
    """Seconds that the rank waits for responses."""
    waits = [wait.share for wait in simulated.ranks[rank].waits if wait.what == "actor_generate"]
    return sum(waits) * simulated.steps.mean


@seeds(3, all=10)
def test_a_rank_does_one_thing_at_a_time(seed: int) -> None:
    spans = simulate(random_plan(seed), steps=2, warm_up=1, traced=True).spans
    for rank in range(4):
        mine = sorted((span for span in spans if span.rank == rank), key=lambda span: span.end_seconds)
        for one, following in itertools.pairwise(mine):
            assert one.end_seconds <= following.start_seconds + 1e-12


def test_spans_are_labelled_simulated_and_cover_only_the_kept_steps() -> None:
    spans = simulate(random_plan(0), steps=2, warm_up=3, traced=True).spans
    assert {span.clock for span in spans} == {"simulated"}
    assert {span.step for span in spans} == {3, 4}


def test_the_memory_of_spans_peaks_where_the_plan_says() -> None:
    plan = random_plan(5)
    spans = [span for span in simulate(plan, steps=1, traced=True).spans if span.kind == "stage"]
    for rank, peak in enumerate(plan.peak_bytes_per_rank):
        assert max(s.facts["memory_bytes"] for s in spans if s.rank == rank) == pytest.approx(peak, abs=1)


def test_tokens_are_counted_over_the_kept_steps() -> None:
    plan = random_plan(0)
    tokens = plan.facts.workload.batch_size * plan.facts.workload.response_lengths.mean
    assert simulate(plan, steps=4).tokens_per_second == pytest.approx(tokens / plan.period_seconds)


def test_the_same_plan_gives_the_same_answer() -> None:
    assert simulate(random_plan(1), traced=True) == simulate(random_plan(1), traced=True)
