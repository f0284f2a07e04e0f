"""A device that waits: it is busy as long as planned, and leaves what the stages after it read."""

from __future__ import annotations

from typing import cast

import pytest
import torch
import torch.distributed as dist

from meshwright.planner.plan.plan import Plan
from meshwright.planner.program.durations import Planned
from meshwright.planner.program.program import lower
from meshwright.planner.simulation.sampled_durations import sample_lengths
from meshwright.profiles.errors import RunFailed
from meshwright.runtime.execution.executor import Executor
from meshwright.runtime.execution.rehearsal_device import RehearsalDevice
from meshwright.runtime.messages.experience import StepExperience
from meshwright.runtime.messages.streaming import Streaming
from meshwright.runtime.messages.transport import Barriers, Transport
from tests.planner.jobs import small_facts
from tests.planner.plans import random_plan


class NoPartners:
    """Barriers to which everybody has already come."""

    def wait(self, ranks: tuple[int, ...]) -> None:
        assert ranks


class NoMessages:
    """An exchange of a rank that is alone."""

    def send(self, *_: object) -> int:
        return 0

    receive = post_receive = send

    def flush(self) -> None:
        return None


def alone() -> Plan:
    return random_plan(0, small_facts(ranks_per_node=1, memory_bytes=2**50))


def batch_of(plan: Plan) -> StepExperience:
    return StepExperience(step=0, rows=range(plan.facts.workload.batch_size))


def device_of(plan: Plan, speed: float = 0.0) -> RehearsalDevice:
    transport = Transport(cast(dist.ProcessGroup, None), rank=0)
    partners = cast(Barriers, NoPartners())
    return RehearsalDevice(plan, 0, partners, Planned(plan), Streaming(plan, transport), speed=speed, seed=0)


def test_the_executor_follows_the_program_and_every_stage_finds_what_it_reads() -> None:
    plan, program = alone(), lower(alone())
    batch = batch_of(plan)
    executor = Executor(
        device_of(plan),
        NoMessages(),  # type: ignore[arg-type]
        lambda _step: batch,
        rank=0,
        start_seconds=0.0,
        clock="rehearsed",
    )
    spans = executor.execute(program, 0, range(1)).spans
    assert [span.instruction for span in spans] == [i.name for i in program.instructions]
    assert {span.clock for span in spans} == {"rehearsed"}
    assert batch.experience.get("tokens", 0).dtype is torch.int64
    prompts, responses = sample_lengths(plan.facts.workload, seed=0, step=0)
    length = int(prompts[3] + responses[3])
    assert [len(batch.experience.get(field, 3)) for field in ("tokens", "values", "scores")] == [length, length, 1]


def test_a_stage_without_its_input_fails_as_it_would_in_a_run() -> None:
    plan = alone()
    with pytest.raises(RunFailed, match="rank 0 lacks rows of tokens for reward_score"):
        device_of(plan).run_stage("reward_score", batch_of(plan))


def test_a_device_is_busy_for_the_predicted_seconds_times_the_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = alone()
    slept: list[float] = []
    monkeypatch.setattr("time.sleep", slept.append)
    device = device_of(plan, speed=0.5)
    device.run_stage("actor_generate", batch_of(plan))
    device.synchronise()
    assert slept[-1] == pytest.approx(0.5 * plan.placement("actor_generate").cost.total, abs=0.05)
