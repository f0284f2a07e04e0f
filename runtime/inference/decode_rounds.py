"""The forward passes of decode rounds on one pipeline stage: decode steps joined with prefill batches, and several
rounds in a row while nothing can be admitted.

On a CPU everything is computed directly on the weights. On a GPU decode steps and short prefills are recorded as CUDA
graphs, and several rounds are launched between two synchronisations with the host. Both sample the same tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import isqrt
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from meshwright.runtime.inference.attention import StepReads, packed_reads, prefill_reads, step_reads, table_reads
from meshwright.runtime.inference.cuda_graphs import Prefills
from meshwright.runtime.inference.decode_step import DecodeRunner, PackedStep
from meshwright.runtime.inference.drafts import VerifiedRows
from meshwright.runtime.inference.sampling import Uniforms
from meshwright.runtime.inference.scheduler import PrefillPart, Scheduler
from meshwright.runtime.inference.slots import NO_LIMIT, LiveGroup, Reals
from meshwright.runtime.inference.stopping import Stopping
from meshwright.runtime.model.block_tables import Numbers
from meshwright.runtime.model.mesh import Mesh
from meshwright.runtime.model.model_shard import Decoder
from meshwright.runtime.model.stage_passes import PipelineLink, forward_cached

SlotTokens: TypeAlias = tuple[int, Sequence[int]]
"""A slot, and the tokens of its sequence."""


class StepRows(NamedTuple):
    """Rows [C] that take a decode step; C may be 0."""

    slots: Numbers
    cached: Numbers
    """Tokens of each row in the cache."""
    tokens: Numbers
    """The next token of each row."""

    def with_drafts(self, drafts: VerifiedRows) -> StepRows:
        """Return the rows that verify drafts [C + D]: each row, followed by one for each token of its draft at the next
        position. Each is a row of the decode step, and all rows of a slot read its blocks."""
        counts = drafts.counts[: len(self.slots)]
        repeats = counts + 1
        starts = np.cumsum(repeats) - repeats
        offsets = np.arange(repeats.sum()) - np.repeat(starts, repeats)
        tokens = np.empty(len(offsets), dtype=np.int64)
        tokens[starts], tokens[offsets > 0] = self.tokens, drafts.tokens
        return StepRows(np.repeat(self.slots, repeats), np.repeat(self.cached, repeats) + offsets, tokens)


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
        verifies: bool = False,
    ) -> None:
        """`decoding` runs decode steps that are not joined with a prefill batch; `prefills`, if given, runs prefill
        batches without cached tokens. With `verifies` several rows of a step may be of one slot, at successive
        positions."""
        self._step, self._decoding, self._cache = step, decoding, step.cache
        self._model, self._mesh, self._relay, self._prefills = model, mesh, relay, prefills
        # By block tables the keys of all rows of a layer are cached before any row attends, as such rows need it.
        self._by_tables = verifies or step.reads_by_tables
        parameter = next(model.parameters())
        self._device, self._dtype = parameter.device, parameter.dtype
        self._uses_modules = parameter.is_cuda
        self._queries_per_group = model.spec.cached_heads(mesh.layout.tp).queries_per_key

    def count(self, num_steps: int, num_batches: int) -> int:
        """Return how often the layers run for these steps and prefill batches: on a CPU the steps join a batch."""
        return num_batches + bool(num_steps) if self._uses_modules else max(num_batches, bool(num_steps))

    def __call__(
        self, steps: StepRows, texts: Sequence[SlotTokens], batches: Sequence[Sequence[PrefillPart]]
    ) -> Tensor | None:
        """Run the steps and the prefill `batches` of the sequences in `texts`, and cache their keys and values. Return
        logits [B, V / tp] of the steps' tokens and of the last token of each sequence on the last stage; None before
        it, or if there are no rows."""
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
        """Return a function that takes the next tokens [B] of these rows on the device, runs one decode step and
        returns logits [B, V / tp]; it may be called `count` times. The model must have one stage and read the cache by
        block tables."""
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
        return step_reads(self._cache, steps.slots, steps.cached, by_tables=self._by_tables)

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


SampleTokens = Callable[[Tensor, Tensor], Tensor]
"""Samples tokens, log-probabilities and sampling masks [2 + K, B] float64 from logits [B, V / tp] and random numbers
[B]."""


class StepsPerSync:
    """The number of rounds launched between two synchronisations.

    With an end token every n rounds, launching k at a time drops (k - 1) / 2 of them at each end and saves all but one
    of k synchronisations: the cheapest k grows with the square root of n. The constant 4 fits a synchronisation
    that costs the host a tenth to a third of what a round costs the device (Qwen2.5-0.5B to Llama-3.1-8B on an H200,
    2026-11-26).
    """

    _MAX_ROUNDS = 16

    def __init__(self, *, may_end: bool) -> None:
        """`may_end` is False without end tokens, where no round is ever dropped."""
        self._num_rounds, self._num_ends, self._may_end = 0, 0, may_end

    @property
    def rounds(self) -> int:
        if not self._may_end:
            return self._MAX_ROUNDS
        return max(1, min(self._MAX_ROUNDS, isqrt(self._num_rounds // (4 * (1 + self._num_ends)))))

    def record(self, num_rounds: int, *, ended: bool) -> None:
        """Record rounds: if `ended`, an end token was sampled after them, else none was sampled in them."""
        self._num_rounds += num_rounds
        self._num_ends += ended


class MultiStepDecoding:
    """Multi-step decoding of a generator with one pipeline stage, used while no sequence can be admitted."""

    def __init__(
        self,
        passes: ForwardPasses,
        seating: Scheduler,
        stopping: Stopping,
        uniforms: Uniforms,
        sample: SampleTokens,
        *,
        checks_each: bool,
    ) -> None:
        """If `checks_each`, every round is checked for end tokens before the next, as on a CPU."""
        self._passes, self._scheduler, self._stopping = passes, seating, stopping
        self._uniforms, self._sample, self._checks_each = uniforms, sample, checks_each
        self.pace = StepsPerSync(may_end=bool(stopping.eos_tokens))

    def run(self, group: LiveGroup, sampled: Tensor, max_rounds: int | None, version: int) -> tuple[int, Tensor]:
        """Sample until an end token, at most `max_rounds` rounds if given.

        `sampled` [2 + K, B] are the tokens, log-probabilities and sampling masks sampled last, which are not recorded
        yet. Return the number of rounds recorded, as sampled by policy `version`, and the [2 + K, B] sampled last, not
        recorded either.
        """
        records, rows, slots = group.records, group.rows, group.first_slot + group.rows
        cached, positions = records.cached(rows) + 1, records.num_sampled[rows] + 1
        limits = (
            self._stopping.num_tokens_left(group) - 1,
            Uniforms.num_hashed(positions),
            NO_LIMIT if max_rounds is None else max_rounds,
        )
        if self._checks_each:
            count = min(*limits, self._scheduler.num_tokens_covered(slots, cached))
        else:
            count = self._scheduler.allocate_ahead(slots, cached, min(*limits, self.pace.rounds))
        if count <= 0:
            return 0, sampled
        uniforms = self._uniforms.ahead(slots, records.sample_ids[rows], positions, count)
        decode = self._one_by_one if self._checks_each else self.run_together
        # The last field is a placeholder: both functions take the tokens from their second argument.
        recorded, sampled = decode(StepRows(slots, cached, cached), sampled, uniforms)
        records.add_several(rows, recorded, version)
        if not self._checks_each:
            self._scheduler.free_ahead(slots, cached + len(recorded))
        return len(recorded), sampled

    def _one_by_one(self, rows: StepRows, sampled: Tensor, uniforms: Tensor) -> tuple[Reals, Tensor]:
        """Check every round: return what was sampled before the first end token [rounds, 2 + K, B], and what was
        sampled next."""
        recorded = list[Reals]()
        while len(recorded) < len(uniforms):
            tokens = sampled[0].numpy().astype(int)
            if self._stopping.any_end(tokens):
                break
            logits = self._passes(StepRows(rows.slots, rows.cached + len(recorded), tokens), (), ())
            assert logits is not None, "a single stage has logits"
            recorded.append(sampled.numpy())
            sampled = self._sample(logits, uniforms[len(recorded) - 1])
        return np.array(recorded), sampled

    def run_together(self, rows: StepRows, first: Tensor, uniforms: Tensor) -> tuple[Reals, Tensor]:
        """Check once after the last round: return what was sampled before the first end token [rounds, 2 + K, B], and
        what was sampled next."""
        step, rounds = self._passes.multi_step(rows, len(uniforms)), [first]
        for number in uniforms.to(first.device):
            rounds.append(self._sample(step(rounds[-1][0].long()), number))
        sampled = torch.stack(rounds).cpu()
        on_host: Reals = sampled.numpy()
        first_end = self._first_end(on_host[:-1, 0].astype(int))
        self.pace.record(first_end, ended=first_end < len(uniforms))
        return on_host[:first_end], sampled[first_end]

    def _first_end(self, tokens: Numbers) -> int:
        """Return the index of the first round in `tokens` [rounds, B] with an end token, or the number of rounds."""
        return next(
            (index for index, round_tokens in enumerate(tokens) if self._stopping.any_end(round_tokens)), len(tokens)
        )
