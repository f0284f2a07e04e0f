"""An update does not depend on how it is computed: layout, micro-batches, recomputation."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from meshwright.profiles.errors import RunFailed
from meshwright.profiles.layout import Layout
from meshwright.profiles.model import ModelSpec, read_model
from meshwright.runtime.bodies import MicroBatch, Trainer
from meshwright.runtime.logprobs import token_logprobs
from meshwright.runtime.mesh import Mesh, build_mesh
from meshwright.runtime.models import Recompute, build_model
from meshwright.runtime.ppo import Share
from meshwright.runtime.weights import load_weights, save_weights
from tests.runtime.checkpoints import tokens, write_checkpoint
from tests.runtime.ranks import run_on_ranks

ROWS, LENGTH = 4, 19
LENGTHS = (LENGTH, 11, 2, 14)
NUM_TOKENS = sum(LENGTHS) - ROWS


def language_loss(spec: ModelSpec, mesh: Mesh, output: Tensor, block: MicroBatch) -> Share:
    """Mean over all rows' tokens of -log p - entropy / 10, as this micro-batch's share of it."""
    logprobs, entropy = token_logprobs(
        output, block.next_tokens.unsqueeze(0), mesh.groups.tp, vocab_size=spec.vocab_size, with_entropy=True
    )
    assert entropy is not None
    loss = (-(logprobs + 0.1 * entropy) * block.fields["mask"]).sum() / NUM_TOKENS
    return Share(loss, {"loss": loss.detach().double()})


def value_loss(spec: ModelSpec, mesh: Mesh, output: Tensor, block: MicroBatch) -> Share:
    loss = ((output - block.fields["goal"]).square() * block.fields["mask"]).sum() / NUM_TOKENS
    return Share(loss, {"loss": loss.detach().double()})


def blocks(size: int, mesh: Mesh) -> list[MicroBatch]:
    """This replica's rows in micro-batches of `size`; the last token of a row has none to predict."""
    ids = tokens(ROWS, LENGTH)
    goal = torch.linspace(-1, 1, ROWS * LENGTH).view(ROWS, LENGTH)
    mine = range(mesh.dp_rank, ROWS, mesh.layout.dp)
    groups = [list(mine)[i : i + size] for i in range(0, len(mine), size)]
    return [
        MicroBatch.of(
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


def _train(how: How, directory: Path, scalar: bool, target: Path) -> list[dict[str, float]] | None:
    """Metrics of three updates, on every member."""
    mesh = build_mesh(Layout.parse(how.layout), 0)
    if not mesh.is_member:
        return None
    spec = read_model(directory, scalar_head=scalar)
    model = build_model(spec, mesh, recompute=how.recompute, trainable=True)
    load_weights(model, spec, mesh, directory)
    # AdamW divides a gradient by its own size: with its usual epsilon, rounding decides where the gradient is nothing.
    trainer = Trainer(model, mesh, learning_rate=1e-3, weight_decay=0.1, max_grad_norm=0.5, epsilon=1e-4)
    loss = functools.partial(value_loss if scalar else language_loss, spec, mesh)
    metrics = [trainer.train_step(blocks(how.rows, mesh), loss) for _ in range(3)]
    save_weights(model, spec, mesh, target, documents_of=directory)
    return metrics


def _written(directory: Path) -> dict[str, Tensor]:
    return {name: tensor for path in directory.glob("*.safetensors") for name, tensor in load_file(path).items()}


ONE_RANK = How("tp1", ROWS)
OTHERS = [
    How("tp1", 1),
    How("tp1", 2),
    How("tp1", 3),
    How("tp1", 4, "selective"),
    How("tp1", 4, "full"),
    How("dp2", 1),
    How("dp4", 1),
    How("tp2", 2),
    How("tp2,sp", 2),
    How("tp2,sp", 2, "full"),
    How("pp2", 1),
    How("pp2", 3, "selective"),
    How("pp4", 1, "full"),
    How("tp2,dp2", 2),
    How("tp2,dp2,sp", 1),
    How("pp2,dp2", 1),
    How("tp2,pp2,sp", 2),
]


@pytest.mark.slow
@pytest.mark.parametrize("scalar", [False, True])
@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Qwen3"])  # Qwen2 ties its embeddings, Qwen3 has norms by head
def test_the_update_is_the_same_however_it_is_computed(tmp_path: Path, family: str, scalar: bool) -> None:
    """To 1e-4 of its metrics and 1e-5 of its weights, which move by up to 1e-3 in each update."""
    head = "ForSequenceClassification" if scalar else "ForCausalLM"
    directory = write_checkpoint(tmp_path / "model", family, head=head)
    reference = run_on_ranks(4, _train, ONE_RANK, directory, scalar, tmp_path / "reference")[0]
    assert reference is not None
    expected = _written(tmp_path / "reference")
    for number, how in enumerate(OTHERS):
        target = tmp_path / str(number)
        for metrics in run_on_ranks(4, _train, how, directory, scalar, target):
            for update, known in zip(metrics or [], reference, strict=metrics is not None):
                assert update == pytest.approx(known, rel=1e-4, abs=1e-6), how
        for name, tensor in _written(target).items():
            torch.testing.assert_close(
                tensor, expected[name], atol=1e-5, rtol=0, msg=lambda m, n=name, h=how: f"{n}, {h}: {m}"
            )


def _one_replica_idle(directory: Path, layout: str) -> list[float] | None:
    """Loss and gradient norm of an update for which only the first replica has rows."""
    mesh = build_mesh(Layout.parse(layout), 0)
    if not mesh.is_member:
        return None
    spec = read_model(directory)
    model = build_model(spec, mesh, trainable=True)
    load_weights(model, spec, mesh, directory)
    rows = MicroBatch.of(tokens(ROWS, LENGTH), {"mask": torch.ones(ROWS, LENGTH)})
    metrics = Trainer(model, mesh, learning_rate=1e-3).train_step(
        [rows] if mesh.dp_rank == 0 else [], functools.partial(language_loss, spec, mesh)
    )
    return [metrics["loss"], metrics["grad_norm"]]


@pytest.mark.slow
def test_a_replica_without_rows_takes_part(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "model")
    alone, *_ = run_on_ranks(4, _one_replica_idle, directory, "tp1")
    for seen in run_on_ranks(4, _one_replica_idle, directory, "pp2,dp2"):
        assert seen == pytest.approx(alone, rel=1e-5)


def _not_a_number(directory: Path) -> tuple[str, bool]:
    """What is said of a loss that is not a number, and whether the weights are as before."""
    mesh = build_mesh(Layout(dp=2), 0)
    if not mesh.is_member:
        return "", True
    model = build_model(read_model(directory), mesh, trainable=True)
    trainer = Trainer(model, mesh, learning_rate=1e-3)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    said = ""
    try:
        trainer.train_step(blocks(2, mesh), lambda output, _: Share(output[..., 0].sum() * math.nan, {}))
    except RunFailed as error:
        said = str(error)
    return said, all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


@pytest.mark.slow
def test_a_gradient_that_is_not_a_number_ends_the_run_and_spares_the_weights(tmp_path: Path) -> None:
    for said, spared in run_on_ranks(4, _not_a_number, write_checkpoint(tmp_path / "model"))[:2]:
        assert "gradient norm of model is nan" in said
        assert spared
