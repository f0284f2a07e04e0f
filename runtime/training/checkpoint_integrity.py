"""Checks a checkpoint before it is loaded: sizes and SHA-256 of its files, and the names in its pickles.

Every rank hashes the files that it wrote and flushes them to disk; when a checkpoint is read, the files are split over
the ranks to be verified. A pickle can execute any function that it names. So the pickle `.metadata` may name only
torch's metadata classes, and the others, `common.pt` and objects stored among the tensors, only plain values and
tensors. Any other name is refused, and nothing is executed.
"""

from __future__ import annotations

import hashlib
import io
import os
import pickle
import pickletools
import re
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

from meshwright.profiles.documents import Document, canonical_json, read_json, write_atomically
from meshwright.profiles.errors import BadInput
from meshwright.profiles.untrusted_text import is_file_name, require_file

MANIFEST = "manifest.json"
"""The last file of a checkpoint to be written: if it exists, the others are complete."""

_RANK_IN_NAME = re.compile(r"(?:__|in_flight-)0*([0-9]+)[_.]")
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
    local = {path.name: _file_sum(path, is_new=True) for path in directory.iterdir() if _writer(path.name) == rank}
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
        actual = _file_sum(path)
    except OSError as error:
        return f"{path} cannot be read ({error.strerror})"
    if actual.num_bytes != recorded.num_bytes:
        return f"{path} has {actual.num_bytes} bytes and was written with {recorded.num_bytes}"
    return None if actual == recorded else f"{path} is not what was written: its SHA-256 differs"


def _file_sum(path: Path, *, is_new: bool = False) -> FileSum:
    with path.open("rb") as file:
        if is_new:
            os.fsync(file.fileno())
        digest = hashlib.file_digest(file, "sha256")
        return FileSum(num_bytes=os.fstat(file.fileno()).st_size, sha256=digest.hexdigest())


def _writer(name: str) -> int:
    """The rank that wrote a file, from its name; 0 if the name has none."""
    match = _RANK_IN_NAME.match(name)
    return int(match[1]) if match else 0


_METADATA, _COMMON = ".metadata", "common.pt"
_MAX_BYTES = 2**32
_ALLOWED = {
    "torch": ("Size", *(name for name, kind in vars(torch).items() if isinstance(kind, torch.dtype))),
    "torch.serialization": ("_get_layout",),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo", "_StoragePrefix"),
    "torch.distributed.checkpoint.metadata": (
        *("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta"),
        *("TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING"),
    ),
    "torch.distributed.checkpoint.planner": ("SavePlan", "TensorWriteData", "WriteItem", "WriteItemType"),
    "collections": ("OrderedDict",),
    "pathlib": ("PosixPath",),
}
"""The names that `.metadata` may use, by module."""


class _RestrictedUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name not in _ALLOWED.get(module, ()):
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return super().find_class(module, name)


def require_safe_pickles(directory: Path) -> None:
    """Raises BadInput if a checkpoint's pickles name a refused function or class, or cannot be read.

    No function that they name is executed.
    """
    try:
        for name in (_METADATA, _COMMON):
            require_file(directory / name, "checkpoint file", _MAX_BYTES)
        metadata = _load_metadata((directory / _METADATA).read_bytes())
        torch.load(directory / _COMMON, weights_only=True)
        for stored in _objects(metadata):
            path = directory / stored.relative_path
            if path.parent != directory:
                raise pickle.UnpicklingError(f"it names {stored.relative_path}, which is not a file in its directory")
            with path.open("rb") as file:
                file.seek(stored.offset)
                torch.load(io.BytesIO(file.read(stored.length)), weights_only=True)
    except Exception as error:  # torch and pickle raise errors of any type for a truncated or foreign file
        message = (str(error).strip().splitlines() or [""])[0][:200].rstrip(".")
        raise BadInput(
            f"checkpoint {directory} cannot be read: {type(error).__name__}: {message}; it is incomplete or of "
            "another job or program, so remove it, or start again in another directory."
        ) from None


def _load_metadata(data: bytes) -> Metadata:
    """Loads the metadata in a pickle.

    Bytearrays are refused, since CPython allocates one before it reads it and writes to stderr if that fails; no
    metadata has any.
    """
    if pickle.BYTEARRAY8 in data and any(code.name == "BYTEARRAY8" for code, _, _ in pickletools.genops(data)):
        raise pickle.UnpicklingError("it holds a bytearray")
    metadata: Metadata = _RestrictedUnpickler(io.BytesIO(data)).load()
    return metadata


def _objects(metadata: Metadata) -> list[Any]:
    """The storage locations of the objects that are not tensors."""
    kinds = metadata.state_dict_metadata
    return [
        stored for index, stored in metadata.storage_data.items() if isinstance(kinds[index.fqn], BytesStorageMetadata)
    ]
