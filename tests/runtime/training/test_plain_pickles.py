"""A pickle in a checkpoint that would run something is refused, and runs nothing."""

from __future__ import annotations

import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from meshwright.profiles.errors import BadInput
from meshwright.profiles.layout import Layout
from meshwright.profiles.model_shape import read_model
from meshwright.runtime.model.mesh import build_mesh
from meshwright.runtime.model.model_shard import build_model
from meshwright.runtime.training.checkpoint import publish, take_snapshot
from meshwright.runtime.training.checkpoint_integrity import require_safe_pickles
from meshwright.runtime.training.trainer import Trainer
from tests.runtime.checkpoints import write_checkpoint
from tests.runtime.ranks import run_on_ranks


class Evil:
    """Makes a directory when it is read."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> object:
        return os.mkdir, (str(self._mark),)


def _save(models: Path, target: Path) -> None:
    mesh = build_mesh(Layout(), 0)
    model = build_model(read_model(models), mesh, trainable=True)
    publish(take_snapshot(target, {"actor_train": Trainer(model, mesh, learning_rate=1.0)}))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("saved")
    run_on_ranks(1, _save, write_checkpoint(directory / "model"), directory / "step")
    return directory / "step"


def test_a_checkpoint_of_our_own_names_nothing_else(saved: Path) -> None:
    require_safe_pickles(saved)


def refused(directory: Path, mark: Path) -> str:
    with pytest.raises(BadInput) as caught:
        require_safe_pickles(directory)
    assert not mark.exists()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_what_would_run_something_is_refused_wherever_it_stands_and_runs_nothing(saved: Path, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    evil = pickle.dumps(Evil(mark))
    for name in (".metadata", "common.pt"):
        copy = tmp_path / f"of{name}"
        shutil.copytree(saved, copy)
        if name == "common.pt":
            torch.save({"x": Evil(mark)}, copy / name)
        else:
            (copy / name).write_bytes(evil)
        assert f"checkpoint {copy} cannot be read: UnpicklingError" in refused(copy, mark)
    copy = tmp_path / "among tensors"
    shutil.copytree(saved, copy)
    metadata = pickle.loads((saved / ".metadata").read_bytes())
    kinds = metadata.state_dict_metadata
    place = next(one for i, one in metadata.storage_data.items() if isinstance(kinds[i.fqn], BytesStorageMetadata))
    with (copy / place.relative_path).open("r+b") as file:
        file.seek(place.offset)
        file.write(evil.ljust(place.length, b"."))
    refused(copy, mark)


def test_a_place_outside_the_checkpoint_is_refused(saved: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(saved, copy)
    content = (copy / ".metadata").read_bytes()
    assert content.count(b"\x0c__0_0.distcp") == 1
    (copy / ".metadata").write_bytes(content.replace(b"\x0c__0_0.distcp", b"\x0c../../x/y/zz"))
    assert "which is not a file in its directory" in refused(copy, tmp_path / "mark")


def test_room_for_a_bytearray_is_not_asked_for(saved: Path, tmp_path: Path) -> None:
    """CPython's reader may complain at standard error where it gets none, beside what it raises."""
    copy = tmp_path / "step"
    shutil.copytree(saved, copy)
    (copy / ".metadata").write_bytes(
        pickle.PROTO + b"\x05" + pickle.BYTEARRAY8 + (2**62).to_bytes(8, "little") + b"few"
    )
    assert "MemoryError" not in refused(copy, tmp_path / "mark")
    (copy / ".metadata").write_bytes(pickle.dumps(bytearray(b"few"), protocol=5))
    assert "it holds a bytearray" in refused(copy, tmp_path / "mark")
