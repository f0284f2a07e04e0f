"""Controllers in a run: all ranks that generate decide alike from what the record holds, and lose no sequence."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from meshwright.planner.job.job import read_job, resolve
from meshwright.planner.plan.plan import Plan
from meshwright.planner.plan.steps_ahead import StepsAhead, steps_ahead_patterns, synchronous
from meshwright.planner.program.controllers import Controllers, ControllerSetting, StepObservation
from meshwright.profiles.algorithms import PPO_GRAPH
from meshwright.profiles.schedule import Schedule
from meshwright.profiles.stages import GENERATE
from meshwright.profiles.trace import NUM_OVERCOMMIT, read_spans
from meshwright.runtime.execution.request import RunRequest
from meshwright.runtime.execution.run import RankRun
from meshwright.runtime.records.run_lines import observations
from meshwright.runtime.rollout.prompts import read_data
from tests.runtime.plans_by_hand import Where, plan_by_hand
from tests.runtime.ranks import run_on_ranks
from tests.runtime.small_job import write_job

STEPS, OVERCOMMIT = 26, 8


def plan_of(path: Path, ahead: StepsAhead | None = None) -> Plan:
    """Two replicas generate, and two ranks score what they draw: if that is of their own turn, in chunks, which are
    longer than any response."""
    chunk_tokens = 256 if ahead == synchronous(PPO_GRAPH) else 0
    facts = resolve(read_job(path), path.parent).model_copy(update={"staleness": 2, "controllers": True})
    where = {
        "actor_generate": Where("0:2", "dp2", Schedule(generation_slots=8, overcommit=OVERCOMMIT)),
        "reward_score": Where("2:2", "tp2", Schedule(micro_batch_size=16, chunk_tokens=chunk_tokens)),
        "ref_logprob": Where("2:2", "dp2", Schedule(micro_batch_size=8)),
        "other": Where("0:2", "dp2", Schedule(micro_batch_size=4)),
    }
    return plan_by_hand(facts, where, ahead)


def follow(asked: RunRequest) -> list[dict[int, tuple[int, ...]]]:
    """By step, the prompts that this rank holds, by row."""
    run = RankRun(asked)
    run.recorder.open(0)
    held = []
    for turn in run.periods:
        experience = run.run_period(turn).experience
        lengths = {row: int(experience.get("prompt_lengths", row)) for row in experience.rows("prompt_lengths")}
        rows = lengths if turn in run.steps else ()
        held.append({row: tuple(experience.get("tokens", row)[: lengths[row]].tolist()) for row in rows})
    run.finish()
    run.close()
    return held[-STEPS:]


@dataclass(frozen=True)
class Ran:
    asked: RunRequest
    prompts: list[dict[int, tuple[int, ...]]]

    @property
    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.asked.out / "metrics.jsonl").read_text().splitlines()]


IN_TURNS = pytest.param(0, id="in turns", marks=pytest.mark.check_all)
ONE_AHEAD = pytest.param(1, id="one ahead")


@pytest.fixture(scope="module", params=[IN_TURNS, ONE_AHEAD])
def ran(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    directory = tmp_path_factory.mktemp("job")
    path = write_job(directory, num_ranks=4)
    plan, job = (
        plan_of(path, steps_ahead_patterns(PPO_GRAPH, 2)[request.param]),
        read_job(path).model_copy(update={"controllers": True}),
    )
    out = directory / "out"
    out.mkdir()
    asked = RunRequest(plan=plan, job=job, directory=directory, out=out, steps=STEPS)
    of_ranks = run_on_ranks(4, follow, asked, timeout=300)
    steps = zip(*of_ranks, strict=True)
    return Ran(asked, [{row: prompt for held in step for row, prompt in held.items()} for step in steps])


@pytest.mark.slow
def test_every_setting_follows_from_what_the_record_holds(ran: Ran) -> None:
    controllers, told = Controllers(ran.asked.plan), observations(ran.asked.out, STEPS)
    assert [observation.step for observation in told] == list(range(STEPS))
    decided = [line for line in ran.lines if "overcommit" in line]
    assert len(decided) == STEPS - ran.asked.plan.ahead[GENERATE]  # the last turn has no step ahead of it
    for line in decided:
        for step in controllers.missing_steps(line["step"]):
            controllers.observe(told[step])
        found = ControllerSetting(chunk_tokens=line["chunk_tokens"], overcommit=line["overcommit"])
        assert found == controllers.setting(line["step"])


@pytest.mark.slow
def test_no_setting_of_a_run_is_above_the_plans_and_both_move(ran: Ran) -> None:
    lines = [line for line in ran.lines if "overcommit" in line]
    chunks = [line["chunk_tokens"] for line in lines]
    assert chunks[:6] == ([0] * 6 if ran.asked.plan.ahead[GENERATE] else [128] * 3 + [256] * 3)
    assert set(chunks) <= set(chunks[:6])
    assert max(line["overcommit"] for line in lines) == OVERCOMMIT
    assert lines[0]["overcommit"] == OVERCOMMIT
    spans = [span for span in read_spans(ran.asked.out / "trace.jsonl") if span.instruction == "actor_generate"]
    of_turns: dict[int, set[float]] = {}
    for span in spans:
        of_turns.setdefault(span.step, set()).add(span.facts[NUM_OVERCOMMIT])
    assert all(len(found) == 1 for found in of_turns.values())  # on both replicas


@pytest.mark.slow
def test_a_run_with_controllers_delivers_every_prompt_once(ran: Ran) -> None:
    data = read_data(ran.asked.job, ran.asked.directory)
    brought = Counter(prompt.tokens for step in range(STEPS) for prompt in data.batch(step))
    assert [sorted(step) for step in ran.prompts] == [list(range(data.batch_size))] * STEPS
    assert Counter(prompt for step in ran.prompts for prompt in step.values()) == brought


def test_a_run_that_is_resumed_goes_on_with_the_setting_it_would_have_had(tmp_path: Path) -> None:
    plan = plan_of(write_job(tmp_path, num_ranks=4))
    whole, told = (
        Controllers(plan),
        [StepObservation(step=n, seconds=n % 5, scores_by_age=((1, -n),)) for n in range(40)],
    )
    for observation in told:
        whole.observe(observation)
    settings = [whole.setting(turn) for turn in range(40)]
    later = Controllers(plan)
    for observation in told[:25]:
        later.observe(observation)
    found = []
    for turn in range(25, 40):
        for step in later.missing_steps(turn):
            later.observe(told[step])
        found.append(later.setting(turn))
    assert found == settings[25:]
    assert settings[30].overcommit < OVERCOMMIT
