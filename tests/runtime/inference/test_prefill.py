"""Prefills by the kernels of a GPU say of prompts what whole passes say, and keep what decode steps then read."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.profiles.layout import Layout
from meshwright.profiles.model_shape import read_model
from meshwright.runtime.inference.attention import prefill_reads, table_reads
from meshwright.runtime.inference.cuda_graphs import GraphedPrefills, Prefills, Work
from meshwright.runtime.inference.decode_step import PackedStep
from meshwright.runtime.model.kernel_choice import ChosenKernels
from meshwright.runtime.model.kv_cache import PagedCache
from meshwright.runtime.model.mesh import build_mesh
from meshwright.runtime.model.model_shard import Decoder, build_model
from meshwright.runtime.model.weights import load_weights
from tests.runtime.checkpoints import FAMILIES, tokens, write_checkpoint
from tests.runtime.ranks import run_on_ranks
from tests.seeds import cases

LENGTHS = (5, 1, 37, 3)
WHOLE = (0, 2, 3)
"""Rows of which the head is asked; the other goes on in the next pass."""
LONGEST = 40


def by_rows(
    query: Tensor, key: Tensor, value: Tensor, begins: Tensor, _: Tensor, longest: int, __: int, **___: object
) -> Tensor:
    """In the place of the kernel that a GPU has: causal attention row by row."""
    found, grouped = torch.full_like(query, torch.nan), query.shape[1] > key.shape[1]  # what is of no row is not told
    for first, end in zip(begins[:-1].tolist(), begins[1:].tolist(), strict=True):
        assert end - first <= longest
        rows = (heads[first:end].transpose(0, 1).unsqueeze(0) for heads in (query, key, value))
        said = F.scaled_dot_product_attention(*rows, is_causal=True, enable_gqa=grouped)
        found[first:end] = said[0].transpose(0, 1)
    return found


class Counted:
    """Stands where CUDA graphs are recorded on a GPU."""

    def __init__(self) -> None:
        self.num_recorded = 0

    def __call__(self, work: Work) -> Work:
        self.num_recorded += 1
        return work


def opened(directory: Path) -> tuple[Decoder, PackedStep]:
    spec, mesh = read_model(directory), build_mesh(Layout(), 0)
    kernels = ChosenKernels(decode="paged", attention="varlen")
    plain = build_model(spec, mesh, kernels=ChosenKernels(decode="paged"))
    assert isinstance(plain, Decoder)
    load_weights(plain, spec, mesh, directory)
    plain.kernels = kernels
    cache = PagedCache(
        num_layers=spec.num_layers,
        num_blocks=9,
        num_rows=6,
        num_kv_heads=spec.num_kv_heads,
        max_tokens=64,
        head_dim=spec.head_dim,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    step = PackedStep(plain, mesh, cache)
    vars(step)["_varlen"] = by_rows
    return plain, step


@torch.no_grad()
def prefilled_and_stepped(directory: Path, is_recorded: bool) -> tuple[Tensor, Tensor, Tensor, Tensor, int]:
    """Logits of the ends of rows and of the token behind each, beside those of whole passes; and how many shapes were
    recorded."""
    model, step = opened(directory)
    counted = Counted()
    prefills = GraphedPrefills(step, model, counted) if is_recorded else Prefills(step)
    ids, rows = tokens(len(LENGTHS), LONGEST), range(2, 2 + len(LENGTHS))
    for row in rows:
        step.cache.tables.allocate(row, LONGEST)
    packed = torch.cat([row[:length] for row, length in zip(ids, LENGTHS, strict=True)])
    reads = prefill_reads(step.cache.tables, rows, LENGTHS, WHOLE)
    prefills(packed.flip(0), reads)  # the same shape again, for others' tokens first
    of_ends = prefills(packed, reads)
    next_tokens = ids[torch.arange(len(LENGTHS)), torch.tensor(LENGTHS)]
    behind = step(next_tokens, table_reads(step.cache.tables, np.array(rows), np.array(LENGTHS)))
    whole = model(ids.view(1, -1), (LONGEST,) * len(LENGTHS)).view(len(LENGTHS), LONGEST, -1)
    ends = torch.tensor(LENGTHS)
    expected = whole[torch.tensor(WHOLE), ends[torch.tensor(WHOLE)] - 1]
    answers = of_ends, expected, behind, whole[torch.arange(len(LENGTHS)), ends]
    one, two, three, four = (logits[:, : model.spec.vocab_size] for logits in answers)
    return one, two, three, four, counted.num_recorded


@cases("family", FAMILIES, few=2)
def test_a_prefill_by_kernels_says_what_a_whole_pass_says_and_steps_go_on_from_it(tmp_path: Path, family: str) -> None:
    directory = write_checkpoint(tmp_path / "model", family=family)
    for is_recorded in (False, True):
        of_ends, whole, behind, beyond, _ = run_on_ranks(1, prefilled_and_stepped, directory, is_recorded)[0]
        torch.testing.assert_close(of_ends, whole, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(behind, beyond, atol=1e-4, rtol=1e-4)


def test_prefills_that_round_to_one_shape_share_a_recording(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "model")
    assert run_on_ranks(1, prefilled_and_stepped, directory, True)[0][-1] == 1


def test_a_pass_says_where_its_tokens_lie_and_which_are_asked(tmp_path: Path) -> None:
    step = run_on_ranks(1, where_tokens_lie, write_checkpoint(tmp_path / "model"))[0]
    assert step == ([0, 1, 2, 0, 1], [1, 1, 1, 2, 2], [0, 3, 5], [4], 3)


def where_tokens_lie(directory: Path) -> tuple[list[int], list[int], list[int], list[int], int]:
    """What a pass over a row of three tokens, of which more are to come, and one of two reads."""
    _, step = opened(directory)
    for row in (0, 1):
        step.cache.tables.allocate(row, 3)
    reads = prefill_reads(step.cache.tables, (0, 1), (3, 2), (1,))
    lists = (one.tolist() for one in (reads.positions, reads.blocks, reads.row_starts, reads.output_tokens))
    return (*lists, reads.longest)
