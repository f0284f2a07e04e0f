"""Point-to-point messages between the stages of one pipeline; sends do not wait for their receiver."""

from __future__ import annotations

from collections import deque

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.runtime.model.mesh import Mesh


class PipelineLink:
    """Sends hidden states from this rank to the next stage, and sampled tokens from the last stage to all others."""

    def __init__(self, mesh: Mesh, device: torch.device) -> None:
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
        """Sends sampled tokens and their log-probabilities [2, B] float64 from the last stage to all others."""
        for rank in self._ranks[:-1]:
            self._send(sampled, rank)

    def receive_sampled(self, num_rows: int) -> Tensor:
        """Waits on an earlier stage for sampled tokens and their log-probabilities, [2, num_rows] float64."""
        return self._receive((2, num_rows), torch.float64, self._ranks[-1])

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
