"""ChosenKernels are chosen by what the machine has, and compute what the plain ones do."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from meshwright.profiles.layout import Layout
from meshwright.profiles.model_shape import read_model
from meshwright.runtime.device.capabilities import DeviceCapabilities, device_capabilities
from meshwright.runtime.model.kernel_choice import PLAIN, ChosenKernels, agree_on_kernels, choose_kernels
from meshwright.runtime.model.mesh import build_mesh
from meshwright.runtime.model.model_shard import build_model
from meshwright.runtime.model.weights import load_weights
from meshwright.runtime.training.trainer import Trainer
from tests.planner.jobs import model_spec
from tests.runtime.checkpoints import write_checkpoint
from tests.runtime.ranks import run_on_ranks
from tests.runtime.updates import blocks, language_loss

SPEC = replace(model_spec("actor"), head_dim=64)
HOPPER = DeviceCapabilities(kind="cuda", capability=(9, 0), has_flash=True, has_triton=True)


def test_a_cpu_computes_plainly() -> None:
    assert (
        choose_kernels(device_capabilities("cpu"), "fp32", [SPEC])
        == choose_kernels(device_capabilities("cpu"), "bf16", [SPEC])
        == PLAIN
    )


@pytest.mark.parametrize(
    ("found", "precision", "head_dim", "attention", "operators"),
    [
        (HOPPER, "bf16", 64, "varlen", "fused"),
        (HOPPER, "fp32", 64, "sdpa", "fused"),
        (HOPPER, "bf16", 512, "sdpa", "fused"),
        (HOPPER, "bf16", 60, "sdpa", "fused"),
        (replace(HOPPER, has_flash=False), "bf16", 64, "sdpa", "fused"),
        (replace(HOPPER, has_triton=False), "bf16", 64, "varlen", "plain"),
        (replace(HOPPER, capability=(7, 5)), "bf16", 64, "sdpa", "fused"),
        (replace(HOPPER, capability=(6, 0)), "bf16", 64, "sdpa", "plain"),
    ],
)
def test_a_gpu_computes_by_what_it_can(
    found: DeviceCapabilities, precision: str, head_dim: int, attention: str, operators: str
) -> None:
    kernels = choose_kernels(found, precision, [SPEC, replace(SPEC, head_dim=head_dim)])
    assert (kernels.attention, kernels.operators, kernels.overlaps_replicas) == (attention, operators, True)


def test_kernels_are_told_in_words() -> None:
    assert PLAIN.description == "attention sdpa, operators plain, decode torch, replicas exchange in one piece"
    assert choose_kernels(HOPPER, "bf16", [SPEC]).description == (
        "attention varlen, operators fused, decode paged, replicas exchange overlap computing"
    )


def _agreed(different: bool) -> bool:
    mine = ChosenKernels(attention="varlen" if torch.distributed.get_rank() == 0 or not different else "sdpa")
    return agree_on_kernels(mine) == mine


def test_ranks_whose_devices_differ_compute_plainly() -> None:
    assert run_on_ranks(2, _agreed, False) == [True, True]
    assert run_on_ranks(2, _agreed, True) == [False, True]


def _gradients(directory: Path, kernels: ChosenKernels) -> list[Tensor]:
    """The loss and the gradients of micro-batches of different lengths."""
    mesh = build_mesh(Layout(), 0)
    if not mesh.is_member:
        return []
    spec = read_model(directory)
    model = build_model(spec, mesh, trainable=True, kernels=kernels)
    load_weights(model, spec, mesh, directory)
    trainer = Trainer(model, mesh, learning_rate=1e-3)
    shares = trainer.accumulate(blocks(2, mesh), functools.partial(language_loss, spec, mesh))
    return [sum(share["loss"] for share in shares), *(one.main_grad.clone() for one in model.parameters())]  # type: ignore[list-item]


@pytest.mark.slow
def test_fused_operators_have_the_loss_and_the_gradients_of_plain_ones(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "model")
    plain, fused = (
        run_on_ranks(2, _gradients, directory, ChosenKernels(operators=operators))[0]
        for operators in ("plain", "fused")
    )
    for one, other in zip(plain, fused, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=0)
