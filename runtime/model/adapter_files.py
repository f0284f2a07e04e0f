"""An adapter by itself as PEFT stores one: two tensors for each projection, and a configuration.

Projections that are side by side here have an A each there, which are equal.
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
from meshwright.runtime.model.model_shard import Held, named_in_whole

_PREFIX = "base_model.model."
"""What PEFT's models put before the names of the model inside."""


def save_adapter(model: Held, spec: ModelSpec, adapter: Adapter, mesh: Mesh, directory: Path, *, base: str) -> None:
    """Writes the adapter of a model into a new directory, for the weights called `base`.

    All members of the mesh call it, over a file system they share; the first rank writes.
    """
    mine = _tensors(model, spec, mesh)
    everyones: list[dict[str, Tensor]] = [{}] * mesh.layout.num_ranks
    dist.all_gather_object(everyones, mine, group=mesh.groups.intra_dist_opt)
    if dist.get_rank() != mesh.first_rank:
        return
    tensors = {name: tensor for part in everyones for name, tensor in part.items()}
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


def _tensors(model: Held, spec: ModelSpec, mesh: Mesh) -> dict[str, Tensor]:
    """Those of this rank's stage by the names of PEFT, on the first tensor-parallel rank of the first replica."""
    found: dict[str, Tensor] = {}
    parameters = dict(named_in_whole(model))
    for name in parameters:
        module, _, kind = name.rpartition(".")
        if kind != DOWN:
            continue
        made_of = recipe(spec, f"{module}.weight")
        downs, ups = (_shards(parameters[f"{module}.{kind}"].detach(), mesh) for kind in (DOWN, UP))
        is_cut_along_inputs = made_of.axis == 1
        down = torch.cat(downs, dim=1) if is_cut_along_inputs else downs[0]
        whole = {made_of.tensors[0].name: ups[0]} if is_cut_along_inputs else made_of.split(ups)
        for stored, up in whole.items():
            path = _PREFIX + stored.removesuffix("weight")
            found[f"{path}lora_A.weight"] = down.cpu().clone()
            found[f"{path}lora_B.weight"] = up.cpu().contiguous()
    return found if (mesh.tp_rank, mesh.dp_rank, mesh.cp_rank) == (0, 0, 0) else {}


def _shards(shard: Tensor, mesh: Mesh) -> list[Tensor]:
    """Those of all tensor-parallel ranks."""
    shards = [torch.empty_like(shard) for _ in range(mesh.layout.tp)]
    dist.all_gather(shards, shard.contiguous(), group=mesh.groups.tp)
    return shards
