"""Megatron's layer layout for pipeline stages with unequal numbers of layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

from meshwright.profiles.layout import unequal_layers_per_stage
from meshwright.profiles.model_shape import ModelSpec
from meshwright.runtime.model.mesh import Mesh


class UnequalLayerLayout(PipelineParallelLayerLayout):
    """The number of layers of every stage, for a rank whose stage is given and not taken from global state.

    Megatron's own class ignores a given stage and reads its global state:
    https://github.com/NVIDIA/Megatron-LM/blob/core_v0.16.1/megatron/core/transformer/transformer_layer.py#L51
    """

    def __init__(self, counts: Sequence[int], pp_rank: int) -> None:
        stages = [["decoder"] * count for count in counts]
        stages[0].insert(0, "embedding")
        stages[-1].append("loss")
        super().__init__(stages, len(counts))
        self._pp_rank = pp_rank

    def get_num_layers_to_build(self, *args: Any, **kwargs: Any) -> int:
        return int(super().get_num_layers_to_build(*args, **{**kwargs, "pp_rank": self._pp_rank}))

    def get_layer_offset(self, *args: Any, **kwargs: Any) -> int:
        return int(super().get_layer_offset(*args, **{**kwargs, "pp_rank": self._pp_rank}))


def unequal_layer_layout(spec: ModelSpec, mesh: Mesh) -> UnequalLayerLayout | None:
    """The layer layout of a model with unequal stages; None if all stages have equally many layers."""
    counts = unequal_layers_per_stage(spec, mesh.layout.pp)
    return UnequalLayerLayout(counts, mesh.pp_rank) if counts else None
