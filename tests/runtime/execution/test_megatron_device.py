"""A rank's device: weights that another pool takes are given away when they are trained, if a turn follows."""

from __future__ import annotations

from typing import Any, cast

import pytest

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
    device = MegatronDevice(cast(StageRunner, heard), refits, bytes_before=0, steps=range(3, 6))
    device.begin(turn)
    for stage in ("critic_train", "actor_train"):
        device.run_stage(stage, StepExperience(step=turn, rows=range(1)))
    assert heard.asked == [f"turn {turn}", "critic_train", "settle", "actor_train", *given]


def test_what_was_learned_passes_through_the_device_beside_what_it_counts() -> None:
    heard: Any = Heard()
    device = MegatronDevice(cast(StageRunner, heard), {}, bytes_before=0, steps=range(3, 6))
    device.begin(3)
    findings = device.run_stage("actor_train", StepExperience(step=3, rows=range(1)))
    assert findings.metrics == {"loss": 0.5}
    assert list(findings.facts) == ["num_tokens", "memory_bytes"]
