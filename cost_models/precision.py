"""Bytes of each number format that a shard may compute in, and the seconds of linears in 8-bit floats."""

from __future__ import annotations

from typing import NamedTuple

from meshwright.cost_models.kernels import Kernels
from meshwright.profiles.cluster import Device
from meshwright.profiles.efficiency import Efficiency
from meshwright.profiles.errors import BadInput
from meshwright.profiles.model_parts.eight_bit_floats import linear_shapes, linears_of
from meshwright.profiles.model_shape import ModelSpec


class Precision(NamedTuple):
    """Bytes of a weight, of an activation between kernels, and of a cached key or value, and the format of the head."""

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
    """Return the format. Raises BadInput if it is unknown or the device has no peak for it."""
    if name not in PRECISIONS:
        raise BadInput(f"precision={name!r} is not known; use {' or '.join(PRECISIONS)}.")
    if name not in device.flops_per_second:
        raise BadInput(f"device {device.name} has no peak for {name}; give flops_per_second.{name}.")
    return PRECISIONS[name]


def element_bytes(precision: str) -> int:
    """Return the bytes per element of a trained model. Raises BadInput for a precision other than fp32 and bf16."""
    if precision not in _TRAINED:
        raise BadInput(f"precision={precision!r} is not known; use {' or '.join(_TRAINED)}.")
    return PRECISIONS[precision].size


_ROUNDING_KERNELS = 3
"""Kernels of each linear: the maximum of each token, its scale, and the 8-bit quotient (runtime/model/quantised.py)."""

_CASTING_KERNELS = 4
"""Further kernels of each linear if 8-bit floats are cast up to be multiplied: both factors, and both scales."""


class QuantisedLinears:
    """Seconds of the linears of a layer of a shard with 8-bit weights; their inputs are rounded to 8 bits as well.

    A GPU multiplies at its fp8 peak and reads one byte per weight. A CPU casts both factors up in every pass and
    multiplies as `kernels` do. With `is_fused`, tokens are rounded by the kernels before.
    """

    def __init__(
        self, model: ModelSpec, device: Device, efficiency: Efficiency, kernels: Kernels, size: int, *, is_fused: bool
    ) -> None:
        """`size` is the number of bytes of an element between kernels."""
        shapes, linears, casts = linear_shapes(model), linears_of(model), device.kind == "cpu"
        if not casts:
            flops = device.flops_per_second["fp8"] * efficiency.sustained
            kernels = Kernels(device, efficiency, flops_per_second=flops, weight_bytes=1, size=size)
        per_input, per_output = (0 if is_fused else 2 * size + 1), 0
        if casts:
            per_input, per_output = per_input + 1 + size, 4 * size
        moved = per_input * linears.num_inputs + per_output * linears.num_outputs
        self._products, self._token_seconds = kernels.products(shapes), kernels.elementwise(moved)
        self._pass_seconds = kernels.elementwise((1 + size) * linears.num_weights) if casts else 0.0
        each = (0 if is_fused else _ROUNDING_KERNELS) + (_CASTING_KERNELS if casts else 0)
        self.num_kernels = each * len(shapes)

    def seconds(self, count: float) -> float:
        """Return the device seconds of one pass over `count` tokens."""
        return self._products(count) + count * self._token_seconds + self._pass_seconds
