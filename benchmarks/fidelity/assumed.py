"""What published rows leave open about how they were measured, from `assumed.yaml`, with the source of each value."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from pydantic import Field

from meshwright.profiles.documents import Document, read_yaml


class Served(Document):
    """The load of serving points: engines with their versions whose prompts are repeated and cached."""

    repeated_prompts: tuple[str, ...]
    source: str = Field(min_length=1)


class Checkpoints(Document):
    """Number formats of published checkpoints, by the name of the model's shape."""

    block_scaled: tuple[str, ...] = Field(description="in 8 bits with a scale for each block of weights")
    few_bits_in_experts: tuple[str, ...] = Field(description="in 4 bits in routed experts alone, else in 16")
    source: str = Field(min_length=1)


class Offline(Document):
    """Offline runs: number of requests by input/output length, where a row does not state it."""

    requests: dict[str, int]
    source: str = Field(min_length=1)


class Real(Document):
    """Updates per step, and micro-batches of a pass for each pipeline stage where there are several."""

    num_minibatches: int = Field(gt=0)
    train_batches_per_stage: int = Field(gt=0)
    forward_batches_per_stage: int = Field(gt=0)
    source: str = Field(min_length=1)


class Recipe(Document):
    """How NeMo-RL runs one model: `forward_rows` sequences of the greatest length are scored together."""

    recompute: str = "none"
    forward_rows: int = Field(default=4, gt=0)


class NemoRl(Document):
    prompt_tokens: int = Field(gt=0)
    length_tail: float = Field(gt=1, description="99th percentile of responses over their median, before the cut")
    sync_memory_share: float = Field(gt=0, le=1, description="of a device, for weights and cache while it generates")
    async_memory_share: float = Field(gt=0, le=1)
    async_generation_share: float = Field(gt=0, lt=1, description="of the ranks, when training goes on beside")
    refit_bytes_per_second: float = Field(gt=0, description="of weights that one rank takes over")
    refit_tensor_seconds: float = Field(ge=0, description="of a whole tensor, on ranks that train and generate in turn")
    unpinned_bytes_per_second: float = Field(
        gt=0, description="of copies between a device and host memory that is not pinned"
    )
    skips_logprob_since: tuple[int, int] = Field(description="the release that trains without previous log-probs")
    recipes: dict[str, Recipe] = Field(description="by the name of the model's shape")
    source: str = Field(min_length=1)


class Verl(Document):
    """How the stages of verl change when they stop sharing ranks."""

    work_share: float = Field(ge=0, le=1, description="of a synchronous generation; the rest waits for the longest")
    alone_share: float = Field(gt=0, le=1, description="of a training stage's time, without an engine on its ranks")
    source: str = Field(min_length=1)


class Adapters(Document):
    """Low-rank adapters of training rows that do not state their rank."""

    rank: int = Field(gt=0)
    of_queries_keys_and_values: tuple[str, ...] = Field(description="sets whose recipes adapt only these linears")
    source: str = Field(min_length=1)


class Transfers(Document):
    """Weight synchronisation of trainers."""

    reshard_start_seconds: float = Field(ge=0, description="before the bytes of a transfer in place")
    tensor_by_tensor_seconds: float = Field(ge=0, description="of a tensor that is sent and loaded alone")
    source: str = Field(min_length=1)


class FunctionalTests(Document):
    """Megatron-LM's functional tests that do not state their ranks."""

    num_gpus: int = Field(gt=0)
    source: str = Field(min_length=1)


class PrimeRl(Document):
    """Steps of prime-rl's trainer."""

    reinforcement_seconds: float = Field(ge=0, description="of a step, besides those of supervised fine-tuning")
    source: str = Field(min_length=1)


class VTrain(Document):
    """The cluster of vTrain's iterations on several nodes."""

    stall_seconds: float = Field(ge=0, description="of a pipeline message, for each further replica on its node")
    source: str = Field(min_length=1)


class Assumed(Document):
    adapters: Adapters
    vtrain: VTrain
    functional_tests: FunctionalTests
    prime_rl: PrimeRl
    transfers: Transfers
    served: Served
    checkpoints: Checkpoints
    offline: Offline
    real: Real
    nemo_rl: NemoRl
    verl: Verl


@cache
def assumed() -> Assumed:
    return read_yaml(Assumed, Path(__file__).with_name("assumed.yaml"), "assumptions")
