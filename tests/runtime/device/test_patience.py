"""Every group waits for as long as its process has patience, whatever its library would."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from meshwright.profiles.layout import Layout
from meshwright.runtime.device.process_groups import collective_timeout, set_collective_timeout
from meshwright.runtime.model.mesh import build_mesh
from tests.runtime.ranks import RankError, run_on_new_ranks


def test_it_is_a_quarter_of_an_hour_until_it_is_told() -> None:
    assert collective_timeout() == timedelta(minutes=15)


def _left_alone() -> float:
    """How long rank 0 waits for the other ranks of a mesh, who do not come."""
    set_collective_timeout(1.0)
    mesh = build_mesh(Layout(tp=2), 0)
    dist.barrier()
    if dist.get_rank() == 0:
        began = time.monotonic()
        with pytest.raises(RuntimeError, match=r"(?i)time"):
            dist.all_reduce(torch.zeros(1), group=mesh.groups.tp)
        waited = time.monotonic() - began
        raise AssertionError(f"waited {1 <= waited < 10}")
    time.sleep(30)
    return 0.0


def test_a_group_of_a_mesh_gives_up_when_patience_ends() -> None:
    with pytest.raises(RankError, match="waited True"):
        run_on_new_ranks(2, _left_alone)
