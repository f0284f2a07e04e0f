"""A rank's device: weights that another pool takes are given away when they are trained, if a turn follows."""

from __future__ import annotations

from typing import Any, cast

import pytest

from meshwright.runtime.execution.actions import Actions
from meshwright.runtime.execution.megatron_device import MegatronDevice
from meshwright.runtime.messages.step_experience import StepExperience
from meshwright.runtime.training.refit import RefitCopy


class Heard:
    """Actions and a refit that write down what is asked of them."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def begin(self, turn: int) -> None:
        self.asked.append(f"turn {turn}")

    def run(self, stage: str, _batch: StepExperience) -> dict[str, float]:
        self.asked.append(stage)
        return {}

    def settle(self) -> None:
        self.asked.append("settle")

    def give(self) -> None:
        self.asked.append("give")


@pytest.mark.parametrize(("turn", "given"), [(4, ["give"]), (5, [])])
def test_weights_are_settled_before_they_are_trained_and_given_after_it_if_a_turn_follows(
    turn: int, given: list[str]
) -> None:
    heard: Any = Heard()
    refits = {("actor_train", "actor_generate"): cast(RefitCopy, heard)}
    device = MegatronDevice(cast(Actions, heard), refits, bytes_before=0, steps=range(3, 6))
    device.begin(turn)
    for stage in ("critic_train", "actor_train"):
        device.run_stage(stage, StepExperience(step=turn, rows=range(1)))
    assert heard.asked == [f"turn {turn}", "critic_train", "settle", "actor_train", *given]
