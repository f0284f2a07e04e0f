"""The state of every parameter is saved whole, by one of the ranks that hold it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from meshwright.profiles.layout import Layout
from meshwright.profiles.model_shape import read_model
from meshwright.runtime.model.mesh import build_mesh
from meshwright.runtime.model.model_shard import build_model
from meshwright.runtime.training.checkpoint import sharded_trainer_state
from meshwright.runtime.training.trainer import Trainer
from tests.runtime.checkpoints import FAMILIES, write_checkpoint
from tests.runtime.ranks import run_on_ranks
from tests.runtime.training.test_checkpoint import Places, Run, _merge


def _moments_and_what_is_saved_of_them(models: Path, num_replicas: int) -> tuple[list[Tensor], dict[int, Tensor]]:
    """This rank's first moments, flat, parameter by parameter, and those that it would write, by number."""
    mesh = build_mesh(Layout(dp=num_replicas), 0)
    trainer = Trainer(build_model(read_model(models / "actor"), mesh, trainable=True), mesh, learning_rate=1e-2)
    [optimizer] = trainer.optimizers
    generator = torch.Generator().manual_seed(mesh.dp_rank)
    held = []
    for parameter in (parameter for buffer in optimizer.buffers for parameter in buffer.param_index_map):
        is_held = parameter in optimizer.model_param_gbuf_map
        moments = optimizer._get_main_param_and_optimizer_states(parameter)["exp_avg"] if is_held else torch.empty(0)
        held.append(moments.normal_(generator=generator))
    [saved] = sharded_trainer_state("actor", trainer, is_loading=False)["param_states"].values()
    return held, {number: state["exp_avg"].data for number, state in saved.items()}


@pytest.mark.slow
@pytest.mark.parametrize("num_replicas", [1, 3])
def test_each_parameter_is_saved_whole_by_the_rank_that_holds_most_of_it(tmp_path: Path, num_replicas: int) -> None:
    write_checkpoint(tmp_path / "actor")
    held, saved = zip(
        *run_on_ranks(num_replicas, _moments_and_what_is_saved_of_them, tmp_path, num_replicas), strict=True
    )
    num_cut = 0
    for number, pieces in enumerate(zip(*held, strict=True)):
        sizes = [*map(len, pieces)]
        [writer] = [rank for rank, mine in enumerate(saved) if number in mine]
        assert writer == sizes.index(max(sizes))
        assert torch.equal(saved[writer][number].flatten(), torch.cat(pieces))
        num_cut += max(sizes) < sum(sizes)
    assert all(saved)
    assert (num_cut > 0) == (num_replicas > 1)


@pytest.mark.slow
def test_a_tied_embedding_behind_a_bucket_that_was_filled_up_is_saved_whole(tmp_path: Path) -> None:
    """One layer of each stage, cut in two, ends half way through what buckets are rounded to."""
    write_checkpoint(tmp_path / "actor", "Qwen2", **FAMILIES["Qwen2"], num_hidden_layers=2)
    places: Places = {"actor": ("tp2,pp2", 0)}
    whole = _merge(tmp_path, Run(places=places, num_updates=2))
    start = _merge(tmp_path, Run(places=places, num_updates=1, written=tmp_path / "saved"))
    rest = _merge(tmp_path, Run(places=places, num_updates=1, read=tmp_path / "saved"))
    assert start["actor"] + rest["actor"] == pytest.approx(whole["actor"], rel=1e-4)
