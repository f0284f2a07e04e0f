"""Reading of a Hugging Face directory's safetensors, one file or several: headers, and slices of tensors."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open
from torch import Tensor

from meshwright.profiles.errors import BadInput
from meshwright.profiles.values import MAX_JSON_BYTES, is_file_name, json_value, read_text, require_file
from meshwright.runtime.model.hf_mapping import StoredTensor

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

_MAX_BYTES = 2**42
"""Largest file that is opened; only the requested slices are read."""


class Header(NamedTuple):
    """The header of one tensor in a file."""

    shape: tuple[int, ...]
    dtype: str  # F32, BF16 and so on


class TensorFiles:
    """A Hugging Face directory of safetensors, one file or several."""

    def __init__(self, directory: Path, model: str) -> None:
        self._directory, self._model = directory, model
        self._open: dict[str, Any] = {}
        self._files = ExitStack()
        self._file_of = self._list_tensors()

    def __enter__(self) -> TensorFiles:
        return self

    def __exit__(self, *_: object) -> None:
        self._files.close()

    def read(self, stored: StoredTensor, *, axis: int = 0, start: int = 0, stop: int | None = None) -> Tensor:
        """The slice of `stored` [rows, ...] from `start` to `stop` along `axis`, shorter if the tensor ends before.

        Raises BadInput if there is no such tensor, or if it has another shape.
        """
        if stored.name not in self._file_of:
            raise BadInput(
                f"checkpoint {self._directory} has no tensor {stored.name!r}, which model {self._model} needs; "
                "give the weights that belong to its config.json."
            )
        view = self._file(self._file_of[stored.name]).get_slice(stored.name)
        shape = tuple(view.get_shape())
        if shape != stored.shape:
            raise BadInput(
                f"checkpoint {self._directory}: tensor {stored.name!r} has shape {shape} and model {self._model} "
                f"needs {stored.shape}; give the weights that belong to its config.json."
            )
        if len(shape) == 1:  # safetensors needs one slice per axis
            tensor: Tensor = view[start:stop]
        else:
            tensor = view[start:stop] if axis == 0 else view[:, start:stop]
        return tensor

    def headers(self) -> dict[str, Header]:
        """The header of every tensor in the files, by name; only headers are read.

        Raises BadInput for a file that cannot be read, and if the index names a tensor that its file does not have.
        """
        headers = {}
        for name in sorted(set(self._file_of.values())):
            file = self._file(name)
            for tensor in file.keys():  # noqa: SIM118 - safe_open is not a mapping
                view = file.get_slice(tensor)
                headers[tensor] = Header(tuple(view.get_shape()), view.get_dtype())
        for tensor, name in self._file_of.items():
            if tensor not in headers:
                raise BadInput(
                    f"checkpoint {self._directory}: {INDEX} says that {name} holds {tensor!r} and it does not; give "
                    "the files that belong together."
                )
        return headers

    def _list_tensors(self) -> dict[str, str]:
        """The file of each tensor, by the tensor's name."""
        index = self._directory / INDEX
        if index.exists():
            return _read_index(index)
        if not (self._directory / SINGLE).exists():
            raise BadInput(_no_weights(self._directory))
        return dict.fromkeys(self._file(SINGLE).keys(), SINGLE)

    def _file(self, name: str) -> Any:
        if name not in self._open:
            require_file(self._directory / name, "checkpoint file", _MAX_BYTES)
            try:
                handle = self._files.enter_context(safe_open(self._directory / name, framework="pt"))
            except (OSError, SafetensorError) as error:
                raise BadInput(f"checkpoint file {self._directory / name} cannot be read: {error}.") from None
            self._open[name] = handle
        return self._open[name]


def _read_index(index: Path) -> dict[str, str]:
    """The file of each tensor from an index."""
    try:
        weight_map = json_value(read_text(index, "checkpoint index", MAX_JSON_BYTES), "it")["weight_map"]
        if not all(is_file_name(name) for name in weight_map.values()):
            raise ValueError("weight_map names a file outside its directory")
    except (BadInput, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = str(error).rstrip(".")
        raise BadInput(f"checkpoint index {index} cannot be read: {reason}; write the checkpoint again.") from None
    return dict(weight_map)


def _no_weights(directory: Path) -> str:
    if any(directory.glob("pytorch_model*.bin")):
        return (
            f"{directory} holds its weights as pytorch_model.bin, which can run code when it is read; save them as "
            "safetensors, with save_pretrained of transformers."
        )
    return (
        f"{directory} holds no weights: neither {SINGLE} nor {INDEX} is there; give a Hugging Face directory saved as "
        "safetensors."
    )
