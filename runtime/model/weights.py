"""Hugging Face checkpoints in and out: each rank reads its own slices, each stage writes its own files."""

from __future__ import annotations

import itertools
import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from meshwright.profiles.errors import BadInput
from meshwright.profiles.layout import Layout
from meshwright.profiles.model_shape import ModelSpec
from meshwright.runtime.model.adapted import is_of_adapter, merged
from meshwright.runtime.model.hf_mapping import Recipe, expert_of, parameters_of_stage, recipe, starts_from_nothing
from meshwright.runtime.model.mesh import Mesh
from meshwright.runtime.model.model_shard import Held, named_in_whole
from meshwright.runtime.model.tensor_files import INDEX, TensorFiles

_DOCUMENTS = (".json", ".txt", ".model", ".jinja")
"""Endings of the files beside the weights: configuration, tokenizer, chat template."""
_TOKENIZER = "tokenizer.json"
_OF_TOKENIZER = re.compile(r"tokenizer|special_tokens_map|added_tokens|vocab|merges|chat_template|spiece")
"""How the names of a tokenizer's files begin, among them its chat template."""

FILE_BYTES = 5 * 10**9
"""Weights per file of a written checkpoint; a writing rank holds about this much in memory."""


def load_weights(model: Held, spec: ModelSpec, mesh: Mesh, directory: Path) -> None:
    """Fills this rank's shard from a Hugging Face directory, reading no more of it than the shard.

    An adapter is left as it is. A scalar head is read from `score.weight`, unless the directory is a language model's,
    as `spec.architecture` says: then it starts at zero. Call it before a trainer takes the model: trainers keep copies
    of the weights. Raises BadInput when there are no weights, when a tensor is missing, or when one has another shape.
    """
    with TensorFiles(directory, spec.name) as checkpoint, torch.no_grad():
        for name, parameter in named_in_whole(model):
            if is_of_adapter(name):
                continue
            if starts_from_nothing(spec, name):
                parameter.zero_()
                continue
            tp = mesh.layout.tp if expert_of(name) is None else mesh.layout.etp
            parameter.copy_(_shard(checkpoint, recipe(spec, name), mesh.tp_rank % tp, tp))


def _shard(checkpoint: TensorFiles, instructions: Recipe, tp_rank: int, tp: int) -> Tensor:
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
    model: Held,
    spec: ModelSpec,
    mesh: Mesh,
    directory: Path,
    *,
    documents_of: Path,
    tokenizer: Path | None = None,
    file_bytes: int = FILE_BYTES,
) -> None:
    """Writes the model, an adapter added to its weights, as a Hugging Face directory, with the configuration and
    tokenizer of `documents_of`, and with the files of `tokenizer`, a directory or a tokenizer.json, where that has none
    of its own.

    All members of the mesh call it, over a file system they share; the first replica writes, and the others write the
    experts that it has not, each stage, and each rank of whole experts, its own files, of about `file_bytes` bytes. The
    directory appears when it is whole. Raises BadInput if it exists.
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
            _write_file(model, spec, mesh, partial / name, file)
    if dist.get_rank() == mesh.first_rank:
        _write_index(spec, files, dtype.itemsize, partial / INDEX)
        _copy_documents(documents_of, tokenizer, partial)
        _edit_config(spec, dtype, partial / "config.json")
    dist.barrier(group=mesh.groups.intra_dist_opt)
    if dist.get_rank() == mesh.first_rank:
        partial.rename(directory)
    dist.barrier(group=mesh.groups.intra_dist_opt)


@dataclass(frozen=True)
class _File:
    """Parameters that one stage of one replica writes together, on one of its tensor-parallel ranks."""

    stage: int
    replica: int
    tp_rank: int
    parameters: list[str]


def _plan_files(spec: ModelSpec, layout: Layout, max_elements: int) -> dict[str, _File]:
    """What is in each file: the same on every rank, in the order of the model."""
    files: list[_File] = []
    for stage, part in itertools.product(range(layout.pp), range(layout.ep)):
        elements = max_elements
        for parameter in parameters_of_stage(spec, layout.pp, stage, layout.vpp):
            if _part(spec, layout, parameter) != part:
                continue
            size = sum(stored.num_elements for stored in recipe(spec, parameter).tensors)
            if elements + size > max_elements:
                files.append(_File(stage, *divmod(part, layout.folded), []))
                elements = 0
            files[-1].parameters.append(parameter)
            elements += size
    return {f"model-{i:05d}-of-{len(files):05d}.safetensors": file for i, file in enumerate(files, 1)}


def _part(spec: ModelSpec, layout: Layout, parameter: str) -> int:
    """The part of the experts that has the parameter, the first for what is in no expert."""
    expert = expert_of(parameter)
    return expert * layout.ep // spec.experts.num_experts if spec.experts and expert is not None else 0


def _write_file(model: Held, spec: ModelSpec, mesh: Mesh, path: Path, file: _File) -> None:
    """One tensor-parallel rank writes: the stage's first gathers what they all have shards of, and the others send
    theirs."""
    local = dict(named_in_whole(model))
    tensors: dict[str, Tensor] = {}
    for parameter in file.parameters:
        is_whole = mesh.layout.folded > 1 and expert_of(parameter) is not None
        if is_whole and mesh.tp_rank != file.tp_rank:
            continue
        shard = merged(local, parameter, spec.adapter)
        shards = [shard] if is_whole else _gather(shard, mesh)
        if mesh.tp_rank == file.tp_rank:
            stored = recipe(spec, parameter).split(shards)
            tensors |= {name: tensor.cpu().contiguous() for name, tensor in stored.items()}
    if mesh.tp_rank == file.tp_rank:
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


def _copy_documents(source: Path, tokenizer: Path | None, target: Path) -> None:
    """Copies what is not weights. A model's own tokenizer is not mixed with files of the other."""
    found = [path for path in source.iterdir() if path.suffix in _DOCUMENTS and not path.name.endswith(".index.json")]
    if tokenizer is not None and not any(path.name == _TOKENIZER for path in found):
        beside = tokenizer.iterdir() if tokenizer.is_dir() else ()
        found += [path for path in beside if path.suffix in _DOCUMENTS and _OF_TOKENIZER.match(path.name)]
    for path in found:
        shutil.copyfile(path, target / path.name)
    if tokenizer is not None and tokenizer.is_file() and not (target / _TOKENIZER).exists():
        shutil.copyfile(tokenizer, target / _TOKENIZER)


def _edit_config(spec: ModelSpec, dtype: torch.dtype, path: Path) -> None:
    """The configuration tells of the type of the weights, and of the head of a critic, which gives one number."""
    config = json.loads(path.read_text(encoding="utf-8"))
    key = "torch_dtype" if "torch_dtype" in config else "dtype"
    config[key] = str(dtype).removeprefix("torch.")
    if spec.scalar_head:
        family = spec.architecture.removesuffix("ForCausalLM").removesuffix("ForSequenceClassification")
        config["architectures"] = [f"{family}ForSequenceClassification"]
        config |= {"num_labels": 1, "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
