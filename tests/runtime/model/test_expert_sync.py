"""Replicas that hold experts together pass through them equally often, those that have nothing to send without it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn

from meshwright.profiles.layout import Layout
from meshwright.runtime.model.mesh import build_mesh
from meshwright.runtime.model.model_shard import Decoder
from meshwright.runtime.model.stage_passes import ExpertLockstep
from tests.runtime.ranks import run_on_ranks

HIDDEN = 8


class Layers(nn.Module):
    """Two layers that write down how many tokens come through each."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.passed: list[int] = []
        layer = SimpleNamespace(mlp=lambda hidden: self.passed.append(hidden.shape[0]))
        self.decoder: Any = SimpleNamespace(layers=[layer, layer])
        self.spec: Any = SimpleNamespace(hidden_size=HIDDEN)


def _passes(layout: Layout, counts: tuple[tuple[int, ...], ...]) -> list[int]:
    """The tokens of every pass of a layer on this rank, which goes through as often as it says, one block at a time."""
    mesh, model = build_mesh(layout, 0), Layers()
    lockstep = ExpertLockstep(cast(Decoder, model), mesh)
    for count in counts[dist.get_rank()]:
        with lockstep.passes(count):
            for _ in range(count):
                for layer in model.decoder.layers:
                    layer.mlp(torch.zeros(3, 1, HIDDEN))
    lockstep.finish()
    return model.passed


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        (((2, 0, 1), (1,)), [[3, 3, 3], [3, 0, 0]]),
        (((), (1, 1)), [[0, 0], [3, 3]]),
        (((1, 2), (2, 1)), [[3, 0, 3, 3], [3, 3, 3, 0]]),
        (((0, 0), (0,)), [[], []]),
    ],
    ids=["one ends first", "one has nothing", "each is ahead once", "nobody has anything"],
)
def test_every_replica_passes_as_often_as_any_and_without_tokens_beyond_its_own(
    counts: tuple[tuple[int, ...], ...], expected: list[list[int]]
) -> None:
    found = run_on_ranks(2, _passes, Layout(dp=2, ep=2), counts)
    assert [tokens[::2] for tokens in found] == [tokens[1::2] for tokens in found] == expected


def test_replicas_that_share_no_experts_wait_for_nobody() -> None:
    assert run_on_ranks(2, _passes, Layout(dp=2), ((1, 2), ())) == [[3] * 6, []]
