"""What was written for OpenRLHF is read as the plan that it was written for."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.planner.trainers.openrlhf import read_openrlhf
from meshwright.planner.trainers.parsed_config import ParsedConfig
from meshwright.profiles.errors import BadInput
from tests.planner.trainers.written import assert_is_read, plan_of, written


@pytest.mark.parametrize("staleness", [0, 1])
def test_every_choice_that_is_read_is_the_plans(tmp_path: Path, staleness: int) -> None:
    plan = plan_of("openrlhf", staleness)
    found = read_openrlhf(written("openrlhf", plan, tmp_path))
    assert_is_read(plan, found)


def configured(tmp_path: Path, *flags: str) -> ParsedConfig:
    """What a configuration of eight ranks for all models says, with flags behind it."""
    given = ["--train.colocate_all", "--actor.num_gpus_per_node 8", "--rollout.n_samples_per_prompt 8"]
    path = tmp_path / "run.sh"
    path.write_text(f"python3 -m openrlhf.cli.train_ppo_ray {' '.join([*given, *flags])}\n")
    return read_openrlhf(path)


def test_a_group_norm_is_grpo_with_its_own_settings(tmp_path: Path) -> None:
    flags = ("--algo.advantage.estimator group_norm", "--actor.eps_clip_low_high 0.2 0.27", "--algo.kl.use_loss")
    found = configured(tmp_path, *flags, "--algo.kl.init_coef 1e-3")
    words = found.by_name
    assert (found.algorithm, words["workload.group_size"], words["grpo.kl_coefficient"]) == ("grpo", 8, 1e-3)
    assert (words["grpo.clip_ratio"], words["grpo.clip_ratio_high"]) == (0.2, 0.27)
    assert "models.ref" in words
    assert "models.critic" not in words
    assert not any(one.what.startswith("critic") for one in found.fields)


@pytest.mark.parametrize(("flags", "steps"), [((), 0), (("--critic.freezing_steps 3",), 3)])
def test_the_steps_in_which_the_actor_is_frozen_are_those_of_the_critic_alone(
    tmp_path: Path, flags: tuple[str, ...], steps: int
) -> None:
    found = configured(tmp_path, "--algo.advantage.estimator gae", *flags)
    assert found.by_name["ppo.critic_warmup_steps"] == steps


def test_no_coefficient_of_kl_is_no_reference(tmp_path: Path) -> None:
    found = configured(tmp_path, "--algo.advantage.estimator dr_grpo", "--algo.kl.init_coef 0")
    assert found.by_name["grpo.normalise_by_std"] is False
    assert "models.ref" not in found.by_name


def test_models_that_are_not_there_have_no_ranks_of_their_own(tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    path.write_text(
        "python3 -m openrlhf.cli.train_ppo_ray --algo.advantage.estimator reinforce --algo.kl.init_coef 0 "
        "--vllm.num_engines 8 --reward.remote_url f.py\n"
    )
    words = read_openrlhf(path).by_name
    assert (words["algorithm"], words["cluster.nodes"], words["actor_generate.pool"]) == ("reinforce++", 2, "8:8")


def test_an_estimator_that_no_job_has_is_refused_by_its_flag(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"algo.advantage.estimator=flash_reinforce is not an algorithm of a job"):
        configured(tmp_path, "--algo.advantage.estimator flash_reinforce")
    with pytest.raises(BadInput, match=r"rollout.n_samples_per_prompt=1: rloo compares"):
        configured(tmp_path, "--algo.advantage.estimator rloo", "--rollout.n_samples_per_prompt=1")
    with pytest.raises(BadInput, match=r"actor.eps_clip_low_high=0.2 is not two numbers"):
        configured(tmp_path, "--actor.eps_clip_low_high 0.2")


def test_flags_that_are_not_known_and_zero_are_told(tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    path.write_text("python3 -m openrlhf.cli.train_ppo_ray --train.colocate_all --colour red --ds.zero_stage 3\n")
    found = read_openrlhf(path)
    assert found.unmodelled["colour=red"] == "it is not a key of openrlhf 0.11.2"
    assert any("--ds.zero_stage 3 is costed as ZeRO-1" in note for note in found.notes)


def test_degrees_that_do_not_divide_their_ranks_are_refused_by_their_flags(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"^ds.tensor_parallel_size=3 x ds.ring_attn_size=2 does not divide the 8 ranks"):
        configured(tmp_path, "--ds.tensor_parallel_size 3", "--ds.ring_attn_size 2")


def test_a_token_budget_replaces_the_rows_of_every_pass(tmp_path: Path) -> None:
    rows = ("--train.micro_batch_size 8", "--rollout.micro_batch_size 16")
    assert configured(tmp_path, *rows, "--train.dynamic_batch_enable").unmodelled == {}
