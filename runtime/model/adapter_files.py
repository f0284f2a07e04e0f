"""Saving an adapter in the format of PEFT: two tensors for each projection, and a configuration.

Projections that are fused here share one A, which PEFT stores once for each.
https://huggingface.co/docs/peft/developer_guides/checkpoint
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from meshwright.profiles.model_parts.adapter import Adapter
from meshwright.profiles.model_shape import ModelSpec
from meshwright.runtime.model.adapted import DOWN, UP
from meshwright.runtime.model.hf_mapping import recipe
from meshwright.runtime.model.mesh import Mesh
from meshwright.runtime.model.model_shard import ModelChunks, named_global_parameters

_PREFIX = "base_model.model."
"""Prefix that PEFT adds to the names of the base model."""


def save_adapter(
    model: ModelChunks, spec: ModelSpec, adapter: Adapter, mesh: Mesh, directory: Path, *, base: str
) -> None:
    """Writes the adapter of a model to a new directory, with `base` as the name of the base model.

    All members of the mesh call it, on a shared file system; the first rank writes.
    """
    local = _tensors(model, spec, mesh)
    per_rank: list[dict[str, Tensor]] = [{}] * mesh.layout.num_ranks
    dist.all_gather_object(per_rank, local, group=mesh.groups.intra_dist_opt)
    if dist.get_rank() != mesh.first_rank:
        return
    tensors = {name: tensor for rank_tensors in per_rank for name, tensor in rank_tensors.items()}
    directory.mkdir()
    save_file(tensors, directory / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": adapter.rank,
        "lora_alpha": adapter.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "target_modules": sorted({name.split(".")[-3] for name in tensors}),
    }
    (directory / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _tensors(model: ModelChunks, spec: ModelSpec, mesh: Mesh) -> dict[str, Tensor]:
    """The whole adapter tensors of this rank's stage by PEFT names, on the first tensor-parallel rank of the first
    replica; empty on others."""
    tensors: dict[str, Tensor] = {}
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
            tensors[f"{path}lora_A.weight"] = down.cpu().clone()
            tensors[f"{path}lora_B.weight"] = up.cpu().contiguous()
    return tensors if (mesh.tp_rank, mesh.dp_rank, mesh.cp_rank) == (0, 0, 0) else {}


def _shards(shard: Tensor, mesh: Mesh) -> list[Tensor]:
    """The shards of all tensor-parallel ranks."""
    shards = [torch.empty_like(shard) for _ in range(mesh.layout.tp)]
    dist.all_gather(shards, shard.contiguous(), group=mesh.groups.tp)
    return shards
