"""An export for vLLM has the degrees, the slots and the arguments with which a run here starts it."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from meshwright.cost_models.cost import Cost, Term
from meshwright.planner.plan.vllm_settings import vllm_settings
from meshwright.planner.trainers.export_settings import engine_memory_share
from meshwright.profiles.stages import GENERATE
from tests.planner.trainers.configurations import configuration
from tests.planner.trainers.plans import best

KEYS = {
    "verl": ("actor_rollout_ref.rollout", "actor_rollout_ref.rollout", "tensor_model_parallel_size"),
    "nemo-rl": ("policy.generation.vllm_kwargs", "policy.generation.vllm_cfg", "tensor_parallel_size"),
}
"""For each trainer: the group of most arguments, that of enforce_eager, and the name of the tensor-parallel degree."""


@pytest.mark.parametrize("name", KEYS)
def test_the_arguments_are_those_of_a_run(name: str) -> None:
    plan = best(name, algorithm="grpo").plan
    placement = plan.placement(GENERATE)
    settings = vllm_settings(plan.facts, placement.schedule)
    assert settings is not None
    found, (group, other_group, degree) = configuration(name, plan), KEYS[name]
    for argument, value in asdict(settings).items():
        if (name, argument) == ("nemo-rl", "enable_prefix_caching"):
            assert f"{group}.{argument}" not in found  # NeMo-RL gives it to vLLM itself, and would give it twice
        elif argument == "max_model_len":  # under the trainer's own key for the length of a sequence
            assert value in (found.get(f"{group}.{argument}"), found.get("policy.max_total_sequence_length"))
        else:
            assert found[f"{other_group if argument == 'enforce_eager' else group}.{argument}"] == value
    assert found[f"{other_group}.{degree}"] == placement.layout.tp
    assert settings.max_num_seqs == placement.schedule.generation_slots
    assert settings.max_num_batched_tokens >= settings.max_model_len


@pytest.mark.parametrize("name", KEYS)
def test_on_a_gpu_the_trainers_own_defaults_hold_but_for_the_slots(name: str) -> None:
    plan = best(name, algorithm="grpo").plan
    device = plan.facts.cluster.device.model_copy(update={"kind": "cuda"})
    cluster = plan.facts.cluster.model_copy(update={"device": device})
    on_gpu = plan.model_copy(update={"facts": plan.facts.model_copy(update={"cluster": cluster})})
    group, other_group, _ = KEYS[name]
    found = configuration(name, on_gpu)
    assert found[f"{group}.max_num_seqs"] == plan.placement(GENERATE).schedule.generation_slots
    assert not {f"{other_group}.enforce_eager", f"{group}.enable_chunked_prefill"} & found.keys()


@pytest.mark.parametrize(("other", "share"), [(0, 0.75), (2**31, 0.63)])
def test_the_share_of_memory_has_a_cache_that_stays_and_one_copy_of_the_weights(other: int, share: float) -> None:
    plan = best("verl", algorithm="grpo").plan
    terms = {"weights": 2**32, "kv cache": 2**33, "weights of the engine": other}
    resident = Cost(tuple(Term(name, float(amount)) for name, amount in terms.items() if amount))
    own = {GENERATE: {"resident": resident, "transient": Cost()}}
    placements = tuple(one.model_copy(update=own.get(one.stage, {})) for one in plan.placements)
    assert plan.facts.cluster.device.memory_bytes == 2**34
    assert engine_memory_share(plan.model_copy(update={"placements": placements})) == share
