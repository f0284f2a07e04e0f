"""Updates of a small model, computed in many ways on real ranks and compared with those of one rank."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from meshwright.profiles.layout import Layout
from meshwright.profiles.model_parts.adapter import Adapter
from meshwright.profiles.model_shape import ModelSpec, read_model
from meshwright.runtime.model.adapters import init_adapter
from meshwright.runtime.model.logprobs import token_logprobs
from meshwright.runtime.model.mesh import Mesh, build_mesh
from meshwright.runtime.model.model_shard import Recompute, build_model, named_global_parameters
from meshwright.runtime.model.weights import load_weights, save_weights
from meshwright.runtime.training.losses import LossShare
from meshwright.runtime.training.trainer import MicroBatch, Trainer
from tests.runtime.checkpoints import tokens
from tests.runtime.ranks import run_on_ranks

ROWS, LENGTH = 4, 19
LENGTHS = (LENGTH, 11, 2, 14)
NUM_TOKENS = sum(LENGTHS) - ROWS


def language_loss(spec: ModelSpec, mesh: Mesh, output: Tensor, block: MicroBatch) -> LossShare:
    """Mean over all rows' tokens of -log p - entropy / 10, as this micro-batch's share of it."""
    logprobs, entropy = token_logprobs(
        output, block.next_tokens.unsqueeze(0), mesh.groups.tp, vocab_size=spec.vocab_size, with_entropy=True
    )
    assert entropy is not None
    loss = (-(logprobs + 0.1 * entropy) * block.fields["mask"]).sum() / NUM_TOKENS
    return LossShare(loss, {"loss": loss.detach().double()})


def value_loss(spec: ModelSpec, mesh: Mesh, output: Tensor, block: MicroBatch) -> LossShare:
    loss = ((output - block.fields["goal"]).square() * block.fields["mask"]).sum() / NUM_TOKENS
    return LossShare(loss, {"loss": loss.detach().double()})


def blocks(size: int, mesh: Mesh) -> list[MicroBatch]:
    """This replica's rows in micro-batches of `size`; the last token of a row has none to predict."""
    ids = tokens(ROWS, LENGTH)
    goal = torch.linspace(-1, 1, ROWS * LENGTH).view(ROWS, LENGTH)
    mine = range(mesh.dp_rank, ROWS, mesh.layout.dp)
    groups = [list(mine)[i : i + size] for i in range(0, len(mine), size)]
    return [
        MicroBatch.pack(
            [ids[row, : LENGTHS[row]] for row in group],
            {
                "mask": [torch.arange(LENGTHS[row]) < LENGTHS[row] - 1 for row in group],
                "goal": [goal[row, : LENGTHS[row]] for row in group],
            },
        )
        for group in groups
    ]


@dataclass(frozen=True)
class How:
    """A way to compute the updates."""

    layout: str
    rows: int  # of a micro-batch
    recompute: Recompute = "none"


HEADS = "ForCausalLM", "ForSequenceClassification"
"""Of an actor and of a critic, whose head is a scalar."""

ONE_RANK = How("tp1", ROWS)


def assert_updates_are_those_of_one_rank(
    directory: Path, hows: Sequence[How], scratch: Path, *, scalar: bool = False, adapter: Adapter | None = None
) -> None:
    """To 1e-4 of their metrics and 1e-5 of the weights, which move by up to 1e-3 in each update."""
    answers = run_on_ranks(4, _train_in_turns, (ONE_RANK, *hows), directory, scalar, scratch, adapter, timeout=600)
    known, expected = answers[0][0], written(scratch / "0")
    assert known is not None
    before = written(directory)
    adapted = {name: tensor for name, tensor in expected.items() if not torch.equal(tensor, before[name])}
    assert_moved(adapted if adapter else expected, before)
    for number, how in enumerate(hows, 1):
        of_members = [metrics for of_rank in answers if (metrics := of_rank[number]) is not None]
        assert len(of_members) == Layout.parse(how.layout).num_ranks
        for metrics in of_members:
            for update, same in zip(metrics, known, strict=True):
                assert update == pytest.approx(same, rel=1e-4, abs=1e-6), how
        found = written(scratch / str(number))
        assert found.keys() == expected.keys()
        for name, tensor in found.items():
            torch.testing.assert_close(tensor, expected[name], atol=1e-5, rtol=0, msg=f"{name}, {how}")


def assert_moved(weights: dict[str, Tensor], before: dict[str, Tensor]) -> None:
    """So that agreement means something. The biases by which routers select experts stay as they were."""
    stays = {name for name in weights if torch.equal(weights[name], before[name])}
    assert stays == {name for name in weights if name.endswith("e_score_correction_bias")}


def written(directory: Path) -> dict[str, Tensor]:
    """All weights of a checkpoint."""
    return {name: tensor for path in directory.glob("*.safetensors") for name, tensor in load_file(path).items()}


def _train_in_turns(
    hows: Sequence[How], directory: Path, scalar: bool, scratch: Path, adapter: Adapter | None
) -> list[list[dict[str, float]] | None]:
    return [_train(how, directory, scalar, scratch / str(number), adapter) for number, how in enumerate(hows)]


def _train(
    how: How, directory: Path, scalar: bool, target: Path, adapter: Adapter | None
) -> list[dict[str, float]] | None:
    """Metrics of two updates, on every member: the second begins with the weights and the moments of the first."""
    mesh = build_mesh(Layout.parse(how.layout), 0)
    if not mesh.is_member:
        return None
    spec = replace(read_model(directory, scalar_head=scalar), adapter=adapter)
    model = build_model(spec, mesh, recompute=how.recompute, trainable=True)
    load_weights(model, spec, mesh, directory)
    init_adapter(dict(named_global_parameters(model)), 0, tp=mesh.layout.tp, tp_rank=mesh.tp_rank, etp=mesh.layout.etp)
    # AdamW divides a gradient by its own size: with its usual epsilon, rounding decides where the gradient is nothing.
    trainer = Trainer(model, mesh, learning_rate=1e-3, weight_decay=0.1, max_grad_norm=0.5, epsilon=1e-4)
    loss = functools.partial(value_loss if scalar else language_loss, spec, mesh)
    metrics = [trainer.train_step(blocks(how.rows, mesh), loss) for _ in range(2)]
    save_weights(model, spec, mesh, target, config_from=directory)
    return metrics
