"""Hugging Face checkpoints in and out: each rank reads its own slices, each stage writes its own files."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from meshwright.profiles.errors import BadInput
from meshwright.profiles.layout import Layout
from meshwright.profiles.model import ModelSpec
from meshwright.runtime.mesh import Mesh
from meshwright.runtime.models import Held, named_in_whole
from meshwright.runtime.stored import OUTPUT, Recipe, Stored, expert_of, parameters_of_stage, recipe

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_DOCUMENTS = (".json", ".txt", ".model", ".jinja")
"""Endings of the files beside the weights: configuration, tokenizer, chat template."""

FILE_BYTES = 5 * 10**9
"""Weights per file of a written checkpoint; a writing rank holds about this much in memory."""


def load_weights(model: Held, spec: ModelSpec, mesh: Mesh, directory: Path) -> None:
    """Fills this rank's shard from a Hugging Face directory, reading no more of it than the shard.

    A scalar head is read from `score.weight`, unless the directory is a language model's, as `spec.architecture`
    says: then it starts at zero. Call it before a trainer takes the model: trainers keep copies of the weights.
    Raises BadInput when there are no weights, when a tensor is missing, or when one has another shape.
    """
    head_from_nothing = spec.scalar_head and not spec.architecture.endswith("ForSequenceClassification")
    with _Checkpoint(directory, spec.name) as checkpoint, torch.no_grad():
        for name, parameter in named_in_whole(model):
            if name == OUTPUT and head_from_nothing:
                parameter.zero_()
                continue
            instructions = recipe(spec, name)
            parameter.copy_(_shard(checkpoint, instructions, mesh.tp_rank, mesh.layout.tp))


def _shard(checkpoint: _Checkpoint, instructions: Recipe, tp_rank: int, tp: int) -> Tensor:
    """One rank's part of a parameter, zero where the vocabulary is padded."""
    if instructions.axis is None:
        return checkpoint.read(instructions.tensors[0])
    parts = []
    for stored in instructions.tensors:
        start, stop = instructions.span(stored, tp_rank, tp)
        part = checkpoint.read(stored, axis=instructions.axis, start=start, stop=stop)
        missing = stop - start - part.shape[instructions.axis]
        parts.append(torch.cat([part, part.new_zeros(missing, *part.shape[1:])]) if missing else part)
    return instructions.join(parts, tp)


def save_weights(
    model: Held, spec: ModelSpec, mesh: Mesh, directory: Path, *, documents_of: Path, file_bytes: int = FILE_BYTES
) -> None:
    """Writes the model as a Hugging Face directory, with the configuration and tokenizer of `documents_of`.

    All members of the mesh call it, over a file system they share; the first replica writes, and the others write the
    experts that it has not, each stage its own files, of about `file_bytes` bytes. The directory appears when it is
    whole. Raises BadInput if it exists.
    """
    if directory.exists():
        raise BadInput(f"{directory} exists already; give a new directory for the weights.")
    partial = directory.with_name(f"{directory.name}.partial")
    dist.barrier(group=mesh.groups.intra_dist_opt)  # until every rank has looked, nothing may appear
    if dist.get_rank() == mesh.first_rank:
        shutil.rmtree(partial, ignore_errors=True)  # what an earlier, cut-short save left
        partial.mkdir(parents=True)
    dist.barrier(group=mesh.groups.intra_dist_opt)
    dtype = next(model.parameters()).dtype
    files = _plan_files(spec, mesh.layout, file_bytes // dtype.itemsize)
    for name, file in files.items():
        if (file.stage, file.replica, 0) == (mesh.pp_rank, mesh.dp_rank, mesh.cp_rank):
            _write_file(model, spec, mesh, partial / name, file.parameters)
    if dist.get_rank() == mesh.first_rank:
        _write_index(spec, files, dtype.itemsize, partial / _INDEX)
        _copy_documents(spec, documents_of, partial)
    dist.barrier(group=mesh.groups.intra_dist_opt)
    if dist.get_rank() == mesh.first_rank:
        partial.rename(directory)
    dist.barrier(group=mesh.groups.intra_dist_opt)


@dataclass(frozen=True)
class _File:
    """Parameters that one stage of one replica writes together."""

    stage: int
    replica: int
    parameters: list[str]


def _plan_files(spec: ModelSpec, layout: Layout, max_elements: int) -> dict[str, _File]:
    """What is in each file: the same on every rank, in the order of the model."""
    files: list[_File] = []
    for stage, replica in itertools.product(range(layout.pp), range(layout.ep)):
        elements = max_elements
        for parameter in parameters_of_stage(spec, layout.pp, stage, layout.vpp):
            if _writer(spec, layout, parameter) != replica:
                continue
            size = sum(stored.num_elements for stored in recipe(spec, parameter).tensors)
            if elements + size > max_elements:
                files.append(_File(stage, replica, []))
                elements = 0
            files[-1].parameters.append(parameter)
            elements += size
    return {f"model-{i:05d}-of-{len(files):05d}.safetensors": file for i, file in enumerate(files, 1)}


def _writer(spec: ModelSpec, layout: Layout, parameter: str) -> int:
    """The first replica that holds the parameter."""
    expert = expert_of(parameter)
    return expert * layout.ep // spec.experts.num_experts if spec.experts and expert is not None else 0


def _write_file(model: Held, spec: ModelSpec, mesh: Mesh, path: Path, parameters: Iterable[str]) -> None:
    """The stage's first tensor-parallel rank gathers and writes; the others send their shards."""
    local = dict(named_in_whole(model))
    tensors: dict[str, Tensor] = {}
    for parameter in parameters:
        shards = _gather(local[parameter].detach(), mesh)
        if mesh.tp_rank == 0:
            stored = recipe(spec, parameter).split(shards)
            tensors |= {name: tensor.cpu().contiguous() for name, tensor in stored.items()}
    if mesh.tp_rank == 0:
        save_file(tensors, path, metadata={"format": "pt"})


def _gather(shard: Tensor, mesh: Mesh) -> list[Tensor]:
    """The shards of all tensor-parallel ranks, on the first of them."""
    if mesh.layout.tp == 1:
        return [shard]
    shards = [torch.empty_like(shard) for _ in range(mesh.layout.tp)] if mesh.tp_rank == 0 else None
    dist.gather(shard.contiguous(), shards, group=mesh.groups.tp, group_dst=0)
    return shards or []


def _write_index(spec: ModelSpec, files: dict[str, _File], itemsize: int, path: Path) -> None:
    stored = {t: name for name, file in files.items() for p in file.parameters for t in recipe(spec, p).tensors}
    index = {
        "metadata": {"total_size": itemsize * sum(tensor.num_elements for tensor in stored)},
        "weight_map": {tensor.name: name for tensor, name in sorted(stored.items(), key=lambda item: item[0].name)},
    }
    path.write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _copy_documents(spec: ModelSpec, source: Path, target: Path) -> None:
    """Copies what is not weights; the configuration of a critic made from a language model tells of its head."""
    for path in source.iterdir():
        if path.suffix in _DOCUMENTS and path.name != _INDEX:
            shutil.copyfile(path, target / path.name)
    if spec.scalar_head:
        config = json.loads((target / "config.json").read_text(encoding="utf-8"))
        family = spec.architecture.removesuffix("ForCausalLM").removesuffix("ForSequenceClassification")
        config["architectures"] = [f"{family}ForSequenceClassification"]
        config |= {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
        (target / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


class _Checkpoint:
    """A Hugging Face directory of safetensors, one file or several."""

    def __init__(self, directory: Path, model: str) -> None:
        self._directory, self._model = directory, model
        self._open: dict[str, Any] = {}
        self._files = ExitStack()
        self._file_of = self._list_tensors()

    def __enter__(self) -> _Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self._files.close()

    def read(self, stored: Stored, *, axis: int = 0, start: int = 0, stop: int | None = None) -> Tensor:
        """`stored` from `start` to `stop` along `axis`, less where the tensor ends sooner."""
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
        if len(shape) == 1:  # a slice of slices needs one entry per axis
            part: Tensor = view[start:stop]
        else:
            part = view[start:stop] if axis == 0 else view[:, start:stop]
        return part

    def _list_tensors(self) -> dict[str, str]:
        """The file of each tensor."""
        index = self._directory / _INDEX
        if index.exists():
            try:
                listed: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            except (ValueError, KeyError) as error:
                raise BadInput(f"checkpoint index {index} cannot be read: {error}.") from None
            return listed
        if not (self._directory / _SINGLE).exists():
            raise BadInput(
                f"{self._directory} holds no weights: neither {_SINGLE} nor {_INDEX} is there; "
                "give a Hugging Face directory saved as safetensors."
            )
        return dict.fromkeys(self._file(_SINGLE).keys(), _SINGLE)

    def _file(self, name: str) -> Any:
        if name not in self._open:
            try:
                handle = self._files.enter_context(safe_open(self._directory / name, framework="pt"))
            except (OSError, SafetensorError) as error:
                raise BadInput(f"checkpoint file {self._directory / name} cannot be read: {error}.") from None
            self._open[name] = handle
        return self._open[name]
