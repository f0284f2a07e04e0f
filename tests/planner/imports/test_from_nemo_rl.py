"""What was written for NeMo-RL is read as the plan that it was written for."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.planner.imports.from_nemo_rl import read_nemo_rl
from meshwright.planner.plan.pins import parse_pin
from meshwright.profiles.algorithms import PPO_GRAPH
from meshwright.profiles.errors import BadInput
from meshwright.profiles.stages import GENERATE
from tests.planner.imports.written import plan_of, written


@pytest.mark.parametrize("staleness", [0, 1])
def test_every_choice_that_is_read_is_the_plans(tmp_path: Path, staleness: int) -> None:
    plan = plan_of("nemo-rl", staleness)
    found = read_nemo_rl(written("nemo-rl", plan, tmp_path))
    pins = [one for one in found.said if one.what.partition(".")[0] in PPO_GRAPH.by_name]
    assert len(pins) > 20
    for one in pins:
        pin = parse_pin(f"{one.what}={one.value}", PPO_GRAPH)
        assert pin.allows(plan.choice(pin.stage, pin.key)), (one, plan.choice(pin.stage, pin.key))
    workload = plan.facts.workload
    assert found.words["workload.batch_size"] == workload.batch_size
    assert found.words["workload.num_minibatches"] == workload.num_minibatches
    assert found.steps_ahead == plan.ahead[GENERATE]


def test_what_trains_no_critic_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("grpo: {num_prompts_per_step: 8}\npolicy: {train_micro_batch_size: 2}\n")
    with pytest.raises(BadInput, match="only PPO is imported"):
        read_nemo_rl(path)


def test_what_leaves_no_rank_to_train_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("policy: {generation: {colocated: {enabled: false, resources: {gpus_per_node: 1}}}}\n")
    with pytest.raises(BadInput, match="leaves no rank to train"):
        read_nemo_rl(path)
