"""Decode steps that are recorded once for a shape and launched whole from then on, as CUDA graphs.

A step of a small batch is hundreds of short kernels, and the host needs longer to launch them one by one than the
device to run them. A recording is of one shape and fixed addresses. So the rows and the blocks of a step are
rounded up to a few sizes, what a step is asked is copied to where the recording reads it, and when the weights have
moved the recordings are made anew.
https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.runtime.generation.decoding import DecodeStep
from meshwright.runtime.model.block_reads import BlockReads, StepShape
from meshwright.runtime.model.model_shard import Decoder
from meshwright.runtime.model.padded_attention import PaddedReads

_ROWS = 8
"""More rows than these are rounded up to a multiple of them, fewer to a power of two."""
_PARTS = 8
"""Blocks are read up to the last one that is held, in whole parts of the cache."""

Work: TypeAlias = Callable[[], Tensor]
Recorder: TypeAlias = Callable[[Work], Work]
"""Makes of some work one that does the same again, on the same tensors, and answers in the same one."""


def can_replay(model: Decoder) -> bool:
    """Whether the model's decode steps can be recorded: on a GPU, and not where the host routes tokens to experts."""
    return next(model.parameters()).is_cuda and model.spec.experts is None


class Replayed:
    """Decode steps with a recording for every shape they have met."""

    def __init__(self, step: DecodeStep, model: Decoder, group_size: int = 1, record: Recorder | None = None) -> None:
        """Blocks may have `group_size` readers; by default `record` makes CUDA graphs."""
        self._step, self._model, self._group_size = step, model, group_size
        self._num_blocks = step.cache.tables.num_blocks + 1
        self._given = record
        self._forget()

    def begin_turn(self) -> None:
        """Drops the recordings if weights are no longer where those read them."""
        self._step.begin_turn()
        if self._weights != _addresses(self._model):
            self._forget()

    def _forget(self) -> None:
        self._weights = _addresses(self._model)
        self._record = self._given or CudaGraphs()
        self._recordings: dict[StepShape, _Recording] = {}

    def __call__(self, inputs: Tensor, reads: BlockReads | PaddedReads) -> Tensor:
        assert isinstance(reads, BlockReads), "rows are laid side by side on a CPU alone"
        num_rows, num_shared = len(reads.lengths), reads.num_shared
        shape = StepShape(
            rows=_rounded_rows(num_rows + 1),
            blocks=min(_up(int(reads.window.max()) + 1, -(-self._num_blocks // _PARTS)), self._num_blocks),
            shared=1 << (num_shared - 1).bit_length() if num_shared else 0,
            readers=self._group_size if num_shared else 1,
        )
        asked = F.pad(inputs, (0, 0) * (inputs.dim() - 1) + (0, shape.rows - num_rows))
        rounded = reads.rounded(shape).to(inputs.device)
        recording = self._recordings.get(shape)
        if recording is None:
            recording = self._recordings[shape] = _Recording(self._step, asked, rounded)
            answer = recording.run()  # also what a recording needs to have run once before
            recording.run = self._record(recording.run)
        else:
            recording.inputs.copy_(asked)
            recording.reads.copy_(rounded)
            answer = recording.run()
        return answer[:num_rows].clone()  # the next step may write over it


class _Recording:
    """The tensors that a recorded step reads, and the step on them."""

    def __init__(self, step: DecodeStep, inputs: Tensor, reads: BlockReads) -> None:
        self.inputs, self.reads = inputs, reads
        self.run: Work = lambda: step(self.inputs, self.reads)


class CudaGraphs:
    """Records as CUDA graphs. They take turns on one stream, so all have their memory from one pool."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, work: Work) -> Work:
        graph = torch.cuda.CUDAGraph()
        # Other threads, which send and receive, may use the device meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            answer = work()

        def replay() -> Tensor:
            graph.replay()
            return answer

        return replay


def _addresses(model: Decoder) -> list[int]:
    return [parameter.data_ptr() for parameter in model.parameters()]


def _rounded_rows(num_rows: int) -> int:
    return _up(num_rows, _ROWS) if num_rows > _ROWS else 1 << (num_rows - 1).bit_length()


def _up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple
