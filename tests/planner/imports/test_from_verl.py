"""What was written for verl is read as the plan that it was written for."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.planner.imports.from_verl import read_verl
from meshwright.planner.plan.pins import parse_pin
from meshwright.profiles.algorithms import PPO_GRAPH
from meshwright.profiles.errors import BadInput
from meshwright.profiles.stages import GENERATE
from tests.planner.imports.written import plan_of, written


@pytest.mark.parametrize("staleness", [0, 1])
def test_every_choice_that_is_read_is_the_plans(tmp_path: Path, staleness: int) -> None:
    plan = plan_of("verl", staleness)
    found = read_verl(written("verl", plan, tmp_path))
    pins = [one for one in found.said if one.what.partition(".")[0] in PPO_GRAPH.by_name]
    assert len(pins) > 20
    for one in pins:
        pin = parse_pin(f"{one.what}={one.value}", PPO_GRAPH)
        assert pin.allows(plan.choice(pin.stage, pin.key)), (one, plan.choice(pin.stage, pin.key))
    workload = plan.facts.workload
    assert found.words["workload.batch_size"] == workload.batch_size
    assert found.words["workload.num_minibatches"] == workload.num_minibatches
    assert found.steps_ahead == plan.ahead[GENERATE]


def test_what_trains_no_critic_is_refused_by_its_key(tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    path.write_text("python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo trainer.nnodes=1\n")
    with pytest.raises(BadInput, match=r"algorithm.adv_estimator=grpo: a job here trains a critic"):
        read_verl(path)


def test_fsdp_leaves_layouts_free_and_unknown_keys_are_told(tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    path.write_text(
        "python3 -m verl.trainer.main_ppo trainer.nnodes=2 trainer.colour=red actor_rollout_ref.rollout.n=4\n"
    )
    found = read_verl(path)
    assert not any(one.what.endswith(".layout") for one in found.said)
    assert found.words["workload.batch_size"] == 4096
    assert any("trainer.colour is no key of verl" in note for note in found.notes)
    assert any("FSDP" in note for note in found.notes)
