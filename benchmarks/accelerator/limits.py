"""The least seconds that a device can need for a body: what it must move, and what it must multiply."""

from __future__ import annotations

from meshwright.cost_models.kernels import element_bytes
from meshwright.profiles.hardware import Device
from meshwright.profiles.model_shape import ModelSpec


def decode_seconds(spec: ModelSpec, device: Device, precision: str, *, rows: int, context: int) -> float:
    """Reading every weight that is multiplied, and the keys and values of `rows` rows of `context` tokens, once.

    Of a table of embeddings that is no head too only the rows' own entries are read, which are not counted.
    """
    cached = 2 * spec.num_layers * spec.kv_size * rows * context
    return (_multiplied(spec) + cached) * element_bytes(precision) / device.memory_bytes_per_second


def train_seconds(spec: ModelSpec, device: Device, precision: str, *, rows: int, tokens: int) -> float:
    """The matrix products of forward and backward at the device's peak, nothing computed twice: 6 for each weight and
    token, and 6 layers x width x tokens for each token's causal attention.

    Model FLOPs utilisation as in https://arxiv.org/abs/2204.02311 appendix B, with half of the attention: it is causal.
    """
    attention = spec.num_layers * spec.num_heads * spec.head_dim * tokens
    return 6 * (_multiplied(spec) + attention) * rows * tokens / device.flops_per_second[precision]


def _multiplied(spec: ModelSpec) -> int:
    """Weights that take part in products: of a table of embeddings that is no head too, entries are looked up."""
    return spec.num_params - (0 if spec.tied_embeddings else spec.embedding_params)
