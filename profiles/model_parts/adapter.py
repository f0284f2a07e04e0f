"""Low-rank adapters (LoRA) on some linears of a model, trained in place of its weights.

    y = W x + (alpha / rank) B A x

W is frozen; A is [rank, inputs] with random initial values, B is [outputs, rank] and starts at zero (Hu et al., LoRA,
arXiv:2106.09685, section 4.1). Linears have the names of Megatron-core; fused linears (queries, keys and values; gate
and up) share one A.
"""

from __future__ import annotations

from typing import Literal, Self, TypeAlias

from pydantic import Field, model_validator

from meshwright.profiles.documents import Document

Linear: TypeAlias = Literal["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"]
"""Linears of a decoder layer: queries, keys and values; attention output; gate and up; down."""

ATTENTION_LINEARS: tuple[Linear, ...] = ("linear_qkv", "linear_proj")
MLP_LINEARS: tuple[Linear, ...] = ("linear_fc1", "linear_fc2")

COLUMN_PARALLEL: tuple[Linear, ...] = ("linear_qkv", "linear_fc1")
_MAX_RANK = 2**14
_TARGETS = "adapted linears: linear_qkv, linear_proj (attention), linear_fc1, linear_fc2 (MLP); default all"


class Adapter(Document):
    """Rank, scale and target linears of an adapter, the same in every layer."""

    rank: int = Field(gt=0, le=_MAX_RANK, description="inner size of the low-rank product")
    alpha: float = Field(gt=0, description="the low-rank product is scaled by alpha / rank")
    targets: tuple[Linear, ...] = Field(default=(*ATTENTION_LINEARS, *MLP_LINEARS), min_length=1, description=_TARGETS)

    @model_validator(mode="after")
    def _targets_are_unique(self) -> Self:
        for name in self.targets:
            if self.targets.count(name) > 1:
                raise ValueError(f"targets lists {name} {self.targets.count(name)} times; list it once")
        return self

    @property
    def scale(self) -> float:
        """Factor on the low-rank product."""
        return self.alpha / self.rank

    @property
    def num_column_parallel(self) -> int:
        """Number of target linears that are column-parallel: tensor parallelism shards their outputs."""
        return sum(name in COLUMN_PARALLEL for name in self.targets)

    @property
    def num_row_parallel(self) -> int:
        """Number of target linears that are row-parallel: tensor parallelism shards their inputs."""
        return len(self.targets) - self.num_column_parallel
