"""An adapter that is written by itself and added to its base is the model that is written whole."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from meshwright.profiles.layout import Layout
from meshwright.profiles.model_parts.adapter import Adapter
from meshwright.profiles.model_shape import read_model
from meshwright.runtime.model.adapters import init_adapter
from meshwright.runtime.model.hf_checkpoint import OUTPUT
from meshwright.runtime.model.mesh import build_mesh
from meshwright.runtime.model.model_shard import build_model, named_global_parameters
from meshwright.runtime.model.weights import load_weights, save_adapter, save_weights
from tests.runtime.checkpoints import write_checkpoint
from tests.runtime.ranks import run_on_ranks

ADAPTER = Adapter(rank=4, alpha=6.0)


def _write(directory: Path, layout: str, out: Path, scalar_head: bool | None = None) -> None:
    mesh = build_mesh(Layout.parse(layout), 0)
    if not mesh.is_member:
        return
    spec = replace(read_model(directory, scalar_head=scalar_head), adapter=ADAPTER)
    model = build_model(spec, mesh)
    load_weights(model, spec, mesh, directory)
    init_adapter(dict(named_global_parameters(model)), 0, tp=mesh.layout.tp, tp_rank=mesh.tp_rank)
    for number, (name, parameter) in enumerate(sorted(named_global_parameters(model))):
        if scalar_head and name == OUTPUT:
            nn.init.normal_(parameter, generator=torch.Generator().manual_seed(0))
        if name.endswith("adapter_up"):
            part = mesh.tp_rank if getattr(parameter, "tensor_model_parallel", False) else 0
            nn.init.normal_(parameter, std=0.05, generator=torch.Generator().manual_seed(1000 * part + number))
    save_weights(model, spec, mesh, out, config_from=directory)
    save_adapter(model, spec, ADAPTER, mesh, out / "adapter", base="the/base")


@pytest.mark.parametrize("layout", ["tp1", "tp2", "tp2,pp2", "pp2,dp2"])
def test_base_and_adapter_add_up_to_what_is_written_whole(tmp_path: Path, layout: str) -> None:
    directory, out = write_checkpoint(tmp_path / "model", "Qwen2"), tmp_path / "out"
    run_on_ranks(4, _write, directory, layout, out)
    held = load_file(out / "adapter" / "adapter_model.safetensors")
    config = json.loads((out / "adapter" / "adapter_config.json").read_text())
    base, merged = (
        {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}
        for folder in (directory, out)
    )
    adapted = {name for name in merged if f"base_model.model.{name.removesuffix('weight')}lora_A.weight" in held}
    assert len(adapted) * 2 == len(held)
    assert {name.split(".")[-2] for name in adapted} == set(config["target_modules"])
    for name, weight in merged.items():
        path = f"base_model.model.{name.removesuffix('weight')}"
        expected = base[name]
        if name in adapted:
            scale = config["lora_alpha"] / config["r"]
            expected = expected + scale * held[f"{path}lora_B.weight"] @ held[f"{path}lora_A.weight"]
            assert (weight - base[name]).abs().max() > 1e-3
        torch.testing.assert_close(weight, expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("layout", ["tp1", "tp2,pp2"])
def test_a_scalar_head_is_written_beside_its_adapter_as_peft_saves_a_module(tmp_path: Path, layout: str) -> None:
    directory, out = write_checkpoint(tmp_path / "model", "Qwen2"), tmp_path / "out"
    run_on_ranks(4, _write, directory, layout, out, True)
    held = load_file(out / "adapter" / "adapter_model.safetensors")
    config = json.loads((out / "adapter" / "adapter_config.json").read_text())
    whole = {name: tensor for path in out.glob("*.safetensors") for name, tensor in load_file(path).items()}
    assert whole["score.weight"].any()
    assert torch.equal(held["base_model.model.score.weight"], whole["score.weight"])
    assert (config["task_type"], config["modules_to_save"]) == ("SEQ_CLS", ["score"])
    assert "score" not in config["target_modules"]


def test_the_configuration_is_one_of_peft(tmp_path: Path) -> None:
    directory, out = write_checkpoint(tmp_path / "model"), tmp_path / "out"
    run_on_ranks(1, _write, directory, "tp1", out)
    config = json.loads((out / "adapter" / "adapter_config.json").read_text())
    assert (config["peft_type"], config["task_type"], config["r"]) == ("LORA", "CAUSAL_LM", 4)
    assert (config["lora_alpha"], config["base_model_name_or_path"]) == (6.0, "the/base")
