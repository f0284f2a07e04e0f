"""slime's own rules hold in what is written for it."""

from __future__ import annotations

import yaml

from meshwright.planner.trainers.exporter import export
from meshwright.planner.trainers.registry import TRAINERS
from tests.planner.drawn import model_of
from tests.planner.trainers.configurations import configuration, plan_ahead
from tests.planner.trainers.plans import best


def test_critic_and_reference_have_the_ranks_and_degrees_of_the_actor() -> None:
    plan = best("slime").plan
    stages = ("actor_train", "critic_train", "critic_value", "ref_logprob", "actor_logprob")
    assert len({plan.placement(stage).layout for stage in stages}) == 1
    assert len({plan.choice(stage, "pool") for stage in stages}) == 1


def test_generation_ahead_excludes_colocation() -> None:
    assert configuration("slime")["colocate"] is True
    assert configuration("slime", plan_ahead("slime"))["colocate"] is False
    found = export(TRAINERS["slime"], plan_ahead("slime"), model_of)
    assert found is not None
    assert "train_async.py" in found.files["run.sh"]


def test_engines_have_all_ranks_of_the_rollout_and_one_model_learns() -> None:
    for plan in (best("slime").plan, plan_ahead("slime")):
        found = export(TRAINERS["slime"], plan, model_of)
        assert found is not None
        models = yaml.safe_load(found.files["sglang.yaml"])["sglang"]
        groups = [group for model in models for group in model["server_groups"]]
        assert sum(group["num_gpus"] for group in groups) == configuration("slime", plan)["rollout-num-gpus"]
        assert all(group["num_gpus"] % group["num_gpus_per_engine"] == 0 for group in groups)
        assert [model["update_weights"] for model in models] == [True, False]
        critic = yaml.safe_load(found.files["megatron.yaml"])["megatron"]
        assert [entry["role"] for entry in critic] == ["critic"]
