"""The state of an optimizer is saved where its parameters lie, with the room between buckets."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from meshwright.runtime.training.distributed_optimizer import _with_room
from tests.runtime.checkpoints import FAMILIES, write_checkpoint
from tests.runtime.training.test_checkpoint import Places, Run, _merge


def test_the_contents_of_buckets_begin_where_the_buckets_do_and_zeros_fill_the_room() -> None:
    """Two buckets of 3 and 2 elements, each rounded up to 4, with two more behind the last."""
    buckets = [SimpleNamespace(numel_unpadded=3), SimpleNamespace(numel_unpadded=2)]
    buffer = SimpleNamespace(numel=10, buckets=buckets, bucket_indices=[(0, 4), (4, 8)])
    whole = _with_room(torch.arange(1.0, 6.0), buffer)
    assert whole.tolist() == [1, 2, 3, 0, 4, 5, 0, 0, 0, 0]


def test_a_buffer_that_is_full_is_as_it_was() -> None:
    buffer = SimpleNamespace(numel=4, buckets=[SimpleNamespace(numel_unpadded=4)], bucket_indices=[(0, 4)])
    packed = torch.arange(4.0)
    assert torch.equal(_with_room(packed, buffer), packed)


@pytest.mark.slow
def test_a_tied_embedding_behind_a_bucket_that_was_filled_up_is_saved_whole(tmp_path: Path) -> None:
    """One layer of each stage, cut in two, ends half way through what buckets are rounded to."""
    write_checkpoint(tmp_path / "actor", "Qwen2", **FAMILIES["Qwen2"], num_hidden_layers=2)
    places: Places = {"actor": ("tp2,pp2", 0)}
    whole = _merge(tmp_path, Run(places=places, num_updates=2))
    start = _merge(tmp_path, Run(places=places, num_updates=1, written=tmp_path / "saved"))
    rest = _merge(tmp_path, Run(places=places, num_updates=1, read=tmp_path / "saved"))
    assert start["actor"] + rest["actor"] == pytest.approx(whole["actor"], rel=1e-4)
