"""The fraction of datasheet peaks that a family of devices achieves, read from `data/efficiency.yaml`.

That file states the source and the date of each constant.
"""

from __future__ import annotations

from functools import cache
from importlib.resources import as_file, files
from typing import Literal, TypeAlias

from pydantic import Field

from meshwright.profiles.documents import Document, read_yaml
from meshwright.profiles.errors import BadInput


class Protocol(Document):
    """A protocol of a collective library: low latency for small tensors, or high bandwidth for large ones."""

    start_seconds: float = Field(ge=0)
    step: float = Field(ge=0, description="share of the message latency that each step of a ring adds")
    link_bytes: float = Field(gt=0, le=1, description="share of the bandwidth of a link inside a node")
    fabric_bytes: float = Field(gt=0, le=1, description="share of the bandwidth of a link between nodes")


class Multicast(Document):
    """Reduction inside the switch (NVLink SHARP): every rank sends the tensor once and receives it once."""

    start_seconds: float = Field(ge=0)
    link_bytes: float = Field(gt=0, le=1)


AttentionKernel: TypeAlias = Literal["native", "flash-1", "flash-2"]
"""The kernels of attention: the one that the device's constants are of, FlashAttention 1 (and its Triton version), or
FlashAttention 2, which has the instructions of Ampere."""

NATIVE: AttentionKernel = "native"

_RIDGE = "p in (compute^p + memory^p)^(1/p); infinity is the roofline max(compute, memory)"


class GemmEfficiency(Document):
    """Constants of GEMMs."""

    flops: float = Field(gt=0, le=1.5, description="share of peak that a full output tile reaches")
    bytes: float = Field(gt=0, le=1, description="share of memory bandwidth, when weights are read for few tokens")
    tiles: tuple[tuple[int, int], ...] = Field(min_length=1, description="output tiles that a library chooses among")
    prologue: float = Field(ge=0, description="elements of the inner dimension that filling a tile costs")
    split: float = Field(gt=0, description="shortest piece of a split inner dimension, in elements")
    tile_cost: float = Field(ge=0, description="extra work of feeding a tile, relative, at an edge of 64")
    ridge: float = Field(ge=1, description=_RIDGE)


class BlockScaled(Document):
    """Constants of 8-bit GEMMs whose weights have a scale for each block, and whose inputs are rounded with theirs by
    a kernel before (DeepSeek-V3, arXiv:2412.19437, section 3.3.2)."""

    flops: float = Field(gt=0, le=1, description="rate over that of a GEMM with one scale for each tensor")
    seconds: float = Field(ge=0, description="start of the rounding kernel")


class Widened(Document):
    """Constants of grouped GEMMs whose kernel widens 4-bit weights to 16 bits (Marlin: Frantar et al.,
    arXiv:2408.11743)."""

    rows: int = Field(gt=0, description="rows of the smallest tile, besides the tiles of other GEMMs")
    bytes: float = Field(gt=0, le=1, description="share of memory bandwidth")


class Grouped(Document):
    """Constants of grouped GEMMs: the experts of a layer in one kernel, with the tiles of single GEMMs."""

    flops: float = Field(gt=0, le=1.5, description="share of peak that a full output tile reaches")
    bytes: float = Field(gt=0, le=1, description="share of memory bandwidth")
    prologue: float = Field(ge=0, description="elements of the inner dimension that filling a tile costs")
    ridge: float = Field(ge=1, description=_RIDGE)
    seconds: float = Field(
        ge=0, description="start-up time of the experts of a layer, including the permutation of tokens"
    )
    four_bit_seconds: float | None = Field(
        default=None, ge=0, description="the same where experts in 4 bits are multiplied as such; null: no different"
    )
    widened: Widened | None = Field(default=None, description="of weights that kernels widen; null: as others")


class AttentionEfficiency(Document):
    """Constants of attention with many new tokens per row: prefill, forward and train."""

    flops: float = Field(gt=0, le=1, description="share of peak")
    block: int = Field(gt=0, description="query tokens of one block")
    tile: float = Field(ge=0, description="keys that a block computes beyond the causal mask")
    tail: float = Field(ge=0, description="waves of blocks added for the partial last one")
    bytes: float = Field(gt=0, le=1, description="share of memory bandwidth, reading and writing heads")
    ridge: float = Field(ge=0.5, description=_RIDGE)
    seconds: float = Field(ge=0, description="start-up time of a call, which is more than one kernel")
    gradients: float = Field(
        default=1.0, gt=0, le=1, description="speed of the backward pass over that of the forward pass"
    )
    flash_1: float | None = Field(
        default=None, gt=0, le=1, description="share of peak of FlashAttention 1; null: as flops"
    )
    flash_2: float | None = Field(
        default=None, gt=0, le=1, description="share of peak of FlashAttention 2; null: as flops"
    )

    def of_kernel(self, kernel: AttentionKernel) -> AttentionEfficiency:
        """Return the constants of this kernel."""
        flops = {NATIVE: None, "flash-1": self.flash_1, "flash-2": self.flash_2}[kernel]
        return self if flops is None else self.model_copy(update={"flops": flops})


class DecodeEfficiency(Document):
    """Constants of attention with one new token per row and a KV cache."""

    bytes: float = Field(gt=0, le=1, description="share of memory bandwidth, when the cache is read")
    block: float = Field(gt=0, description="cached tokens that one processor reads for one key head")
    row_seconds: float = Field(ge=0, description="per row and key head on one processor")
    head_seconds: float = Field(ge=0, description="per query head on one processor")
    seconds: float = Field(ge=0, description="start-up time of a call")
    join_seconds: float = Field(ge=0, description="time to combine the blocks of a row, if it has several")
    group: int = Field(
        ge=1, description="fewest query heads per key head with which the cache is split over processors"
    )
    saturation: float = Field(gt=0, le=1, description="share of processors that saturate the memory bandwidth")
    ridge: float = Field(ge=0.5, description=_RIDGE)


class Efficiency(Document):
    """Constants of the equations in `cost_models.kernels`, `compute` and `communication`. The equations define what
    each constant means."""

    gemm: GemmEfficiency
    block_scaled: BlockScaled | None = Field(default=None, description="null: no such GEMMs")
    grouped: Grouped
    attention: AttentionEfficiency
    decoding: DecodeEfficiency
    sustained: float = Field(gt=0, le=1, description="speed of back-to-back GEMMs over that of a single one")
    elementwise_bytes: float = Field(gt=0, le=1)
    kernel_seconds: float = Field(ge=0, description="start and end of one kernel on the device")
    overlaps_launch: bool = Field(description="true: kernels are launched while earlier ones still run")
    protocols: tuple[Protocol, ...] = Field(min_length=1, description="the fastest is used for each size")
    multicast: Multicast | None = None
    peer: Protocol | None = Field(default=None, description="all-reduce through peer memory, in one node")
    message: Protocol | None = Field(
        default=None, description="send-receive between two ranks; null: like the protocols"
    )
    transfer_bytes: float = Field(
        gt=0, le=1, description="share of a link's bandwidth that large point-to-point copies achieve"
    )
    kernels_per_layer: int = Field(ge=0, description="launched by the forward pass of one layer")
    routing_kernels: int = Field(ge=0, description="additional kernels of the forward pass of a layer with experts")
    expert_kernels: int = Field(
        ge=0, description="launched by the forward pass of one expert, if experts run one by one"
    )
    kernels_at_ends: int = Field(ge=0, description="launched by embedding and head together")
    date: str
    source: str = Field(min_length=1)

    def of_kernel(self, kernel: AttentionKernel) -> Efficiency:
        """Return the constants with which attention runs in this kernel."""
        return self if kernel == NATIVE else self.model_copy(update={"attention": self.attention.of_kernel(kernel)})


class _Families(Document):
    families: dict[str, Efficiency]
    devices: dict[str, str] = Field(description="family of each device by name")
    kinds: dict[str, str] = Field(description="family of a device that is not listed, by kind")


@cache
def efficiency_of(kind: str, name: str = "") -> Efficiency:
    """Return the efficiencies of a device by name, or of its kind (cuda or cpu) if the name is not listed.

    Raises BadInput for an unknown kind.
    """
    known = _families()
    if kind not in known.kinds:
        raise BadInput(f"device kind {kind!r} is not known; use {' or '.join(known.kinds)}.")
    return known.families[known.devices.get(name, known.kinds[kind])]


@cache
def _families() -> _Families:
    with as_file(files("meshwright.profiles") / "data" / "efficiency.yaml") as path:
        return read_yaml(_Families, path, "efficiencies")
