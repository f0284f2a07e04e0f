"""A checkpoint that is written beside training holds what there was when it was begun, or the run learns it is not."""

from __future__ import annotations

import functools
import os
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing import ShardedTensor

from meshwright.profiles.errors import BadInput, RunFailed
from meshwright.profiles.layout import Layout
from meshwright.profiles.model_shape import read_model
from meshwright.runtime.model.mesh import build_mesh
from meshwright.runtime.model.model_shard import build_model
from meshwright.runtime.training.checkpoint import Saver, _copy_to_host, load_trainers, publish, take_snapshot
from meshwright.runtime.training.trainer import Trainer
from tests.runtime.checkpoints import write_checkpoint
from tests.runtime.ranks import run_on_ranks
from tests.runtime.updates import blocks, language_loss
from tests.seeds import cases


def _updated_meanwhile(models: Path, saved: Path, num_replicas: int) -> list[float]:
    """Losses of an update that is done while a checkpoint is written, and of the same from what was written."""
    spec, mesh = read_model(models / "actor"), build_mesh(Layout(dp=num_replicas), 0)
    trainer = Trainer(build_model(spec, mesh, trainable=True), mesh, learning_rate=1e-2)
    loss, saver = functools.partial(language_loss, spec, mesh), Saver(dist.new_group(backend="gloo"))
    trainer.train_step(blocks(2, mesh), loss)
    assert saver.seconds is None
    saver.save(lambda: take_snapshot(saved, {"actor": trainer}), lambda: None)
    first = [trainer.train_step(blocks(2, mesh), loss)["loss"] for _ in range(2)]
    saver.wait()
    assert saver.seconds is not None
    assert saver.seconds > 0
    load_trainers(saved, {"actor": trainer})
    return [*first, *(trainer.train_step(blocks(2, mesh), loss)["loss"] for _ in range(2))]


@pytest.mark.slow
@cases("num_replicas", [1, 2], few=1)
def test_what_is_saved_is_what_there_was_when_the_save_began(tmp_path: Path, num_replicas: int) -> None:
    write_checkpoint(tmp_path / "actor")
    for losses in run_on_ranks(num_replicas, _updated_meanwhile, tmp_path, tmp_path / "saved", num_replicas):
        assert losses[:2] == losses[2:]
        assert losses[0] != losses[1]
    assert [path.name for path in tmp_path.iterdir() if "saved" in path.name] == ["saved"]


def _sharded(key: str, data: torch.Tensor, replica: int = 0) -> ShardedTensor:
    return ShardedTensor.from_rank_offsets(key, data, replica_id=replica)


def test_what_was_gathered_for_a_checkpoint_and_what_another_rank_writes_is_not_copied() -> None:
    gathered, live, elsewhere = torch.zeros(3), torch.arange(6.0)[2:5], torch.zeros(3)
    state = {
        "gathered": _sharded("gathered", gathered),
        "live": _sharded("live", live),
        "elsewhere": _sharded("elsewhere", elsewhere, replica=1),
    }
    _copy_to_host(state, {tensor.untyped_storage().data_ptr() for tensor in (live, elsewhere)})
    assert state["gathered"].data is gathered
    assert state["elsewhere"].data is elsewhere
    live.zero_()
    assert state["live"].data.tolist() == [2, 3, 4]


def _writes_in(directory: Path) -> list[int]:
    """The threads in which three checkpoints are written."""
    saver, threads = Saver(dist.new_group(backend="gloo")), list[int]()
    for number in range(3):
        taken = functools.partial(
            take_snapshot, directory / str(number), {}, lambda _: threads.append(threading.get_native_id())
        )
        saver.save(taken, lambda: None)
    saver.wait()
    return threads


def test_every_checkpoint_is_written_in_one_thread(tmp_path: Path) -> None:
    for threads in run_on_ranks(2, _writes_in, tmp_path):
        assert len(threads) == 3
        assert len({*threads, os.getpid()}) == 2


def _fails_on_rank_one(directory: Path) -> list[str]:
    """What each rank is told where one cannot write, when it waits and when it waits again."""
    saver, said = Saver(dist.new_group(backend="gloo")), []

    def beside(_: Path) -> None:
        if dist.get_rank() == 1:
            raise BadInput("no room.")

    saver.save(lambda: take_snapshot(directory, {}, beside), lambda: None)
    for _ in range(2):
        with pytest.raises(RunFailed) as caught:
            saver.wait()
        said.append(str(caught.value))
    return said


def test_a_rank_that_cannot_write_ends_the_run_on_all(tmp_path: Path) -> None:
    for said in run_on_ranks(2, _fails_on_rank_one, tmp_path / "saved"):
        assert all("saved.partial cannot be written: BadInput: no room; is its disk full?" in each for each in said)
    assert not (tmp_path / "saved").exists()


def _publishes_behind_what_was_cut_short(directory: Path) -> None:
    publish(take_snapshot(directory, {}), on_published=(directory.with_name("behind")).touch)
    with pytest.raises(BadInput, match="exists already"):
        take_snapshot(directory, {})


def test_what_a_cut_short_save_left_goes_and_what_comes_behind_is_done_once_it_is_whole(tmp_path: Path) -> None:
    (tmp_path / "step-000001.partial").mkdir()
    run_on_ranks(2, _publishes_behind_what_was_cut_short, tmp_path / "step-000002")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["behind", "step-000002"]
