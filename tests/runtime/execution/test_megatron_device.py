"""A rank's device: weights that another pool takes are given away when they are trained, if a turn follows."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch

from meshwright.runtime.execution.megatron_device import MegatronDevice, StageRunner
from meshwright.runtime.messages.experience import StepExperience
from meshwright.runtime.records.results import InstructionResult
from meshwright.runtime.training.refit import RefitCopy


class Heard:
    """Actions and a refit that write down what is asked of them."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def begin(self, turn: int) -> None:
        self.asked.append(f"turn {turn}")

    def run(self, stage: str, _batch: StepExperience) -> InstructionResult:
        self.asked.append(stage)
        return InstructionResult(facts={"num_tokens": 7.0}, metrics={"loss": 0.5})

    def wait(self) -> None:
        self.asked.append("settle")

    def start_send(self) -> None:
        self.asked.append("give")


@pytest.mark.parametrize(("turn", "given"), [(4, ["give"]), (5, [])])
def test_weights_are_settled_before_they_are_trained_and_given_after_it_if_a_turn_follows(
    turn: int, given: list[str]
) -> None:
    heard: Any = Heard()
    refits = {("actor_train", "actor_generate"): cast(RefitCopy, heard)}
    device = MegatronDevice(cast(StageRunner, heard), refits, bytes_before=0, tensor_bytes=0, steps=range(3, 6))
    device.begin(turn)
    for stage in ("critic_train", "actor_train"):
        device.run_stage(stage, StepExperience(step=turn, rows=range(1)))
    assert heard.asked == [f"turn {turn}", "critic_train", "settle", "actor_train", *given]


def test_what_was_learned_passes_through_the_device_beside_what_it_counts() -> None:
    heard: Any = Heard()
    device = MegatronDevice(cast(StageRunner, heard), {}, bytes_before=0, tensor_bytes=0, steps=range(3, 6))
    device.begin(4)
    findings = device.run_stage("actor_train", StepExperience(step=4, rows=range(1)))
    assert findings.metrics == {"loss": 0.5}
    assert list(findings.facts) == ["num_tokens", "memory_bytes"]


@pytest.mark.parametrize(("steps", "measured"), [(range(3, 6), 4), (range(3, 4), 3)])
def test_memory_on_a_cpu_is_measured_in_the_second_period_if_there_are_two(steps: range, measured: int) -> None:
    heard: Any = Heard()
    device = MegatronDevice(cast(StageRunner, heard), {}, bytes_before=0, tensor_bytes=0, steps=steps)
    with_memory = []
    for period in steps:
        device.begin(period)
        result = device.run_stage("actor_train", StepExperience(step=period, rows=range(1)))
        with_memory += [period] if "memory_bytes" in result.facts else []
    assert with_memory == [measured]


def test_a_process_counts_its_models_and_what_a_stage_adds_and_nothing_else() -> None:
    ballast, mib = torch.ones(100 * 2**18), 2**20
    held = [torch.ones(10 * 2**18)]

    class Allocates(Heard):
        def run(self, stage: str, _batch: StepExperience) -> InstructionResult:
            torch.ones(30 * 2**18)
            return super().run(stage, _batch)

    actions: Any = Allocates()
    device = MegatronDevice(cast(StageRunner, actions), {}, bytes_before=0, tensor_bytes=held[0].nbytes, steps=range(1))
    device.begin(0)
    result = device.run_stage("actor_train", StepExperience(step=0, rows=range(1)))
    assert result.facts["memory_bytes"] == pytest.approx(40 * mib, abs=4 * mib)
    assert ballast.nbytes == 100 * mib
