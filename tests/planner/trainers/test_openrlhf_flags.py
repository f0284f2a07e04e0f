"""Scripts of OpenRLHF before 0.11 say what they would say with the flags of today."""

from __future__ import annotations

from pathlib import Path

from meshwright.planner.trainers.config_keys import TrainerConfig, known_keys
from meshwright.planner.trainers.openrlhf import read_openrlhf
from meshwright.planner.trainers.openrlhf_flags import CURRENT_NAMES, with_current_flags

BEFORE = (
    "--colocate_all_models --actor_num_gpus_per_node 8 --vllm_tensor_parallel_size 2 --n_samples_per_prompt 8 "
    "--advantage_estimator group_norm --init_kl_coef 1e-3 --use_kl_loss --eps_clip_low_high 0.2 0.27 "
    "--prompt_max_len 1024 --generate_max_len 3072 --gradient_checkpointing --use_dynamic_batch "
    "--train_max_tokens_per_gpu 16384"
)
NOW = (
    "--train.colocate_all --actor.num_gpus_per_node 8 --vllm.tensor_parallel_size 2 --rollout.n_samples_per_prompt 8 "
    "--algo.advantage.estimator group_norm --algo.kl.init_coef 1e-3 --algo.kl.use_loss --actor.eps_clip_low_high 0.2 "
    "0.27 --data.max_len 4096 --rollout.max_new_tokens 3072 --actor.gradient_checkpointing_enable "
    "--train.dynamic_batch_enable --train.max_tokens_per_gpu 16384"
)


def test_every_present_name_is_one() -> None:
    known = known_keys("openrlhf")
    assert [name for name in CURRENT_NAMES.values() if not known.knows(name)] == []


def test_a_script_of_before_says_what_one_of_today_says(tmp_path: Path) -> None:
    said = []
    for name, flags in (("before.sh", BEFORE), ("now.sh", NOW)):
        (tmp_path / name).write_text(f"python3 -m openrlhf.cli.train_ppo_ray {flags}\n")
        said.append(read_openrlhf(tmp_path / name))
    assert said[0] == said[1]


def test_what_was_one_flag_for_two_models_is_both() -> None:
    given = TrainerConfig(known=known_keys("openrlhf"), values={"ref_reward_offload": True})
    found = with_current_flags(given).values
    assert found == {"ref.offload": True, "reward.offload": True}


def test_the_group_that_has_another_name_later_is_the_one_of_now() -> None:
    flags = {"fsdp.enable_sleep": True, "fsdp.param_dtype": "bf16", "fsdp.of_its_own": 1}
    found = with_current_flags(TrainerConfig(known=known_keys("openrlhf"), values=flags)).values
    assert found == {"ds.enable_sleep": True, "ds.param_dtype": "bf16", "fsdp.of_its_own": 1}
