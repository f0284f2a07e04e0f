"""What was written for slime is read as the plan that it was written for."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.planner.trainers.parsed_config import ParsedConfig
from meshwright.planner.trainers.slime import read_slime
from meshwright.profiles.errors import BadInput
from tests.planner.trainers.written import assert_is_read, plan_of, written


@pytest.mark.parametrize("staleness", [0, 1])
def test_every_choice_that_is_read_is_the_plans(tmp_path: Path, staleness: int) -> None:
    plan = plan_of("slime", staleness)
    found = read_slime(written("slime", plan, tmp_path))
    assert_is_read(plan, found)


def configured(tmp_path: Path, *flags: str) -> ParsedConfig:
    """What a configuration of GRPO on eight ranks says, with flags behind it."""
    given = ["--advantage-estimator grpo", "--colocate", "--rollout-batch-size 32", "--n-samples-per-prompt 8"]
    given += ["--rollout-max-response-len 8192", "--global-batch-size 256"]
    path = tmp_path / "run.sh"
    path.write_text(f"python3 train.py {' '.join([*given, *flags])}\n")
    return read_slime(path)


def test_grpo_has_groups_its_own_settings_and_no_critic(tmp_path: Path) -> None:
    found = configured(tmp_path, "--eps-clip-high 0.28", "--disable-grpo-std-normalization")
    words = found.by_name
    assert (found.algorithm, words["workload.group_size"], words["workload.batch_size"]) == ("grpo", 8, 256)
    assert (words["grpo.clip_ratio"], words["grpo.clip_ratio_high"]) == (0.2, 0.28)
    assert words["grpo.normalise_by_std"] is False
    assert words["grpo.loss_mean"] == "sequence"
    assert "models.ref" not in words
    assert not any(one.what.startswith(("critic", "ref_", "models.critic")) for one in found.fields)


def test_a_kl_loss_asks_for_a_reference_whatever_its_coefficient(tmp_path: Path) -> None:
    words = configured(tmp_path, "--use-kl-loss", "--kl-loss-coef 0.00").by_name
    assert words["grpo.kl_coefficient"] == 0.0
    assert "ref_logprob.layout" in words


def test_gspo_is_read_as_grpo_and_told_and_others_are_refused(tmp_path: Path) -> None:
    found = configured(tmp_path, "--advantage-estimator gspo")
    assert found.algorithm == "grpo"
    assert any("--advantage-estimator gspo" in note for note in found.notes)
    with pytest.raises(BadInput, match="advantage-estimator=on_policy_distillation is not an algorithm of a job"):
        configured(tmp_path, "--advantage-estimator on_policy_distillation")


def test_a_single_sample_of_a_prompt_has_its_score_as_its_advantage(tmp_path: Path) -> None:
    found = configured(tmp_path, "--n-samples-per-prompt 1")
    assert found.algorithm == "reinforce++"
    assert any("n-samples-per-prompt=1 with advantage-estimator=grpo" in note for note in found.notes)


def test_ranks_that_leave_none_to_generate_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    path.write_text("python3 train.py --advantage-estimator ppo --rollout-batch-size 8 --rollout-max-response-len 8\n")
    with pytest.raises(BadInput, match="leaves no rank to generate"):
        read_slime(path)


def test_degrees_that_do_not_divide_their_ranks_are_refused_by_their_flags(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"^context-parallel-size=3 does not divide the 8 ranks of its pool"):
        configured(tmp_path, "--actor-num-gpus-per-node 8", "--context-parallel-size 3")
