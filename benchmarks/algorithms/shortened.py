"""A language model without its last layer: a student that has something to learn of the whole one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file


def write_shortened(source: Path, target: Path) -> Path:
    """Writes the model of a Hugging Face directory without its last layer; returns the directory that it is in."""
    shutil.copytree(source, target)
    config = json.loads((source / "config.json").read_text())
    last = config["num_hidden_layers"] - 1
    (target / "config.json").write_text(json.dumps({**config, "num_hidden_layers": last}, indent=2))
    tensors = load_file(source / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith(f"model.layers.{last}.")}
    save_file(kept, target / "model.safetensors", metadata={"format": "pt"})
    return target
