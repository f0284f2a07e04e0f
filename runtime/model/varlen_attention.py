"""Causal attention of packed rows of any lengths by one call of a variable-length kernel.

The kernel is torch's, which runs on a GPU only: https://docs.pytorch.org/docs/2.12/nn.attention.varlen.html
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

_CAUSAL = (-1, 0)
"""The window with which torch's kernel is causal."""


class VarlenKernel(Protocol):
    """The used part of the signature of `torch.nn.attention.varlen.varlen_attn`."""

    def __call__(  # noqa: PLR0917 - torch's signature
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cu_seq_q: Tensor,
        cu_seq_k: Tensor,
        max_q: int,
        max_k: int,
        *,
        window_size: tuple[int, int],
        enable_gqa: bool,
    ) -> Tensor:
        """The output [T, heads, D] for packed query [T, heads, D], key and value [T, kv_heads, D].

        `cu_seq_q` and `cu_seq_k` [N + 1] int32 are the cumulative lengths of rows; `max_q` and `max_k` the longest.
        """


@dataclass(frozen=True)
class RowBounds:
    """The offsets of packed rows."""

    offsets: Tensor
    """Offset of each row, and the end, [N + 1] int32."""
    max_length: int
    """Number of tokens of the longest row."""


def torch_varlen_kernel() -> VarlenKernel:
    """Torch's variable-length kernel. Up to version 2.11 it has no `enable_gqa` argument and always groups heads."""
    # Imported here because the import takes seconds, which processes on a CPU do not need.
    from torch.nn.attention.varlen import varlen_attn  # noqa: PLC0415

    kernel: Any = varlen_attn  # returns only the output by default
    if "enable_gqa" in inspect.signature(varlen_attn).parameters:
        return kernel

    def without_enable_gqa(*args: Any, window_size: tuple[int, int], **_: Any) -> Tensor:
        output: Tensor = kernel(*args, window_size=window_size)
        return output

    return without_enable_gqa


def attend_rows(query: Tensor, key: Tensor, value: Tensor, rows: RowBounds, kernel: VarlenKernel) -> Tensor:
    """The output [T, 1, heads, D] for packed query [T, 1, heads, D], key and value [T, 1, kv_heads, D]."""
    begins, longest, grouped = rows.offsets, rows.max_length, query.shape[2] > key.shape[2]
    query, key, value = (heads.squeeze(1).contiguous() for heads in (query, key, value))
    attended = kernel(query, key, value, begins, begins, longest, longest, window_size=_CAUSAL, enable_gqa=grouped)
    return attended.unsqueeze(1)
