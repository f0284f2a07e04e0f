"""The adapter of a run: what it starts with, which is chance, and what training made of it."""

from __future__ import annotations

from pathlib import Path

import torch
import yaml
from safetensors.torch import load_file
from torch import Tensor, nn

from meshwright.profiles.stages import Role
from meshwright.runtime.execution.request import RunRequest
from meshwright.runtime.model.adapters import init_adapter
from tests.reference import low_rank
from tests.runtime.observed import Observed
from tests.runtime.refereed import Distances

MODULES = {
    "linear_qkv": "self_attention.linear_qkv",
    "linear_proj": "self_attention.linear_proj",
    "linear_fc1": "mlp.linear_fc1",
    "linear_fc2": "mlp.linear_fc2",
}


def started(asked: RunRequest, role: Role = Role.ACTOR) -> dict[str, Tensor]:
    """By `layer.linear`, A [rank, inputs]."""
    spec = asked.plan.facts.models.spec(role)
    assert spec.adapter is not None
    inputs = {
        name: inner
        for name, (inner, _) in zip(
            [name for name in MODULES if name in spec.adapter.targets], spec.adapted_linears, strict=True
        )
    }
    named = {
        (layer, name): f"decoder.layers.{layer}.{MODULES[name]}" for layer in range(spec.num_layers) for name in inputs
    }
    parameters = {
        f"{module}.adapter_down": nn.Parameter(torch.zeros(spec.adapter.rank, inputs[name]))
        for (_, name), module in named.items()
    }
    init_adapter(parameters, asked.job.settings.seed, tp=1, tp_rank=0)
    return {f"{layer}.{name}": parameters[f"{module}.adapter_down"].detach() for (layer, name), module in named.items()}


def compare_adapter(found: Distances, run: Observed, base: Path, expected: nn.Module, role: Role = Role.ACTOR) -> None:
    """Notes how far what training added to each weight is from the reference's; weights without an adapter are as they
    were, but for a scalar head."""
    before = {key: value for path in base.glob("*.safetensors") for key, value in load_file(path).items()}
    changes = low_rank.changes(expected)
    for name, value in run.weights(role).items():
        if name == "score.weight":
            head = expected.get_parameter(name).detach()
            assert not torch.equal(value.double(), before[name].double())
            found.add(name, value.double(), head)
            continue
        change = value.double() - before[name].double()
        if name in changes:
            found.add(f"change of {name}", change, changes[name])
        else:
            assert not change.any(), name


ADAPTER = {"rank": 4, "alpha": 8.0}


def adapted_job(path: Path) -> Path:
    """The small job with an adapter of the actor, whose reference is the actor without it, in a file beside it."""
    document = yaml.safe_load(path.read_text())
    document["models"]["actor"]["adapter"] = ADAPTER
    adapted = path.with_name(f"adapted-{path.name}")
    adapted.write_text(yaml.safe_dump(document))
    return adapted
