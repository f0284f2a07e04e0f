"""The groups of a layout: who is next to whom, and who holds the same weights."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from meshwright.profiles.layout import Layout
from meshwright.runtime.model.mesh import build_mesh
from tests.runtime.ranks import run_on_ranks

GROUPS = ("tp", "dp", "pp", "mp", "intra_dist_opt", "embd", "ep", "expt_tp", "expt_dp", "tp_ep", "tp_ep_pp")
Sight = tuple[tuple[int, int, int], dict[str, tuple[int, ...]]]


def _sight(layout: Layout, first_rank: int) -> Sight:
    """What a rank sees: its coordinates and the ranks of each of its groups."""
    mesh = build_mesh(layout, first_rank)
    groups = {}
    if mesh.is_member:
        for name in GROUPS:
            groups[name] = tuple(dist.get_process_group_ranks(getattr(mesh.groups, name)))
    return (mesh.tp_rank, mesh.dp_rank, mesh.pp_rank), groups


def test_tensor_parallel_ranks_are_neighbours_and_stages_are_furthest_apart() -> None:
    sights = run_on_ranks(4, _sight, Layout(tp=2, pp=2), 0)
    assert [coordinates for coordinates, _ in sights] == [(0, 0, 0), (1, 0, 0), (0, 0, 1), (1, 0, 1)]
    assert sights[3][1] == {
        "tp": (2, 3),
        "dp": (3,),
        "pp": (1, 3),
        "mp": (0, 1, 2, 3),
        "intra_dist_opt": (0, 1, 2, 3),
        "embd": (1, 3),
        "ep": (3,),
        "expt_tp": (2, 3),
        "expt_dp": (3,),
        "tp_ep": (2, 3),
        "tp_ep_pp": (0, 1, 2, 3),
    }
    sights = run_on_ranks(4, _sight, Layout(tp=2, dp=2, sp=True), 0)
    assert sights[1][1]["tp"] == (0, 1)
    assert sights[1][1]["dp"] == (1, 3)


def test_neighbouring_replicas_hold_experts_together() -> None:
    sights = run_on_ranks(4, _sight, Layout(dp=4, ep=2), 0)
    assert [(groups["ep"], groups["expt_dp"]) for _, groups in sights] == [
        ((0, 1), (0, 2)),
        ((0, 1), (1, 3)),
        ((2, 3), (0, 2)),
        ((2, 3), (1, 3)),
    ]
    groups = run_on_ranks(4, _sight, Layout(tp=2, dp=2, ep=2, sp=True), 0)[2][1]
    assert (groups["ep"], groups["expt_dp"], groups["tp_ep"]) == ((0, 2), (2,), (0, 1, 2, 3))
    groups = run_on_ranks(4, _sight, Layout(pp=2, dp=2, ep=2), 0)[2][1]
    assert (groups["ep"], groups["tp_ep"], groups["tp_ep_pp"]) == ((2, 3), (2, 3), (0, 1, 2, 3))


def test_whole_experts_are_dealt_out_to_the_tensor_parallel_ranks_of_replicas() -> None:
    sights = run_on_ranks(4, _sight, Layout(tp=2, dp=2, ep=2, etp=1), 0)
    assert [(groups["expt_tp"], groups["ep"], groups["expt_dp"]) for _, groups in sights] == [
        ((0,), (0, 1), (0, 2)),
        ((1,), (0, 1), (1, 3)),
        ((2,), (2, 3), (0, 2)),
        ((3,), (2, 3), (1, 3)),
    ]
    groups = run_on_ranks(4, _sight, Layout(tp=2, dp=2, ep=4, etp=1, sp=True), 0)[2][1]
    assert (groups["ep"], groups["tp_ep"], groups["expt_dp"], groups["tp"]) == (
        (0, 1, 2, 3),
        (0, 1, 2, 3),
        (2,),
        (2, 3),
    )


def test_a_mesh_on_part_of_the_world_leaves_the_others_out() -> None:
    sights = run_on_ranks(4, _sight, Layout(pp=2), 2)
    assert sights[0] == ((-1, -1, -1), {})
    assert sights[3][0] == (0, 0, 1)
    assert sights[3][1]["pp"] == (2, 3)


def _groups_are_shared() -> bool:
    first, second = build_mesh(Layout(tp=2, dp=2), 0), build_mesh(Layout(tp=2, dp=2, sp=True), 0)
    return first.groups.tp is second.groups.tp and first.groups.dp is second.groups.dp


def test_a_group_of_the_same_ranks_is_made_once() -> None:
    assert all(run_on_ranks(4, _groups_are_shared))


def _holders(layout: Layout, first_rank: int) -> tuple[list[tuple[list[int], list[int]]], tuple[list[int], list[int]]]:
    """Who holds the same weights and the same experts as each rank of the mesh, and this rank's groups of them."""
    mesh = build_mesh(layout, first_rank)
    said = [
        (list(mesh.holders(rank, of_experts=False)), list(mesh.holders(rank, of_experts=True))) for rank in mesh.ranks
    ]
    if not mesh.is_member:
        return said, ([], [])
    dp_cp, expt_dp = (dist.get_process_group_ranks(group) for group in (mesh.groups.dp_cp, mesh.groups.expt_dp))
    return said, (dp_cp, expt_dp)


@pytest.mark.parametrize("layout", ["dp4,ep2", "cp2,dp2", "tp2,dp2", "pp2", "tp2,dp2,ep2,etp1"])
def test_every_rank_of_the_world_knows_who_holds_the_same_weights_and_experts(layout: str) -> None:
    parsed = Layout.parse(layout)
    first_rank = 4 - parsed.num_ranks
    answers = run_on_ranks(4, _holders, parsed, first_rank)
    groups = [of_rank for _, of_rank in answers[first_rank:]]
    assert [said for said, _ in answers] == [groups] * 4


def _ranks_of_groups() -> tuple[int, dict[str, tuple[int, ...]]]:
    mesh = build_mesh(Layout(tp=2, cp=2), 0)
    names = ("tp", "cp", "dp", "tp_cp", "dp_cp", "tp_dp_cp", "mp", "intra_dist_opt")
    return mesh.cp_rank, {name: tuple(dist.get_process_group_ranks(getattr(mesh.groups, name))) for name in names}


def test_ranks_that_cut_sequences_are_next_to_tensor_parallel_ones() -> None:
    assert run_on_ranks(4, _ranks_of_groups)[3] == (
        1,
        {
            "tp": (2, 3),
            "cp": (1, 3),
            "dp": (3,),
            "tp_cp": (0, 1, 2, 3),
            "dp_cp": (1, 3),
            "tp_dp_cp": (0, 1, 2, 3),
            "mp": (2, 3),
            "intra_dist_opt": (0, 1, 2, 3),
        },
    )
