"""Log-probabilities of the runtime's models beside those of `transformers`, in fp32 and in bf16."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import transformers
from torch import Tensor

from benchmarks.accelerator.jobs import config_of, write_weights
from benchmarks.accelerator.world import World
from meshwright.profiles.layout import Layout
from meshwright.profiles.model_shape import read_model
from meshwright.runtime.device import host
from meshwright.runtime.device.capabilities import device_capabilities
from meshwright.runtime.launch.launch import ProcessSetup, launch
from meshwright.runtime.model.kernel_choice import choose_kernels
from meshwright.runtime.model.mesh import build_mesh
from meshwright.runtime.model.model_shard import Decoder, build_model
from meshwright.runtime.model.weights import load_weights
from meshwright.runtime.training.trainer import MicroBatch, forward_logprobs
from meshwright.runtime.training.weight_copies import DTYPES

LAYERS = {"qwen2.5-0.5b": 24, "llama-3.1-8b": 2}
"""Of the models that are compared, which differ in biases, heads and tied embeddings."""


class Apart(NamedTuple):
    """How far log-probabilities of one side are from another's, over all tokens but the first of each row."""

    mean: float
    most: float

    @classmethod
    def of(cls, one: Tensor, other: Tensor) -> Apart:
        differences = (one - other).abs()
        return cls(float(differences.mean()), float(differences.max()))

    def __str__(self) -> str:
        return f"{self.mean:.1e}, {self.most:.1e}"


def report(world: World) -> str:
    """As a table of Markdown."""
    lines = [
        "| model | fp32: this to transformers, mean and most | bf16: this to transformers in fp32 | "
        "bf16: transformers to itself in fp32 |",
        "|---|---|---|---|",
    ]
    for name in LAYERS:
        exact, ours, theirs = compare(world, name)
        lines.append(f"| {name} | {exact} | {ours} | {theirs} |")
    return "\n".join(lines)


def compare(world: World, name: str) -> tuple[Apart, Apart, Apart]:
    """In the order of the table."""
    layers = {} if world.tiny else {"num_hidden_layers": LAYERS[name]}
    config = config_of(world, name, **layers)
    checkpoint = write_weights(world.directory("agreement") / name, config, torch.float32, world.kind)
    draw = random.Random(0)
    lengths = (24, 9, 2) if world.tiny else (1024, 700, 33, 2)
    rows = [draw.choices(range(config["vocab_size"]), k=length) for length in lengths]
    exact, rounded = (_theirs(checkpoint, rows, dtype, world.kind) for dtype in DTYPES.values())
    ours = launch(_ours, checkpoint, rows, num_ranks=1, setup=ProcessSetup(world.kind))[0]
    return Apart.of(ours[0], exact), Apart.of(ours[1], exact), Apart.of(rounded, exact)


def _theirs(checkpoint: Path, rows: Sequence[Sequence[int]], dtype: torch.dtype, kind: str) -> Tensor:
    """[T - rows] fp32, on the host: of each token given those before it."""
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=dtype).to(kind).eval()
    found = []
    with torch.no_grad():
        for row in rows:
            tokens = torch.tensor([row], device=kind)
            logprobs = model(tokens).logits[0, :-1].float().log_softmax(-1)
            found.append(logprobs.gather(1, tokens[0, 1:, None]).squeeze(1).cpu())
    return torch.cat(found)


def _ours(checkpoint: Path, rows: Sequence[Sequence[int]]) -> list[Tensor]:
    """As `_theirs`, all rows packed in one pass, in each type and by the kernels of a run; on the one rank."""
    spec, mesh = read_model(checkpoint), build_mesh(Layout(), 0)
    block, found = MicroBatch.pack(torch.tensor(row) for row in rows), []
    for precision in DTYPES:
        kernels = choose_kernels(device_capabilities(host.device().type), precision, [spec])
        model = build_model(spec, mesh, dtype=DTYPES[precision], kernels=kernels)
        assert isinstance(model, Decoder)
        load_weights(model, spec, mesh, checkpoint)
        (logprobs,) = forward_logprobs(model, mesh, [block])
        found.append(torch.cat([values[:-1] for values in block.split_rows(logprobs.cpu())]))
    return found
