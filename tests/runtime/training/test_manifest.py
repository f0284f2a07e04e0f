"""A checkpoint whose files are not what was written is found, whatever happened to them and whichever rank looks."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path

import pytest
import torch.distributed as dist

from meshwright.runtime.training.checkpoint_integrity import MANIFEST, _damage_of_share, find_damage, write_manifest
from tests.runtime.ranks import run_on_ranks

NAMES = ("__0_0.distcp", "__1_0.distcp", "common.pt", ".metadata", "in_flight-00001.safetensors")


def _sealed(directory: Path) -> str | None:
    if dist.get_rank() == 0:
        draw = random.Random(0)
        for name in NAMES:
            (directory / name).write_bytes(draw.randbytes(draw.randint(50, 3000)))
    write_manifest(directory)
    dist.barrier()
    return find_damage(directory)


@pytest.fixture(scope="module")
def sealed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("sealed")
    assert run_on_ranks(2, _sealed, directory) == [None, None]
    return directory


def test_all_ranks_see_what_one_of_them_finds(sealed: Path, tmp_path: Path) -> None:
    for name in NAMES:
        copy = tmp_path / f"of{name}"
        shutil.copytree(sealed, copy)
        (copy / name).unlink()
        one, other = run_on_ranks(2, find_damage, copy)
        assert one == other == f"{copy / name} cannot be read (No such file or directory)"


def test_of_300_checkpoints_that_were_cut_or_flipped_every_one_is_found(sealed: Path, tmp_path: Path) -> None:
    draw = random.Random(1)
    for number in range(300):
        copy = tmp_path / str(number)
        shutil.copytree(sealed, copy)
        path = copy / draw.choice((*NAMES, MANIFEST))
        content = bytearray(path.read_bytes())
        if draw.random() < 0.5:
            content = content[: draw.randrange(len(content))]
        else:
            content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        path.write_bytes(content)
        found = _damage_of_share(copy, 0, 1)
        assert found is not None, path
        assert "\n" not in found
        shutil.rmtree(copy)


def test_a_manifest_names_no_file_elsewhere(sealed: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(sealed, copy)
    manifest = copy / MANIFEST
    text = manifest.read_text()
    manifest.write_text(text.replace("common.pt", "../common.pt"))
    assert _damage_of_share(copy, 0, 1) == f"{MANIFEST} names ../common.pt, which is not a file in its directory"
    for name in ("", ".", "x" * 256):
        manifest.write_text(text.replace("common.pt", name))
        assert "which is not a file in its directory" in str(_damage_of_share(copy, 0, 1))
    manifest.write_text(text.replace("common.pt", "\\u0000"))
    assert "has a character that a terminal does not show" in str(_damage_of_share(copy, 0, 1))


def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(sealed: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(sealed, copy)
    (copy / "common.pt").unlink()
    os.mkfifo(copy / "common.pt")
    assert _damage_of_share(copy, 0, 1) == f"{copy / 'common.pt'} is not a file"
