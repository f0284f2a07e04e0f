"""State in host memory: its storage on the device is gone meanwhile, and nothing that is computed changes."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch
from torch import Tensor

from meshwright.profiles.layout import Layout
from meshwright.profiles.model_shape import read_model
from meshwright.runtime.model.mesh import build_mesh
from meshwright.runtime.model.model_shard import build_model
from meshwright.runtime.model.weights import load_weights
from meshwright.runtime.training.offload import OffloadedOptimizer, OffloadedWeights
from meshwright.runtime.training.trainer import MicroBatch, Trainer, forward_logprobs
from tests.runtime.checkpoints import tokens, write_checkpoint
from tests.runtime.laws.test_experts import mixture
from tests.runtime.ranks import run_on_ranks
from tests.runtime.updates import blocks, language_loss

pytestmark = pytest.mark.slow


def storage_bytes(found: list[Tensor]) -> int:
    return sum(tensor.untyped_storage().nbytes() for tensor in found)


def moments(trainer: Trainer) -> list[Tensor]:
    states = [state for part in trainer.optimizers for state in part.optimizer.state.values()]
    return [tensor for state in states for tensor in state.values() if tensor.ndim]


def updates(directory: Path, layout: str, dtype: torch.dtype, hosted: bool) -> list[float] | None:
    """Loss and gradient norm of every update, the state being away between them or always there."""
    mesh = build_mesh(Layout.parse(layout), 0)
    if not mesh.is_member:
        return None
    spec = read_model(directory)
    model = build_model(spec, mesh, dtype=dtype, trainable=True)
    load_weights(model, spec, mesh, directory)
    trainer = Trainer(model, mesh, learning_rate=1e-2, weight_decay=0.1)
    groups = [group for part in trainer.optimizers for group in part.shard_fp32_from_float16_groups]
    main = [weight.data for group in groups for weight in group]
    assert bool(main) == (dtype == torch.bfloat16)
    gradients = [parameter.main_grad for parameter in model.parameters()]
    size = storage_bytes(main) + storage_bytes(moments(trainer))
    away = OffloadedOptimizer(trainer) if hosted else None
    loss = functools.partial(language_loss, spec, mesh)
    seen = []
    for _ in range(3):
        if away:
            assert storage_bytes([*main, *moments(trainer), *gradients]) == 0
            assert away.reload() == size
        metrics = trainer.train_step(blocks(2, mesh), loss)
        seen += [metrics["loss"], metrics["grad_norm"]]
        if away:
            assert away.offload() == size
    return seen


@pytest.mark.parametrize(
    ("family", "layout", "dtype"),
    [("Llama", "dp2", torch.bfloat16), ("Llama", "tp2,sp", torch.float32), ("Mixtral", "dp2,ep2", torch.bfloat16)],
)
def test_updates_with_the_optimizer_in_host_memory_between_them_are_the_same(
    tmp_path: Path, family: str, layout: str, dtype: torch.dtype
) -> None:
    directory = mixture(tmp_path / "model") if family == "Mixtral" else write_checkpoint(tmp_path / "model", family)
    always_there = run_on_ranks(4, updates, directory, layout, dtype, False)
    assert run_on_ranks(4, updates, directory, layout, dtype, True) == always_there
    assert always_there[0] is not None
    assert always_there[0][0] != always_there[0][-2]


def scored(directory: Path) -> tuple[int, int, list[Tensor]]:
    """Bytes of the weights on the device while they are away and when they are there; scores before and after."""
    mesh = build_mesh(Layout.parse("tp2"), 0)
    if not mesh.is_member:
        return 0, 0, []
    spec = read_model(directory)
    model = build_model(spec, mesh)
    load_weights(model, spec, mesh, directory)
    micro_batch = MicroBatch.pack(tokens(2, 7, seed=1))
    answers = forward_logprobs(model, mesh, [micro_batch])
    hosted, weights = OffloadedWeights(model), [parameter.data for parameter in model.parameters()]
    away = storage_bytes(weights)
    assert hosted.offload() == 0  # the host's copy never changes
    num_bytes = hosted.reload()
    assert num_bytes == storage_bytes(weights)
    return away, num_bytes, [*answers, *forward_logprobs(model, mesh, [micro_batch])]


def test_weights_that_come_back_score_as_before(tmp_path: Path) -> None:
    for away, there, answers in run_on_ranks(4, scored, write_checkpoint(tmp_path / "model"))[:2]:
        assert away == 0
        assert there > 0
        assert torch.equal(*answers)
