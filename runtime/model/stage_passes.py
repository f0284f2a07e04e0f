"""Forward passes of one pipeline stage: messages to the other stages, equal numbers of passes on replicas that share
experts, and passes over rows whose earlier tokens are in the cache.

A pass through a layer of experts is collective over all replicas that share them. A replica whose sequences have ended,
or which has fewer rows, takes part without tokens until all replicas are done.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.runtime.model.context_parallel import num_padding_tokens
from meshwright.runtime.model.kv_cache import ContinuedRows
from meshwright.runtime.model.mesh import Mesh
from meshwright.runtime.model.model_shard import Decoder


class PipelineLink:
    """Sends hidden states from this rank to the next stage, and sampled tokens from the last stage to all others."""

    def __init__(self, mesh: Mesh, device: torch.device, *, kept_size: int = 0) -> None:
        """Each sampled token comes with `kept_size` places of its sampling mask."""
        self._sampled_values = 2 + kept_size
        self._ranks = dist.get_process_group_ranks(mesh.groups.pp)
        self._position = self._ranks.index(dist.get_rank())
        self._device = device
        self._in_flight: deque[tuple[dist.Work, Tensor]] = deque()

    def send_hidden(self, hidden: Tensor) -> None:
        """Sends hidden states [..., hidden] to the next stage."""
        self._send(hidden, self._ranks[self._position + 1])

    def receive_hidden(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Waits for hidden states [*shape] of this dtype from the previous stage."""
        return self._receive(shape, dtype, self._ranks[self._position - 1])

    def send_sampled(self, sampled: Tensor) -> None:
        """Sends sampled tokens, their log-probabilities and sampling masks [2 + K, B] float64 from the last stage to
        all others."""
        for rank in self._ranks[:-1]:
            self._send(sampled, rank)

    def receive_sampled(self, num_rows: int) -> Tensor:
        """On any stage but the last, waits for sampled tokens, their log-probabilities and sampling masks,
        [2 + K, num_rows] float64."""
        return self._receive((self._sampled_values, num_rows), torch.float64, self._ranks[-1])

    def flush(self) -> None:
        """Waits until all sends have completed."""
        while self._in_flight:
            self._in_flight.popleft()[0].wait()

    def _send(self, tensor: Tensor, rank: int) -> None:
        tensor = tensor.contiguous()
        work = dist.isend(tensor, rank)
        assert work is not None
        self._in_flight.append((work, tensor))
        while self._in_flight and self._in_flight[0][0].is_completed():
            self._in_flight.popleft()

    def _receive(self, shape: tuple[int, ...], dtype: torch.dtype, rank: int) -> Tensor:
        buffer = torch.empty(shape, dtype=dtype, device=self._device)
        dist.recv(buffer, rank)
        return buffer


class ExpertLockstep:
    """Keeps one rank's pipeline stage in step with other replicas; does nothing if each replica has all experts."""

    def __init__(self, model: Decoder, mesh: Mesh) -> None:
        self._model, self._mesh = model, mesh
        parameter = next(model.parameters())
        self._no_tokens = parameter.new_zeros((0, 1, model.spec.hidden_size)).detach()

    @contextmanager
    def passes(self, count: int) -> Iterator[None]:
        """Context in which the caller makes `count` passes through this rank's layers.

        Empty passes follow, up to the maximum count of all replicas.
        """
        if self._mesh.layout.expert_replicas == 1:
            yield
            return
        max_count = self._max_over_replicas(1 + count) - 1  # 0 is for replicas in `finish`
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


@torch.no_grad()
def forward_cached(
    model: Decoder, mesh: Mesh, link: PipelineLink, tokens: Tensor, rows: ContinuedRows, *, ends_only: bool = False
) -> Tensor:
    """On the last stage, the decoder's output for tokens [S] of packed rows; on others, the hidden states to send.

    Hidden states are received from the previous stage, which must pass the same rows. With `ends_only` the head is
    applied to the last token of each row only.
    """
    hidden = None
    if not mesh.is_first_stage:
        num_tokens = len(tokens) + num_padding_tokens(len(tokens), mesh.layout)
        local_tokens = num_tokens // mesh.layout.tp if mesh.layout.sp else num_tokens
        hidden = link.receive_hidden((local_tokens, 1, model.spec.hidden_size), model.config.params_dtype)
    model.set_input_tensor(hidden)
    output: Tensor = model(tokens.unsqueeze(0), rows.lengths, rows, ends_only=ends_only)
    return output
