"""How a framework runs a layer and an update: what changes costs and is not a choice of the planner.

From `data/frameworks.yaml`, sourced and dated there. `runtime` is this project's own.
"""

from __future__ import annotations

from functools import cache
from importlib.resources import as_file, files

from pydantic import Field

from meshwright.profiles.documents import Document, read_yaml
from meshwright.profiles.errors import BadInput, suggestion


class Framework(Document):
    """Facts of a training or an inference code."""

    flash_attention: bool = Field(description="false: scores are written to memory")
    cuda_graphs: bool = Field(default=False, description="every pass is one launch, with what is around it")
    recorded_decode: bool = Field(
        default=False, description="the layers of a decode step are one launch; what is around them is not"
    )
    sharded_optimizer: bool = Field(
        default=True, description="false: every replica reduces all gradients and updates everything"
    )
    overlapped_reduction: bool = Field(default=False, description="gradients are reduced during the backward pass")
    hidden_exchanges: float = Field(
        default=0.0, ge=0, le=1, description="share of tensor-parallel exchanges that runs beside the products"
    )
    peer_reductions: bool = Field(default=False, description="small all-reduces go through the memory of peers")
    scattered_messages: bool = Field(default=False, description="each tensor-parallel rank sends a part, then gathers")
    stall_seconds: float = Field(
        default=0.0,
        ge=0,
        description="of a scattered message, for each further replica on its node",
    )
    gradient_bytes: int = Field(default=4, gt=0, description="of a reduced gradient")
    loss_bytes: int = Field(default=54, gt=0, description="traffic per logit of a log-probability")
    loss_backward_bytes: int = Field(default=54, gt=0, description="traffic per logit of its gradient")
    launch_seconds: float | None = Field(
        default=None, ge=0, description="time of the host to launch one kernel; the device's own when not given"
    )
    round_seconds: float = Field(default=0.0, ge=0, description="time of the host between two rounds of decoding")
    row_seconds: float = Field(default=0.0, ge=0, description="time of the host for each sequence of a round")
    call_seconds: float = Field(
        default=0.0, ge=0, description="time of the controller around each function call of a step"
    )
    grouped_experts: bool = Field(default=True, description="false: the experts of a rank run one by one")
    start_share: float = Field(default=1.0, ge=0, le=1, description="of a kernel's start that is left inside a graph")
    kernels_per_layer: int | None = Field(
        default=None, gt=0, description="where kernels are fused; otherwise the device's"
    )
    sampling_bytes: int = Field(default=56, gt=0, description="traffic per logit when a token is sampled")
    cache_share: float = Field(
        default=0.9, gt=0, le=1, description="of the memory that weights leave, for keys and values"
    )
    max_rows: int = Field(default=2048, gt=0, description="most sequences that decode together")
    max_tokens: int | None = Field(
        default=None, gt=0, description="most tokens of prompts in one pass; all that are admitted when not given"
    )
    source: str = Field(min_length=1)


class _Frameworks(Document):
    frameworks: dict[str, Framework]


def framework_named(name: str) -> Framework:
    """The facts of a framework. Raises BadInput for an unknown name."""
    known = _frameworks()
    if name not in known:
        raise BadInput(f"framework {name!r} is not known; {suggestion(name, known)}")
    return known[name]


@cache
def _frameworks() -> dict[str, Framework]:
    with as_file(files("meshwright.profiles") / "data" / "frameworks.yaml") as path:
        return read_yaml(_Frameworks, path, "frameworks").frameworks
