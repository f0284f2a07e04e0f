"""What the files of a checkpoint are: their sizes and SHA-256, so that one which was cut, flipped or swapped is found.

Every rank sums the files that it wrote, and has the disk take them. When a checkpoint is read the files are dealt over
the ranks.
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
"""The last file of a checkpoint: where it is, the others are whole."""

_OF_RANK = re.compile(r"(?:__|underway-)0*([0-9]+)[_.]")
"""Names of files that carry the rank which wrote them."""


class FileSum(Document):
    """Of one file."""

    num_bytes: int
    sha256: str


class Manifest(Document):
    """Of all files of a checkpoint, by name."""

    files: dict[str, FileSum]


def seal(directory: Path, group: dist.ProcessGroup | None = None) -> None:
    """Writes the manifest of a directory that all ranks have written to. Collective over the world, or over a group of
    all its ranks."""
    dist.barrier(group)
    rank = dist.get_rank()
    mine = {path.name: _sum(path, is_new=True) for path in directory.iterdir() if _writer(path.name) == rank}
    parts: list[dict[str, FileSum]] = [{}] * dist.get_world_size()
    dist.all_gather_object(parts, mine, group=group)
    if rank == 0:
        found = {name: one for part in parts for name, one in part.items()}
        write_atomically(directory / MANIFEST, canonical_json(Manifest(files=found)))
        sync(directory)


def damage(directory: Path) -> str | None:
    """What is wrong with the files of a checkpoint, the same on every rank; None where they are as they were written.

    Collective over the world.
    """
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    parts: list[str | None] = [None] * num_ranks
    dist.all_gather_object(parts, _damage_of_share(directory, rank, num_ranks))
    return next((part for part in parts if part), None)


def sync(directory: Path) -> None:
    """Has the disk take the names in a directory."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _damage_of_share(directory: Path, rank: int, num_ranks: int) -> str | None:
    """As far as one of several ranks looks: at every so many of the files, in the order of their names."""
    try:
        files = read_json(Manifest, directory / MANIFEST, "manifest").files
    except BadInput as error:
        return str(error).rstrip(".")
    for name in sorted(files)[rank::num_ranks]:
        if found := _damage_of(directory, name, files[name]):
            return found
    return None


def _damage_of(directory: Path, name: str, known: FileSum) -> str | None:
    path = directory / name
    if not is_file_name(name):
        return f"{MANIFEST} names {name}, which is no file beside it"
    if path.exists() and not path.is_file():
        return f"{path} is no file"
    try:
        found = _sum(path)
    except OSError as error:
        return f"{path} cannot be read ({error.strerror})"
    if found.num_bytes != known.num_bytes:
        return f"{path} has {found.num_bytes} bytes and was written with {known.num_bytes}"
    return None if found == known else f"{path} is not what was written: its SHA-256 differs"


def _sum(path: Path, *, is_new: bool = False) -> FileSum:
    with path.open("rb") as file:
        if is_new:
            os.fsync(file.fileno())
        found = hashlib.file_digest(file, "sha256")
        return FileSum(num_bytes=os.fstat(file.fileno()).st_size, sha256=found.hexdigest())


def _writer(name: str) -> int:
    """The rank that wrote a file; the first where its name says nothing."""
    found = _OF_RANK.match(name)
    return int(found[1]) if found else 0
