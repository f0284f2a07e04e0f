"""Megatron builds the layers that the split of a model gives each stage, wherever the mesh of the model lies."""

from __future__ import annotations

import pytest
import torch
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from meshwright.profiles.layout import Layout, stage_layers
from meshwright.profiles.model_shape import ModelSpec
from meshwright.runtime.model.mesh import Mesh
from meshwright.runtime.model.model_shard import unequal_layer_layout


def mesh_of(pp: int, pp_rank: int) -> Mesh:
    """As one rank sees it, without groups."""
    return Mesh(Layout(pp=pp), first_rank=3, tp_rank=0, cp_rank=0, dp_rank=0, pp_rank=pp_rank, _groups=None)


def spec_of(num_layers: int) -> ModelSpec:
    return ModelSpec(
        name="small",
        architecture="LlamaForCausalLM",
        num_layers=num_layers,
        hidden_size=64,
        ffn_size=256,
        num_heads=4,
        num_kv_heads=4,
        head_dim=16,
        vocab_size=256,
        max_positions=512,
        tied_embeddings=False,
        activation="silu",
        norm_epsilon=1e-6,
    )


@pytest.mark.parametrize(("num_layers", "pp"), [(5, 2), (6, 4), (7, 4), (7, 5), (61, 16)])
def test_megatron_counts_the_layers_of_a_stage_as_the_split_does(num_layers: int, pp: int) -> None:
    for stage in range(pp):
        config = TransformerConfig(
            num_layers=num_layers,
            hidden_size=64,
            num_attention_heads=4,
            pipeline_model_parallel_size=pp,
            pipeline_model_parallel_layout=unequal_layer_layout(spec_of(num_layers), mesh_of(pp, stage)),
            pipeline_dtype=torch.float32,
            cuda_graph_scope=[],  # the default warns of itself
        )
        layers = stage_layers(spec_of(num_layers), pp, stage)
        assert get_num_layers_to_build(config, pp_rank=stage) == len(layers)
        assert get_transformer_layer_offset(config, pp_rank=stage) == layers.start


def test_where_all_stages_hold_as_many_layers_megatron_is_told_nothing() -> None:
    assert unequal_layer_layout(spec_of(8), mesh_of(4, 1)) is None
