"""What was written for OpenRLHF is read as the plan that it was written for."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.planner.imports.from_openrlhf import read_openrlhf
from meshwright.planner.plan.pins import parse_pin
from meshwright.profiles.algorithms import PPO_GRAPH
from meshwright.profiles.errors import BadInput
from meshwright.profiles.stages import GENERATE
from tests.planner.imports.written import plan_of, written


@pytest.mark.parametrize("staleness", [0, 1])
def test_every_choice_that_is_read_is_the_plans(tmp_path: Path, staleness: int) -> None:
    plan = plan_of("openrlhf", staleness)
    found = read_openrlhf(written("openrlhf", plan, tmp_path))
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
    path.write_text("python3 -m openrlhf.cli.train_ppo_ray --algo.advantage.estimator rloo\n")
    with pytest.raises(BadInput, match=r"algo.advantage.estimator=rloo"):
        read_openrlhf(path)


def test_flags_that_are_not_known_and_zero_are_told(tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    path.write_text("python3 -m openrlhf.cli.train_ppo_ray --train.colocate_all --colour red --ds.zero_stage 3\n")
    notes = read_openrlhf(path).notes
    assert any("--colour is no flag" in note for note in notes)
    assert any("--ds.zero_stage 3 is costed as 1" in note for note in notes)
