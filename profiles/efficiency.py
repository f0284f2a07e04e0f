"""The share of its datasheet that a kind of device reaches, from `data/efficiency.yaml`, sourced and dated there."""

from __future__ import annotations

from functools import cache
from importlib.resources import as_file, files

from pydantic import Field

from meshwright.profiles.documents import Document, read_yaml


class Efficiency(Document):
    """Shares in (0, 1]; attention reaches `attention_flops * n / (n + attention_half_tokens)` at n tokens."""

    gemm_flops: float = Field(gt=0, le=1)
    gemm_bytes: float = Field(gt=0, le=1, description="of memory bandwidth, when weights are read for few tokens")
    attention_flops: float = Field(gt=0, le=1)
    attention_half_tokens: float = Field(ge=0)
    attention_bytes: float = Field(gt=0, le=1, description="of memory bandwidth, when a KV cache is read")
    elementwise_bytes: float = Field(gt=0, le=1)
    link_bytes: float = Field(gt=0, le=1)
    kernels_per_layer: int = Field(ge=0, description="launched by the forward pass of one layer")
    kernels_at_ends: int = Field(ge=0, description="launched by embedding and head together")
    date: str
    source: str = Field(min_length=1)


class _Kinds(Document):
    cuda: Efficiency
    cpu: Efficiency


@cache
def efficiency_of(kind: str) -> Efficiency:
    """The efficiencies of a kind of device, cuda or cpu."""
    with as_file(files("meshwright.profiles") / "data" / "efficiency.yaml") as path:
        kinds = read_yaml(_Kinds, path, "efficiencies")
    found: Efficiency = getattr(kinds, kind)
    return found
