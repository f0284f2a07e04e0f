"""What is planned and not run is told, and everything else is run."""

from __future__ import annotations

from dataclasses import replace

from meshwright.profiles.experts import Experts
from meshwright.profiles.model_shape import model_from_config, run_violations

SPEC = model_from_config(
    {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 260,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
    },
    name="m",
)


def test_experts_of_a_family_that_is_not_built_are_told_those_that_are() -> None:
    experts = Experts(num_experts=4, experts_per_token=2, ffn_size=32)
    assert not list(run_violations(SPEC))
    assert not list(run_violations(replace(SPEC, architecture="MixtralForCausalLM", experts=experts)))
    [said] = run_violations(replace(SPEC, architecture="NemotronHForCausalLM", experts=experts))
    assert "not run in NemotronHForCausalLM; use Mixtral or Qwen2Moe or" in said


def test_types_of_rotary_embeddings_that_no_cost_depends_on_are_planned_and_not_run() -> None:
    [said] = run_violations(replace(SPEC, planned_rope="dynamic"))
    assert "has rope type 'dynamic', which can be planned and simulated but not run" in said


def test_one_expert_per_token_with_a_weight_of_one_is_planned_and_not_run() -> None:
    one = replace(
        SPEC, architecture="MixtralForCausalLM", experts=Experts(num_experts=4, experts_per_token=1, ffn_size=32)
    )
    [said] = run_violations(one)
    assert "has one expert per token with normalised weights" in said
    assert one.experts is not None
    free = replace(one, architecture="Qwen3MoeForCausalLM", experts=replace(one.experts, normalized=False))
    assert not list(run_violations(free))
