"""Prefills of prompts that start, recorded as CUDA graphs where they are short.

A GPU computes a short pass of a small model long before its host has launched all of its kernels, and slots that are
refilled one by one need such passes again and again. Tokens, rows and the longest row are rounded up to a few sizes; a
long pass, which keeps the device busy, is not recorded.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from meshwright.runtime.generation.cuda_graphs import CudaGraphs, RecordedWork, Recorder, addresses, power_of_two
from meshwright.runtime.generation.packed_step import PackedStep
from meshwright.runtime.generation.prefill import PrefillReads
from meshwright.runtime.model.model_shard import Decoder

_MAX_RECORDED_TOKENS = 2048
"""Tokens of the longest pass that is recorded: with 24 layers of hidden size 896 the host took 31 ms to launch the
kernels of a pass that the device computes in 8 ms (4,096 tokens, H200, 2026-11-26)."""
_TOKEN_MULTIPLE, _MIN_TOKENS = 256, 32
"""More tokens than the first are rounded up to a multiple of it, fewer to a power of two, at least the second."""


class Prefills:
    """The prefills of one pipeline stage, without recording."""

    def __init__(self, step: PackedStep) -> None:
        self._step = step

    def refresh_weights(self) -> None:
        """Prepare for the passes of a period, before which weights may have moved; to be called before the first."""

    def __call__(self, inputs: Tensor, reads: PrefillReads) -> Tensor:
        """Run `PackedStep.prefill` on tokens [S] or hidden states [S, hidden], with inputs and reads on the host."""
        device = self._step.cache.keys.device
        return self._step.prefill(inputs.to(device), reads.to(device))


class GraphedPrefills(Prefills):
    """Prefills with a CUDA graph for every shape that has occurred."""

    def __init__(self, step: PackedStep, model: Decoder, record: Recorder | None = None) -> None:
        """`record` makes CUDA graphs by default."""
        super().__init__(step)
        self._model, self._custom_record = model, record
        self._forget()

    def refresh_weights(self) -> None:
        if self._weights != addresses(self._model):
            self._forget()

    def _forget(self) -> None:
        self._weights = addresses(self._model)
        self._record = self._custom_record or CudaGraphs()
        self._recordings: dict[tuple[int, int, int], _RecordedPrefill] = {}
        """The recordings by number of tokens, of rows and of tokens of the longest row."""

    def __call__(self, inputs: Tensor, reads: PrefillReads) -> Tensor:
        num_tokens, num_rows = len(reads.positions), len(reads.row_starts) - 1
        if num_tokens > _MAX_RECORDED_TOKENS:
            return super().__call__(inputs, reads)
        shape = _rounded_tokens(num_tokens), power_of_two(num_rows), max(_MIN_TOKENS, power_of_two(reads.longest))
        if shape not in self._recordings:
            self._recordings[shape] = _RecordedPrefill(self._step, shape, inputs)
        recording = self._recordings[shape]
        recording.copy_inputs(inputs, reads)
        answer = recording.work.run(self._record)
        # Others may read it only after the next pass has overwritten it.
        return answer[: len(reads.output_tokens) if self._step.returns_logits else num_tokens].clone()


class _RecordedPrefill:
    """The tensors that a recorded pass reads, and the pass on them. All numbers from the host come in one copy."""

    def __init__(self, step: PackedStep, shape: tuple[int, int, int], like: Tensor) -> None:
        """`shape` is the number of tokens, of rows and of tokens of the longest row; `like` gives the dimensions of the
        inputs."""
        num_tokens, num_rows, longest = shape
        self._sizes = [num_tokens, num_tokens, num_tokens, num_rows + 1, num_rows]
        self._packed = torch.zeros(sum(self._sizes), dtype=torch.int32, device=step.cache.keys.device)
        tokens, positions, blocks, begins, asked = self._packed.split(self._sizes)
        reads = PrefillReads(positions, blocks, begins, asked, longest)
        self._inputs = tokens if like.dim() == 1 else like.new_zeros(num_tokens, *like.shape[1:])
        self.work = RecordedWork(lambda: step.prefill(self._inputs, reads))

    def copy_inputs(self, inputs: Tensor, reads: PrefillReads) -> None:
        """Copy in the inputs and the reads of a pass. The padding is tokens of no row, which write to the spare block,
        and rows without tokens."""
        packed = np.zeros(len(self._packed), dtype=np.int32)
        tokens, positions, blocks, begins, asked = np.split(packed, np.cumsum(self._sizes)[:-1])
        num_tokens = len(reads.positions)
        positions[:num_tokens], blocks[:num_tokens] = reads.positions.numpy(), reads.blocks.numpy()
        begins[: len(reads.row_starts)], begins[len(reads.row_starts) :] = reads.row_starts.numpy(), num_tokens
        asked[: len(reads.output_tokens)] = reads.output_tokens.numpy()
        if inputs.dim() == 1:
            tokens[:num_tokens] = inputs.numpy()
        else:
            self._inputs[:num_tokens].copy_(inputs)
        # From memory that is not pinned, the copy is staged before the call returns.
        self._packed.copy_(torch.from_numpy(packed), non_blocking=True)


def _rounded_tokens(num_tokens: int) -> int:
    return (
        -(-num_tokens // _TOKEN_MULTIPLE) * _TOKEN_MULTIPLE
        if num_tokens > _TOKEN_MULTIPLE
        else max(_MIN_TOKENS, power_of_two(num_tokens))
    )
