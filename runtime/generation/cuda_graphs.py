"""Decode steps that are recorded once for a shape and launched whole from then on, as CUDA graphs.

A step of a small batch is hundreds of short kernels, and the host needs longer to launch them one by one than the
device to run them. A recording is of one shape and fixed addresses. So the rows of a step and the blocks of the longest
are rounded up to a few sizes, what a step is asked is copied to where the recording reads it, and when the weights have
moved the recordings are made anew.
https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from meshwright.runtime.device.garbage import uncollected
from meshwright.runtime.generation.decoding import DecodeStep
from meshwright.runtime.generation.table_attention import StepReads, TableReads
from meshwright.runtime.model.model_shard import Decoder

_ROWS = 8
"""More rows than these are rounded up to a multiple of them, fewer to a power of two."""
Work: TypeAlias = Callable[[], Tensor]
Recorder: TypeAlias = Callable[[Work], Work]
"""Makes of some work one that does the same again, on the same tensors, and answers in the same one."""


def can_replay(model: Decoder) -> bool:
    """Whether the model's decode steps can be recorded: on a GPU, and not where the host routes tokens to experts."""
    return next(model.parameters()).is_cuda and model.spec.experts is None


class Replayed:
    """Decode steps with a recording for every shape they have met."""

    def __init__(self, step: DecodeStep, model: Decoder, record: Recorder | None = None) -> None:
        """By default `record` makes CUDA graphs."""
        self._step, self._model, self._given = step, model, record
        self._most_blocks = step.cache.tables.table.shape[1]
        self._forget()

    def begin_turn(self) -> None:
        """Drops the recordings if weights are no longer where those read them."""
        self._step.begin_turn()
        if self._weights != addresses(self._model):
            self._forget()

    def _forget(self) -> None:
        self._weights = addresses(self._model)
        self._record = self._given or CudaGraphs()
        self._recordings: dict[tuple[int, int], _Recording] = {}
        """By rows and blocks."""

    def __call__(self, inputs: Tensor, reads: StepReads) -> Tensor:
        assert isinstance(reads, TableReads), "other reads are of a CPU"
        recording = self._recording(reads, inputs)
        recording.take(inputs, reads)
        answer, num_rows = recording.work.run(self._record), len(reads.lengths)
        # The next stage takes hidden states when the next step may have written over them.
        return answer[:num_rows] if self._step.answers_with_logits else answer[:num_rows].clone()

    def successive(self, reads: TableReads) -> Callable[[Tensor], Tensor]:
        """What answers with logits [B, V / tp] to tokens [B] on the device, one step after another."""
        num_rows = len(reads.lengths)
        recording = self._recording(reads, reads.lengths)
        recording.take(torch.zeros(num_rows, dtype=torch.int32), reads)

        def step(tokens: Tensor) -> Tensor:
            recording.feed(tokens)
            answer = recording.work.run(self._record)[:num_rows]
            recording.lengthen(num_rows)
            return answer

        return step

    def _recording(self, reads: TableReads, like: Tensor) -> _Recording:
        """That of the shape that rounds these up, for inputs like these."""
        num_rows, num_blocks = reads.tables.shape
        shape = _rounded_rows(num_rows), min(power_of_two(num_blocks), self._most_blocks)
        if shape not in self._recordings:
            self._recordings[shape] = _Recording(self._step, shape, like)
        return self._recordings[shape]


class RecordedWork:
    """Work that is done as it is the first time and recorded behind it, for what is recorded needs to have run once."""

    def __init__(self, work: Work) -> None:
        self._work, self._is_recorded = work, False

    def run(self, record: Recorder) -> Tensor:
        """What the work answers, [rows, ...]."""
        answer = self._work()
        if not self._is_recorded:
            self._work, self._is_recorded = record(self._work), True
        return answer


class _Recording:
    """The tensors that a recorded step reads, and the step on them. Numbers of the host come in one message."""

    def __init__(self, step: DecodeStep, shape: tuple[int, int], like: Tensor) -> None:
        """For so many rows and blocks, and inputs like these."""
        rows, blocks = shape
        device = step.cache.keys.device
        self._message = torch.zeros(rows * (blocks + 2), dtype=torch.int32, device=device)
        lengths, tokens, tables = self._message.split([rows, rows, rows * blocks])
        self._reads = TableReads(lengths, tables.view(rows, blocks))
        self._inputs = tokens if like.dim() == 1 else like.new_zeros(rows, *like.shape[1:])
        self.work = RecordedWork(lambda: step(self._inputs, self._reads))

    def feed(self, tokens: Tensor) -> None:
        """Takes over tokens [B] that are on the device."""
        self._inputs[: len(tokens)].copy_(tokens)

    def lengthen(self, num_rows: int) -> None:
        """The first rows have a token more in the cache; those that round them up have none."""
        self._reads.lengths[:num_rows].add_(1)

    def take(self, inputs: Tensor, reads: TableReads) -> None:
        """Takes over a step's inputs and what it reads, with rows and blocks that round them up: zeros."""
        (rows, blocks), (num_rows, num_blocks) = self._reads.tables.shape, reads.tables.shape
        message = np.zeros(len(self._message), dtype=np.int32)
        message[:num_rows] = reads.lengths.numpy()
        message[2 * rows :].reshape(rows, blocks)[:num_rows, :num_blocks] = reads.tables.numpy()
        if inputs.dim() == 1:
            message[rows : rows + num_rows] = inputs.numpy()
        else:
            self._inputs[:num_rows].copy_(inputs)
        # Of memory that is not pinned a copy is taken before the call returns.
        self._message.copy_(torch.from_numpy(message), non_blocking=True)


class CudaGraphs:
    """Records as CUDA graphs. They take turns on one stream, so all have their memory from one pool."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, work: Work) -> Work:
        graph = torch.cuda.CUDAGraph()
        # Other threads, which send and receive, may use the device meanwhile. A graph that is collected breaks the one
        # that is being recorded.
        with uncollected(), torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            answer = work()

        def replay() -> Tensor:
            graph.replay()
            return answer

        return replay


def addresses(model: Decoder) -> list[int]:
    """Where its weights lie, from which recordings read them."""
    return [parameter.data_ptr() for parameter in model.parameters()]


def _rounded_rows(num_rows: int) -> int:
    return -(-num_rows // _ROWS) * _ROWS if num_rows > _ROWS else power_of_two(num_rows)


def power_of_two(count: int) -> int:
    """The least that is not smaller."""
    return 1 << (count - 1).bit_length()
