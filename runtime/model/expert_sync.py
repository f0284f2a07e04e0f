"""Replicas that hold the experts of a model together pass through them together, each as often as the others.

A pass through a layer's experts is a collective of all these replicas. One that has nothing to send any more, because
its sequences have ended or its rows were fewer, takes part without tokens until none of them has.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from meshwright.runtime.model.mesh import Mesh
from meshwright.runtime.model.model_shard import Decoder


class Lockstep:
    """One rank's, of one pipeline stage. Where replicas hold all experts each it does nothing and sends nothing."""

    def __init__(self, model: Decoder, mesh: Mesh) -> None:
        self._model, self._mesh = model, mesh
        parameter = next(model.parameters())
        self._nothing = parameter.new_zeros((0, 1, model.spec.hidden_size)).detach()

    @contextmanager
    def passes(self, count: int) -> Iterator[None]:
        """Within it the caller passes `count` times through its layers; all replicas have agreed on the most."""
        if self._mesh.layout.expert_replicas == 1:
            yield
            return
        most = self._agree(1 + count) - 1
        yield
        self._join(most - count)

    def finish(self) -> None:
        """Takes part in what the other replicas still pass, until all have come to this call."""
        if self._mesh.layout.expert_replicas > 1:
            while most := self._agree(0):
                self._join(most - 1)

    def _agree(self, count: int) -> int:
        """The largest number among the replicas."""
        counted = torch.tensor(count, device=self._nothing.device)
        dist.all_reduce(counted, op=dist.ReduceOp.MAX, group=self._mesh.groups.ep)
        return int(counted)

    @torch.no_grad()
    def _join(self, num_passes: int) -> None:
        for _ in range(num_passes):
            for layer in self._model.decoder.layers:
                layer.mlp(self._nothing)
