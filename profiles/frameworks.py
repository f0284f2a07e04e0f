"""How a framework runs a layer and an update, and what generates with it: what changes costs and is not a choice of the
planner.

From `data/frameworks.yaml` and `data/engines.yaml`, sourced and dated there. `runtime` is this project's own.
"""

from __future__ import annotations

from functools import cache
from importlib.resources import as_file, files
from typing import Literal, TypeAlias, get_args

from pydantic import Field

from meshwright.profiles.documents import Document, read_yaml
from meshwright.profiles.errors import BadInput, suggestion

EngineName: TypeAlias = Literal["meshwright-eager", "meshwright-graph", "vllm", "sglang", "trtllm"]

EAGER: EngineName = "meshwright-eager"
GRAPH: EngineName = "meshwright-graph"

OWN: tuple[EngineName, ...] = (EAGER, GRAPH)
"""Those that this project runs; the others generate for other trainers."""


class Framework(Document):
    """Facts of a training or an inference code."""

    flash_attention: bool = Field(description="false: scores are written to memory")
    cuda_graphs: bool = Field(default=False, description="every pass is one launch, with what is around it")
    recorded_kernels: int | None = Field(
        default=None,
        gt=0,
        description="of a layer of a decode step whose layers are one launch, what is around them being launched; "
        "none are recorded when not given",
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


class EngineRefit(Document):
    """How an engine is given new weights."""

    in_place: bool = Field(
        description="each rank receives what it holds, where that is read; else all whole tensors pass its loader"
    )


class Engine(Document):
    """Facts of what generates."""

    framework: str = Field(description="whose decode steps and prefills it has")
    gpu_framework: str | None = Field(default=None, description="the same on a GPU, where it is another there")
    refit: EngineRefit
    source: str = Field(min_length=1)

    def passes_on(self, kind: str) -> Framework:
        """How its decode steps and prefills run on devices of a kind, cuda or cpu."""
        return framework_named(self.gpu_framework if self.gpu_framework and kind == "cuda" else self.framework)


class _Frameworks(Document):
    frameworks: dict[str, Framework]


class _Engines(Document):
    engines: dict[EngineName, Engine]


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


def engine_named(name: str) -> Engine:
    """The facts of an engine. Raises BadInput for an unknown name."""
    known = {str(engine): facts for engine, facts in _engines().items()}
    if name not in known:
        raise BadInput(f"engine {name!r} is not known; {suggestion(name, known)}")
    return known[name]


def own_framework(kind: str) -> Framework:
    """How this project trains and scores on devices of a kind, cuda or cpu."""
    return engine_named(EAGER).passes_on(kind)


def own_engine(kind: str, *, has_experts: bool) -> EngineName:
    """What `run` generates with on devices of a kind (cuda or cpu), by a model with experts or without: decode steps
    are recorded on a GPU, and not where the host routes tokens to experts."""
    return GRAPH if kind == "cuda" and not has_experts else EAGER


def require_possible_engine(name: EngineName, kind: str, *, has_experts: bool) -> None:
    """Raises BadInput for decode steps that are to be recorded and cannot be."""
    if name != GRAPH or own_engine(kind, has_experts=has_experts) == GRAPH:
        return
    why = "the host routes tokens to experts" if kind == "cuda" else "a CPU has no graphs"
    raise BadInput(f"engine={GRAPH} records decode steps on a GPU, and {why}; use {EAGER}.")


def require_own_engine(name: EngineName) -> None:
    """Raises BadInput for an engine that this project does not run."""
    if name not in OWN:
        raise BadInput(
            f"the plan is for engine {name}, which meshwright does not run; export it to a trainer that does, or plan "
            f"the job with engine: {' or '.join(OWN)}."
        )


@cache
def _engines() -> dict[EngineName, Engine]:
    with as_file(files("meshwright.profiles") / "data" / "engines.yaml") as path:
        found = read_yaml(_Engines, path, "engines").engines
    assert set(found) == set(get_args(EngineName)), found
    return found
