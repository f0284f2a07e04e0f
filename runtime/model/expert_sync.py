"""Equal numbers of forward passes on replicas that share the experts of a model.

The experts of a layer are a collective of all these replicas. A replica whose sequences have ended, or which has fewer
rows, takes part without tokens until all replicas are done.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from meshwright.runtime.model.mesh import Mesh
from meshwright.runtime.model.model_shard import Decoder


class ExpertLockstep:
    """Keeps one rank's pipeline stage in step with other replicas; does nothing if each replica has all experts."""

    def __init__(self, model: Decoder, mesh: Mesh) -> None:
        self._model, self._mesh = model, mesh
        parameter = next(model.parameters())
        self._no_tokens = parameter.new_zeros((0, 1, model.spec.hidden_size)).detach()

    @contextmanager
    def passes(self, count: int) -> Iterator[None]:
        """Context in which the caller makes `count` passes through its layers.

        Empty passes follow, up to the maximum count of all replicas.
        """
        if self._mesh.layout.expert_replicas == 1:
            yield
            return
        max_count = self._max_over_replicas(1 + count) - 1
        yield
        self._pass_empty(max_count - count)

    def finish(self) -> None:
        """Makes empty passes while other replicas still make passes, until all of them have called this."""
        if self._mesh.layout.expert_replicas > 1:
            while max_count := self._max_over_replicas(0):
                self._pass_empty(max_count - 1)

    def _max_over_replicas(self, count: int) -> int:
        maximum = torch.tensor(count, device=self._no_tokens.device)
        dist.all_reduce(maximum, op=dist.ReduceOp.MAX, group=self._mesh.groups.ep)
        return int(maximum)

    @torch.no_grad()
    def _pass_empty(self, num_passes: int) -> None:
        for _ in range(num_passes):
            for layer in self._model.decoder.layers:
                layer.mlp(self._no_tokens)
