"""Loading and saving of weights in Hugging Face format, and of adapters in the format of PEFT.

Each rank reads only its shard, and each pipeline stage writes its own files. PEFT stores two tensors for each
projection; projections that are fused here share one A, which PEFT stores once for each of them.
https://huggingface.co/docs/peft/developer_guides/checkpoint
"""

from __future__ import annotations

import itertools
import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from meshwright.profiles.errors import BadInput
from meshwright.profiles.layout import Layout
from meshwright.profiles.model_parts.adapter import Adapter
from meshwright.profiles.model_shape import ModelSpec, score_class
from meshwright.runtime.model.adapters import DOWN, UP, is_adapter_parameter, merge_adapter
from meshwright.runtime.model.hf_checkpoint import (
    INDEX,
    OUTPUT,
    Recipe,
    TensorFiles,
    expert_of,
    has_stacks,
    parameters_of_stage,
    recipe,
    starts_at_zero,
)
from meshwright.runtime.model.mesh import Mesh
from meshwright.runtime.model.model_shard import ModelChunks, named_global_constants, named_global_parameters

_DOCUMENTS = (".json", ".txt", ".model", ".jinja")
"""Suffixes of files other than weights: configuration, tokenizer, chat template."""
_TOKENIZER = "tokenizer.json"
_TOKENIZER_FILES = re.compile(r"tokenizer|special_tokens_map|added_tokens|vocab|merges|chat_template|spiece")
"""Matches the names of a tokenizer's files, its chat template among them."""

FILE_BYTES = 5 * 10**9
"""Bytes of weights per file of a saved checkpoint; a writing rank needs about as much memory."""


def load_weights(model: ModelChunks, spec: ModelSpec, mesh: Mesh, directory: Path) -> None:
    """Loads this rank's shard from a Hugging Face directory, reading no more than the shard.

    An adapter is not changed. A scalar head is read from `score.weight`, or set to zero if the directory holds a
    language model, as `spec.architecture` says. Call it before a trainer is built, which copies the weights.
    Raises BadInput if there are no weights, if a tensor is missing, or if one has another shape.
    """
    with TensorFiles(directory, spec.name) as checkpoint, torch.no_grad():
        for name, parameter in named_global_parameters(model):
            if is_adapter_parameter(name):
                continue
            if starts_at_zero(spec, name):
                parameter.zero_()
                continue
            tp = mesh.layout.tp if expert_of(name) is None else mesh.layout.etp
            parameter.copy_(_shard(checkpoint, recipe(spec, name), mesh.tp_rank % tp, tp))
    load_constants(model, spec, directory)


def load_constants(model: ModelChunks, spec: ModelSpec, directory: Path) -> None:
    """Loads what no refit moves, because nothing trains it: see `named_global_constants`.

    Raises BadInput as `load_weights` does.
    """
    constants = dict(named_global_constants(model))
    if not constants:
        return
    with TensorFiles(directory, spec.name) as checkpoint:
        for name, constant in constants.items():
            constant.copy_(checkpoint.read(recipe(spec, name).tensors[0]))


def _shard(checkpoint: TensorFiles, instructions: Recipe, tp_rank: int, tp: int) -> Tensor:
    """One rank's shard of a parameter, zero where the vocabulary is padded."""
    if instructions.axis is None:
        return instructions.join([checkpoint.read(instructions.tensors[0])], tp)
    parts = []
    for stored in instructions.tensors:
        start, stop = instructions.span(stored, tp_rank, tp)
        part = checkpoint.read(stored, axis=instructions.axis, start=start, stop=stop)
        num_padding_rows = stop - start - part.shape[instructions.axis]
        parts.append(torch.cat([part, part.new_zeros(num_padding_rows, *part.shape[1:])]) if num_padding_rows else part)
    return instructions.join(parts, tp)


def save_weights(
    model: ModelChunks,
    spec: ModelSpec,
    mesh: Mesh,
    directory: Path,
    *,
    config_from: Path,
    tokenizer: Path | None = None,
    file_bytes: int = FILE_BYTES,
) -> None:
    """Saves the model, with its adapter merged, as a Hugging Face directory.

    The configuration and tokenizer are copied from `config_from`; if that has no tokenizer, it is copied from
    `tokenizer`, a directory or a tokenizer.json. All members of the mesh call it, on a shared file system. Each
    pipeline stage of the first replica writes its own files of about `file_bytes` bytes; experts that the first replica
    does not have are written by others. The directory is complete once it exists. Raises BadInput if it exists already.
    """
    if directory.exists():
        raise BadInput(f"{directory} exists already; give a new directory for the weights.")
    partial = directory.with_name(f"{directory.name}.partial")
    dist.barrier(group=mesh.groups.intra_dist_opt)  # every rank checks that it does not exist before it is made
    if dist.get_rank() == mesh.first_rank:
        shutil.rmtree(partial, ignore_errors=True)  # left by a save that was interrupted
        partial.mkdir(parents=True)
    dist.barrier(group=mesh.groups.intra_dist_opt)
    dtype = next(model.parameters()).dtype
    files = _plan_files(spec, mesh.layout, file_bytes // dtype.itemsize)
    for name, file in files.items():
        if file.is_stacked and mesh.pp_rank == file.stage and _gathers_stacks(mesh):
            _write_stacks(model, spec, mesh, partial / name, file)
        elif not file.is_stacked and (file.stage, file.replica, 0) == (mesh.pp_rank, mesh.dp_rank, mesh.cp_rank):
            _write_file(model, spec, mesh, partial / name, file)
    if dist.get_rank() == mesh.first_rank:
        _write_index(spec, files, dtype.itemsize, partial / INDEX)
        _copy_documents(config_from, tokenizer, partial)
        _edit_config(spec, dtype, partial / "config.json")
    dist.barrier(group=mesh.groups.intra_dist_opt)
    if dist.get_rank() == mesh.first_rank:
        partial.rename(directory)
    dist.barrier(group=mesh.groups.intra_dist_opt)


@dataclass(frozen=True)
class _File:
    """The parameters of one file, written by one tensor-parallel rank of one pipeline stage of one replica."""

    stage: int
    replica: int
    tp_rank: int
    parameters: list[str]
    is_stacked: bool = False
    """True for parameters that are stored in stacks over all experts, which the first rank of the stage writes."""


def _plan_files(spec: ModelSpec, layout: Layout, max_elements: int) -> dict[str, _File]:
    """The files of a checkpoint by name, in the order of the model; the same on every rank."""
    files: list[_File] = []
    for stage, ep_rank in itertools.product(range(layout.pp), range(layout.ep)):
        elements, stack = max_elements, ""
        for parameter in parameters_of_stage(spec, layout.pp, stage, layout.vpp):
            if _ep_rank(spec, layout, parameter) != ep_rank:
                continue
            instructions = recipe(spec, parameter)
            size = sum(stored.num_elements for stored in instructions.tensors)
            name = instructions.tensors[0].name if instructions.is_stacked else ""
            is_full = elements + size > max_elements and not (name and name == stack)  # a stack is in one file
            if is_full or bool(name) is not bool(stack):
                files.append(_File(stage, *divmod(ep_rank, layout.fold_size), [], is_stacked=bool(name)))
                elements = 0
            stack = name
            files[-1].parameters.append(parameter)
            elements += size
    return {f"model-{i:05d}-of-{len(files):05d}.safetensors": file for i, file in enumerate(files, 1)}


def _ep_rank(spec: ModelSpec, layout: Layout, parameter: str) -> int:
    """The expert-parallel rank that writes the parameter; 0 for a parameter of no expert, and for stacks of all."""
    expert = expert_of(parameter)
    if has_stacks(spec):
        return 0
    return expert * layout.ep // spec.experts.num_experts if spec.experts and expert is not None else 0


def _write_file(model: ModelChunks, spec: ModelSpec, mesh: Mesh, path: Path, file: _File) -> None:
    """Writes a file on one tensor-parallel rank, which gathers the shards of sharded parameters from the others."""
    local, constants = dict(named_global_parameters(model)), dict(named_global_constants(model))
    tensors: dict[str, Tensor] = {}
    for parameter in file.parameters:
        if parameter in constants:
            if mesh.tp_rank == file.tp_rank:
                tensors[recipe(spec, parameter).tensors[0].name] = constants[parameter].cpu().contiguous()
            continue
        is_whole_expert = mesh.layout.fold_size > 1 and expert_of(parameter) is not None
        if is_whole_expert and mesh.tp_rank != file.tp_rank:
            continue
        shard = merge_adapter(local, parameter, spec.adapter)
        shards = [shard] if is_whole_expert else _gather(shard, mesh)
        if mesh.tp_rank == file.tp_rank:
            stored = recipe(spec, parameter).split(shards)
            tensors |= {name: tensor.cpu().contiguous() for name, tensor in stored.items()}
    if mesh.tp_rank == file.tp_rank:
        save_file(tensors, path, metadata={"format": "pt"})


def _gathers_stacks(mesh: Mesh) -> bool:
    """True on the ranks of a pipeline stage that together hold the experts once, the stage's first rank among them."""
    return mesh.first_rank + mesh.layout.index(pp=mesh.pp_rank) in dist.get_process_group_ranks(mesh.groups.tp_ep)


def _write_stacks(model: ModelChunks, spec: ModelSpec, mesh: Mesh, path: Path, file: _File) -> None:
    """Writes stacks of the parameters of all experts on the first rank of a pipeline stage, which gathers them."""
    local, layout, ranks = dict(named_global_parameters(model)), mesh.layout, mesh.groups.tp_ep
    assert spec.experts is not None
    num_local = spec.experts.num_experts // layout.ep
    writer = mesh.first_rank + layout.index(pp=mesh.pp_rank)
    tensors: dict[str, Tensor] = {}
    for first in range(0, len(file.parameters), spec.experts.num_experts):
        parameters = file.parameters[first : first + spec.experts.num_experts]
        mine = torch.stack([merge_adapter(local, one, spec.adapter) for one in parameters if one in local])
        gathered = [torch.empty_like(mine) for _ in range(ranks.size())] if dist.get_rank() == writer else None
        dist.gather(mine, gathered, dst=writer, group=ranks)
        if gathered is None:
            continue
        places = [layout.coordinates(rank - mesh.first_rank) for rank in dist.get_process_group_ranks(ranks)]
        by_place = {
            (layout.ep_rank(place.tp, place.dp), place.tp % layout.etp): part
            for place, part in zip(places, gathered, strict=True)
        }
        elements = [
            recipe(spec, parameter).split(
                [by_place[expert // num_local, etp_rank][expert % num_local] for etp_rank in range(layout.etp)]
            )
            for expert, parameter in enumerate(parameters)
        ]
        [name] = elements[0]
        tensors[name] = torch.stack([element[name] for element in elements]).cpu()
    if dist.get_rank() == writer:
        save_file(tensors, path, metadata={"format": "pt"})


def _gather(shard: Tensor, mesh: Mesh) -> list[Tensor]:
    """The shards of all tensor-parallel ranks, on the first of them; empty on the others."""
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
    """Copies all files other than weights; files of `tokenizer` only if the model has no tokenizer of its own."""
    paths = [path for path in source.iterdir() if path.suffix in _DOCUMENTS and not path.name.endswith(".index.json")]
    if tokenizer is not None and not any(path.name == _TOKENIZER for path in paths):
        candidates = tokenizer.iterdir() if tokenizer.is_dir() else ()
        paths += [path for path in candidates if path.suffix in _DOCUMENTS and _TOKENIZER_FILES.match(path.name)]
    for path in paths:
        shutil.copyfile(path, target / path.name)
    if tokenizer is not None and tokenizer.is_file() and not (target / _TOKENIZER).exists():
        shutil.copyfile(tokenizer, target / _TOKENIZER)


def _edit_config(spec: ModelSpec, dtype: torch.dtype, path: Path) -> None:
    """Sets the dtype of the weights in config.json and, for a scalar head, the architecture with one label."""
    config = json.loads(path.read_text(encoding="utf-8"))
    key = "torch_dtype" if "torch_dtype" in config else "dtype"
    config[key] = str(dtype).removeprefix("torch.")
    if spec.scalar_head:
        config["architectures"] = [score_class(spec.architecture)]
        config |= {"num_labels": 1, "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


_PREFIX = "base_model.model."
"""Prefix that PEFT adds to the names of the base model."""


def save_adapter(
    model: ModelChunks, spec: ModelSpec, adapter: Adapter, mesh: Mesh, directory: Path, *, base: str
) -> None:
    """Writes the adapter of a model to a new directory, with `base` as the name of the base model.

    All members of the mesh call it, on a shared file system; the first rank writes.
    """
    whole = {name: tensor.cpu().contiguous().clone() for name, tensor in stored_adapter(model, spec, mesh)}
    local = whole if (mesh.tp_rank, mesh.dp_rank, mesh.cp_rank) == (0, 0, 0) else {}
    per_rank: list[dict[str, Tensor]] = [{}] * mesh.layout.num_ranks
    dist.all_gather_object(per_rank, local, group=mesh.groups.intra_dist_opt)
    if dist.get_rank() != mesh.first_rank:
        return
    tensors = {name: tensor for rank_tensors in per_rank for name, tensor in rank_tensors.items()}
    directory.mkdir()
    save_file(tensors, directory / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {
        "peft_type": "LORA",
        "task_type": "SEQ_CLS" if spec.scalar_head else "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": adapter.rank,
        "lora_alpha": adapter.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "target_modules": sorted({name.split(".")[-3] for name in tensors if "lora_" in name}),
        **({"modules_to_save": ["score"]} if spec.scalar_head else {}),
    }
    (directory / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def stored_adapter(model: ModelChunks, spec: ModelSpec, mesh: Mesh) -> Iterator[tuple[str, Tensor]]:
    """Yields the whole adapter tensors [...] of this rank's pipeline stage by their names in PEFT's format, one linear
    after another, and then a scalar head.

    Tensor-parallel ranks gather the shards of one linear at a time, so all of them iterate together.
    """
    parameters = dict(named_global_parameters(model))
    for name in parameters:
        module, _, kind = name.rpartition(".")
        if kind != DOWN:
            continue
        weight = recipe(spec, f"{module}.weight")
        downs, ups = (_shards(parameters[f"{module}.{kind}"].detach(), mesh) for kind in (DOWN, UP))
        is_row_parallel = weight.axis == 1
        down = torch.cat(downs, dim=1) if is_row_parallel else downs[0]
        stored_ups = {weight.tensors[0].name: ups[0]} if is_row_parallel else weight.split(ups)
        for stored, up in stored_ups.items():
            path = _PREFIX + stored.removesuffix("weight")
            yield f"{path}lora_A.weight", down
            yield f"{path}lora_B.weight", up
    if spec.scalar_head and OUTPUT in parameters:
        yield _PREFIX + recipe(spec, OUTPUT).tensors[0].name, parameters[OUTPUT].detach()


def _shards(shard: Tensor, mesh: Mesh) -> list[Tensor]:
    """The shards of all tensor-parallel ranks."""
    shards = [torch.empty_like(shard) for _ in range(mesh.layout.tp)]
    dist.all_gather(shards, shard.contiguous(), group=mesh.groups.tp)
    return shards
