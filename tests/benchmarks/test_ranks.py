"""Layouts beside one rank on one device: messages by way of the host say what they should, and so do the layouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks.accelerator.ranks import (
    NUM_RANKS,
    Case,
    Failed,
    Row,
    cases_on,
    compare,
    read_rows,
    rows_of,
    write_models,
)
from benchmarks.accelerator.staged import BACKEND, OnOneDevice, staged_backend
from benchmarks.accelerator.world import World
from tests.runtime.ranks import run_on_new_ranks, run_on_ranks

EXACT = 1e-5


def _messages() -> dict[str, Any]:
    """What rank 1 of two has of every kind of message."""
    group = dist.new_group([0, 1], backend=staged_backend())
    rank, found = dist.get_rank(), dict[str, Any]()
    mine = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.bfloat16) * (rank + 1)

    summed = mine.clone()
    dist.all_reduce(summed, group=group)
    highest = torch.tensor(rank)
    dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
    column = torch.zeros(2, 2)[:, rank]  # which does not lie in one piece
    dist.all_reduce(column.add_(1), group=group)
    found["sums"] = summed, highest, column

    told = mine.clone()
    dist.broadcast(told, 0, group=group)
    found["told"] = told

    uneven = [torch.zeros(1, dtype=torch.int64), torch.zeros(3, dtype=torch.int64)]
    dist.all_gather(uneven, torch.full_like(uneven[rank], rank + 5), group=group)
    whole = torch.zeros(8, dtype=torch.bfloat16)
    dist.all_gather_into_tensor(whole, mine, group=group)
    objects = [""] * 2
    dist.all_gather_object(objects, f"of {rank}", group=group)
    parts = [torch.zeros_like(mine) for _ in range(2)] if rank == 1 else None
    dist.gather(mine, parts, dst=1, group=group)
    found["gathered"] = *uneven, whole, objects, parts

    part, longer = torch.zeros(2, dtype=torch.bfloat16), torch.zeros(1 + 2 * rank)
    dist.reduce_scatter_tensor(part, mine, group=group)
    dist.reduce_scatter(longer, [torch.ones(1), torch.ones(3)], group=group)
    given = torch.zeros(2)
    dist.scatter(given, [torch.zeros(2), torch.ones(2)] if rank == 0 else None, src=0, group=group)
    found["scattered"] = part, longer, given

    rows = torch.arange(6.0).view(3, 2) + 10 * rank
    came = torch.zeros(2 + 2 * rank, 2)
    dist.all_to_all_single(came, rows, [1 + rank, 1 + rank], [1, 2], group=group)
    evenly = torch.zeros(2)
    dist.all_to_all_single(evenly, torch.tensor([1.0, 2.0]) + 10 * rank, group=group)
    found["exchanged"] = came, evenly

    other, received = 1 - rank, torch.zeros_like(mine)
    operations = [dist.P2POp(dist.isend, mine, other, group), dist.P2POp(dist.irecv, received, other, group)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    found["received"] = received

    late = mine.clone()
    work = dist.all_reduce(late, group=group, async_op=True)
    work.wait()
    work.wait()
    found["late"] = late, work.is_completed()
    dist.barrier(group=group)
    dist.destroy_process_group(group)
    return found


def test_messages_by_way_of_the_host_are_those_of_any_group() -> None:
    _, found = run_on_ranks(2, _messages)
    half = torch.bfloat16
    of_one, of_both = (torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=half) * factor for factor in (1, 3))
    _same(found["sums"], (of_both, torch.tensor(1), torch.tensor([2.0, 2.0])))
    _same(found["told"], of_one)
    one, three, whole, objects, parts = found["gathered"]
    _same((one, three), (torch.tensor([5]), torch.tensor([6, 6, 6])))
    _same((whole, parts), (torch.cat([of_one, 2 * of_one]), [of_one, 2 * of_one]))
    assert objects == ["of 0", "of 1"]
    _same(found["scattered"], (of_both[2:], torch.full((3,), 2.0), torch.ones(2)))
    _same(found["exchanged"], (torch.tensor([[2.0, 3], [4, 5], [12, 13], [14, 15]]), torch.tensor([2.0, 12.0])))
    _same((found["received"], found["late"][0]), (of_one, of_both))
    assert found["late"][1]


def _same(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def _in_a_staged_world(cases: list[Case], directory: Path) -> str:
    """Measures them among ranks that are joined anew; by what they are joined."""
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    file = directory / "rendezvous"
    backend = OnOneDevice("cpu").set_up()
    dist.init_process_group(backend, init_method=f"file://{file}", rank=rank, world_size=size)
    rows_of(cases, directory, tiny=True)
    return dist.get_backend()


def test_a_layout_whose_messages_go_through_the_host_says_learns_and_draws_what_one_rank_does(tmp_path: Path) -> None:
    directory = write_models(tiny(tmp_path))
    case = Case("dense", "fp32", "plain", "pp2")
    assert run_on_new_ranks(2, _in_a_staged_world, [case], directory) == [BACKEND] * 2
    [row] = read_rows(directory)
    assert row.case == case
    assert_equal_to_one_rank(row)


def assert_equal_to_one_rank(row: Row) -> None:
    assert max(row.logprobs, row.grad_norm, row.weights) < EXACT
    assert row.moved > 10 * EXACT
    cut = "cp" in row.case.layout
    assert row.equal_tokens == (None if cut else row.num_tokens)
    assert row.num_tokens > 0


def tiny(out: Path) -> World:
    return World(out=out, device="cpu", tiny=True)


@pytest.mark.check_all
def test_every_layout_is_compared_and_in_fp32_equal_to_one_rank(tmp_path: Path) -> None:
    cases = cases_on("cpu")
    found = compare(tiny(tmp_path), cases, num_ranks=NUM_RANKS)
    assert [one.case for one in found] == cases
    for row in found:
        assert isinstance(row, Row), str(row)
        if row.case.precision == "fp32":
            assert_equal_to_one_rank(row)
        else:
            assert row.logprobs < 0.1
            assert row.grad_norm < 0.01


@pytest.mark.check_all
def test_a_layout_that_fails_says_why_and_those_behind_it_are_compared(tmp_path: Path) -> None:
    side = ("dense", "fp32", "plain")
    bad, good, also_bad = (Case(*side, layout) for layout in ("vpp2,pp2", "dp2", "ep2,dp2"))
    first, second, third = compare(tiny(tmp_path), [bad, good, also_bad], num_ranks=2)
    assert isinstance(first, Failed)
    assert str(first).startswith("| dense | fp32 | plain | vpp2,pp2 | 2 | staged, gloo | failed: ")
    assert isinstance(second, Row)
    assert_equal_to_one_rank(second)
    assert isinstance(third, Failed)
