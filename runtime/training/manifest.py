"""The manifest of a checkpoint: sizes and SHA-256 of its files, to detect truncated, corrupt and swapped ones.

Every rank hashes the files that it wrote and flushes them to disk. When a checkpoint is read, the files are split over
the ranks to be verified.
"""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path

import torch.distributed as dist

from meshwright.profiles.documents import Document, canonical_json, read_json, write_atomically
from meshwright.profiles.errors import BadInput
from meshwright.profiles.values import is_file_name

MANIFEST = "manifest.json"
"""The last file of a checkpoint to be written: if it exists, the others are complete."""

_RANK_IN_NAME = re.compile(r"(?:__|underway-)0*([0-9]+)[_.]")
"""Matches the names of files that contain the rank which wrote them."""


class FileSum(Document):
    """The size and SHA-256 of one file."""

    num_bytes: int
    sha256: str


class Manifest(Document):
    """The sizes and hashes of all files of a checkpoint, by name."""

    files: dict[str, FileSum]


def write_manifest(directory: Path, group: dist.ProcessGroup | None = None) -> None:
    """Writes the manifest of a directory that all ranks have written to.

    Collective over the world, or over a group of all its ranks.
    """
    dist.barrier(group)
    rank = dist.get_rank()
    local = {path.name: _sum(path, is_new=True) for path in directory.iterdir() if _writer(path.name) == rank}
    per_rank: list[dict[str, FileSum]] = [{}] * dist.get_world_size()
    dist.all_gather_object(per_rank, local, group=group)
    if rank == 0:
        sums = {name: file_sum for rank_sums in per_rank for name, file_sum in rank_sums.items()}
        write_atomically(directory / MANIFEST, canonical_json(Manifest(files=sums)))
        fsync_directory(directory)


def find_damage(directory: Path) -> str | None:
    """A sentence on the first damaged file of a checkpoint, the same on every rank; None if all match the manifest.

    Collective over the world.
    """
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    per_rank: list[str | None] = [None] * num_ranks
    dist.all_gather_object(per_rank, _damage_of_share(directory, rank, num_ranks))
    return next((sentence for sentence in per_rank if sentence), None)


def fsync_directory(directory: Path) -> None:
    """Flushes the entries of a directory to disk."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _damage_of_share(directory: Path, rank: int, num_ranks: int) -> str | None:
    """The first damage among the files that this rank verifies: every `num_ranks`-th one in the order of names."""
    try:
        files = read_json(Manifest, directory / MANIFEST, "manifest").files
    except BadInput as error:
        return str(error).rstrip(".")
    for name in sorted(files)[rank::num_ranks]:
        if sentence := _damage_of(directory, name, files[name]):
            return sentence
    return None


def _damage_of(directory: Path, name: str, recorded: FileSum) -> str | None:
    path = directory / name
    if not is_file_name(name):
        return f"{MANIFEST} names {name}, which is not a file in its directory"
    if path.exists() and not path.is_file():
        return f"{path} is not a file"
    try:
        actual = _sum(path)
    except OSError as error:
        return f"{path} cannot be read ({error.strerror})"
    if actual.num_bytes != recorded.num_bytes:
        return f"{path} has {actual.num_bytes} bytes and was written with {recorded.num_bytes}"
    return None if actual == recorded else f"{path} is not what was written: its SHA-256 differs"


def _sum(path: Path, *, is_new: bool = False) -> FileSum:
    with path.open("rb") as file:
        if is_new:
            os.fsync(file.fileno())
        digest = hashlib.file_digest(file, "sha256")
        return FileSum(num_bytes=os.fstat(file.fileno()).st_size, sha256=digest.hexdigest())


def _writer(name: str) -> int:
    """The rank that wrote a file, from its name; 0 if the name has none."""
    match = _RANK_IN_NAME.match(name)
    return int(match[1]) if match else 0
