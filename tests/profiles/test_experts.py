"""Models with experts and with latent attention, held against the modules that transformers builds of their configs."""

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from meshwright.profiles.errors import BadInput
from meshwright.profiles.layout import Layout, layout_violations
from meshwright.profiles.model_shape import ModelSpec, model_from_config
from meshwright.profiles.table import shape_of

BASE: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 128,
    "num_experts_per_tok": 2,
}
LATENT: dict[str, Any] = BASE | {
    "intermediate_size": 160,
    "moe_intermediate_size": 48,
    "num_key_value_heads": 8,
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 6,
    "n_group": 1,
    "topk_group": 1,
}
GPT_OSS: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 201_088,
    "max_position_embeddings": 131_072,
    "sliding_window": 128,
    "attention_bias": True,
    "num_experts_per_tok": 4,
    "rope_scaling": {"rope_type": "yarn", "factor": 32.0},
    "quantization_config": {"quant_method": "mxfp4"},
}
SMALL: dict[str, dict[str, Any]] = {
    "mixtral": BASE | {"architectures": ["MixtralForCausalLM"], "intermediate_size": 96, "num_local_experts": 4},
    "qwen2_moe": BASE
    | {
        "architectures": ["Qwen2MoeForCausalLM"],
        "intermediate_size": 160,
        "moe_intermediate_size": 48,
        "shared_expert_intermediate_size": 96,
        "num_experts": 6,
    },
    "qwen3_moe": BASE
    | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "intermediate_size": 160,
        "moe_intermediate_size": 48,
        "num_experts": 6,
        "head_dim": 16,
    },
    "deepseek_v2": LATENT
    | {"architectures": ["DeepseekV2ForCausalLM"], "n_shared_experts": 2, "first_k_dense_replace": 1},
    "deepseek_v3": LATENT
    | {"architectures": ["DeepseekV3ForCausalLM"], "n_shared_experts": 1, "first_k_dense_replace": 3},
    "gpt_oss": BASE
    | {
        "architectures": ["GptOssForCausalLM"],
        "intermediate_size": 96,
        "num_local_experts": 4,
        "head_dim": 16,
        "sliding_window": 32,
    },
}
FAMILIES = pytest.mark.parametrize("family", SMALL)


def spec(family: str, **changes: Any) -> ModelSpec:
    return model_from_config(SMALL[family] | changes, name="m")


def built(family: str, **changes: Any) -> dict[str, int]:
    """Parameters by name of the module that transformers builds, without memory."""
    config = AutoConfig.for_model(
        family, **{k: v for k, v in (SMALL[family] | changes).items() if k != "architectures"}
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return {name: parameter.numel() for name, parameter in model.named_parameters()}


@FAMILIES
def test_parameters_are_those_of_the_module(family: str) -> None:
    assert spec(family).num_params == sum(built(family).values())


@pytest.mark.parametrize("changes", [{"decoder_sparse_step": 2}, {"mlp_only_layers": [2]}, {"decoder_sparse_step": 9}])
def test_some_layers_may_have_a_plain_mlp(changes: dict[str, Any]) -> None:
    counts, model = built("qwen3_moe", **changes), spec("qwen3_moe", **changes)
    for number in range(4):
        own = sum(count for name, count in counts.items() if f".layers.{number}." in name)
        assert model.params_between(number, number + 1) == own


def test_queries_may_be_projected_at_once() -> None:
    assert spec("deepseek_v2", q_lora_rank=None).num_params == sum(built("deepseek_v2", q_lora_rank=None).values())


@FAMILIES
def test_a_config_that_transformers_wrote_is_read(family: str) -> None:
    config = AutoConfig.for_model(family, **{k: v for k, v in SMALL[family].items() if k != "architectures"})
    written = config.to_dict() | {"architectures": SMALL[family]["architectures"]}
    assert model_from_config(written, name="m").num_params == spec(family).num_params


@FAMILIES
def test_parameters_of_experts_are_counted_apart(family: str) -> None:
    model, routed = spec(family), {name: count for name, count in built(family).items() if ".experts." in name}
    assert model.expert_params_between(0, model.num_layers) == sum(routed.values())
    for i in range(model.num_layers):
        own = sum(count for name, count in routed.items() if f".layers.{i}." in name)
        assert model.expert_params_between(i, i + 1) == own


@FAMILIES
def test_layers_add_up_and_dense_ones_come_first(family: str) -> None:
    model = spec(family)
    each = [model.params_between(i, i + 1) for i in range(4)]
    counts = built(family)
    assert each == [sum(n for name, n in counts.items() if f".layers.{i}." in name) for i in range(4)]
    assert sum(each) == model.params_between(0, 4) == round(4 * model.layer_params)


@FAMILIES
def test_two_shards_hold_the_model_once_and_what_they_repeat(family: str) -> None:
    """Norms, routers, gates, biases behind a sum and projections down to a latent rank are whole on every rank."""
    repeated = ("norm", "mlp.gate.", "mlp.router", "shared_expert_gate", "q_a_proj", "kv_a_proj")
    repeated += ("o_proj.bias", "down_proj_bias")
    whole = sum(count for name, count in built(family).items() if any(part in name for part in repeated))
    model = spec(family)
    assert 2 * model.shard(2).num_params == model.num_params + whole


@pytest.mark.parametrize(
    ("config", "total", "active"),
    [
        (
            {
                "architectures": ["MixtralForCausalLM"],
                "hidden_size": 4096,
                "intermediate_size": 14336,
                "num_hidden_layers": 32,
                "num_attention_heads": 32,
                "num_key_value_heads": 8,
                "vocab_size": 32000,
                "max_position_embeddings": 32768,
                "num_local_experts": 8,
                "num_experts_per_tok": 2,
            },
            46_702_792_704,  # "46.7B total parameters but only uses 12.9B parameters per token", arXiv:2401.04088
            12.9e9,
        ),
        (
            {
                "architectures": ["DeepseekV3ForCausalLM"],
                "hidden_size": 7168,
                "intermediate_size": 18432,
                "moe_intermediate_size": 2048,
                "num_hidden_layers": 61,
                "num_attention_heads": 128,
                "num_key_value_heads": 128,
                "vocab_size": 129280,
                "max_position_embeddings": 163840,
                "n_routed_experts": 256,
                "n_shared_experts": 1,
                "num_experts_per_tok": 8,
                "first_k_dense_replace": 3,
                "q_lora_rank": 1536,
                "kv_lora_rank": 512,
                "qk_nope_head_dim": 128,
                "qk_rope_head_dim": 64,
                "v_head_dim": 128,
                "rope_scaling": {"type": "yarn", "factor": 40},
            },
            671_026_404_352,  # "671B total parameters with 37B activated for each token", arXiv:2412.19437
            37.5e9,
        ),
        # "20.91B" with "3.61B" active and "116.83B" with "5.13B", unembedding among these and embedding not:
        # gpt-oss model card, arXiv:2508.10925, table 1
        (GPT_OSS | {"num_hidden_layers": 24, "num_local_experts": 32}, 20_914_757_184, 3.61e9 + 201_088 * 2880),
        (GPT_OSS | {"num_hidden_layers": 36, "num_local_experts": 128}, 116_829_156_672, 5.13e9 + 201_088 * 2880),
    ],
    ids=["mixtral-8x7b", "deepseek-v3", "gpt-oss-20b", "gpt-oss-120b"],
)
def test_published_models_have_their_published_sizes(config: dict[str, Any], total: int, active: float) -> None:
    model = model_from_config(config, name="m")
    assert model.num_params == total
    assert model.experts is not None
    missed = 1 - model.experts.experts_per_token / model.experts.num_experts
    left_out = missed * model.expert_params_between(0, model.num_layers)
    assert model.num_params - left_out == pytest.approx(active, rel=0.01)


def test_latent_attention_caches_one_vector_and_one_rotary_key() -> None:
    assert [spec("deepseek_v3").shard(tp).cached_elements for tp in (1, 8)] == [32 + 8, 32 + 8]
    assert [spec("mixtral").shard(tp).cached_elements for tp in (1, 4)] == [2 * 4 * 8, 2 * 8]


def test_many_tokens_reach_every_expert_and_one_reaches_its_own() -> None:
    experts = spec("qwen2_moe").experts
    assert experts is not None
    assert experts.num_selected(1) == pytest.approx(2)
    assert [round(experts.num_selected(n), 1) for n in (2, 1000)] == [3.3, 6.0]


@pytest.mark.parametrize(
    ("family", "changes", "says"),
    [
        ("mixtral", {"num_local_experts": None}, "'num_local_experts' is None; it must be a positive integer"),
        ("mixtral", {"num_experts_per_tok": 5}, "experts_per_token=5 is more than num_experts=4"),
        ("qwen3_moe", {"decoder_sparse_step": 0}, "'decoder_sparse_step' is 0; it must be a positive integer"),
        ("qwen3_moe", {"mlp_only_layers": "2"}, "'mlp_only_layers' is '2'; it must be a list of layer numbers"),
        ("deepseek_v2", {"kv_lora_rank": None}, "'kv_lora_rank' is None; it must be a positive integer"),
        ("deepseek_v3", {"attention_bias": True}, "attention_bias of latent attention is not supported"),
    ],
)
def test_what_is_not_known_of_experts_is_refused(family: str, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(BadInput) as error:
        spec(family, **changes)
    assert says in str(error.value)


def test_tensor_parallelism_must_divide_each_expert() -> None:
    narrow = spec("deepseek_v2", moe_intermediate_size=44)
    assert layout_violations(Layout(tp=4), narrow) == ()
    odd = spec("deepseek_v2", moe_intermediate_size=42)
    assert layout_violations(Layout(tp=4), odd) == ("tp=4 does not divide the 42 columns of an expert of m; use tp=2.",)
    with pytest.raises(BadInput, match="tp=4 does not divide expert_ffn_size=42 of model m"):
        odd.shard(4)


def test_experts_are_spread_in_equal_parts() -> None:
    six = spec("qwen3_moe")
    assert layout_violations(Layout(dp=12, ep=6), six) == ()
    assert layout_violations(Layout(dp=12, ep=4), six) == ("ep=4 does not divide the 6 experts of m; use ep=3.",)


@FAMILIES
def test_expert_parameters_are_those_of_the_module(family: str) -> None:
    model = spec(family)
    counts = built(family)
    for first, last in ((0, 4), (1, 3), (3, 4)):
        names = [n for n in counts if ".experts." in n and any(f".layers.{i}." in n for i in range(first, last))]
        assert model.expert_params_between(first, last) == sum(counts[name] for name in names)


def test_a_table_has_no_shape_for_experts() -> None:
    with pytest.raises(BadInput, match="model m has experts, and tables hold dense shapes; plan it without a table"):
        shape_of(spec("mixtral"), 1)
