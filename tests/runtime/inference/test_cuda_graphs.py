"""A recorded decode step gives what the step itself gives, whatever was added to round it up."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from meshwright.profiles.layout import Layout
from meshwright.profiles.model_parts.layer_kinds import LayerKind
from meshwright.profiles.model_parts.linear_attention import LinearAttention
from meshwright.profiles.model_shape import ModelSpec
from meshwright.runtime.device.capabilities import device_capabilities
from meshwright.runtime.inference.attention import TableReads, table_reads
from meshwright.runtime.inference.cuda_graphs import GraphedDecodeStep, Recorder, Work, can_replay
from meshwright.runtime.inference.decode_step import DecodeStep
from meshwright.runtime.launch.launch import ProcessSetup, launch
from meshwright.runtime.model.kernel_choice import choose_kernels
from meshwright.runtime.model.kv_cache import PagedCache, allocate_cache
from meshwright.runtime.model.mesh import build_mesh
from meshwright.runtime.model.model_shard import Decoder, build_model
from tests.planner.jobs import model_spec
from tests.runtime.ranks import run_on_ranks

SPEC = model_spec("actor")
WITH_STATES = replace(
    SPEC,
    linear=LinearAttention(
        rule="gated delta", num_key_heads=2, num_value_heads=4, key_dim=6, value_dim=10, conv_kernel=3
    ),
    layer_kinds=(LayerKind("linear"), LayerKind("attention")) * 2,
)
MAX_TOKENS, NUM_ROWS, NUM_BLOCKS = 600, 24, 160
STEPS = ((0, (3, 1, 4, 1, 5)), (12, (250, 0, 7)), (0, (4, 2, 5, 2, 6, 9)), (12, (258, 255)), (0, tuple(range(11))))
"""First row and cached tokens of each row, step by step: shapes are rounded alike, and past the rows of a group."""


@dataclass
class Counted:
    """Records by calling again, which is what a graph does but for the time it takes."""

    recorded: list[Work] = field(default_factory=list)

    def __call__(self, work: Work) -> Work:
        self.recorded.append(work)
        return work


class Bench(NamedTuple):
    model: Decoder
    cache: PagedCache
    step: DecodeStep


def bench(device: str = "cpu", spec: ModelSpec = SPEC) -> Bench:
    mesh = build_mesh(Layout(), 0)
    model = build_model(spec, mesh, kernels=choose_kernels(device_capabilities(device), "fp32", [spec]))
    assert isinstance(model, Decoder)
    cache = allocate_cache(
        spec,
        model.layers,
        1,
        num_blocks=NUM_BLOCKS,
        num_rows=NUM_ROWS,
        max_tokens=MAX_TOKENS,
        dtype=torch.float32,
        device=torch.device(device),
    )
    return Bench(model, cache, DecodeStep(model, mesh, cache))


def fill(cache: PagedCache) -> None:
    """As if rows had been prefilled: rows that were added before may have written to them."""
    draw = torch.Generator().manual_seed(0)
    states = (cache.states.states, cache.states.inputs) if cache.states else ()
    for held in (cache.keys, cache.values, *states):
        held.copy_(torch.randn(held.shape, generator=draw))


def asked(cache: PagedCache, first_row: int, lengths: tuple[int, ...], device: str) -> tuple[Tensor, TableReads]:
    rows = np.arange(first_row, first_row + len(lengths))
    for row, length in zip(rows.tolist(), lengths, strict=True):
        cache.tables.release(row)
        cache.tables.allocate(row, length + 1)
    return torch.arange(len(lengths)) + first_row, table_reads(cache.tables, rows, np.array(lengths))


@torch.no_grad()
def by_both(device: str, record: Recorder | None, spec: ModelSpec = SPEC) -> list[tuple[Tensor, Tensor]]:
    """The answers of the step and of recordings of it, twice through the steps, so that every recording is used."""
    plain, recorded = bench(device, spec), bench(device, spec)
    replayed = GraphedDecodeStep(recorded.step, recorded.model, record)
    answers = []
    for first_row, lengths in STEPS + STEPS:
        fill(plain.cache)
        fill(recorded.cache)
        one, other = (asked(cache, first_row, lengths, device) for cache in (plain.cache, recorded.cache))
        answers.append((plain.step(*one).cpu(), replayed(*other).cpu()))
    return answers


@torch.no_grad()
def one_after_another(device: str, record: Recorder | None, spec: ModelSpec = SPEC) -> list[tuple[Tensor, Tensor]]:
    """The answers of four steps of three rows, each asked alone, and of a recording that goes on by itself."""
    plain, recorded = bench(device, spec), bench(device, spec)
    lengths, count, answers = (30, 3, 40), 4, []
    for one in (plain, recorded):
        fill(one.cache)
        for row, length in enumerate(lengths):
            one.cache.tables.allocate(row, length + count)
    rows, fed = np.arange(3), [torch.arange(3) + index for index in range(count)]
    step = GraphedDecodeStep(recorded.step, recorded.model, record).multi_step(
        table_reads(recorded.cache.tables, rows, np.array(lengths), count)
    )
    for index, tokens in enumerate(fed):
        alone = plain.step(tokens, table_reads(plain.cache.tables, rows, np.array(lengths) + index))
        answers.append((alone.cpu(), step(tokens.to(device)).clone().cpu()))
    return answers


def shapes_recorded() -> int:
    counted = Counted()
    by_both("cpu", counted)
    return len(counted.recorded)


@torch.no_grad()
def blocks_written() -> set[int]:
    """Blocks of whose keys a step of three rows changed some."""
    recorded = bench()
    fill(recorded.cache)
    before = recorded.cache.keys.clone()
    GraphedDecodeStep(recorded.step, recorded.model, Counted())(*asked(recorded.cache, 0, (3, 1, 4), "cpu"))
    return set((recorded.cache.keys != before).any(dim=(0, 2, 3, 4)).nonzero()[:, 0].tolist())


@torch.no_grad()
def recorded_after(move: bool) -> int:
    """Recordings of one shape that was asked for before and after its weights were, or were not, moved."""
    recorded, counted = bench(), Counted()
    replayed = GraphedDecodeStep(recorded.step, recorded.model, counted)
    replayed(*asked(recorded.cache, 0, (3, 1), "cpu"))
    for parameter in recorded.model.parameters():
        parameter.data = parameter.data.clone() if move else parameter.data.mul_(2.0)
    replayed.refresh_weights()
    replayed(*asked(recorded.cache, 0, (3, 1), "cpu"))
    return len(counted.recorded)


@pytest.mark.parametrize("spec", [SPEC, WITH_STATES], ids=["attention", "states"])
def test_a_recording_answers_what_the_step_answers(spec: ModelSpec) -> None:
    for plain, replayed in run_on_ranks(1, by_both, "cpu", Counted(), spec)[0]:
        torch.testing.assert_close(replayed, plain, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("spec", [SPEC, WITH_STATES], ids=["attention", "states"])
def test_a_recording_that_goes_on_by_itself_answers_what_each_step_would(spec: ModelSpec) -> None:
    for plain, replayed in run_on_ranks(1, one_after_another, "cpu", Counted(), spec)[0]:
        torch.testing.assert_close(replayed, plain, atol=1e-5, rtol=1e-5)


def test_steps_that_round_to_one_shape_share_a_recording() -> None:
    assert run_on_ranks(1, shapes_recorded) == [4]


def test_rows_that_are_added_write_to_the_spare_block() -> None:
    assert run_on_ranks(1, blocks_written) == [{0, 1, 2, 3}]


@pytest.mark.parametrize(("move", "recordings"), [(False, 1), (True, 2)])
def test_recordings_are_made_anew_when_weights_have_moved_and_not_when_they_have_changed(
    move: bool, recordings: int
) -> None:
    assert run_on_ranks(1, recorded_after, move) == [recordings]


def nothing_to_replay() -> bool:
    return can_replay(bench().model)


def test_nothing_is_recorded_on_a_processor() -> None:
    assert run_on_ranks(1, nothing_to_replay) == [False]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
def test_cuda_graphs_answer_what_the_step_answers() -> None:
    for steps in (by_both, one_after_another):
        for plain, replayed in launch(steps, "cuda", None, num_ranks=1, setup=ProcessSetup("cuda"))[0]:
            torch.testing.assert_close(replayed, plain, atol=1e-4, rtol=1e-4)
