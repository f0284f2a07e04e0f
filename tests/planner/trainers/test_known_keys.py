"""The keys of other trainers are facts with a version and a source."""

from __future__ import annotations

import pytest

from meshwright.planner.trainers.config_keys import known_keys
from meshwright.planner.trainers.registry import TRAINERS


@pytest.mark.parametrize("name", TRAINERS)
def test_keys_say_where_and_of_which_version_they_were_read(name: str) -> None:
    known = TRAINERS[name].keys
    assert known.trainer == name
    assert known.source
    assert known.version
    assert known.version in TRAINERS[name].label
    assert len(known.keys) > 60


def test_a_key_is_known_as_it_is_written_and_a_new_one_only_where_names_are_free() -> None:
    verl = known_keys("verl")
    prefix = "actor_rollout_ref.actor.megatron"
    assert verl.knows(f"{prefix}.tensor_model_parallel_size")
    assert not verl.knows(f"{prefix}.tensor_parallel_size")
    assert verl.knows(f"+{prefix}.override_transformer_config.num_layers_in_first_pipeline_stage")
    assert verl.knows(f"+{prefix}.override_ddp_config.overlap_grad_reduce")
    assert not verl.knows("+trainer.colour")
