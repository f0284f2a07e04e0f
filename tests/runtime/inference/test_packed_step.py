"""A pass over packed rows says the same whatever else is asked or goes with it."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from meshwright.profiles.layout import Layout
from meshwright.runtime.inference.attention import PackedReads, packed_reads, step_reads
from meshwright.runtime.inference.decode_step import PackedStep
from meshwright.runtime.model.mesh import build_mesh
from meshwright.runtime.model.model_shard import Decoder, build_model
from tests.planner.jobs import model_spec
from tests.runtime.model.filled_caches import with_room
from tests.runtime.ranks import run_on_ranks

LENGTHS = (4, 9, 2)
TOKENS = torch.arange(sum(LENGTHS)) * 7 % 200


def opened() -> tuple[PackedStep, PackedReads]:
    """A step on a cache in which rows 0 to 2 have room, and reads for packed rows that begin there."""
    mesh, spec = build_mesh(Layout(), 0), model_spec("actor")
    model = build_model(spec, mesh)
    assert isinstance(model, Decoder)
    cache = with_room(spec, 5, 12, 32)
    per_group = spec.num_heads // spec.num_kv_heads
    return PackedStep(model, mesh, cache), packed_reads(cache, range(3), [0] * 3, LENGTHS, per_group)


def of_all_and_of_some() -> tuple[Tensor, Tensor]:
    step, reads = opened()
    every, some = torch.arange(len(TOKENS)), torch.tensor([12, 3])
    return step.packed(TOKENS, reads, every)[some], step.packed(TOKENS, reads, some)


def together_and_apart() -> tuple[Tensor, Tensor]:
    """Of two rows that take a step, whose first token nothing is before, and of packed rows behind them."""
    step, reads = opened()
    beside = step_reads(step.cache, np.array([3, 4]), np.zeros(2, dtype=np.int64))
    asked, tokens = torch.tensor([3, 14]), torch.tensor([5, 6])
    together = step.packed(torch.cat((tokens, TOKENS)), reads, asked, beside)
    return together, torch.cat((step(tokens, beside), step.packed(TOKENS, reads, asked)))


def with_nothing_asked() -> tuple[Tensor, Tensor]:
    """What a step says behind rows of which no token was asked for, and behind those of which the last was."""
    found = []
    for asked in (torch.zeros(0, dtype=torch.int64), torch.tensor([3])):
        step, reads = opened()
        assert len(step.packed(TOKENS, reads, asked)) == len(asked)
        found.append(step(torch.tensor([1]), step_reads(step.cache, np.array([0]), np.array([4]))))
    return found[0], found[1]


def test_what_is_asked_for_does_not_change_what_is_said() -> None:
    for two in (of_all_and_of_some, together_and_apart, with_nothing_asked):
        found, expected = run_on_ranks(1, two)[0]
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
