"""Properties of training frameworks and inference engines that change costs and that the planner cannot choose.

They are read from `data/frameworks.yaml` and `data/engines.yaml`, which state sources and dates. The frameworks named
`runtime...` are this project's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.resources import as_file, files
from typing import Literal, TypeAlias, get_args

from pydantic import Field

from meshwright.profiles.documents import Document, read_yaml
from meshwright.profiles.efficiency import NATIVE, AttentionKernel
from meshwright.profiles.errors import BadInput, suggestion

EngineName: TypeAlias = Literal["meshwright-eager", "meshwright-graph", "vllm", "sglang", "trtllm"]

EAGER: EngineName = "meshwright-eager"
GRAPH: EngineName = "meshwright-graph"
VLLM: EngineName = "vllm"
SGLANG: EngineName = "sglang"

OWN_ENGINES: tuple[EngineName, ...] = (EAGER, GRAPH)
"""The engines of this project."""

RUN_ENGINES: tuple[EngineName, ...] = (*OWN_ENGINES, VLLM, SGLANG)
"""The engines that `run` starts; the others generate for other trainers."""

NOT_RUN: Mapping[EngineName, str] = {
    SGLANG: "`run` was never tried with it: the integration follows the interface of SGLang 0.5.23 and was tested only "
    "against a test double, and plans do not count the memory of its process"
}
"""The caveat that is printed for each engine that `run` starts but was never tried with."""


class Framework(Document):
    """Properties of a training framework, or of the model code of a generation engine."""

    flash_attention: bool = Field(description="false: attention scores are written to memory")
    attention_kernel: AttentionKernel = Field(
        default=NATIVE, description="kernel of attention: native to the device, flash-1 or flash-2"
    )
    cuda_graphs: bool = Field(default=False, description="every whole pass is one CUDA graph")
    records_experts: bool = Field(
        default=True, description="false: graphs leave out the dispatch of tokens to experts, which the host launches"
    )
    recorded_kernels: int | None = Field(
        default=None,
        gt=0,
        description="kernels per layer in the CUDA graph that runs all layers of a decode step, while everything else "
        "is launched from the host; null: no such graph",
    )
    sharded_optimizer: bool = Field(
        default=True, description="false: every replica reduces all gradients and updates everything"
    )
    sharded_weights: bool = Field(
        default=False,
        description="weights are sharded over replicas (FSDP, ZeRO-3): a layer's are gathered before its forward and "
        "its backward pass, and its gradients are scattered after, beside the compute of its neighbours",
    )
    overlapped_reduction: bool = Field(default=False, description="gradients are reduced during the backward pass")
    hidden_exchanges: float = Field(
        default=0.0, ge=0, le=1, description="share of tensor-parallel communication that overlaps with GEMMs"
    )
    peer_reductions: bool = Field(default=False, description="small all-reduces use peer memory (custom all-reduce)")
    scattered_messages: bool = Field(default=False, description="each tensor-parallel rank sends a part, then gathers")
    gradient_bytes: int = Field(default=4, gt=0, description="bytes per element of a reduced gradient")
    loss_bytes: int = Field(default=54, gt=0, description="memory traffic per logit of a log-probability")
    logit_bytes: int | None = Field(
        default=None, gt=0, description="memory per logit in training; null: 16 bits and a chunk in 32 bits"
    )
    loss_backward_bytes: int = Field(default=54, gt=0, description="memory traffic per logit of its gradient")
    launch_seconds: float | None = Field(
        default=None, ge=0, description="time of the host to launch one kernel; the device's own when not given"
    )
    forward_launch_seconds: float | None = Field(
        default=None, ge=0, description="the same in a pass without gradients; that of training when not given"
    )
    launch_deviation: float | None = Field(
        default=None,
        ge=0,
        description="relative standard deviation of these times where they are of the runs that they describe; "
        "otherwise that of launches in uncertainty.yaml",
    )
    round_seconds: float = Field(default=0.0, ge=0, description="time of the host between two rounds of decoding")
    row_seconds: float = Field(default=0.0, ge=0, description="time of the host for each sequence of a round")
    overlapped_host: bool = Field(
        default=False, description="the host prepares a round of decoding while the device computes the one before"
    )
    call_seconds: float = Field(
        default=0.0, ge=0, description="time of the controller around each function call of a step"
    )
    gather_bytes_per_second: float | None = Field(
        default=None,
        gt=0,
        description="rate at which whole tensors are gathered to be sent to a loader; null: as fast as links",
    )
    merged_adapters: bool = Field(
        default=True, description="a refit sends the weights with the adapter merged; false: the adapter alone"
    )
    grouped_experts: bool = Field(default=True, description="false: the experts of a rank run one by one")
    counts_on_host: bool = Field(
        default=False,
        description="the host waits in every layer with experts until it has the number of tokens of each expert",
    )
    fused_expert_biases: bool = Field(
        default=True,
        description="false: biases of experts and clamps of their gate are kernels of their own in training",
    )
    merged_copies: bool = Field(
        default=False,
        description="a token is sent once to each other node that has any of its experts (DeepEP, HybridEP); false: "
        "once for each of its experts",
    )
    overlapped_experts: bool = Field(
        default=False,
        description="tokens travel to experts of one micro-batch while another one computes, in training",
    )
    start_share: float = Field(
        default=1.0, ge=0, le=1, description="share of a kernel's start-up that remains inside a CUDA graph"
    )
    eager_operators: bool = Field(
        default=False, description="norms, rotary embeddings and gates run as PyTorch's operators, one after the other"
    )
    kernels_per_layer: int | None = Field(
        default=None, gt=0, description="where kernels are fused; otherwise the device's"
    )
    kernels_at_ends: int | None = Field(
        default=None, gt=0, description="launched by embedding and head together; otherwise the device's"
    )
    sampling_bytes: int = Field(default=56, gt=0, description="memory traffic per logit when a token is sampled")
    cache_share: float = Field(
        default=0.9, gt=0, le=1, description="share of the memory left by the weights that the KV cache takes"
    )
    max_rows: int = Field(default=2048, gt=0, description="maximum number of sequences that decode together")
    max_tokens: int | None = Field(
        default=None, gt=0, description="maximum prompt tokens in one prefill pass; unlimited if not given"
    )
    source: str = Field(min_length=1)


class EngineRefit(Document):
    """The way in which an engine receives new weights."""

    in_place: bool = Field(
        description="each rank receives its shards into the tensors in use; false: the loader gets whole tensors"
    )
    tensor_seconds: float = Field(default=0.0, ge=0, description="time of the loader for each tensor")


class EngineSleep(Document):
    """The rates at which an engine in its own process frees the memory of its KV cache and takes it again."""

    freed_bytes_per_second: float = Field(gt=0, description="rate at which it is freed after a run of the stage")
    taken_bytes_per_second: float = Field(gt=0, description="rate at which it is taken before the next one")


class Engine(Document):
    """Properties of a generation engine."""

    framework: str = Field(description="framework that describes its decode steps and prefills")
    gpu_framework: str | None = Field(default=None, description="that framework on a GPU, if it differs")
    frees_windows: bool = Field(
        description="layers with a sliding window keep only the blocks of a sequence that the window touches; false: "
        "they keep all, as the other layers do"
    )
    latent_copies: int = Field(
        default=1,
        ge=1,
        description="how often the KV cache holds a token's vector of latent attention: 2 as key and as value, or 1",
    )
    verifies_together: bool = Field(
        default=False,
        description="the drafted tokens of a sequence are rows of one kernel that reads its cache once; false: each is "
        "a row of a decode step, which reads the cache by itself",
    )
    refit: EngineRefit
    process_bytes: float = Field(
        default=0.0,
        ge=0,
        description="memory of its process without a model, where one runs beside each rank (on CPUs)",
    )
    sleep: EngineSleep | None = Field(
        default=None,
        description="how fast it frees its KV cache and takes it again, where such a process runs (on CPUs)",
    )
    source: str = Field(min_length=1)

    def framework_on(self, kind: str) -> Framework:
        """Return the framework of its decode steps and prefills on devices of a kind, cuda or cpu."""
        return framework_named(self.gpu_framework if self.gpu_framework and kind == "cuda" else self.framework)


class _Frameworks(Document):
    frameworks: dict[str, Framework]


class _Engines(Document):
    engines: dict[EngineName, Engine]


def framework_named(name: str) -> Framework:
    """Return the properties of a framework. Raises BadInput for an unknown name."""
    known = _frameworks()
    if name not in known:
        raise BadInput(f"framework {name!r} is not known; {suggestion(name, known)}")
    return known[name]


@cache
def _frameworks() -> dict[str, Framework]:
    with as_file(files("meshwright.profiles") / "data" / "frameworks.yaml") as path:
        return read_yaml(_Frameworks, path, "frameworks").frameworks


def engine_named(name: str) -> Engine:
    """Return the properties of an engine. Raises BadInput for an unknown name."""
    known = {str(engine): facts for engine, facts in _engines().items()}
    if name not in known:
        raise BadInput(f"engine {name!r} is not known; {suggestion(name, known)}")
    return known[name]


def own_framework(kind: str) -> Framework:
    """Return the framework with which this project trains and scores on devices of a kind, cuda or cpu."""
    return framework_named("runtime-cuda" if kind == "cuda" else "runtime")


def own_engine(kind: str, *, has_experts: bool) -> EngineName:
    """Return the engine that `run` uses on devices of a kind (cuda or cpu).

    Decode steps are CUDA graphs on a GPU, except with experts, where the host routes tokens.
    """
    return GRAPH if kind == "cuda" and not has_experts else EAGER


def require_graph_support(name: EngineName, kind: str, *, has_experts: bool) -> None:
    """Raises BadInput if the engine needs CUDA graphs and these are not possible."""
    if name != GRAPH or own_engine(kind, has_experts=has_experts) == GRAPH:
        return
    reason = "the host routes tokens to experts" if kind == "cuda" else "a CPU has no graphs"
    raise BadInput(f"engine={GRAPH} records decode steps on a GPU, and {reason}; use {EAGER}.")


def require_run_engine(name: EngineName) -> None:
    """Raises BadInput for an engine that `run` does not start."""
    if name not in RUN_ENGINES:
        raise BadInput(
            f"the plan is for engine {name}, which meshwright does not run; export it to a trainer that does, or plan "
            f"the job with engine: {' or '.join(RUN_ENGINES)}."
        )


@cache
def _engines() -> dict[EngineName, Engine]:
    with as_file(files("meshwright.profiles") / "data" / "engines.yaml") as path:
        engines = read_yaml(_Engines, path, "engines").engines
    assert set(engines) == set(get_args(EngineName)), engines
    return engines
