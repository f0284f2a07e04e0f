"""Context parallelism: the tokens of each rank, and the gathering of keys and values over the ranks.

A row of a micro-batch is padded to 2 x cp slices of equal length, of which rank r has slices r and 2 x cp - 1 - r, so
that all ranks compute equally many scores under a causal mask. A rank gathers the keys and values of all ranks before
attention (Llama 3 report, arXiv:2407.21783, section 3.3.2).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.profiles.layout import Layout
from meshwright.runtime.device import host
from meshwright.runtime.model.mesh import Mesh


class ShardSlice(NamedTuple):
    """A slice of a row: its number of tokens, and the positions of the row's start and of the slice's end.

    Positions count the padded tokens of all ranks in the order of their sequences.
    """

    size: int
    row: int
    end: int


class SequenceShard:
    """This rank's shard of packed rows of these lengths, which are sharded over the ranks of `group`."""

    def __init__(self, lengths: Sequence[int], group: dist.ProcessGroup) -> None:
        self._lengths, self._group = tuple(lengths), group
        self._rank, self._cp = group.rank(), group.size()
        self._sizes = tuple(-(-length // (2 * self._cp)) for length in self._lengths)
        self.num_tokens = 2 * sum(self._sizes)
        """Number of tokens of this rank, padding included; the same on every rank."""

    def slices(self) -> Iterator[ShardSlice]:
        """Yields this rank's slices in order."""
        row = 0
        for size in self._sizes:
            for number in self._slice_numbers(self._rank):
                yield ShardSlice(size, row, row + (number + 1) * size)
            row += 2 * self._cp * size

    @cached_property
    def positions(self) -> Tensor:
        """Position of each of this rank's tokens in its row, [S] int64."""
        return torch.cat(self._positions(self._rank))

    def select(self, values: Tensor, *, padding: int = 0) -> Tensor:
        """This rank's shard [S, ...] of values [T, ...], one for each token; `padding` stands for padding."""
        padded = torch.cat([values, values.new_full((1, *values.shape[1:]), padding)])
        return padded[self._token_indices(self._rank).to(values.device)]

    def gather_values(self, local: Tensor) -> Tensor:
        """Gathers values [T, ...] of all tokens from each rank's shard [S, ...]; not differentiable."""
        gathered = local.new_empty(self._cp * self.num_tokens, *local.shape[1:])
        dist.all_gather_into_tensor(gathered, local.contiguous(), group=self._group)
        indices = torch.cat([self._token_indices(rank) for rank in range(self._cp)]).to(local.device)
        values = local.new_zeros(sum(self._lengths) + 1, *local.shape[1:])
        values[indices] = gathered
        return values[:-1]

    def gather(self, local: Tensor) -> Tensor:
        """Gathers each rank's [S, ...] to [cp x S, ...], in the order of the sequences, padding included."""
        by_rank = local.new_empty(self._cp * len(local), *local.shape[1:])
        dist.all_gather_into_tensor(by_rank, local.contiguous(), group=self._group)
        return by_rank.index_select(0, self._in_order)

    def reduce_scatter(self, values: Tensor) -> Tensor:
        """Sums [cp x S, ...], in the order of the sequences, over the ranks; returns this rank's shard [S, ...]."""
        shard = values.new_empty(self.num_tokens, *values.shape[1:])
        by_rank = values.index_select(0, self._by_rank)
        dist.reduce_scatter_tensor(shard, by_rank, group=self._group)
        return shard

    def _slice_numbers(self, rank: int) -> tuple[int, int]:
        return rank, 2 * self._cp - 1 - rank

    def _positions(self, rank: int) -> list[Tensor]:
        """Positions of a rank's tokens in each row, [2 x size] per row."""
        return [
            torch.cat([torch.arange(number * size, (number + 1) * size) for number in self._slice_numbers(rank)])
            for size in self._sizes
        ]

    def _token_indices(self, rank: int) -> Tensor:
        """Indices of a rank's tokens among the tokens [T] of all rows, [S] int64; T for padding."""
        start, indices = 0, []
        for length, positions in zip(self._lengths, self._positions(rank), strict=True):
            indices.append(torch.where(positions < length, start + positions, sum(self._lengths)))
            start += length
        return torch.cat(indices)

    @cached_property
    def _by_rank(self) -> Tensor:
        """Indices of the tokens of rank 0, then of rank 1 and so on, among all tokens in the order of the sequences,
        padding included: [cp x S] int64 on the device."""
        starts = [2 * self._cp * before for before in accumulate(self._sizes, initial=0)]
        indices = [
            start + positions
            for rank in range(self._cp)
            for start, positions in zip(starts, self._positions(rank), strict=False)
        ]
        return torch.cat(indices).to(host.device())

    @cached_property
    def _in_order(self) -> Tensor:
        """The inverse permutation of `_by_rank`, [cp x S] int64 on the device."""
        return self._by_rank.argsort()


def sequence_shard(lengths: Sequence[int], mesh: Mesh) -> SequenceShard | None:
    """This rank's shard of rows of these lengths; None without context parallelism."""
    return SequenceShard(lengths, mesh.groups.cp) if mesh.layout.cp > 1 else None


def num_tokens_of_rank(lengths: Sequence[int], mesh: Mesh) -> int:
    """Number of tokens of each rank for rows of these lengths."""
    shard = sequence_shard(lengths, mesh)
    return shard.num_tokens if shard else sum(lengths)


def num_padding_tokens(num_tokens: int, layout: Layout) -> int:
    """Number of padding tokens after a rank's `num_tokens`, so that sequence parallelism can split them equally over
    tp ranks."""
    return -num_tokens % layout.tp if layout.sp else 0


class Gathered:
    """Gathered keys and values of all ranks, which are gathered again for the backward pass instead of saved for it."""

    def __init__(self, local: Tensor, parts: SequenceShard) -> None:
        """`local` [S, ...] are the keys or values of this rank, whose shard is `parts`."""
        self._local, self._shard = local, parts
        self._address = 0
        self._regathered: Tensor | None = None

    @contextmanager
    def whole(self) -> Iterator[Tensor]:
        """Context that yields [cp x S, ...] of all ranks, in the order of the sequences.

        Autograd saves no views of it inside the context; they are recomputed from a second gather.
        """
        gathered: Tensor = _Gather.apply(self._local, self._shard)
        self._local, self._address = self._local.detach(), gathered.untyped_storage().data_ptr()
        with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
            yield gathered

    def _pack(self, saved: Tensor) -> Any:
        if saved.untyped_storage().data_ptr() != self._address:
            return saved
        return saved.size(), saved.stride(), saved.storage_offset()

    def _unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        if self._regathered is None:
            self._regathered = self._shard.gather(self._local)
        return self._regathered.as_strided(*packed)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, parts: SequenceShard) -> Tensor:
        ctx.parts = parts
        return parts.gather(own)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.parts.reduce_scatter(gradient), None
