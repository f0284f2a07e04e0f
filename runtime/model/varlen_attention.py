"""Causal attention of rows of any lengths by one call of a variable-length kernel.

The kernel is torch's own, which runs on a GPU alone: https://docs.pytorch.org/docs/2.12/nn.attention.varlen.html
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

_CAUSAL = (-1, 0)
"""The window by which torch's kernel is causal."""


class VarlenKernel(Protocol):
    """What is used of `torch.nn.attention.varlen.varlen_attn`."""

    def __call__(  # noqa: PLR0917 - as torch has it
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
        """[T, heads, D] from query [T, heads, D], key and value [T, kv_heads, D], rows being one behind the other.

        `cu_seq_q` and `cu_seq_k` [N + 1] int32 say where rows begin, and the end; `max_q` and `max_k` the longest.
        """


@dataclass(frozen=True)
class RowBounds:
    """Where rows lie that are one behind the other."""

    begins: Tensor
    """[N + 1] int32: where each begins, and the end."""
    longest: int
    """Tokens of the longest."""


def torch_kernel() -> VarlenKernel:
    """Torch's own. Up to 2.11 it groups heads without being told that it may."""
    # Imported where it runs: what it registers takes seconds, which processes on a CPU would spend for nothing.
    from torch.nn.attention.varlen import varlen_attn  # noqa: PLC0415

    kernel: Any = varlen_attn  # which answers more than the output only if asked
    if "enable_gqa" in inspect.signature(varlen_attn).parameters:
        return kernel

    def grouping(*args: Any, window_size: tuple[int, int], **_: Any) -> Tensor:
        found: Tensor = kernel(*args, window_size=window_size)
        return found

    return grouping


def attend_rows(query: Tensor, key: Tensor, value: Tensor, rows: RowBounds, kernel: VarlenKernel) -> Tensor:
    """[T, 1, heads, D] from query [T, 1, heads, D], key and value [T, 1, kv_heads, D], T the tokens of all rows."""
    begins, longest, grouped = rows.begins, rows.longest, query.shape[2] > key.shape[2]
    query, key, value = (heads.squeeze(1).contiguous() for heads in (query, key, value))
    attended = kernel(query, key, value, begins, begins, longest, longest, window_size=_CAUSAL, enable_gqa=grouped)
    return attended.unsqueeze(1)
