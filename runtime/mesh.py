"""The process groups of one layout on a contiguous run of ranks.

Several models live in one process, each with a mesh of its own; megatron's global model-parallel state is never
initialised. A group is made once per set of ranks and shared by every mesh that needs it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection

from meshwright.profiles.layout import Layout
from meshwright.runtime import host

_GROUPS: dict[tuple[dist.ProcessGroup, tuple[int, ...]], dist.ProcessGroup] = {}
"""Groups made so far, by the world they belong to and their ranks, ascending."""


@dataclass(frozen=True)
class Mesh:
    """A layout placed on the ranks `[first_rank, first_rank + layout.num_ranks)`, as one rank of the world sees it.

    Within the mesh tp varies fastest, then dp, then pp.
    """

    layout: Layout
    first_rank: int
    tp_rank: int
    """Position along tensor parallelism, and so on; -1 on a rank that is not a member."""
    dp_rank: int
    pp_rank: int
    _groups: ProcessGroupCollection | None

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(range(self.first_rank, self.first_rank + self.layout.num_ranks))

    @property
    def is_member(self) -> bool:
        return self._groups is not None

    @property
    def groups(self) -> ProcessGroupCollection:
        """Megatron's collection of groups; only a member has it."""
        assert self._groups is not None, f"rank {dist.get_rank()} is not in the mesh on ranks {self.ranks}"
        return self._groups

    @property
    def is_first_stage(self) -> bool:
        """Whether this rank holds the embedding; False on a rank that is not a member."""
        return self.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank holds the output head; False on a rank that is not a member."""
        return self.pp_rank == self.layout.pp - 1


def build_mesh(layout: Layout, first_rank: int) -> Mesh:
    """The mesh of `layout` from `first_rank` on.

    Every rank of the world calls it with the same arguments in the same order; only members communicate.
    """
    host.install()
    rank = dist.get_rank()
    if not first_rank <= rank < first_rank + layout.num_ranks:
        return Mesh(layout, first_rank, tp_rank=-1, dp_rank=-1, pp_rank=-1, _groups=None)
    tp_rank, dp_rank, pp_rank = layout.coordinates(rank - first_rank)

    def along(*axes: str) -> dist.ProcessGroup:
        """The group of the ranks that differ from this one at most along `axes`."""
        tp = range(layout.tp) if "tp" in axes else (tp_rank,)
        dp = range(layout.dp) if "dp" in axes else (dp_rank,)
        pp = range(layout.pp) if "pp" in axes else (pp_rank,)
        return _group(first_rank + layout.index(tp=t, dp=d, pp=p) for t, d, p in itertools.product(tp, dp, pp))

    groups = _collection(along)
    ends = {0, layout.pp - 1}
    at_an_end = pp_rank in ends
    groups.embd = _group(first_rank + layout.index(tp=tp_rank, dp=dp_rank, pp=p) for p in ends) if at_an_end else None
    return Mesh(layout, first_rank, tp_rank, dp_rank, pp_rank, groups)


def _collection(along: Callable[..., dist.ProcessGroup]) -> ProcessGroupCollection:
    """Megatron's names for the groups, of which there are few: context and expert parallelism are not used.

    The order of the calls is the order in which every member makes its groups, so none waits for another in a ring.
    """
    tp, dp, pp, alone = along("tp"), along("dp"), along("pp"), along()
    stage, replica, everyone = along("tp", "dp"), along("tp", "pp"), along("tp", "dp", "pp")
    groups = ProcessGroupCollection()
    groups.tp = groups.tp_cp = groups.expt_tp = groups.tp_ep = tp
    groups.dp = groups.dp_cp = groups.expt_dp = groups.intra_dp_cp = groups.intra_expt_dp = dp
    groups.pp = pp
    groups.cp = groups.ep = groups.pos_embd = alone
    groups.tp_dp_cp = stage
    groups.mp = groups.tp_ep_pp = replica
    groups.intra_dist_opt = everyone
    groups.hcp = groups.inter_dist_opt = None
    return groups


def _group(ranks: Iterable[int]) -> dist.ProcessGroup:
    """The group of these ranks, of which this rank is one; its members make it together the first time."""
    world = dist.group.WORLD
    assert world is not None, "the world's process group is initialised before any mesh is built"
    key = (world, tuple(sorted(ranks)))
    if key not in _GROUPS:
        _GROUPS[key] = dist.new_group(key[1], use_local_synchronization=True)
    return _GROUPS[key]
