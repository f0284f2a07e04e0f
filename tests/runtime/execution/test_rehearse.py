"""Rehearsals: real processes and messages follow the program to its end, in the simulated time."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from meshwright.planner.plan.evaluate import evaluate
from meshwright.planner.plan.plan import Plan
from meshwright.planner.plan.steps_ahead import steps_ahead_patterns
from meshwright.planner.program.durations import Planned, StepWork
from meshwright.planner.program.program import Send, lower
from meshwright.profiles.algorithms import PPO_GRAPH
from meshwright.profiles.errors import BadInput, RunFailed
from meshwright.profiles.schedule import Schedule
from meshwright.profiles.trace import Run, chrome_trace
from meshwright.runtime.execution.rehearse import RehearsalRequest, rehearse, run_process
from meshwright.runtime.records.results import Rehearsal
from tests.planner.jobs import small_facts
from tests.planner.plans import random_plan
from tests.runtime.plans_by_hand import Where, plan_by_hand
from tests.runtime.ranks import run_on_ranks

PATTERNS = steps_ahead_patterns(PPO_GRAPH, 2)
STEPS = 2


def test_a_rehearsal_at_no_speed_is_refused() -> None:
    with pytest.raises(BadInput, match="--speed 0 is not above 0"):
        rehearse(pooled(), Planned(pooled()), speed=0)


def slow_enough(plan: Plan) -> Plan:
    """The plan with every cost ten times as long, so that waits dominate on a busy machine."""
    longer = [p.model_copy(update={"cost": p.cost.scaled(10)}) for p in plan.placements]
    return evaluate(plan.model_copy(update={"placements": tuple(longer)}))


def pooled() -> Plan:
    """A plan of four ranks with several pools and hand-overs between them."""
    plans = map(random_plan, range(100))
    return slow_enough(next(plan for plan in plans if len(plan.pools) > 3 and plan.refits))


RANKS_PER_PROCESS = [2, *(pytest.param(number, marks=pytest.mark.check_all) for number in (1, 4, 3))]


@pytest.fixture(scope="module", params=RANKS_PER_PROCESS)
def rehearsed(request: pytest.FixtureRequest) -> Rehearsal:
    plan = pooled()
    return rehearse(plan, Planned(plan), steps=STEPS, speed=2 / plan.period_seconds, ranks_per_process=request.param)


@pytest.mark.check_all
def test_a_rehearsed_step_takes_about_as_long_as_a_simulated_one(rehearsed: Rehearsal) -> None:
    assert rehearsed.simulated.mean == pytest.approx(pooled().period_seconds)
    assert -0.001 < rehearsed.error < 0.25  # two seconds a step, on a machine that does other things besides


@pytest.mark.slow
def test_every_instruction_of_every_rank_is_followed(rehearsed: Rehearsal) -> None:
    program = lower(pooled())
    followed = sorted((s.step, s.rank, s.instruction) for s in rehearsed.spans)
    expected = [(n + 1, rank, i.name) for n in range(STEPS) for i in program.instructions for rank in i.ranks]
    assert followed == sorted(expected)
    assert rehearsed.overhead_wall_seconds < 1e-3


@pytest.mark.slow
def test_messages_have_the_sizes_of_the_experience(rehearsed: Rehearsal) -> None:
    plan = pooled()
    workload = plan.facts.workload
    tokens = workload.batch_size * (workload.prompt.max + workload.response.max)
    sends = [i for i in lower(plan).instructions if isinstance(i, Send) and i.producer == "actor_generate"]
    copies = sum(len(send.targets) for send in sends)
    assert rehearsed.message_bytes > 0
    assert rehearsed.message_bytes < 2 * copies * tokens * 12 + 1e6


@pytest.mark.slow
def test_a_rehearsal_is_a_process_of_its_own_in_a_timeline(rehearsed: Rehearsal) -> None:
    events = json.loads(chrome_trace([Run(spans=rehearsed.spans)]))["traceEvents"]
    assert [e["args"]["name"] for e in events if e["name"] == "process_name"] == ["REHEARSED"]


def streamed() -> Plan:
    """Four ranks, two of which generate, one scores what they draw as it is drawn, and one does all else."""
    where = {
        "other": Where("3:1"),
        "actor_generate": Where("0:2", "dp2", Schedule(generation_slots=8)),
        "reward_score": Where("2:1", schedule=Schedule(chunk_tokens=32)),
        "ref_logprob": Where("2:1", schedule=Schedule(chunk_tokens=48)),
    }
    return plan_by_hand(small_facts(memory_bytes=2**50), where)


@pytest.mark.check_all
def test_what_streams_is_rehearsed_in_the_simulated_time() -> None:
    plan = streamed()
    assert len(lower(plan).streams) == 2
    found = rehearse(plan, Planned(plan), steps=STEPS, speed=2 / plan.period_seconds, ranks_per_process=2)
    assert -0.001 < found.error < 0.25
    scored = {span.rank: span.facts["num_tokens"] for span in found.spans if span.instruction == "reward_score"}
    drawn = {span.rank: span.facts["num_tokens"] for span in found.spans if span.instruction == "actor_generate"}
    assert scored == {2: sum(drawn.values())}


def plan_of(seed: int) -> Plan:
    """Synchronous plans and those whose stages work ahead by one and by two steps, in turns."""
    return random_plan(seed, ahead=PATTERNS[seed % len(PATTERNS)])


def follow_random_plans(seeds: range) -> int:
    """Rehearses many plans without waiting, two ranks to a process; how many instructions of a turn were followed."""
    followed = 0
    for seed in seeds:
        plan = plan_of(seed)
        request = RehearsalRequest(
            plan=plan,
            durations=Planned(plan),
            steps=1,
            seed=seed,
            speed=1e-9,
            ranks_per_process=2,
            began=0.0,
        )
        followed += sum(len(spans) for part in run_process(request) for spans in part.periods)
    return followed


@pytest.mark.check_all
def test_no_random_legal_plan_comes_to_a_standstill() -> None:
    seeds = range(200)
    followed = sum(run_on_ranks(2, follow_random_plans, seeds))
    assert followed == sum(len(i.ranks) for seed in seeds for i in lower(plan_of(seed)).instructions)


class AskedHere:
    """Planned work that only this process may ask for, step by step in their order."""

    name = "asked here"

    def __init__(self, plan: Plan) -> None:
        self._planned, self._process, self._asked = Planned(plan), os.getpid(), 0

    def of_step(self, step: int, /) -> StepWork:
        assert (os.getpid(), self._asked) == (self._process, step)
        self._asked += 1
        return self._planned.of_step(step)


@pytest.mark.slow
def test_lengths_are_drawn_once_for_all_ranks_of_all_processes() -> None:
    """Ranks that share a process drew them at once, from one generation whose turns then went astray."""
    plan = pooled()
    durations = AskedHere(plan)
    found = rehearse(plan, durations, steps=1, speed=0.1 / plan.period_seconds, ranks_per_process=2)
    assert found.simulated.mean == pytest.approx(plan.period_seconds)


class Failing:
    """Work that lacks a stage, so that every rank fails at it."""

    name = "failing"

    def of_step(self, _step: int, /) -> StepWork:
        return StepWork(seconds={}, num_tokens=1.0)


@pytest.mark.slow
def test_a_rank_that_fails_ends_the_rehearsal_with_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match=r"rank \d failed: KeyError"):
        rehearse(pooled(), Failing(), steps=1, ranks_per_process=2)
