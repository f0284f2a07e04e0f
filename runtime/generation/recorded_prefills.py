"""Passes over the prompts of rows that begin, which are recorded as decode steps are where they are short.

A GPU has computed a short pass of a small model long before its host has launched all of its kernels, and slots that
are refilled one by one ask for such a pass again and again. Tokens, rows and the longest row are rounded up to a few
sizes; a long pass, which keeps the device busy, is not recorded.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from meshwright.runtime.generation.cuda_graphs import CudaGraphs, RecordedWork, Recorder, addresses, power_of_two
from meshwright.runtime.generation.packed_step import PackedStep
from meshwright.runtime.generation.prefill import PrefillReads
from meshwright.runtime.model.model_shard import Decoder

_MOST_TOKENS = 2048
"""Of a pass that is recorded: of 24 layers of 0.9 thousand numbers the host launched the kernels in 31 ms, in which the
device computed for 8 (4,096 tokens, H200, 2026-11-26)."""
_COARSE, _LEAST = 256, 32
"""More tokens than the former are rounded up to a multiple of it, fewer to a power of two, the latter at least."""


class Prefills:
    """Of one pipeline stage, each at once."""

    def __init__(self, step: PackedStep) -> None:
        self._step = step

    def begin_turn(self) -> None:
        """To be called before the passes of a turn: weights may have moved since the last."""

    def __call__(self, inputs: Tensor, reads: PrefillReads) -> Tensor:
        """As `PackedStep.prefill`, with tokens and reads on the host."""
        device = self._step.cache.keys.device
        return self._step.prefill(inputs.to(device), reads.to(device))


class RecordedPrefills(Prefills):
    """With a recording for every shape that they have met."""

    def __init__(self, step: PackedStep, model: Decoder, record: Recorder | None = None) -> None:
        """By default `record` makes CUDA graphs."""
        super().__init__(step)
        self._model, self._given = model, record
        self._forget()

    def begin_turn(self) -> None:
        if self._weights != addresses(self._model):
            self._forget()

    def _forget(self) -> None:
        self._weights = addresses(self._model)
        self._record = self._given or CudaGraphs()
        self._recordings: dict[tuple[int, int, int], _Recording] = {}
        """By tokens, rows and tokens of the longest row."""

    def __call__(self, inputs: Tensor, reads: PrefillReads) -> Tensor:
        num_tokens, num_rows = len(reads.positions), len(reads.begins) - 1
        if num_tokens > _MOST_TOKENS:
            return super().__call__(inputs, reads)
        shape = _rounded(num_tokens), power_of_two(num_rows), max(_LEAST, power_of_two(reads.longest))
        if shape not in self._recordings:
            self._recordings[shape] = _Recording(self._step, shape, inputs)
        recording = self._recordings[shape]
        recording.take(inputs, reads)
        answer = recording.work.run(self._record)
        # Others read it when the next pass may have written over it.
        return answer[: len(reads.asked) if self._step.answers_with_logits else num_tokens].clone()


class _Recording:
    """The tensors that a recorded pass reads, and the pass on them. Numbers of the host come in one message."""

    def __init__(self, step: PackedStep, shape: tuple[int, int, int], like: Tensor) -> None:
        """For so many tokens, rows and tokens of the longest, and inputs like these."""
        num_tokens, num_rows, longest = shape
        self._sizes = [num_tokens, num_tokens, num_tokens, num_rows + 1, num_rows]
        self._message = torch.zeros(sum(self._sizes), dtype=torch.int32, device=step.cache.keys.device)
        tokens, positions, blocks, begins, asked = self._message.split(self._sizes)
        reads = PrefillReads(positions, blocks, begins, asked, longest)
        self._inputs = tokens if like.dim() == 1 else like.new_zeros(num_tokens, *like.shape[1:])
        self.work = RecordedWork(lambda: step.prefill(self._inputs, reads))

    def take(self, inputs: Tensor, reads: PrefillReads) -> None:
        """Takes over a pass's inputs and what it reads. What rounds them up are tokens of no row, which write to the
        spare block, and rows without a token."""
        message = np.zeros(len(self._message), dtype=np.int32)
        tokens, positions, blocks, begins, asked = np.split(message, np.cumsum(self._sizes)[:-1])
        num_tokens = len(reads.positions)
        positions[:num_tokens], blocks[:num_tokens] = reads.positions.numpy(), reads.blocks.numpy()
        begins[: len(reads.begins)], begins[len(reads.begins) :] = reads.begins.numpy(), num_tokens
        asked[: len(reads.asked)] = reads.asked.numpy()
        if inputs.dim() == 1:
            tokens[:num_tokens] = inputs.numpy()
        else:
            self._inputs[:num_tokens].copy_(inputs)
        # Of memory that is not pinned a copy is taken before the call returns.
        self._message.copy_(torch.from_numpy(message), non_blocking=True)


def _rounded(num_tokens: int) -> int:
    return -(-num_tokens // _COARSE) * _COARSE if num_tokens > _COARSE else max(_LEAST, power_of_two(num_tokens))
