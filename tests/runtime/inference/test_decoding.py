"""Prefill and the decode step compute what whole forward passes compute, for every family and layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import Tensor

from meshwright.profiles.layout import Layout
from meshwright.profiles.model_shape import read_model
from meshwright.runtime.inference.attention import step_reads
from meshwright.runtime.inference.decode_step import DecodeStep
from meshwright.runtime.model.kernel_choice import PLAIN, ChosenKernels
from meshwright.runtime.model.kv_cache import allocate_cache
from meshwright.runtime.model.mesh import Mesh, build_mesh
from meshwright.runtime.model.model_shard import Decoder, Interleaved, build_model
from meshwright.runtime.model.stage_passes import PipelineLink, forward_cached
from meshwright.runtime.model.weights import load_weights
from tests.runtime.checkpoints import BIASED_LLAMA, FAMILIES, SHAPE, WINDOWS, tokens, write_checkpoint
from tests.runtime.laws.test_experts import DELTAS, LATENT
from tests.runtime.laws.test_experts import FAMILIES as EXPERTS
from tests.runtime.model.test_quantised import refitted
from tests.runtime.ranks import run_on_ranks
from tests.seeds import cases

pytestmark = pytest.mark.slow

LENGTHS = (5, 11, 1)
STEPS = 4
NUM_ROWS, LENGTH = len(LENGTHS), max(LENGTHS) + STEPS


def held(
    directory: Path, layout: str, is_quantised: bool, kernels: ChosenKernels = PLAIN
) -> tuple[Decoder | None, Mesh]:
    """The model on a rank of the layout, whole or in 8 bits."""
    if is_quantised:
        return refitted(directory, layout)
    mesh, spec = build_mesh(Layout.parse(layout), 0), read_model(directory)
    model = build_model(spec, mesh, kernels=kernels) if mesh.is_member else None
    if model is not None:
        load_weights(model, spec, mesh, directory)
    assert not isinstance(model, Interleaved)
    return model, mesh


@torch.no_grad()
def step_by_step(
    directory: Path, layout: str, is_quantised: bool = False, decode: Literal["torch", "paged"] | None = None
) -> Tensor | None:
    """This rank's logits [1 + steps, B, V / tp] after the prompts of rows of different lengths and each token behind.

    Rows sit from slot 2 on. None before the last stage. With `decode` steps read by tables, as on a GPU.
    """
    kernels = ChosenKernels(decode=decode) if decode else PLAIN
    model, mesh, spec = *held(directory, layout, is_quantised, kernels), read_model(directory)
    if model is None:
        return None
    cache = allocate_cache(
        spec,
        model.layers,
        mesh.layout.tp,
        num_blocks=7,
        num_rows=6,
        max_tokens=LENGTH,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    relay, step, ids = PipelineLink(mesh, torch.device("cpu")), DecodeStep(model, mesh, cache), tokens(NUM_ROWS, LENGTH)
    lengths = torch.tensor(LENGTHS)

    prompts = torch.cat([row[:length] for row, length in zip(ids, LENGTHS, strict=True)])
    slots, cached = np.arange(2, 2 + NUM_ROWS), np.array(LENGTHS)
    for slot in slots.tolist():
        cache.tables.allocate(slot, LENGTH)
    rows = cache.continue_rows(range(2, 2 + NUM_ROWS), [0] * NUM_ROWS, LENGTHS)
    output = forward_cached(model, mesh, relay, prompts, rows, ends_only=True)
    outputs = [output.squeeze(1)]
    for number in range(STEPS):
        if not mesh.is_last_stage:
            relay.send_hidden(output)
        if mesh.is_first_stage:
            inputs = ids[torch.arange(NUM_ROWS), lengths + number]
        else:
            inputs = relay.receive_hidden((NUM_ROWS, spec.hidden_size), torch.float32)
        lengths_now = cached + number
        by_tables = bool(decode) or step.reads_by_tables
        output = step(inputs, step_reads(cache, slots, lengths_now, by_tables=by_tables)).clone()
        outputs.append(output)
    if not mesh.is_last_stage:
        relay.send_hidden(output)
    relay.flush()
    return torch.stack(outputs)[..., : model._num_token_columns()] if mesh.is_last_stage else None


@torch.no_grad()
def by_modules(directory: Path, is_quantised: bool = False) -> Tensor:
    """The same logits [1 + steps, B, V] from whole forward passes on one rank."""
    (model, _), spec = held(directory, "tp1", is_quantised), read_model(directory)
    if model is None:
        return torch.empty(0)
    packed = model(tokens(NUM_ROWS, LENGTH).view(1, -1), (LENGTH,) * NUM_ROWS)[..., : spec.vocab_size]
    whole = packed.view(NUM_ROWS, LENGTH, -1).transpose(0, 1)
    ends = torch.tensor(LENGTHS) - 1
    return torch.stack([whole[ends + number, torch.arange(NUM_ROWS)] for number in range(1 + STEPS)])


VARIANTS: dict[str, dict[str, Any]] = {
    **{family: {"family": family} for family in FAMILIES},
    "biased Llama": BIASED_LLAMA,
    **{f"{family} with a window": {"family": family, **changes} for family, changes in WINDOWS.items()},
    **{
        family: {"family": family, **EXPERTS[family]}
        for family in ("Glm4Moe", "MiniMaxM2", *LATENT, "GptOss", "Llama4", *DELTAS)
    },
}


@cases("variant", VARIANTS, few=["Llama", "DeepseekV3", "Llama4"])
def test_prefill_and_decode_steps_agree_with_whole_passes(tmp_path: Path, variant: str) -> None:
    directory = write_checkpoint(tmp_path / "model", **VARIANTS[variant])
    expected = run_on_ranks(4, by_modules, directory)[0]
    assert expected.shape == (1 + STEPS, NUM_ROWS, SHAPE["vocab_size"])
    for layout in ("tp1", "tp2", "pp2", "tp2,pp2"):
        shards = [logits for logits in run_on_ranks(4, step_by_step, directory, layout) if logits is not None]
        assert len(shards) == Layout.parse(layout).tp
        torch.testing.assert_close(torch.cat(shards, dim=-1), expected, atol=1e-4, rtol=1e-4)


BY_KERNELS = [variant for variant in VARIANTS if variant not in ("GptOss", "Llama4")]
"""Variants that the Triton kernel decodes: it has neither sinks nor chunks."""


@cases("decode", ["torch", "paged"], few=1)
@cases("variant", BY_KERNELS, few=["Gemma3"])
def test_steps_that_read_by_tables_agree_with_whole_passes(tmp_path: Path, variant: str, decode: str) -> None:
    directory = write_checkpoint(tmp_path / "model", **VARIANTS[variant])
    expected = run_on_ranks(4, by_modules, directory)[0]
    for layout in ("tp1", "tp2,pp2"):
        answers = run_on_ranks(4, step_by_step, directory, layout, False, decode)
        shards = [logits for logits in answers if logits is not None]
        torch.testing.assert_close(torch.cat(shards, dim=-1), expected, atol=1e-4, rtol=1e-4)


def test_prefill_and_decode_steps_agree_in_8_bits(tmp_path: Path) -> None:
    """But where a number lies halfway between two, which may go either way; tp cuts inputs, whose largest differ."""
    directory = write_checkpoint(tmp_path / "model", **BIASED_LLAMA)
    expected = run_on_ranks(4, by_modules, directory, True)[0]
    for layout in ("tp1", "tp2", "pp2"):
        shards = [logits for logits in run_on_ranks(4, step_by_step, directory, layout, True) if logits is not None]
        off = (torch.cat(shards, dim=-1) - expected).abs()
        assert float(off.median()) < (0.05 if layout == "tp2" else 1e-4)
        assert float(off.mean()) < 0.05
