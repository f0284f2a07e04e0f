"""Bytes and rates of each number format that a shard may compute in."""

from __future__ import annotations

from typing import NamedTuple

from meshwright.profiles.cluster import Device
from meshwright.profiles.errors import BadInput


class Precision(NamedTuple):
    """Bytes of a weight, of an activation between kernels, and of a cached key or value; the format of the head."""

    weight_bytes: float
    size: int
    cache_bytes: int
    head: str


PRECISIONS = {
    "fp32": Precision(4, 4, 4, "fp32"),
    "bf16": Precision(2, 2, 2, "bf16"),
    "fp8": Precision(1, 2, 1, "bf16"),
    "fp4": Precision(0.5625, 2, 1, "bf16"),
}
"""fp8 and fp4 as inference engines use them: 16-bit between kernels, an fp8 cache; fp4 has an fp8 scale for each 16
weights (NVFP4; TensorRT-LLM docs, "Numerical Precision")."""

_TRAINED = ("fp32", "bf16")


def precision_named(name: str, device: Device) -> Precision:
    """The format; raises BadInput when it is not known or the device has no peak for it."""
    if name not in PRECISIONS:
        raise BadInput(f"precision={name!r} is not known; use {' or '.join(PRECISIONS)}.")
    if name not in device.flops_per_second:
        raise BadInput(f"device {device.name} has no peak for {name}; give flops_per_second.{name}.")
    return PRECISIONS[name]


def element_bytes(precision: str) -> int:
    """Bytes per element of a model that is trained; raises BadInput for a precision other than fp32 and bf16."""
    if precision not in _TRAINED:
        raise BadInput(f"precision={precision!r} is not known; use {' or '.join(_TRAINED)}.")
    return PRECISIONS[precision].size
