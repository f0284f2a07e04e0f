"""The generation engine: continuous batching over the tensor- and pipeline-parallel ranks of one replica.

With p pipeline stages, p groups of slots are in flight: while one group's token passes through the later stages, the
first stage works on the next group. All ranks of a replica do the same work in the same order; activations go forward
from stage to stage, and the last stage sends the sampled tokens back to the others. Between two periods no message is
in transit, and sequences in flight keep their tokens, keys and values while the weights may change under them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.planner.simulation.flight import Flight
from meshwright.profiles.model_shape import ModelSpec
from meshwright.profiles.packing import max_prefill_tokens, num_blocks_for
from meshwright.runtime.inference.chunk_streaming import Listener
from meshwright.runtime.inference.cuda_graphs import GraphedDecodeStep, GraphedPrefills, Prefills, can_replay
from meshwright.runtime.inference.decode_rounds import NO_STEPS, ForwardPasses, MultiStepDecoding, StepRows
from meshwright.runtime.inference.decode_step import DecodeRunner, PackedStep
from meshwright.runtime.inference.drafts import AcceptanceCounts, Drafter, ResponseHistory, VerifiedRows
from meshwright.runtime.inference.in_flight import SequencesInFlight
from meshwright.runtime.inference.replica_engine import Period, ReplicaEngine
from meshwright.runtime.inference.sampling import Sampling, Uniforms
from meshwright.runtime.inference.scheduler import (
    NOTHING_SCHEDULED,
    PrefillPart,
    ScheduledBatch,
    Scheduler,
    SharedPrompts,
)
from meshwright.runtime.inference.slots import (
    Finish,
    LiveGroup,
    LiveSequence,
    Numbers,
    PartialResponse,
    Prompt,
    Reals,
    Response,
    split_into_batches,
)
from meshwright.runtime.inference.stopping import Stopping, StopStrings
from meshwright.runtime.inference.tool_turns import ToolTurns
from meshwright.runtime.model.kv_cache import allocate_cache
from meshwright.runtime.model.mesh import Mesh
from meshwright.runtime.model.model_shard import Decoder
from meshwright.runtime.model.recurrent_states import RecurrentStates
from meshwright.runtime.model.stage_passes import ExpertLockstep, PipelineLink


class Generator(ReplicaEngine):
    """Samples responses from one replica's copy of a model."""

    def __init__(
        self,
        model: Decoder,
        spec: ModelSpec,
        mesh: Mesh,
        *,
        num_slots: int,
        max_tokens: int,
        max_response: int,
        num_blocks: int | None = None,
        eos_tokens: frozenset[int],
        temperature: float,
        seed: int,
        top_k: int = 0,
        top_p: float = 1.0,
        keeps_mask: bool = False,
        stop_strings: StopStrings | None = None,
        recomputes_cache: bool = False,
        use_cuda_graphs: bool = True,
        group_size: int = 1,
        tool_turns: ToolTurns | None = None,
        draft_tokens: int = 0,
        history: ResponseHistory | None = None,
        acceptance: AcceptanceCounts | None = None,
    ) -> None:
        """At most `num_slots` sequences are decoded at a time, each at most `max_tokens` long including its prompt, in
        a cache of `num_blocks` KV blocks. The default is enough blocks for every slot to hold the longest sequence; the
        minimum is enough for one.

        `Sampling` documents the distribution that is sampled, and what `keeps_mask` keeps with a token; `Stopping`
        documents what ends a response. Sequences in flight keep keys and values of older weights, so the distribution
        of their later tokens is that of no single version; with `recomputes_cache` the keys and values are recomputed
        with the new weights. One row of every `group_size` rows of a prompt is prefilled; the others share its blocks.
        With `tool_turns` rollouts are multi-turn, and a tool answers between two turns. A decode round verifies drafts
        of at most `draft_tokens` tokens of each sequence, from the responses in `history` and those in flight; it
        samples the same tokens as without drafts, and counts in `acceptance` how many are accepted. Drafts go neither
        with turns nor with layers that have a recurrent state, which cannot be rolled back.
        """
        assert not (draft_tokens and tool_turns), "rollouts with turns are not decoded speculatively"
        blocks_per_row = num_blocks_for(max_tokens)
        num_blocks = num_slots * blocks_per_row if num_blocks is None else num_blocks
        assert num_blocks >= blocks_per_row, f"{num_blocks} blocks of cache hold no sequence of {max_tokens} tokens"
        self._recomputes_cache, self._cached_version = recomputes_cache, -1
        self._max_prefill_tokens = max_prefill_tokens(-(-num_slots // mesh.layout.pp), max_tokens - max_response)
        parameter = next(model.parameters())
        self._model, self._spec, self._mesh = model, spec, mesh
        call_end = tool_turns.call_end if tool_turns else None
        self._stopping = Stopping(
            eos_tokens=eos_tokens, max_response=max_response, strings=stop_strings, call_end=call_end
        )
        self._sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, keeps_mask=keeps_mask)
        kept_size = self._sampling.kept_size(spec.vocab_size)
        self._seed, self._uniforms = seed, Uniforms(seed, num_slots)
        self._flight: Flight[Prompt, LiveGroup, Response] = Flight(LiveGroup.split(num_slots, mesh.layout.pp))
        for group in self._flight.groups:
            group.keep_sets(kept_size)
        self._cache = allocate_cache(
            spec,
            model.layers,
            mesh.layout.tp,
            num_blocks=num_blocks,
            num_rows=num_slots,
            max_tokens=max_tokens,
            dtype=parameter.dtype,
            device=parameter.device,
        )
        step, replays = PackedStep(model, mesh, self._cache), use_cuda_graphs and can_replay(model)
        self._step: DecodeRunner = GraphedDecodeStep(step, model) if replays else step
        self._prefills = (GraphedPrefills(step, model) if replays else Prefills(step)) if step.can_prefill else None
        self._relay = PipelineLink(mesh, parameter.device, kept_size=kept_size)
        self._passes = ForwardPasses(
            step, self._step, model, mesh, self._relay, prefills=self._prefills, verifies=draft_tokens > 0
        )
        self._prompts, self._lockstep = SharedPrompts(group_size), ExpertLockstep(model, mesh)
        self._sampled: dict[int, Tensor | None] = {}
        """The sampled tokens, log-probabilities and sampling masks [2 + K, B] of groups that are in a forward pass, by
        first slot; None where the last stage has not sent them yet."""
        assert not (draft_tokens and self._cache.states), "a recurrent state cannot be rolled back after a draft"
        self._history = history or ResponseHistory()
        self._drafter = Drafter(draft_tokens, self._history) if draft_tokens else None
        self._drafts: dict[int, VerifiedRows] = {}
        """The drafts of groups that are in a forward pass, by first slot."""
        self.acceptance = acceptance or AcceptanceCounts(draft_tokens)
        self.scheduler = Scheduler(self._cache.tables, self._prompts, self._flight)
        self.tool_turns = tool_turns
        # On a GPU, rounds after an end token are computed and then dropped, but a state cannot be rolled back.
        would_roll_back = parameter.is_cuda and self._cache.states is not None
        self._can_multi_step = _is_alone(mesh) and not (tool_turns or stop_strings or would_roll_back or draft_tokens)
        self._ahead = MultiStepDecoding(
            self._passes,
            self.scheduler,
            self._stopping,
            self._uniforms,
            self._sample,
            checks_each=not parameter.is_cuda,
        )

    @property
    def replays(self) -> bool:
        """True if decode steps are recorded as CUDA graphs, which read this generator's cache."""
        return isinstance(self._step, GraphedDecodeStep)

    @property
    def in_flight(self) -> tuple[Prompt, ...]:
        """The prompts that are admitted and not delivered: first the ended, then the live and paused ones, those
        between two turns, and the waiting ones."""
        ended, live = ([sequence.prompt for sequence in sequences] for sequences in (self._flight.ended, self._live()))
        paused = [sequence.prompt for sequence in self.scheduler.paused]
        return (*ended, *live, *paused, *(self.tool_turns.in_flight if self.tool_turns else ()), *self._flight.waiting)

    def snapshot(self) -> SequencesInFlight:
        """Return a snapshot of everything in flight; only valid between two periods."""
        flight, live = self._flight, self._live()
        held, turns = self.tool_turns.snapshot() if self.tool_turns else ((), {})
        return SequencesInFlight(
            period=flight.period,
            live=tuple(tuple(sequence.to_partial() for sequence in group.live) for group in flight.groups),
            paused=(*self.scheduler.paused, *held),
            turns=turns,
            waiting=tuple(flight.waiting),
            ended=tuple(flight.ended),
            blocks=tuple(tuple(self._cache.tables.blocks_of_row(sequence.slot).tolist()) for sequence in live),
            cached=tuple(self._cache.read(sequence.slot, sequence.num_cached) for sequence in live),
            states=tuple(states.read(sequence.slot) for sequence in live) if (states := self._cache.states) else (),
        )

    def restore(self, snapshot: SequencesInFlight) -> None:
        """Restore a snapshot of a generator that was made with the same arguments; every live sequence gets the same KV
        blocks."""
        for group, live in zip(self._flight.groups, snapshot.live, strict=True):
            for partial in live:
                group.add(partial)
        for partial in snapshot.paused:
            self.scheduler.pause(partial)
        if self.tool_turns:
            self.tool_turns.restore(snapshot.turns)
        self._flight.resume(snapshot.period, snapshot.waiting, snapshot.ended, snapshot.paused)
        for sequence, blocks, (keys, values) in zip(self._live(), snapshot.blocks, snapshot.cached, strict=True):
            self._cache.tables.restore(sequence.slot, blocks)
            self._cache.write(sequence.slot, keys, values)
        if self._cache.states is not None:
            for sequence, (states, inputs) in zip(self._live(), snapshot.states, strict=True):
                self._cache.states.write(sequence.slot, states, inputs)

    def _live(self) -> list[LiveSequence]:
        return [sequence for group in self._flight.groups for sequence in group.live]

    def _run(self, waiting: list[Prompt], period: Period) -> tuple[Response, ...]:
        version, stream = period.version, period.stream
        self._model.eval()
        self._step.refresh_weights()
        if self._prefills:
            self._prefills.refresh_weights()
        self._prompts.forget()
        if self.tool_turns:
            for partial in self.tool_turns.begin_period(period.delivery):
                self.scheduler.pause(partial)
        if self._recomputes_cache and version != self._cached_version:
            self._recompute_cache()
        self._cached_version = version
        if self._drafter:
            live = [sequence.to_partial() for sequence in self._live()]
            self._drafter.begin_period((*self._flight.ended, *live, *self.scheduler.paused))
        delivered = self._flight.run_period(
            waiting,
            period.delivery,
            process_sampled=lambda group: self._process_sampled(group, version, stream),
            step=self._step_group,
            multi_step=lambda max_rounds: self._multi_step(max_rounds, version, stream),
            min_rounds=period.min_rounds,
        )
        self._relay.flush()
        if self.tool_turns:
            self.tool_turns.end_period()
        self._lockstep.finish()
        if self._drafter:
            for response in delivered:
                self._history.add(response.prompt.tokens, response.tokens, response.step)
        return delivered

    def prefill_pass(self, lengths: Sequence[int]) -> Callable[[], object]:
        """Return a function that prefills prompts of these lengths in tokens and samples their first tokens. Nothing
        else may be in flight. It may be called any number of times; the profiler times it."""
        [group] = self._flight.groups
        sequences = []
        for row, length in enumerate(lengths):
            self._cache.tables.allocate(group.next_slot, length + 1)
            sequences.append(group.add(PartialResponse(prompt=Prompt(row=row, sample_id=row, tokens=(1,) * length))))
        batch, no_rows = ScheduledBatch(sequences, list(range(len(sequences))), {}, len(sequences), {}), group.rows[:0]
        return lambda: _to_host(
            self.sample_next(group, no_rows, batch, batch.prefill_batches(self._max_prefill_tokens))
        )

    def decode_pass(self, cached: Sequence[int], shortest: int, longest: int, at_once: int = 1) -> Callable[[], object]:
        """Return a function that runs one decode step of rows that have `cached` tokens each in the cache, or `at_once`
        steps without a synchronisation between them, with nothing else in flight. It may be called any number of times;
        the profiler times it.

        A row that would get more than `longest` tokens ends, and one with `shortest` cached tokens takes its place. If
        the two are equal, no row grows from call to call.
        """
        [group] = self._flight.groups
        prompt = (1,) * shortest
        for row in range(len(cached)):
            group.add(
                PartialResponse(
                    prompt=Prompt(row=row, sample_id=row, tokens=prompt), tokens=(1,), logprobs=(0,), versions=(0,)
                )
            )
        records, rows = group.records, group.rows
        records.num_sampled[rows] = np.array(cached) - shortest + 1
        self.scheduler.allocate_next(group)

        def step() -> object:
            tokens = (
                self._decode_several(group, at_once)
                if at_once > 1
                else _to_host(self.sample_next(group, rows, NOTHING_SCHEDULED, ()))
            )
            if shortest < longest:
                records.num_sampled[rows] += at_once
                ended = rows[records.cached(rows) > longest]
                self.scheduler.release((group.first_slot + ended).tolist())
                records.num_sampled[ended] = 1
                self.scheduler.allocate_next(group)
            return tokens

        return step

    def _decode_several(self, group: LiveGroup, count: int) -> object:
        """Return the next `count` tokens of all rows of a group, end tokens included, after one synchronisation with
        the host."""
        records, rows = group.records, group.rows
        slots, cached = group.first_slot + rows, records.cached(rows)
        num_covered = self.scheduler.allocate_ahead(slots, cached, count)
        assert num_covered == count, f"{num_covered} of {count} rounds have blocks"
        uniforms = self._uniforms.at(slots, records.sample_ids[rows], records.num_sampled[rows])
        num_values = 2 + self._sampling.kept_size(self._spec.vocab_size)
        first = torch.zeros(num_values, len(rows), dtype=torch.float64, device=self._cache.keys.device)
        sampled, _ = self._ahead.run_together(StepRows(slots, cached, cached), first, uniforms.repeat(count, 1))
        return sampled.tolist()

    def _pause(self, partial: PartialResponse) -> None:
        self.scheduler.pause(partial)

    def _process_sampled(self, group: LiveGroup, version: int, stream: Listener | None) -> Sequence[Response]:
        """Append the tokens sampled by the forward pass of the group; return the responses that end with them."""
        if group.first_slot not in self._sampled:
            return ()
        sampled, drafts = self._sampled.pop(group.first_slot), self._drafts.pop(group.first_slot, None)
        if sampled is None:
            sampled = self._relay.receive_sampled(len(group.live) + (len(drafts.tokens) if drafts else 0))
        if drafts:
            responses = self._record_verified(group, sampled.cpu().numpy(), drafts, version)
        else:
            tokens, logprobs, *kept = sampled.cpu().numpy()
            responses, freed = group.record(
                tokens.astype(int), logprobs, version=version, finish=self._finish, kept=kept
            )
            self.scheduler.release(freed)
        if self.tool_turns:
            self._flight.num_held += self.tool_turns.begin_calls(group, self.scheduler)
        if stream is not None:
            stream.on_round(group.live, responses)
        return responses

    def _record_verified(
        self, group: LiveGroup, sampled: Reals, drafts: VerifiedRows, version: int
    ) -> Sequence[Response]:
        """Append the verified tokens to the live sequences of a group; return the responses that end with them.

        `sampled` [2 + K, B + D] are tokens, log-probabilities and sampling masks.
        """
        assert self._drafter
        kept, before = drafts.num_kept(sampled[0].astype(np.int64)), group.records.num_sampled[group.rows]
        rows = group.rows
        starts = np.cumsum(drafts.counts + 1) - (drafts.counts + 1)
        responses, freed = group.record_several(sampled, kept, starts, version=version, finish=self._stopping.finish)
        self.acceptance.record(drafts.counts, kept, group.records.num_sampled[rows] - before)
        for response in responses:
            self._drafter.end(response)
        self.scheduler.release(freed)
        if len(group.rows):
            self.scheduler.free_ahead(group.first_slot + group.rows, group.records.cached(group.rows) + 1)
        return responses

    def _new_drafts(self, drafter: Drafter, group: LiveGroup, num_continuing: int) -> VerifiedRows:
        """Return drafts for the first `num_continuing` live sequences of a group, as far as they have blocks and tokens
        left; the others have just been scheduled."""
        # A sequence samples one token more than it accepts.
        limits = np.minimum(self._stopping.tokens_left(group)[:num_continuing] - 1, drafter.draft_tokens)
        slots, cached = (
            group.first_slot + group.rows[:num_continuing],
            group.records.cached(group.rows[:num_continuing]),
        )
        drafts = [drafter.draft(sequence, limit) for sequence, limit in zip(group.live, limits.tolist(), strict=False)]
        counts = np.array([len(draft) for draft in drafts], dtype=np.int64)
        if counts.any():
            counts = self.scheduler.allocate_drafts(slots, cached + 1, counts)
        none = [()] * (len(group.live) - num_continuing)
        return VerifiedRows.of([*(d[:count] for d, count in zip(drafts, counts.tolist(), strict=True)), *none])

    def _finish(self, group: LiveGroup) -> dict[int, Finish]:
        """Return which live sequences end with the last sampled tokens, and why; one that calls a tool continues if
        turns and tokens are left."""
        finished = self._stopping.finish(group)
        return self.tool_turns.take_calls(group, finished) if self.tool_turns else finished

    def _step_group(self, group: LiveGroup) -> int:
        """Run one decode round of the group, with the prefill of the sequences that are scheduled; return how many of
        these are new."""
        self.scheduler.allocate_next(group)
        continuing = group.rows
        answered = self.tool_turns.resume_answered(group, self.scheduler) if self.tool_turns else ()
        scheduled = self.scheduler.schedule(group, answered)
        if self.tool_turns:
            self.tool_turns.limit(group, scheduled.sequences)
        batches, sampled = scheduled.prefill_batches(self._max_prefill_tokens), None
        with self._lockstep.passes(self._passes.count(len(continuing), len(batches))):
            if group.live:
                if self._drafter:
                    drafts = self._new_drafts(self._drafter, group, len(continuing))
                    self._drafts[group.first_slot] = drafts
                sampled = self._sampled[group.first_slot] = self.sample_next(group, continuing, scheduled, batches)
        self._prompts.keep_for(self._flight.waiting)
        if sampled is not None:
            self._relay.send_sampled(sampled)
        elif self.tool_turns and not self._sampled:
            self.tool_turns.wait_for_answer()
        return scheduled.num_new

    def _multi_step(self, max_rounds: int | None, version: int, stream: Listener | None) -> int:
        """Run decode rounds in which nothing can be admitted and no sequence reaches its length limit; return how many.
        A round that samples an end token is the last, and is left to `_process_sampled`."""
        group = self._flight.groups[0]
        if not self._can_multi_step or not group.live or self.scheduler.can_schedule(group):
            return 0
        if stream is not None and stream.needs_each_round:
            return 0
        sampled = self._sampled[group.first_slot]
        assert sampled is not None, "a single stage has what it sampled"
        count, self._sampled[group.first_slot] = self._ahead.run(group, sampled, max_rounds, version)
        if stream is not None and count:
            stream.on_rounds(len(group.live), count)
        return count

    @torch.no_grad()
    def sample_next(
        self, group: LiveGroup, continuing: Numbers, admitted: ScheduledBatch, parts: Sequence[Sequence[PrefillPart]]
    ) -> Tensor | None:
        """Return the next tokens of the group, their log-probabilities and sampling masks, [2 + K, B] float64: of the
        rows that continue, then of the admitted sequences. `parts` are the prefill batches of the latter. None except
        on the last stage."""
        records, prefilled = group.records, [admitted.sequences[index] for index in admitted.prefilled]
        steps = StepRows(group.first_slot + continuing, records.cached(continuing), records.last(continuing))
        drafts = self._drafts.get(group.first_slot)
        if drafts:
            steps = steps.with_drafts(drafts)
        logits = self._passes(
            steps, [(sequence.slot, (*sequence.prompt.tokens, *sequence.tokens)) for sequence in prefilled], parts
        )
        if admitted.sequences:
            logits = self._all_logits(logits, len(steps.slots), admitted)
        return None if logits is None else self._sample_group(logits, group, drafts)

    def _all_logits(self, logits: Tensor | None, num_continuing: int, admitted: ScheduledBatch) -> Tensor | None:
        """Return logits [B, V / tp] of the rows that continue, with their drafts, and of all admitted sequences, given
        those of the rows that continue and of the prefilled ones. A sequence that was not prefilled shares the cached
        prompt of another sample. None except on the last stage."""
        if self._cache.states is not None:
            self._share_states(self._cache.states, admitted)
        for index, source in admitted.shared_from.items():
            sequence = admitted.sequences[index]
            self._cache.share(source, sequence.slot, len(sequence.prompt.tokens))
        prefilled = None if logits is None else logits[num_continuing:]
        admitted_logits = self._prompts.all_logits(admitted.sequences, admitted.prefilled, prefilled)
        if logits is None or admitted_logits is None or not admitted.shared_from:
            return admitted_logits if logits is None else logits
        return torch.cat((logits[:num_continuing], admitted_logits))

    def _share_states(self, states: RecurrentStates, admitted: ScheduledBatch) -> None:
        """Copy the states after shared prompts, and keep the state after a prompt that a waiting sequence shares."""
        prefilled = {admitted.sequences[index].slot for index in admitted.prefilled if index not in admitted.cached}
        for index, source in admitted.shared_from.items():
            states.start_from_prompt(admitted.sequences[index].slot, source if source in prefilled else None)
        waiting = self._flight.waiting
        next_source = self._prompts.source(waiting[0]) if waiting else None
        if next_source is not None and next_source in prefilled:
            states.keep_prompt(next_source)

    @torch.no_grad()
    def _recompute_cache(self) -> None:
        """Recompute the keys and values of all live sequences, in prefill batches of the size that memory was planned
        for."""
        live = self._live()
        rows = [
            (sequence.slot, (*sequence.prompt.tokens, *sequence.tokens)[: sequence.num_cached]) for sequence in live
        ]
        batches = list(split_into_batches([len(tokens) for _, tokens in rows], self._max_prefill_tokens))
        with self._lockstep.passes(self._passes.count(0, len(batches))):
            self._passes(NO_STEPS, rows, batches)
        self._relay.flush()

    def _sample_group(self, logits: Tensor, group: LiveGroup, drafts: VerifiedRows | None) -> Tensor:
        """Return tokens, log-probabilities and sampling masks [2 + K, B] float64 for all rows of the group, from logits
        [B, V / tp]; with drafts of D tokens [2 + K, B + D], from as many logits."""
        records, rows = group.records, group.rows
        sample_ids, positions = records.sample_ids[rows], records.num_sampled[rows]
        if drafts:
            numbers = drafts.uniforms(self._seed, sample_ids, positions)
        else:
            numbers = self._uniforms.at(group.first_slot + rows, sample_ids, positions)
        return self._sample(logits, numbers)

    @torch.inference_mode()
    def _sample(self, shards: Tensor, uniforms: Tensor) -> Tensor:
        """Return tokens, log-probabilities and sampling masks [2 + K, B] float64, sampled from logits [B, V / tp] with
        uniform numbers [B]. Runs on the last stage."""
        logits = _gather_vocabulary(shards, self._mesh)[:, : self._spec.vocab_size]
        return self._sampling.sample_rows(logits, uniforms.to(logits.device))


def _to_host(sampled: Tensor | None) -> object:
    """Copy the sampled tokens to the host, on the last stage."""
    return sampled if sampled is None else sampled.tolist()


def _is_alone(mesh: Mesh) -> bool:
    """True if no other pipeline stage and no other replica works in step with this one, so that it may run several
    rounds at once."""
    return mesh.layout.pp == 1 and mesh.layout.expert_replicas == 1


def _gather_vocabulary(logits: Tensor, mesh: Mesh) -> Tensor:
    """Return logits [B, V], gathered from the shards [B, V / tp] of the tensor-parallel group."""
    if mesh.layout.tp == 1:
        return logits
    shards = [torch.empty_like(logits) for _ in range(mesh.layout.tp)]
    dist.all_gather(shards, logits.contiguous(), group=mesh.groups.tp)
    return torch.cat(shards, dim=-1)
