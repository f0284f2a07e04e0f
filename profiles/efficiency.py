"""The share of its datasheet that a family of devices reaches, from `data/efficiency.yaml`, sourced and dated there."""

from __future__ import annotations

from functools import cache
from importlib.resources import as_file, files

from pydantic import Field

from meshwright.profiles.documents import Document, read_yaml
from meshwright.profiles.errors import BadInput


class Protocol(Document):
    """One way of a collective library to pass a tensor around: quick to start, or fast at size."""

    start_seconds: float = Field(ge=0)
    step: float = Field(ge=0, description="of the latency of a message, for each step of a ring")
    link_bytes: float = Field(gt=0, le=1, description="share of a link inside a node")
    fabric_bytes: float = Field(gt=0, le=1, description="share of a link between nodes")


class Multicast(Document):
    """Reduction inside the switch: every rank sends the tensor once and receives it once."""

    start_seconds: float = Field(ge=0)
    link_bytes: float = Field(gt=0, le=1)


class GemmEfficiency(Document):
    """Matrix products."""

    flops: float = Field(gt=0, le=1.5, description="share of peak that a full output tile reaches")
    bytes: float = Field(gt=0, le=1, description="of memory bandwidth, when weights are read for few tokens")
    tiles: tuple[tuple[int, int], ...] = Field(min_length=1, description="output tiles that a library chooses among")
    prologue: float = Field(ge=0, description="elements of the inner dimension that filling a tile costs")
    split: float = Field(gt=0, description="shortest piece of a split inner dimension, in elements")
    tile_cost: float = Field(ge=0, description="extra work of feeding a tile, relative, at an edge of 64")
    ridge: float = Field(ge=1, description="power that joins compute and memory time; infinite is a roofline")


class Grouped(Document):
    """Products of experts in one kernel, on the tiles of a single product."""

    flops: float = Field(gt=0, le=1.5, description="share of peak that a full output tile reaches")
    bytes: float = Field(gt=0, le=1, description="of memory bandwidth")
    prologue: float = Field(ge=0, description="elements of the inner dimension that filling a tile costs")
    ridge: float = Field(ge=1, description="power that joins compute and memory time")
    seconds: float = Field(ge=0, description="start of the experts of a layer, with what sorts tokens for them")


class AttentionEfficiency(Document):
    """Attention of many new tokens a row."""

    flops: float = Field(gt=0, le=1, description="share of peak")
    block: int = Field(gt=0, description="query rows that are computed together")
    tile: float = Field(ge=0, description="keys that a block computes beyond the causal triangle")
    tail: float = Field(ge=0, description="waves by which the last blocks are late")
    bytes: float = Field(gt=0, le=1, description="of memory bandwidth, reading and writing heads")
    ridge: float = Field(ge=0.5, description="power that joins compute and memory time")
    seconds: float = Field(ge=0, description="start of a call, which is more than one kernel")
    gradients: float = Field(default=1.0, gt=0, le=1, description="speed of its gradients, of the forward pass")


class DecodeEfficiency(Document):
    """Attention of one new token a row on a KV cache."""

    bytes: float = Field(gt=0, le=1, description="of memory bandwidth, when the cache is read")
    block: float = Field(gt=0, description="cached tokens that one processor reads for one key head")
    row_seconds: float = Field(ge=0, description="per row and key head on one processor")
    head_seconds: float = Field(ge=0, description="per query head on one processor")
    seconds: float = Field(ge=0, description="start of a call")
    join_seconds: float = Field(ge=0, description="of joining the blocks of a row, where it has several")
    group: int = Field(ge=1, description="fewest query heads a key head whose cache is spread over processors")
    saturation: float = Field(gt=0, le=1, description="share of processors that fill the memory")
    ridge: float = Field(ge=0.5, description="power that joins the time of reading and of work")


class Efficiency(Document):
    """Constants of the laws in `cost_models.kernels`, `compute` and `collectives`, which say how each is used."""

    gemm: GemmEfficiency
    grouped: Grouped
    attention: AttentionEfficiency
    decoding: DecodeEfficiency
    sustained: float = Field(gt=0, le=1, description="of the speed of a product alone, when products follow each other")
    elementwise_bytes: float = Field(gt=0, le=1)
    kernel_seconds: float = Field(ge=0, description="start and end of one kernel on the device")
    overlaps_launch: bool = Field(description="whether kernels are launched while earlier ones still run")
    protocols: tuple[Protocol, ...] = Field(min_length=1, description="the quickest is used for each size")
    multicast: Multicast | None = None
    peer: Protocol | None = Field(default=None, description="all-reduce through the memory of peers, in one node")
    message: Protocol | None = Field(
        default=None, description="from one rank to another; as the protocols where it was not measured"
    )
    transfer_bytes: float = Field(gt=0, le=1, description="share of a link that large point-to-point copies reach")
    kernels_per_layer: int = Field(ge=0, description="launched by the forward pass of one layer")
    routing_kernels: int = Field(
        ge=0, description="that the forward pass of a layer launches more where it has experts"
    )
    expert_kernels: int = Field(
        ge=0, description="launched by the forward pass of one expert, where each runs by itself"
    )
    kernels_at_ends: int = Field(ge=0, description="launched by embedding and head together")
    date: str
    source: str = Field(min_length=1)


class _Families(Document):
    families: dict[str, Efficiency]
    devices: dict[str, str] = Field(description="family of each device by name")
    kinds: dict[str, str] = Field(description="family of a device that is not listed, by kind")


@cache
def efficiency_of(kind: str, name: str = "") -> Efficiency:
    """The efficiencies of a device by name, or of its kind (cuda or cpu) when the name is not listed.

    Raises BadInput for a kind that is not known.
    """
    known = _families()
    if kind not in known.kinds:
        raise BadInput(f"device kind {kind!r} is not known; use {' or '.join(known.kinds)}.")
    return known.families[known.devices.get(name, known.kinds[kind])]


@cache
def _families() -> _Families:
    with as_file(files("meshwright.profiles") / "data" / "efficiency.yaml") as path:
        return read_yaml(_Families, path, "efficiencies")
