"""The process groups of one layout on a contiguous range of ranks.

Each of the models in a process has its own mesh; Megatron's global model-parallel state is never initialised. A group
is created once per set of ranks, and shared by every mesh and refit that needs it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache

import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection

from meshwright.profiles.layout import Layout
from meshwright.runtime.device import host
from meshwright.runtime.device.process_groups import collective_timeout

_GROUPS: dict[tuple[dist.ProcessGroup, tuple[int, ...]], dist.ProcessGroup] = {}
"""Groups created so far, by their world and ranks; the keys are the same on every rank, member or not."""

_EXPERT_AXES = {"etp", "fold", "spread", "edp"}
"""Axes of the layout of experts; see `ExpertCoordinates`."""

_WEIGHT_REPLICA_AXES = ("cp", "dp")
_EXPERT_REPLICA_AXES = ("cp", "edp")
"""Axes along which ranks hold the same weights, and those along which they hold the same expert weights."""


@dataclass(frozen=True)
class Mesh:
    """A layout placed on the ranks `[first_rank, first_rank + layout.num_ranks)`, as one rank of the world sees it.

    Within the mesh tp varies fastest, then cp, then dp, then pp. For experts see `ExpertCoordinates`.
    """

    layout: Layout
    first_rank: int
    tp_rank: int
    """Rank along the tensor-parallel axis; like the others below -1 on a rank that is not a member."""
    cp_rank: int
    dp_rank: int
    pp_rank: int
    _groups: ProcessGroupCollection | None
    expert_column: dist.ProcessGroup | None = None
    """The ranks at this rank's position in each of the replicas that share the experts; None on non-members."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """The global ranks of the mesh, ascending."""
        return tuple(range(self.first_rank, self.first_rank + self.layout.num_ranks))

    @property
    def is_member(self) -> bool:
        """True if this rank is in the mesh."""
        return self._groups is not None

    @property
    def groups(self) -> ProcessGroupCollection:
        """Megatron's collection of process groups; only on members."""
        assert self._groups is not None, f"rank {dist.get_rank()} is not in the mesh on ranks {self.ranks}"
        return self._groups

    def holders(self, rank: int, *, of_experts: bool) -> Sequence[int]:
        """The ranks of the mesh that hold the same weights, or the same experts, as its member `rank`, itself
        included."""
        sets = _slices(self.layout, self.first_rank, _EXPERT_REPLICA_AXES if of_experts else _WEIGHT_REPLICA_AXES)
        return next(ranks for ranks in sets if rank in ranks)

    def expert_holders(self, rank: int, ep_rank: int) -> Sequence[int]:
        """The ranks of the mesh that are on the pipeline stage of its member `rank` and hold the experts, or shards of
        them, at `ep_rank` of the expert-parallel axis."""
        layout, stage = self.layout, self.layout.coordinates(rank - self.first_rank).pp
        places = ((index, layout.coordinates(index)) for index in range(layout.num_ranks))
        return [
            self.first_rank + index
            for index, place in places
            if place.pp == stage and layout.ep_rank(place.tp, place.dp) == ep_rank
        ]

    @property
    def ep_rank(self) -> int:
        """Rank along the expert-parallel axis; meaningless on a rank that is not a member."""
        return self.layout.ep_rank(self.tp_rank, self.dp_rank)

    @property
    def is_first_of_replica(self) -> bool:
        """True if this rank is the first of its replica of the model; False on a rank that is not a member."""
        return self.tp_rank == self.pp_rank == 0

    @property
    def is_first_stage(self) -> bool:
        """True if this rank is on the first pipeline stage, which has the embedding; False on non-members."""
        return self.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        """True if this rank is on the last pipeline stage, which has the output head; False on non-members."""
        return self.pp_rank == self.layout.pp - 1


def build_mesh(layout: Layout, first_rank: int) -> Mesh:
    """Builds the mesh of `layout` on the ranks from `first_rank` on.

    Collective over the world: every rank calls it with the same arguments in the same order, member or not, because
    torch names groups by a counter.
    """
    host.install()

    def along(*axes: str) -> dist.ProcessGroup | None:
        return _make(_slices(layout, first_rank, axes))

    pipeline_ends = [sorted({ranks[0], ranks[-1]}) for ranks in _slices(layout, first_rank, ("pp",))]
    groups, column = _collection(along, _make(pipeline_ends)), along("spread")
    index = dist.get_rank() - first_rank
    if not 0 <= index < layout.num_ranks:
        return Mesh(layout, first_rank, tp_rank=-1, cp_rank=-1, dp_rank=-1, pp_rank=-1, _groups=None)
    tp, cp, dp, pp = layout.coordinates(index)
    return Mesh(
        layout, first_rank, tp_rank=tp, cp_rank=cp, dp_rank=dp, pp_rank=pp, _groups=groups, expert_column=column
    )


def _collection(
    along: Callable[..., dist.ProcessGroup | None], pipeline_ends: dist.ProcessGroup | None
) -> ProcessGroupCollection:
    """The groups under Megatron's names.

    `pipeline_ends` is the group of the first and last stages of a pipeline, which share tied embeddings; None on other
    stages.
    """
    tp, cp, dp, pp, single = along("tp"), along("cp"), along("dp"), along("pp"), along()
    stage, replica, all_ranks = along("tp", "cp", "dp"), along("tp", "pp"), along("tp", "cp", "dp", "pp")
    groups = ProcessGroupCollection()
    groups.tp, groups.expt_tp = tp, along("etp")
    groups.cp, groups.tp_cp = cp, along("tp", "cp")
    groups.dp = dp
    groups.dp_cp = groups.intra_dp_cp = along(*_WEIGHT_REPLICA_AXES)
    groups.pp = pp
    groups.pos_embd = single
    groups.ep, groups.tp_ep = along("fold", "spread"), along("etp", "fold", "spread")
    groups.tp_ep_pp = along("etp", "fold", "spread", "pp")
    groups.expt_dp = groups.intra_expt_dp = along(*_EXPERT_REPLICA_AXES)
    groups.embd = pipeline_ends
    groups.tp_dp_cp = stage
    groups.mp = replica
    groups.intra_dist_opt = all_ranks
    groups.hcp = groups.inter_dist_opt = None
    return groups


@cache
def _slices(layout: Layout, first_rank: int, axes: tuple[str, ...]) -> Sequence[Sequence[int]]:
    """Sets of the layout's ranks that differ along `axes` only, each ascending.

    The axes are those of the layout or those of its experts.
    """
    coordinates = layout.expert_coordinates if _EXPERT_AXES.intersection(axes) else layout.coordinates
    sets: dict[tuple[int, ...], list[int]] = {}
    for index in range(layout.num_ranks):
        position = coordinates(index)._asdict()
        other_axes = tuple(position[axis] for axis in position if axis not in axes)
        sets.setdefault(other_axes, []).append(first_rank + index)
    return list(sets.values())


def group_of(ranks: Sequence[int]) -> dist.ProcessGroup | None:
    """The group of these ranks; None on other ranks. Collective over the world, like `build_mesh`."""
    return _make([ranks])


def _make(sets: Iterable[Sequence[int]]) -> dist.ProcessGroup | None:
    """Creates the group of each set of ranks unless it exists; returns the group that this rank is in."""
    world = dist.group.WORLD
    assert world is not None, "the world's process group is initialised before any mesh is built"
    own_group = None
    for ranks in sets:
        key = (world, tuple(ranks))
        if key not in _GROUPS:
            _GROUPS[key] = dist.new_group(list(ranks), timeout=collective_timeout())
        if dist.get_rank() in ranks:
            own_group = _GROUPS[key]
    return own_group
