"""verl's own rules hold in what is written for it."""

from __future__ import annotations

from meshwright.planner.job.whatif_settings import with_setting
from meshwright.planner.plan.plan import Plan
from meshwright.profiles.layout import Layout
from tests.planner.trainers.configurations import configuration, plan_ahead
from tests.planner.trainers.plans import best

A, R = "actor_rollout_ref", "actor_rollout_ref.rollout"


def test_degrees_are_those_of_the_training_stages_and_divide_the_trainers_ranks() -> None:
    found, plan = configuration("verl"), best("verl").plan
    for model, stage in ((f"{A}.actor", "actor_train"), ("critic", "critic_train"), (f"{A}.ref", "ref_logprob")):
        layout = plan.placement(stage).layout
        assert found[f"{model}.megatron.tensor_model_parallel_size"] == layout.tp
        assert found[f"{model}.megatron.pipeline_model_parallel_size"] == layout.pp
        assert layout.num_ranks == found["trainer.nnodes"] * found["trainer.n_gpus_per_node"]  # type: ignore[operator]


def test_an_engine_has_no_pipeline_and_both_budgets_of_the_critic_are_one() -> None:
    for plan in (best("verl").plan, plan_ahead("verl")):
        found = configuration("verl", plan)
        assert plan.placement("actor_generate").layout.pp == 1
        assert plan.placement("reward_score").layout.pp == 1
        assert found["critic.ppo_max_token_len_per_gpu"] == found["critic.forward_max_token_len_per_gpu"]


def test_generation_on_the_trainers_ranks_is_synchronous() -> None:
    found = configuration("verl")
    assert found["trainer.v1.trainer_mode"] == "sync"
    assert f"{R}.nnodes" not in found


def test_generation_ahead_has_its_ranks_its_backend_and_updates_that_make_up_a_batch() -> None:
    found = configuration("verl", plan_ahead("verl"))
    assert found["trainer.v1.trainer_mode"] == "separate_async"
    steps = found["trainer.v1.separate_async.parameter_sync_step"]
    assert found["data.train_batch_size"] == steps * found[f"{A}.actor.ppo_mini_batch_size"]  # type: ignore[operator]
    assert found[f"{R}.checkpoint_engine.backend"] != "naive"
    assert found[f"{R}.nnodes"] > 0  # type: ignore[operator]
    assert found["reward.reward_model.enable_resource_pool"] is True


def test_8_bit_floats_are_asked_of_the_engine_and_tokens_are_weighted() -> None:
    plan = best("verl").plan
    assert f"{R}.quantization" not in configuration("verl", plan)
    facts = plan.facts.model_copy(update={"generation_weights": "fp8"})
    found = configuration("verl", plan.model_copy(update={"facts": facts}))
    assert found[f"{R}.quantization"] == "fp8"
    assert found["algorithm.rollout_correction.rollout_is"] == "token"
    assert found["algorithm.rollout_correction.rollout_is_threshold"] == 2.0


def test_an_uneven_pipeline_of_the_reference_has_a_mapping_of_its_own() -> None:
    plan, key = best("verl").plan, f"{A}.ref.megatron.override_transformer_config"
    assert key not in configuration("verl", plan)
    deeper = plan.model_copy(update={"facts": with_setting(plan.facts, {"models.actor.num_layers": 7})})

    def with_pipelines(**degrees: int) -> Plan:
        placements = tuple(
            one.model_copy(update={"layout": Layout(pp=degrees.get(one.stage, 1), dp=4 // degrees.get(one.stage, 1))})
            for one in deeper.placements
        )
        return deeper.model_copy(update={"placements": placements})

    assert configuration("verl", with_pipelines(actor_train=4))[key] == "{}"
    uneven = with_setting(plan.facts, {"models.ref.num_layers": 7})
    deeper = plan.model_copy(update={"facts": uneven})
    found = configuration("verl", with_pipelines(ref_logprob=4))
    assert found[key] == "{num_layers_in_first_pipeline_stage:2,num_layers_in_last_pipeline_stage:1}"
