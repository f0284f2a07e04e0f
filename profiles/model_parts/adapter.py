"""A low-rank adapter: what is trained in place of the weights of a model, beside some of its linears.

    y = W x + (alpha / rank) B A x

W stays as it is; A is [rank, inputs] and starts at random, B is [outputs, rank] and starts at zero (Hu et al., LoRA,
arXiv:2106.09685, section 4.1). Linears have the names of Megatron-core: those side by side (queries, keys and values;
gate and up) have one A.
"""

from __future__ import annotations

from typing import Literal, Self, TypeAlias

from pydantic import Field, model_validator

from meshwright.profiles.documents import Document

Linear: TypeAlias = Literal["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"]
"""Of a decoder layer: queries, keys and values; the attention's output; gate and up; down."""

ATTENTION: tuple[Linear, ...] = ("linear_qkv", "linear_proj")
MLP: tuple[Linear, ...] = ("linear_fc1", "linear_fc2")

_COLUMNS = ("linear_qkv", "linear_fc1")
_MOST_RANK = 2**14
_TARGETS = "linears that have it: linear_qkv, linear_proj (attention), linear_fc1, linear_fc2 (MLP); default all"


class Adapter(Document):
    """Its sizes, the same in every layer."""

    rank: int = Field(gt=0, le=_MOST_RANK, description="inner size of the low-rank product")
    alpha: float = Field(gt=0, description="the product counts alpha / rank times")
    targets: tuple[Linear, ...] = Field(default=(*ATTENTION, *MLP), min_length=1, description=_TARGETS)

    @model_validator(mode="after")
    def _once(self) -> Self:
        for name in self.targets:
            if self.targets.count(name) > 1:
                raise ValueError(f"targets lists {name} {self.targets.count(name)} times; list it once")
        return self

    @property
    def scale(self) -> float:
        """How often the product counts."""
        return self.alpha / self.rank

    @property
    def num_columns(self) -> int:
        """Of its linears those that tensor parallelism cuts along their outputs."""
        return sum(name in _COLUMNS for name in self.targets)

    @property
    def num_rows(self) -> int:
        """Those that it cuts along their inputs."""
        return len(self.targets) - self.num_columns
