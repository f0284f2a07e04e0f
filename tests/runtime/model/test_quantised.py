"""Linears in 8-bit floats answer what their rounded factors give, in every layout, and close to the whole ones."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from torch import Tensor, nn

from meshwright.profiles.layout import Layout
from meshwright.profiles.model_shape import read_model
from meshwright.runtime.model.fp8_linears import (
    FP8_DTYPE,
    QuantisedWeight,
    largest_of_rows,
    named_quantised_weights,
    quantise_linears,
    quantise_rows,
    scaled_matmul,
)
from meshwright.runtime.model.mesh import Mesh, build_mesh
from meshwright.runtime.model.model_shard import Decoder, build_model
from meshwright.runtime.model.weights import load_weights
from meshwright.runtime.training.refit import RefitCopy
from meshwright.runtime.training.trainer import MicroBatch, forward_logprobs
from tests.runtime.checkpoints import BIASED_LLAMA, FAMILIES, tokens, write_checkpoint
from tests.runtime.ranks import run_on_ranks
from tests.seeds import cases

HALF_STEP = 2**-4
"""Of a number with three bits of mantissa, the most that rounding moves it, relative to it."""


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def quantised(weight: Tensor) -> QuantisedWeight:
    found = QuantisedWeight(nn.Parameter(weight))
    found.set(weight, largest_of_rows(weight))
    return found


def rounded(values: Tensor, largest: Tensor | None = None) -> Tensor:
    """The numbers that are left of a matrix, by the words of `profiles.model_parts.fp8_weights`."""
    top = values.abs().amax(dim=-1, keepdim=True) if largest is None else largest
    scale = top / 448 + 1e-12
    return (values / scale).to(FP8_DTYPE).float() * scale


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_product_is_that_of_the_rounded_factors(dtype: torch.dtype) -> None:
    weight, inputs = drawn(48, 64).to(dtype), drawn(2, 3, 64, seed=1).to(dtype)
    expected = rounded(inputs.float()) @ rounded(weight.float()).t()
    found = quantised(weight).multiply(inputs)
    assert (found.shape, found.dtype) == ((2, 3, 48), dtype)
    tolerance = 1e-5 if dtype == torch.float32 else 0.1
    torch.testing.assert_close(found.float(), expected, atol=tolerance, rtol=1e-2 if tolerance > 1e-5 else 1e-5)


def test_rounding_moves_a_product_by_half_a_step_of_each_factor_at_most() -> None:
    weight, inputs = drawn(48, 64), drawn(5, 64, seed=1)
    off = (quantised(weight).multiply(inputs) - F.linear(inputs, weight)).abs()
    least = inputs.abs().amax() * weight.abs().amax() / 448 / 2**9  # of numbers below the smallest normal one
    assert bool((off <= (2 * HALF_STEP + HALF_STEP**2) * F.linear(inputs.abs(), weight.abs()) + 64 * least).all())
    assert float(off.max()) > 0


def test_a_gpu_is_asked_for_the_product_that_a_cpu_makes_of_numbers_that_are_cast_up() -> None:
    """The very call, on the processor that is here."""
    weight, inputs = drawn(48, 64), drawn(5, 64, seed=1)
    by_token, by_output = (largest_of_rows(values) / 448 + 1e-12 for values in (inputs, weight))
    rows, columns = (inputs / by_token).to(FP8_DTYPE), (weight / by_output).to(FP8_DTYPE)
    found = scaled_matmul(rows, by_token, columns, by_output, torch.float32)
    torch.testing.assert_close(found, quantised(weight).multiply(inputs), atol=1e-5, rtol=1e-5)


def test_a_kernel_rounds_rows_as_torch_does(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = drawn(5, 96)
    expected_values, expected_scales = quantise_rows(rows)
    monkeypatch.setattr("meshwright.runtime.model.fp8_linears.runs_triton_kernels", lambda _: True)
    values, scales = quantise_rows(rows)
    torch.testing.assert_close(scales, expected_scales, rtol=1e-6, atol=0.0)
    off = (values.float() * scales - expected_values.float() * expected_scales).abs()
    assert bool((off <= 1e-5 * rows.abs()).all())


def test_rows_of_zeros_stay_zero() -> None:
    weight = drawn(16, 32)
    weight[3] = 0.0
    found = quantised(weight).multiply(torch.cat([torch.zeros(1, 32), drawn(1, 32)]))
    assert bool((found[0] == 0).all())
    assert found[1, 3] == 0
    assert bool(found.isfinite().all())


def test_new_numbers_are_written_where_the_old_ones_are_read() -> None:
    weight = quantised(drawn(16, 32))
    read = weight.multiply
    first = read(drawn(2, 32))
    weight.set(drawn(16, 32, seed=5), largest_of_rows(drawn(16, 32, seed=5)))
    assert not torch.equal(read(drawn(2, 32)), first)
    assert weight.num_bytes == 16 * 32 + 4 * 16


def refitted(directory: Path, layout: str, first: int = 0) -> tuple[Decoder | None, Mesh]:
    """A model in 8 bits in a layout, refit from one rank that has the weights, and its mesh."""
    source_mesh, mesh = build_mesh(Layout(), 0), build_mesh(Layout.parse(layout), first)
    spec, whole, target = read_model(directory), None, None
    if source_mesh.is_member:
        whole = build_model(spec, source_mesh)
        load_weights(whole, spec, source_mesh, directory)
    if mesh.is_member:
        target = build_model(spec, mesh, seed=7)
        assert isinstance(target, Decoder)
        quantise_linears(target)
    RefitCopy(whole, source_mesh, target, mesh).run()
    return target, mesh


def answers_of(directory: Path, layout: str) -> Tensor | None:
    """Log-probabilities of a model in 8 bits, on a rank of the last stage."""
    model, mesh = refitted(directory, layout)
    return (forward_logprobs(model, mesh, [MicroBatch.pack(tokens())]) or [None])[0] if model is not None else None


def answers_of_rounded(directory: Path, layout: str) -> Tensor | None:
    """The same of whole weights that are what rounding leaves, whose linears are given what it leaves of inputs."""
    mesh = build_mesh(Layout.parse(layout), 0)
    if not mesh.is_member:
        return None
    spec = read_model(directory)
    model, whole = build_model(spec, mesh), build_model(spec, build_mesh(Layout(), torch.distributed.get_rank()))
    load_weights(model, spec, mesh, directory)
    load_weights(whole, spec, build_mesh(Layout(), torch.distributed.get_rank()), directory)
    assert isinstance(model, Decoder)
    assert isinstance(whole, Decoder)
    for index, layer in enumerate(model.decoder.layers):
        one = whole.decoder.layers[index + model.layers.start]
        pairs = ((layer.self_attention, one.self_attention), (layer.mlp, one.mlp))
        for (_, linear), (_, complete) in (
            pair for mine, other in pairs for pair in zip(mine.named_children(), other.named_children(), strict=True)
        ):
            if isinstance(linear, ColumnParallelLinear | RowParallelLinear):
                largest = None if isinstance(linear, ColumnParallelLinear) else largest_of_rows(complete.weight.data)
                linear.weight.data.copy_(rounded(linear.weight.data, largest))
                linear.register_forward_pre_hook(_round_inputs)
    return (forward_logprobs(model, mesh, [MicroBatch.pack(tokens())]) or [None])[0]


def _round_inputs(_module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (rounded(inputs[0]), *inputs[1:])


@pytest.mark.slow
@cases("family", [*FAMILIES, "biased Llama"], few=1)
def test_a_refit_model_answers_as_its_rounded_weights_and_inputs_do(tmp_path: Path, family: str) -> None:
    biased = family == "biased Llama"
    directory = write_checkpoint(tmp_path / "model", **(BIASED_LLAMA if biased else {"family": family}))
    for layout in ("tp1", "tp2", "pp2", "tp2,pp2"):
        found, expected = (
            [answer for answer in run_on_ranks(4, work, directory, layout) if answer is not None]
            for work in (answers_of, answers_of_rounded)
        )
        assert len(found) == len(expected) == Layout.parse(layout).tp
        for one, other in zip(found, expected, strict=True):
            off = (one - other).abs()
            assert float(off.median()) < 1e-4
            assert float(off.mean()) < 1e-2  # a number halfway between two may go either way


def weights_of(directory: Path, layout: str) -> dict[str, tuple[int, Tensor]]:
    """By name the 8-bit numbers of this rank, and its rank of tensor parallelism."""
    model, mesh = refitted(directory, layout)
    return (
        {name: (mesh.tp_rank, weight.dequantised) for name, weight in named_quantised_weights(model)} if model else {}
    )


@pytest.mark.slow
def test_weights_are_the_same_numbers_in_every_layout(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "model")
    (whole,) = [found for found in run_on_ranks(4, weights_of, directory, "tp1") if found]
    for layout in ("tp2", "pp2"):
        parts = [found for found in run_on_ranks(4, weights_of, directory, layout) if found]
        for name, (_, numbers) in whole.items():
            mine = [part[name][1] for part in parts if name in part]
            if "linear_proj" in name or "linear_fc2" in name:
                torch.testing.assert_close(torch.cat(mine, dim=1), numbers, atol=0, rtol=0)
            else:
                together = torch.cat(mine).sort(dim=0).values
                torch.testing.assert_close(together, numbers.sort(dim=0).values, atol=0, rtol=0)
