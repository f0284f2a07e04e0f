"""What was written for slime is read as the plan that it was written for."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.planner.imports.from_slime import read_slime
from meshwright.planner.plan.pins import parse_pin
from meshwright.profiles.algorithms import PPO_GRAPH
from meshwright.profiles.errors import BadInput
from meshwright.profiles.stages import GENERATE
from tests.planner.imports.written import plan_of, written


@pytest.mark.parametrize("staleness", [0, 1])
def test_every_choice_that_is_read_is_the_plans(tmp_path: Path, staleness: int) -> None:
    plan = plan_of("slime", staleness)
    found = read_slime(written("slime", plan, tmp_path))
    pins = [one for one in found.said if one.what.partition(".")[0] in PPO_GRAPH.by_name]
    assert len(pins) > 20
    for one in pins:
        pin = parse_pin(f"{one.what}={one.value}", PPO_GRAPH)
        assert pin.allows(plan.choice(pin.stage, pin.key)), (one, plan.choice(pin.stage, pin.key))
    workload = plan.facts.workload
    assert found.words["workload.batch_size"] == workload.batch_size
    assert found.words["workload.num_minibatches"] == workload.num_minibatches
    assert found.steps_ahead == plan.ahead[GENERATE]


def test_what_trains_no_critic_is_refused_by_its_flag(tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    path.write_text("python3 train.py --advantage-estimator grpo --rollout-batch-size 8\n")
    with pytest.raises(BadInput, match="--advantage-estimator grpo"):
        read_slime(path)


def test_ranks_that_leave_none_to_generate_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    path.write_text("python3 train.py --advantage-estimator ppo --rollout-batch-size 8 --rollout-max-response-len 8\n")
    with pytest.raises(BadInput, match="leaves no rank to generate"):
        read_slime(path)
