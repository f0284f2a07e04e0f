"""Checks of the pickles in a checkpoint before Megatron and torch load them.

A pickle can execute any function that it names. A checkpoint's pickles may name only torch's metadata classes, in
`.metadata`, and plain values and tensors, in `common.pt` and in objects among the tensors. Any other name is refused,
and nothing is executed.
"""

from __future__ import annotations

import io
import pickle
import pickletools
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

from meshwright.profiles.errors import BadInput
from meshwright.profiles.values import require_file

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
    """Raises BadInput if a checkpoint's pickles name anything else, or cannot be read; executes none of them."""
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
