"""Sequences that are cut over context-parallel ranks: which tokens a rank has, and what passes between the ranks.

A row of a micro-batch is padded to 2 x cp slices of one length, of which rank r has slices r and 2 x cp - 1 - r, so
that all have as many scores under a causal mask. Before its queries attend, a rank gathers the keys and values of all
(Llama 3 report, arXiv:2407.21783, section 3.3.2).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from meshwright.profiles.layout import Layout
from meshwright.runtime.device import host
from meshwright.runtime.model.mesh import Mesh


class ShardSlice(NamedTuple):
    """Some of a rank's tokens: how many, and among the tokens of all ranks in the order of their sequences, where their
    row begins and where they end."""

    size: int
    row: int
    end: int


class Parts:
    """The part of rows of these lengths, one behind the other, that one of the ranks of `group` has."""

    def __init__(self, lengths: Sequence[int], group: dist.ProcessGroup) -> None:
        self._lengths, self._group = tuple(lengths), group
        self._rank, self._cp = group.rank(), group.size()
        self._sizes = tuple(-(-length // (2 * self._cp)) for length in self._lengths)
        self.num_tokens = 2 * sum(self._sizes)
        """Of this rank and of every other, padding included."""

    def slices(self) -> Iterator[ShardSlice]:
        """This rank's, in the order in which it has them."""
        row = 0
        for size in self._sizes:
            for number in self._numbers(self._rank):
                yield ShardSlice(size, row, row + (number + 1) * size)
            row += 2 * self._cp * size

    @cached_property
    def positions(self) -> Tensor:
        """[S] int64, of each of this rank's tokens in its row."""
        return torch.cat(self._positions(self._rank))

    def of(self, values: Tensor) -> Tensor:
        """This rank's [S] of values [T], one for each token; zero where it has padding."""
        return F.pad(values, (0, 1))[self._places(self._rank).to(values.device)]

    def joined(self, own: Tensor) -> Tensor:
        """Values [T] of every token from what each rank has of them, [S]; nothing passes back."""
        everyones = own.new_empty(self._cp * self.num_tokens)
        dist.all_gather_into_tensor(everyones, own.contiguous(), group=self._group)
        places = torch.cat([self._places(rank) for rank in range(self._cp)]).to(own.device)
        return own.new_zeros(sum(self._lengths) + 1).scatter_(0, places, everyones)[:-1]

    def gathered(self, own: Tensor) -> Tensor:
        """[cp x S, ...] of all ranks' tokens in the order of their sequences, from each rank's own [S, ...]."""
        everyones = own.new_empty(self._cp * len(own), *own.shape[1:])
        dist.all_gather_into_tensor(everyones, own.contiguous(), group=self._group)
        return everyones.index_select(0, self._in_order)

    def scattered(self, values: Tensor) -> Tensor:
        """This rank's own [S, ...] of the sum over the ranks of [cp x S, ...] in the order of the sequences."""
        own = values.new_empty(self.num_tokens, *values.shape[1:])
        by_rank = values.index_select(0, self._by_rank)
        dist.reduce_scatter_tensor(own, by_rank, group=self._group)
        return own

    def _numbers(self, rank: int) -> tuple[int, int]:
        return rank, 2 * self._cp - 1 - rank

    def _positions(self, rank: int) -> list[Tensor]:
        """Of each row."""
        return [
            torch.cat([torch.arange(number * size, (number + 1) * size) for number in self._numbers(rank)])
            for size in self._sizes
        ]

    def _places(self, rank: int) -> Tensor:
        """[S] int64, where among the tokens [T] of all rows those of a rank are; T for padding."""
        start, places = 0, []
        for length, positions in zip(self._lengths, self._positions(rank), strict=True):
            places.append(torch.where(positions < length, start + positions, sum(self._lengths)))
            start += length
        return torch.cat(places)

    @cached_property
    def _by_rank(self) -> Tensor:
        """[cp x S] int64 on the device, where in the order of the sequences the tokens of rank 0 are, then those of
        rank 1, and so on."""
        starts = [2 * self._cp * before for before in accumulate(self._sizes, initial=0)]
        places = [
            start + positions
            for rank in range(self._cp)
            for start, positions in zip(starts, self._positions(rank), strict=False)
        ]
        return torch.cat(places).to(host.device())

    @cached_property
    def _in_order(self) -> Tensor:
        """[cp x S] int64 on the device, where among the tokens of rank 0, then of rank 1, those in order are."""
        return self._by_rank.argsort()


def parts_of(lengths: Sequence[int], mesh: Mesh) -> Parts | None:
    """This rank's part of rows of these lengths; None where sequences are whole."""
    return Parts(lengths, mesh.groups.cp) if mesh.layout.cp > 1 else None


def num_tokens_of_rank(lengths: Sequence[int], mesh: Mesh) -> int:
    """How many tokens of rows of these lengths every rank has."""
    parts = parts_of(lengths, mesh)
    return parts.num_tokens if parts else sum(lengths)


def padding_behind(num_tokens: int, layout: Layout) -> int:
    """Tokens of no meaning behind so many of a rank, which sequence parallelism cuts into tp equal parts."""
    return -num_tokens % layout.tp if layout.sp else 0


class Gathered:
    """Keys and values of all ranks, which are gathered again for the backward pass and not kept for it."""

    def __init__(self, own: Tensor, parts: Parts) -> None:
        """`own` [S, ...] are this rank's."""
        self._own, self._parts = own, parts
        self._address = 0
        self._again: Tensor | None = None

    @contextmanager
    def whole(self) -> Iterator[Tensor]:
        """Those of all, [cp x S, ...] in the order of the sequences; what is saved of them meanwhile is not kept."""
        found: Tensor = _Gather.apply(self._own, self._parts)
        self._own, self._address = self._own.detach(), found.untyped_storage().data_ptr()
        with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
            yield found

    def _pack(self, saved: Tensor) -> Any:
        if saved.untyped_storage().data_ptr() != self._address:
            return saved
        return saved.size(), saved.stride(), saved.storage_offset()

    def _unpack(self, kept: Any) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        if self._again is None:
            self._again = self._parts.gathered(self._own)
        return self._again.as_strided(*kept)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, parts: Parts) -> Tensor:
        ctx.parts = parts
        return parts.gathered(own)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.parts.scattered(gradient), None
