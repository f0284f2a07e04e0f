"""Decode steps and short prefills as CUDA graphs: recorded once for each shape and replayed from then on.

They are hundreds of short kernels, and the host needs longer to launch them one by one than the device to run them. A
graph has one shape and fixed addresses. So sizes are rounded up to a few, inputs are copied to where the graph reads
them, and the graphs are recorded again when the weights have moved.
https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from meshwright.cost_models.protocol import Memo
from meshwright.runtime.device.garbage_collection import no_garbage_collection
from meshwright.runtime.inference.attention import PrefillReads, StepReads, TableReads
from meshwright.runtime.inference.decode_step import DecodeStep, PackedStep
from meshwright.runtime.model.model_shard import Decoder

_ROW_MULTIPLE = 8
"""More rows than this are rounded up to a multiple of it, fewer to a power of two."""
Work: TypeAlias = Callable[[], Tensor]
Recorder: TypeAlias = Callable[[Work], Work]
"""Records some work; the function it returns does the same work on the same tensors and returns its result in the same
tensor."""


def can_replay(model: Decoder) -> bool:
    """True if the decode steps of the model can be recorded: on a GPU, and without experts, because the host routes
    tokens to them."""
    return next(model.parameters()).is_cuda and model.spec.experts is None


class GraphedDecodeStep:
    """Decode steps with a CUDA graph for every shape that has occurred."""

    def __init__(self, step: DecodeStep, model: Decoder, record: Recorder | None = None) -> None:
        """`record` makes CUDA graphs by default."""
        self._step, self._model, self._custom_record = step, model, record
        self._max_blocks = step.cache.tables.table.shape[1]
        self._forget()

    def refresh_weights(self) -> None:
        """Drop the graphs if weights are no longer where the graphs read them."""
        self._step.refresh_weights()
        if self._weights != addresses(self._model):
            self._forget()

    def _forget(self) -> None:
        self._weights = addresses(self._model)
        self._record = self._custom_record or CudaGraphs()
        self._recordings: Memo[tuple[int, int], _RecordedStep] = Memo()
        """The recordings by number of rows and of blocks."""

    def __call__(self, inputs: Tensor, reads: StepReads) -> Tensor:
        assert isinstance(reads, TableReads), "other reads are for a CPU"
        recording = self._recording(reads, inputs)
        recording.copy_inputs(inputs, reads)
        output, num_rows = recording.work.run(self._record), len(reads.lengths)
        # The next step may overwrite hidden states before the next stage has received them, so they are copied.
        return output[:num_rows] if self._step.returns_logits else output[:num_rows].clone()

    def multi_step(self, reads: TableReads) -> Callable[[Tensor], Tensor]:
        """Return a function that maps tokens [B] on the device to logits [B, V / tp], one step after another."""
        num_rows = len(reads.lengths)
        recording = self._recording(reads, reads.lengths)
        recording.copy_inputs(torch.zeros(num_rows, dtype=torch.int32), reads)

        def step(tokens: Tensor) -> Tensor:
            recording.copy_tokens(tokens)
            output = recording.work.run(self._record)[:num_rows]
            recording.lengthen(num_rows)
            return output

        return step

    def _recording(self, reads: TableReads, like: Tensor) -> _RecordedStep:
        """Return the recording of the shape that these reads are rounded up to, for inputs with the dimensions of
        `like`."""
        num_rows, num_blocks = reads.tables.shape
        shape = _rounded_rows(num_rows), min(power_of_two(num_blocks), self._max_blocks)
        return self._recordings.memoize(shape, lambda: _RecordedStep(self._step, shape, like))


class RecordedWork:
    """Work that runs eagerly the first time and is recorded right after, because it must have run once before it is
    recorded; later runs replay the recording."""

    def __init__(self, work: Work) -> None:
        self._work, self._is_recorded = work, False

    def run(self, record: Recorder) -> Tensor:
        """Run the work and return its result, [rows, ...]."""
        output = self._work()
        if not self._is_recorded:
            self._work, self._is_recorded = record(self._work), True
        return output


class _RecordedStep:
    """The tensors that a recorded step reads, and the step on them. All numbers from the host come in one copy."""

    def __init__(self, step: DecodeStep, shape: tuple[int, int], like: Tensor) -> None:
        """`shape` is the number of rows and of blocks; `like` gives the dimensions of the inputs."""
        rows, blocks = shape
        device = step.cache.keys.device
        self._packed = torch.zeros(rows * (blocks + 3), dtype=torch.int32, device=device)
        lengths, tokens, states, tables = self._packed.split([rows, rows, rows, rows * blocks])
        self._reads = TableReads(lengths, tables.view(rows, blocks), states)
        self._inputs = tokens if like.dim() == 1 else like.new_zeros(rows, *like.shape[1:])
        self.work = RecordedWork(lambda: step(self._inputs, self._reads))

    def copy_tokens(self, tokens: Tensor) -> None:
        """Copy in tokens [B] that are on the device."""
        self._inputs[: len(tokens)].copy_(tokens)

    def lengthen(self, num_rows: int) -> None:
        """Count one more cached token for the first `num_rows` rows; padding rows have none."""
        self._reads.lengths[:num_rows].add_(1)

    def copy_inputs(self, inputs: Tensor, reads: TableReads) -> None:
        """Copy in the inputs and the reads of a step, padded with rows and blocks of zeros."""
        (rows, blocks), (num_rows, num_blocks) = self._reads.tables.shape, reads.tables.shape
        packed = np.zeros(len(self._packed), dtype=np.int32)
        packed[:num_rows] = reads.lengths.numpy()
        packed[2 * rows : 2 * rows + num_rows] = reads.states.numpy()
        packed[3 * rows :].reshape(rows, blocks)[:num_rows, :num_blocks] = reads.tables.numpy()
        if inputs.dim() == 1:
            packed[rows : rows + num_rows] = inputs.numpy()
        else:
            self._inputs[:num_rows].copy_(inputs)
        # A copy from memory that is not pinned is staged before the call returns, so `packed` may then be freed.
        self._packed.copy_(torch.from_numpy(packed), non_blocking=True)


class CudaGraphs:
    """Records work as CUDA graphs. They are replayed one at a time on one stream, so all share one memory pool."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, work: Work) -> Work:
        graph = torch.cuda.CUDAGraph()
        # Other threads, which send and receive, may use the device meanwhile. If a graph is garbage-collected during a
        # recording, the recording fails.
        with no_garbage_collection(), torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            output = work()

        def replay() -> Tensor:
            graph.replay()
            return output

        return replay


def addresses(model: Decoder) -> list[int]:
    """Return the addresses of the model's weights, from which graphs read them."""
    return [parameter.data_ptr() for parameter in model.parameters()]


def _rounded_rows(num_rows: int) -> int:
    return -(-num_rows // _ROW_MULTIPLE) * _ROW_MULTIPLE if num_rows > _ROW_MULTIPLE else power_of_two(num_rows)


def power_of_two(count: int) -> int:
    """Return the smallest power of two that is at least `count`."""
    return 1 << (count - 1).bit_length()


_MAX_RECORDED_TOKENS = 2048
"""Tokens of the longest pass that is recorded: with 24 layers of hidden size 896 the host took 31 ms to launch the
kernels of a pass that the device computes in 8 ms (4,096 tokens, H200, 2026-11-26)."""
_TOKEN_MULTIPLE, _MIN_TOKENS = 256, 32
"""Token counts above the first number are rounded up to a multiple of it, others to a power of two, at least the second
number."""


class Prefills:
    """The prefills of one pipeline stage, without recording."""

    def __init__(self, step: PackedStep) -> None:
        self._step = step

    def refresh_weights(self) -> None:
        """Prepare for the passes of a period; call it before the first, since weights may have moved."""

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
        self._recordings: Memo[tuple[int, int, int], _RecordedPrefill] = Memo()
        """The recordings by number of tokens, of rows and of tokens of the longest row."""

    def __call__(self, inputs: Tensor, reads: PrefillReads) -> Tensor:
        num_tokens, num_rows = len(reads.positions), len(reads.row_starts) - 1
        if num_tokens > _MAX_RECORDED_TOKENS:
            return super().__call__(inputs, reads)
        shape = _rounded_tokens(num_tokens), power_of_two(num_rows), max(_MIN_TOKENS, power_of_two(reads.longest))
        recording = self._recordings.memoize(shape, lambda: _RecordedPrefill(self._step, shape, inputs))
        recording.copy_inputs(inputs, reads)
        output = recording.work.run(self._record)
        # The next pass may overwrite the output before others have read it, so it is copied.
        return output[: len(reads.output_tokens) if self._step.returns_logits else num_tokens].clone()


class _RecordedPrefill:
    """The tensors that a recorded pass reads, and the pass on them. All numbers from the host come in one copy."""

    def __init__(self, step: PackedStep, shape: tuple[int, int, int], like: Tensor) -> None:
        """`shape` is the number of tokens, of rows and of tokens of the longest row; `like` gives the dimensions of the
        inputs."""
        num_tokens, num_rows, longest = shape
        self._sizes = [num_tokens, num_tokens, num_tokens, num_rows + 1, num_rows]
        self._packed = torch.zeros(sum(self._sizes), dtype=torch.int32, device=step.cache.keys.device)
        tokens, positions, blocks, row_starts, output_tokens = self._packed.split(self._sizes)
        reads = PrefillReads(positions, blocks, row_starts, output_tokens, longest)
        self._inputs = tokens if like.dim() == 1 else like.new_zeros(num_tokens, *like.shape[1:])
        self.work = RecordedWork(lambda: step.prefill(self._inputs, reads))

    def copy_inputs(self, inputs: Tensor, reads: PrefillReads) -> None:
        """Copy in the inputs and the reads of a pass. The padding is tokens of no row, which write to the spare block,
        and rows without tokens."""
        packed = np.zeros(len(self._packed), dtype=np.int32)
        tokens, positions, blocks, row_starts, output_tokens = np.split(packed, np.cumsum(self._sizes)[:-1])
        num_tokens = len(reads.positions)
        positions[:num_tokens], blocks[:num_tokens] = reads.positions.numpy(), reads.blocks.numpy()
        row_starts[: len(reads.row_starts)], row_starts[len(reads.row_starts) :] = reads.row_starts.numpy(), num_tokens
        output_tokens[: len(reads.output_tokens)] = reads.output_tokens.numpy()
        if inputs.dim() == 1:
            tokens[:num_tokens] = inputs.numpy()
        else:
            self._inputs[:num_tokens].copy_(inputs)
        # A copy from memory that is not pinned is staged before the call returns, so `packed` may then be freed.
        self._packed.copy_(torch.from_numpy(packed), non_blocking=True)


def _rounded_tokens(num_tokens: int) -> int:
    return (
        -(-num_tokens // _TOKEN_MULTIPLE) * _TOKEN_MULTIPLE
        if num_tokens > _TOKEN_MULTIPLE
        else max(_MIN_TOKENS, power_of_two(num_tokens))
    )
