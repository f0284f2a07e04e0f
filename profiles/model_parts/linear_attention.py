"""Layers that keep one state per sequence instead of keys and values of every token: gated delta rule and Mamba-2.

Both project a token to key heads (of the input and of the output) and value heads, convolve these over the last tokens,
and update a state of key size x value size in each value head:

    gated delta rule   S_t = a_t S_(t-1) (1 - b_t k_t k_t^T) + b_t v_t k_t^T    (Yang et al., arXiv:2412.06464, (10))
    Mamba-2            S_t = a_t S_(t-1) + d_t x_t B_t^T                        (Dao and Gu, arXiv:2405.21060, 6)

A pass over many tokens computes them in chunks, with matrix products inside a chunk and one state between chunks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

from meshwright.profiles.errors import BadInput
from meshwright.profiles.model_parts.hf_config import flag, required_size

Rule: TypeAlias = Literal["gated delta", "mamba"]
"""How a state is updated."""

_CHUNK_TOKENS = 64
"""Tokens of a chunk of the gated delta rule (flash-linear-attention and transformers)."""

STATE_BYTES = 4
"""Bytes of an element of the state, which transformers and the kernels keep in fp32 in any precision of the model."""

SPARE_STATES = 2
"""States that are kept in addition to one for each row: one that padding rows write to, and the state after a prompt
that several samples share."""


@dataclass(frozen=True, kw_only=True)
class LinearAttention:
    """The sizes of a layer with a state; Mamba-2 calls its key heads groups, and its key size the state size."""

    rule: Rule
    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_kernel: int
    chunk_tokens: int = _CHUNK_TOKENS
    conv_bias: bool = False

    @property
    def value_size(self) -> int:
        """Width of the concatenated value heads."""
        return self.num_value_heads * self.value_dim

    @property
    def conv_size(self) -> int:
        """Channels of the convolution: both kinds of key heads, and the value heads."""
        return 2 * self.num_key_heads * self.key_dim + self.value_size

    @property
    def num_gates(self) -> int:
        """Projected numbers per value head: decay and step size, or the step size that gives both."""
        return 2 if self.rule == "gated delta" else 1

    def linears(self, hidden_size: int) -> tuple[tuple[int, int], ...]:
        """The (input size, output size) of each projection: what is convolved, output gate and gates; output."""
        projected = self.conv_size + self.value_size + self.num_gates * self.num_value_heads
        return (hidden_size, projected), (self.value_size, hidden_size)

    @property
    def small_params(self) -> int:
        """Parameters besides the projections: convolution, decays, step sizes, and the norm of the output.

        The delta rule's norm is the same for all heads; Mamba-2 has a weight for each channel, and skips the state.
        """
        convolution = self.conv_size * (self.conv_kernel + self.conv_bias)
        if self.rule == "gated delta":
            return convolution + 2 * self.num_value_heads + self.value_dim
        return convolution + 3 * self.num_value_heads + self.value_size

    @property
    def state_elements(self) -> int:
        """Elements of the state of one sequence."""
        return self.num_value_heads * self.key_dim * self.value_dim

    @property
    def conv_elements(self) -> int:
        """Elements of one sequence's last inputs of the convolution, in the precision of the model."""
        return self.conv_size * self.conv_kernel

    def state_bytes(self, element_bytes: float) -> float:
        """Bytes that one layer holds for a sequence of any length."""
        return STATE_BYTES * self.state_elements + element_bytes * self.conv_elements

    @property
    def elements(self) -> int:
        """Elements per token of the convolved heads, before and after the convolution, output gate and output."""
        return 2 * self.conv_size + 2 * self.value_size

    def rule_elements(self, chunk: int) -> float:
        """Return the fp32 elements per token that the gated delta rule, its norm and its gate hold for the backward
        pass if torch computes them in chunks of `chunk` tokens.

        In chunks of c tokens, a key head of size k holds its query and key before and after their norms (4 k) and two
        matrices of products (2 c). A value head of size v holds four such matrices (4 c), the right sides and solutions
        of the system (2 k + 2 v), queries and keys times their decays (2 k), its values, updates, outputs and gates
        (6 v), and its share of the state of the chunk (k v / c).
        """
        k, v = self.key_dim, self.value_dim
        of_value_head = 4 * chunk + 4 * k + 8 * v + k * v / chunk
        return self.num_key_heads * (4 * k + 2 * chunk) + self.num_value_heads * of_value_head

    @property
    def work(self) -> int:
        """Multiply-adds per token besides the projections, in chunks of c tokens.

        With key size k and value size v of a head, the delta rule has two products of c x k (keys with keys, queries
        with keys), three of c x k or c x v (the solved keys and values, and the output inside the chunk) and three of
        k x v (both uses of the state, and its update). Mamba-2 has one of c x k in each group, one of c x v, and two of
        k x v. The convolution adds its kernel for each channel.
        """
        inside, k, v = self.chunk_tokens, self.key_dim, self.value_dim
        if self.rule == "gated delta":
            heads = self.num_value_heads * (inside * (3 * k + 2 * v) + 3 * k * v)
        else:
            heads = self.num_key_heads * inside * k + self.num_value_heads * (inside * v + 2 * k * v)
        return heads + self.conv_size * self.conv_kernel

    def shard(self, tp: int) -> LinearAttention:
        """The heads on one of `tp` ranks."""
        return replace(self, num_key_heads=self.num_key_heads // tp, num_value_heads=self.num_value_heads // tp)


def delta_from_config(config: Mapping[str, Any], name: str) -> LinearAttention:
    """Return the gated delta layers that a Hugging Face config with all defaults filled in describes.

    Raises BadInput for an invalid size, and for key heads that do not serve equally many value heads.
    """
    num_keys = required_size(config, "linear_num_key_heads", name)
    num_values = required_size(config, "linear_num_value_heads", name)
    if num_values % num_keys:
        raise BadInput(
            f"model {name}: linear_num_key_heads={num_keys} does not divide linear_num_value_heads={num_values}; "
            "correct the one that does not match the weights."
        )
    return LinearAttention(
        rule="gated delta",
        num_key_heads=num_keys,
        num_value_heads=num_values,
        key_dim=required_size(config, "linear_key_head_dim", name),
        value_dim=required_size(config, "linear_value_head_dim", name),
        conv_kernel=required_size(config, "linear_conv_kernel_dim", name),
    )


def mamba_from_config(config: Mapping[str, Any], name: str) -> LinearAttention:
    """Return the Mamba-2 layers that a Hugging Face config with all defaults filled in describes.

    Raises BadInput for an invalid size.
    """
    return LinearAttention(
        rule="mamba",
        num_key_heads=required_size(config, "n_groups", name),
        num_value_heads=required_size(config, "mamba_num_heads", name),
        key_dim=required_size(config, "ssm_state_size", name),
        value_dim=required_size(config, "mamba_head_dim", name),
        conv_kernel=required_size(config, "conv_kernel", name),
        chunk_tokens=required_size(config, "chunk_size", name),
        conv_bias=flag(config, "use_conv_bias", name),
    )
