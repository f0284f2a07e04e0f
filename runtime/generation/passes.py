"""The forward pass of one pipeline stage in a decode round: single tokens of rows that continue, and uncached tokens.

On a CPU everything is computed directly on the weights, and the first prefill batch goes with the single tokens: a pass
of few tokens costs more to call than to compute. On a GPU decode steps are recorded as CUDA graphs, and so are short
prefill batches of rows that start. Prefill batches of rows that continue go through megatron's modules there, and so do
all of them where kernels are not chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from meshwright.runtime.generation.decoding import DecodeRunner
from meshwright.runtime.generation.packed_attention import packed_reads
from meshwright.runtime.generation.packed_step import PackedStep
from meshwright.runtime.generation.prefill import prefill_reads
from meshwright.runtime.generation.recorded_prefills import Prefills
from meshwright.runtime.generation.seating import PrefillPart
from meshwright.runtime.generation.table_attention import StepReads, step_reads, table_reads
from meshwright.runtime.model.cache_blocks import Numbers
from meshwright.runtime.model.cached_forward import forward_cached
from meshwright.runtime.model.mesh import Mesh
from meshwright.runtime.model.model_shard import Decoder
from meshwright.runtime.model.pipeline_p2p import PipelineLink

SlotTokens: TypeAlias = tuple[int, Sequence[int]]
"""A slot, and the tokens of its sequence."""


class StepRows(NamedTuple):
    """Rows [C] that take a decode step; C may be 0."""

    slots: Numbers
    cached: Numbers
    """Tokens of each row in the cache."""
    tokens: Numbers
    """The next token of each row."""


NO_STEPS = StepRows(*(np.zeros(0, dtype=np.int64) for _ in StepRows._fields))


class _PrefillBatch(NamedTuple):
    """A prefill batch: parts of sequences, concatenated."""

    slots: tuple[int, ...]
    cached: tuple[int, ...]
    lengths: tuple[int, ...]
    tokens: Numbers
    """The tokens [S]."""
    complete: list[int]
    """The indices of the parts that reach the end of their sequence."""

    @classmethod
    def of(cls, parts: Sequence[PrefillPart], texts: Sequence[SlotTokens]) -> _PrefillBatch:
        return cls(
            slots=tuple(texts[row][0] for row, _, _ in parts),
            cached=tuple(first for _, first, _ in parts),
            lengths=tuple(end - first for _, first, end in parts),
            tokens=np.array([token for row, first, end in parts for token in texts[row][1][first:end]], dtype=np.int64),
            complete=[index for index, (row, _, end) in enumerate(parts) if end == len(texts[row][1])],
        )


class ForwardPasses:
    """The forward passes of one rank."""

    def __init__(
        self,
        step: PackedStep,
        decoding: DecodeRunner,
        model: Decoder,
        mesh: Mesh,
        relay: PipelineLink,
        *,
        prefills: Prefills | None = None,
    ) -> None:
        """`decoding` runs decode steps that are not joined with a prefill batch; `prefills`, if given, runs batches of
        rows that start."""
        self._step, self._decoding, self._cache = step, decoding, step.cache
        self._model, self._mesh, self._relay, self._prefills = model, mesh, relay, prefills
        parameter = next(model.parameters())
        self._device, self._dtype = parameter.device, parameter.dtype
        self._uses_modules = parameter.is_cuda
        self._queries_per_group = model.spec.num_heads // model.spec.num_kv_heads

    def count(self, num_steps: int, num_batches: int) -> int:
        """Return how often the layers are run for these steps and prefill batches."""
        return num_batches + bool(num_steps) if self._uses_modules else max(num_batches, bool(num_steps))

    def __call__(
        self, steps: StepRows, texts: Sequence[SlotTokens], batches: Sequence[Sequence[PrefillPart]]
    ) -> Tensor | None:
        """Cache the keys and values of the steps' tokens and of the texts, which are split over prefill batches. Return
        logits [B, V / tp] of the steps' tokens and of the last token of each text on the last stage; None before it, or
        if there are no rows."""
        joined = None if self._uses_modules or not batches or not len(steps.slots) else steps
        outputs = [] if joined or not len(steps.slots) else [self._run_steps(steps)]
        for parts in batches:
            batch = _PrefillBatch.of(parts, texts)
            if self._prefills is not None and not any(batch.cached):
                outputs.append(self._run_prefill(self._prefills, batch))
            else:
                outputs.append(self._run_modules(batch) if self._uses_modules else self._run_packed(batch, joined))
            joined = None
        if not outputs or not self._mesh.is_last_stage:
            return None
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def multi_step(self, steps: StepRows, count: int) -> Callable[[Tensor], Tensor]:
        """Return a function that runs decode steps of the same rows, `count` at most, one after the other, for a model
        with one stage that reads the cache by block tables: it takes the next tokens [B] on the device and returns
        logits [B, V / tp]."""
        return self._decoding.multi_step(table_reads(self._cache.tables, steps.slots, steps.cached, count))

    def _run_steps(self, steps: StepRows) -> Tensor:
        return self._send(self._decoding(self._inputs(steps.tokens), self._reads(steps)))

    def _run_packed(self, batch: _PrefillBatch, steps: StepRows | None) -> Tensor:
        """Run a prefill batch directly on the weights, after the steps."""
        reads_of_steps = None if steps is None else self._reads(steps)  # first, since it may move blocks
        reads = packed_reads(self._cache, batch.slots, batch.cached, batch.lengths, self._queries_per_group)
        ends = torch.from_numpy(np.cumsum(batch.lengths)[batch.complete] - 1)
        tokens = batch.tokens if steps is None else np.concatenate([steps.tokens, batch.tokens])
        return self._send(self._step.packed(self._inputs(tokens), reads, ends, reads_of_steps))

    def _run_prefill(self, prefills: Prefills, batch: _PrefillBatch) -> Tensor:
        reads = prefill_reads(self._cache.tables, batch.slots, batch.lengths, batch.complete)
        return self._send(prefills(self._inputs(batch.tokens), reads))

    def _run_modules(self, batch: _PrefillBatch) -> Tensor:
        rows = self._cache.continue_rows(batch.slots, batch.cached, batch.lengths)
        tokens = torch.from_numpy(batch.tokens).to(self._device)
        output = forward_cached(self._model, self._mesh, self._relay, tokens, rows, ends_only=True)
        return self._send(output.squeeze(1)[batch.complete] if self._mesh.is_last_stage else output)

    def _reads(self, steps: StepRows) -> StepReads:
        return step_reads(self._cache, steps.slots, steps.cached)

    def _inputs(self, tokens: Numbers) -> Tensor:
        """Return the tokens [S] on the first stage, their hidden states [S, hidden] from the previous stage on the
        others."""
        if self._mesh.is_first_stage:
            return torch.from_numpy(tokens)
        return self._relay.receive_hidden((len(tokens), self._model.spec.hidden_size), self._dtype)

    def _send(self, output: Tensor) -> Tensor:
        """Return the output after sending it to the next stage, if there is one."""
        if not self._mesh.is_last_stage:
            self._relay.send_hidden(output)
        return output
