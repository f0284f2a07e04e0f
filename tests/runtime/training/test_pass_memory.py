"""The tensors of a pass take no more than is planned for them on a CPU, and not much less."""

from __future__ import annotations

import functools
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from meshwright.cost_models.memory_cost import LayoutMemory, Operators
from meshwright.profiles.algorithms import PPO_GRAPH
from meshwright.profiles.layout import Layout
from meshwright.profiles.lengths import LengthSpec
from meshwright.profiles.model_shape import ModelSpec, read_model
from meshwright.profiles.schedule import Schedule
from meshwright.profiles.workload import Workload
from meshwright.runtime.model.mesh import build_mesh
from meshwright.runtime.model.model_shard import build_model
from meshwright.runtime.training.trainer import MicroBatch, Trainer, forward_logprobs
from tests.runtime.checkpoints import FAMILIES as DENSE
from tests.runtime.checkpoints import tokens, write_checkpoint
from tests.runtime.laws.test_experts import FAMILIES as MIXTURES
from tests.runtime.laws.test_experts import mixture
from tests.runtime.ranks import run_on_ranks
from tests.runtime.updates import language_loss
from tests.seeds import cases

pytestmark = pytest.mark.slow

ROWS, LENGTH = 8, 32
VOCAB_SIZE = 32
"""So few that the layers of a model take nearly all of its memory."""


class LivePeak(TorchDispatchMode):
    """The most bytes alive at once in storages that operators made inside this context."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0
        self._alive: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {storage._cdata for storage in _storages((args, kwargs or {}))}
        result = func(*args, **(kwargs or {}))
        for storage in _storages(result):
            if storage._cdata not in known | self._alive.keys():
                self._alive[storage._cdata] = storage.nbytes()
                weakref.finalize(storage, self._alive.pop, storage._cdata)
        self.bytes = max(self.bytes, sum(self._alive.values()))
        return result


def _storages(tree: Any) -> list[torch.UntypedStorage]:
    return [leaf.untyped_storage() for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _planned_bytes(stage: str, spec: ModelSpec) -> float:
    """What a pass over one micro-batch of all rows needs besides the state of its stage."""
    response = LengthSpec(max=LENGTH - 1, fixed=LENGTH - 1)
    workload = Workload(batch_size=ROWS, prompt=LengthSpec(max=1, fixed=1), response=response, num_minibatches=1)
    memory = LayoutMemory(
        PPO_GRAPH.by_name[stage],
        spec,
        Layout.parse("tp1"),
        workload,
        element_bytes=4,
        operators=Operators(is_fused=False, delta_by_torch=True),
    )
    return memory.memory(Schedule(micro_batch_size=ROWS)).transient.total


def _passes(directory: Path) -> dict[str, tuple[float, float]]:
    """Planned and live bytes by stage, in the second of two passes; nothing on ranks without the model."""
    mesh, spec = build_mesh(Layout.parse("tp1"), 0), read_model(directory)
    if not mesh.is_member:
        return {}
    ids = tokens(ROWS, LENGTH) % VOCAB_SIZE
    trainer = Trainer(build_model(spec, mesh, trainable=True), mesh, learning_rate=1e-3)
    loss = functools.partial(language_loss, spec, mesh)
    mask = [torch.ones(LENGTH, dtype=torch.bool)] * ROWS
    scored = build_model(spec, mesh)
    found = {}
    for _ in range(2):
        blocks = [MicroBatch.pack(list(ids), {"mask": mask})]
        with LivePeak() as training:
            trainer.accumulate(blocks, loss)
        with LivePeak() as scoring:
            forward_logprobs(scored, mesh, blocks)
        found = {"actor_train": training.bytes, "actor_logprob": scoring.bytes}
    return {stage: (_planned_bytes(stage, spec), num_bytes) for stage, num_bytes in found.items()}


LARGEST_RATIO = {"actor_train": 1.3, "actor_logprob": 2.2}
"""Planned over live bytes. Forward passes are planned with the tensors of experts and of the head alive at once, and
where attention has a cap or sinks with the scores of all blocks."""


@cases("family", [*MIXTURES, *DENSE], few=["GptOss", "Qwen3_5"])
def test_tensors_of_a_pass_take_what_is_planned_at_most(tmp_path: Path, family: str) -> None:
    """Layers with experts, clamped gates, norms of queries and keys, windows, caps, sinks and latent attention."""
    write = mixture if family in MIXTURES else write_checkpoint
    changes = {} if family in MIXTURES else DENSE[family]
    directory = write(tmp_path / "model", family, **changes, vocab_size=VOCAB_SIZE)
    (found,) = [passes for passes in run_on_ranks(4, _passes, directory) if passes]
    for stage, (planned, live) in found.items():
        assert live <= planned <= LARGEST_RATIO[stage] * live, (stage, planned, live)
