"""The pickles in a checkpoint, which megatron and torch read without care, are looked through before they do.

A pickle can run what its writer chose, by naming it. These name nothing but the classes of torch's own bookkeeping, in
`.metadata`, and plain values and tensors, in `common.pt` and in objects among the tensors: any other name is refused,
and nothing is run.
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
_MOST_BYTES = 2**32
_PLAIN = {
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
"""What `.metadata` may name, by module."""


class _Plain(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name not in _PLAIN.get(module, ()):
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return super().find_class(module, name)


def require_plain(directory: Path) -> None:
    """Raises BadInput for a checkpoint whose pickles name anything else, or that cannot be read; runs none of it."""
    try:
        for name in (_METADATA, _COMMON):
            require_file(directory / name, "checkpoint file", _MOST_BYTES)
        metadata = _loaded((directory / _METADATA).read_bytes())
        torch.load(directory / _COMMON, weights_only=True)
        for stored in _objects(metadata):
            path = directory / stored.relative_path
            if path.parent != directory:
                raise pickle.UnpicklingError(f"it names {stored.relative_path}, which is no file beside it")
            with path.open("rb") as file:
                file.seek(stored.offset)
                torch.load(io.BytesIO(file.read(stored.length)), weights_only=True)
    except Exception as error:  # torch and pickle raise what they like at a file that was cut or is foreign
        said = (str(error).strip().splitlines() or [""])[0][:200].rstrip(".")
        raise BadInput(
            f"checkpoint {directory} cannot be read: {type(error).__name__}: {said}; it was cut short or is of another "
            "job or program, so remove it, or begin again in another directory."
        ) from None


def _loaded(data: bytes) -> Metadata:
    """The metadata in a pickle. CPython makes room for a bytearray before it reads it, and complains at standard error
    where there is none; no metadata holds one."""
    if pickle.BYTEARRAY8 in data and any(code.name == "BYTEARRAY8" for code, _, _ in pickletools.genops(data)):
        raise pickle.UnpicklingError("it holds a bytearray")
    found: Metadata = _Plain(io.BytesIO(data)).load()
    return found


def _objects(metadata: Metadata) -> list[Any]:
    """Where the objects lie that are no tensors."""
    kinds = metadata.state_dict_metadata
    return [one for index, one in metadata.storage_data.items() if isinstance(kinds[index.fqn], BytesStorageMetadata)]
