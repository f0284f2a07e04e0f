"""The generation engine: continuous batching over the tensor- and pipeline-parallel ranks of one replica.

With p pipeline stages, p groups of slots are in flight: while one group's token passes through the later stages, the
first stage works on the next group. All ranks of a replica do the same work in the same order; activations go forward
from stage to stage, and the last stage sends the sampled tokens back to the others. Between two periods no message is
in transit, and sequences in flight keep their tokens, keys and values while the weights may change under them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.planner.simulation.flight import Delivery, Everything, Flight
from meshwright.profiles.model_shape import ModelSpec
from meshwright.profiles.packing import blocks_of, most_packed
from meshwright.runtime.generation.chunking import Listener
from meshwright.runtime.generation.cuda_graphs import Replayed, can_replay
from meshwright.runtime.generation.decoding import Decoding
from meshwright.runtime.generation.in_flight_state import InFlight
from meshwright.runtime.generation.packed_step import PackedStep
from meshwright.runtime.generation.passes import NO_STEPS, Passes, StepRows
from meshwright.runtime.generation.recorded_prefills import Prefills, RecordedPrefills
from meshwright.runtime.generation.records import Numbers
from meshwright.runtime.generation.rounds_ahead import RoundsAhead
from meshwright.runtime.generation.sampling import Sampling, Uniforms
from meshwright.runtime.generation.seating import NOBODY, Part, Seated, Seating
from meshwright.runtime.generation.shared_prompts import SharedPrompts
from meshwright.runtime.generation.slots import (
    Beginning,
    Finish,
    LiveGroup,
    LiveSequence,
    Partial,
    Prompt,
    Response,
    packs,
)
from meshwright.runtime.generation.stopping import Stopping, StopStrings
from meshwright.runtime.generation.tool_turns import ToolTurnTaking
from meshwright.runtime.model.expert_sync import Lockstep
from meshwright.runtime.model.kv_cache import PagedCache
from meshwright.runtime.model.mesh import Mesh
from meshwright.runtime.model.model_shard import Decoder
from meshwright.runtime.model.pipeline_p2p import Relay


class Generator:
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
        stop_strings: StopStrings | None = None,
        recomputes_cache: bool = False,
        records_steps: bool = True,
        group_size: int = 1,
        tool_turns: ToolTurnTaking | None = None,
    ) -> None:
        """At most `num_slots` sequences are decoded at a time, each at most `max_tokens` long including its prompt, in
        a cache of `num_blocks` KV blocks. The default is enough blocks for every slot to hold the longest sequence; the
        minimum is enough for one.

        `Sampling` documents the distribution that is sampled and `Stopping` what ends a response. Sequences in flight
        keep the keys and values of older weights, so that their later tokens are sampled from no single version; with
        `recomputes_cache` these are recomputed with the new weights. One row of every `group_size` rows of a prompt is
        prefilled, the others share its blocks. With `tool_turns` rollouts have several turns, between which a tool
        answers.
        """
        blocks_per_row = blocks_of(max_tokens)
        num_blocks = num_slots * blocks_per_row if num_blocks is None else num_blocks
        assert num_blocks >= blocks_per_row, f"{num_blocks} blocks of cache hold no sequence of {max_tokens} tokens"
        self._recomputes_cache, self._cached_version = recomputes_cache, -1
        self._max_prefill_tokens = most_packed(-(-num_slots // mesh.layout.pp), max_tokens - max_response)
        parameter = next(model.parameters())
        self._model, self._spec, self._mesh = model, spec, mesh
        call_end = tool_turns.call_end if tool_turns else None
        self._stopping = Stopping(
            eos_tokens=eos_tokens, max_response=max_response, strings=stop_strings, calls=call_end
        )
        self._sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p)
        self._uniforms = Uniforms(seed, num_slots)
        self._flight: Flight[Prompt, LiveGroup, Response] = Flight(LiveGroup.cut(num_slots, mesh.layout.pp))
        self._cache = PagedCache(
            num_layers=len(model.decoder.layers),
            num_blocks=num_blocks,
            num_rows=num_slots,
            num_kv_heads=spec.num_kv_heads // mesh.layout.tp,
            max_tokens=max_tokens,
            head_dim=spec.head_dim,
            dtype=parameter.dtype,
            device=parameter.device,
        )
        step, replays = PackedStep(model, mesh, self._cache), records_steps and can_replay(model)
        self._step: Decoding = Replayed(step, model) if replays else step
        self._prefills = (RecordedPrefills(step, model) if replays else Prefills(step)) if step.can_prefill else None
        self._relay = Relay(mesh, parameter.device)
        self._passes = Passes(step, self._step, model, mesh, self._relay, prefills=self._prefills)
        self._prompts, self._lockstep = SharedPrompts(group_size), Lockstep(model, mesh)
        self._sampled: dict[int, Tensor | None] = {}
        """The sampled tokens and log-probabilities [2, B] of groups that are in a forward pass, by first slot; None
        where the last stage has not sent them yet."""
        self.seating = Seating(self._cache.tables, self._prompts, self._flight)
        self._tool_turns = tool_turns
        self._can_multi_step = _is_alone(mesh) and not (tool_turns or stop_strings)
        self._ahead = RoundsAhead(
            self._passes, self.seating, self._stopping, self._uniforms, self._sample, looks=not parameter.is_cuda
        )

    def generate(self, prompts: Sequence[Prompt], *, version: int = 0) -> tuple[Response, ...]:
        """Return the responses in order of step and row, all sampled by policy `version`, with nothing else in flight.

        Every rank of the replica must call with the same prompts.
        """
        assert not self.in_flight, "a period has left sequences in flight"
        return self.turn(prompts, version=version, delivery=Everything())

    @property
    def in_flight(self) -> tuple[Prompt, ...]:
        """The prompts that are admitted and not delivered: first the ended, then the live, paused and waiting ones."""
        ended, live = ([sequence.prompt for sequence in sequences] for sequences in (self._flight.ended, self._live()))
        return (*ended, *live, *(sequence.prompt for sequence in self.seating.paused), *self._flight.waiting)

    def kept(self) -> InFlight:
        """Return a snapshot of everything in flight; only valid between two periods."""
        flight, live = self._flight, self._live()
        return InFlight(
            turn=flight.turn,
            live=tuple(tuple(sequence.kept() for sequence in group.live) for group in flight.groups),
            paused=tuple(self.seating.paused),
            waiting=tuple(flight.waiting),
            ended=tuple(flight.ended),
            blocks=tuple(tuple(self._cache.tables.held(sequence.slot).tolist()) for sequence in live),
            cached=tuple(self._cache.read(sequence.slot, sequence.num_cached) for sequence in live),
        )

    def resume(self, kept: InFlight) -> None:
        """Restore a snapshot of a generator of the same kind; every live sequence gets the same KV blocks."""
        for group, live in zip(self._flight.groups, kept.live, strict=True):
            for partial in live:
                group.seat(partial)
        self.seating.paused = list(kept.paused)
        self._flight.resume(kept.turn, kept.waiting, kept.ended, kept.paused)
        for sequence, blocks, (keys, values) in zip(self._live(), kept.blocks, kept.cached, strict=True):
            self._cache.tables.restore(sequence.slot, blocks)
            self._cache.write(sequence.slot, keys, values)

    def _live(self) -> list[LiveSequence]:
        return [sequence for group in self._flight.groups for sequence in group.live]

    def turn(
        self,
        admitted: Sequence[Prompt],
        *,
        version: int,
        delivery: Delivery,
        least_rounds: int = 0,
        stream: Listener | None = None,
        begun: Mapping[int, Beginning] | None = None,
    ) -> tuple[Response, ...]:
        """Sample with policy `version` until `delivery` is satisfied, and for at least `least_rounds` decode rounds
        while anything is left to sample. Return what was delivered, in order of step and row.

        The admitted prompts wait for slots, first come first served; what is not delivered stays in flight for the next
        period. `stream` receives tokens as they are sampled. `begun` maps the sample id of an admitted prompt to what
        was sampled for it before the run was resumed. Every rank of the replica must call with the same arguments, and
        every replica that holds experts together with this one must call too, with its own.
        """
        waiting = self._resume_admitted(admitted, begun or {})
        self._model.eval()
        self._step.begin_turn()
        if self._prefills:
            self._prefills.begin_turn()
        self._prompts.forget()
        if self._tool_turns:
            self._tool_turns.begin()
        if self._recomputes_cache and version != self._cached_version:
            self._recompute_cache()
        self._cached_version = version
        delivered = self._flight.play(
            waiting,
            delivery,
            learn=lambda group: self._process_sampled(group, version, stream),
            advance=self._step_group,
            skip=lambda most: 0 if stream else self._multi_step(most, version),
            least_rounds=least_rounds,
        )
        self._relay.flush()
        if self._tool_turns:
            self._tool_turns.end()
        self._lockstep.finish()
        return delivered

    def prefills(self, lengths: Sequence[int]) -> Callable[[], object]:
        """Return a function that samples the first tokens of prompts with these lengths in tokens, with nothing else in
        flight. It may be called any number of times; the profiler times it."""
        [group] = self._flight.groups
        sequences = []
        for row, length in enumerate(lengths):
            self._cache.tables.take(group.next_slot, length + 1)
            sequences.append(group.seat(Partial(prompt=Prompt(row=row, draw=row, tokens=(1,) * length))))
        batch, no_rows = Seated(sequences, list(range(len(sequences))), {}, len(sequences), {}), group.rows[:0]
        return lambda: _to_host(self.draw_next(group, no_rows, batch, batch.parts(self._max_prefill_tokens)))

    def steps(self, cached: Sequence[int], shortest: int, longest: int, at_once: int = 1) -> Callable[[], object]:
        """Return a function that runs one decode step of rows that have `cached` tokens each in the cache, or `at_once`
        steps without a synchronisation between them, with nothing else in flight. It may be called any number of times;
        the profiler times it.

        A row that would get more than `longest` tokens ends, and one with `shortest` cached tokens takes its place. If
        the two are equal, no row grows from call to call.
        """
        [group] = self._flight.groups
        prompt = (1,) * shortest
        for row in range(len(cached)):
            group.seat(
                Partial(prompt=Prompt(row=row, draw=row, tokens=prompt), tokens=(1,), logprobs=(0,), versions=(0,))
            )
        records, rows = group.records, group.rows
        records.num_drawn[rows] = np.array(cached) - shortest + 1
        self.seating.grow(group)

        def step() -> object:
            tokens = (
                self._decode_several(group, at_once)
                if at_once > 1
                else _to_host(self.draw_next(group, rows, NOBODY, ()))
            )
            if shortest < longest:
                records.num_drawn[rows] += at_once
                ended = rows[records.cached(rows) > longest]
                self.seating.release((group.first_slot + ended).tolist())
                records.num_drawn[ended] = 1
                self.seating.grow(group)
            return tokens

        return step

    def _decode_several(self, group: LiveGroup, count: int) -> object:
        """Return the next `count` tokens of all rows of a group, end tokens included, after one synchronisation with
        the host."""
        records, rows = group.records, group.rows
        slots, cached = group.first_slot + rows, records.cached(rows)
        num_covered = self.seating.grow_ahead(slots, cached, count)
        assert num_covered == count, f"{num_covered} of {count} rounds have blocks"
        uniforms = self._uniforms.of(slots, records.draws[rows], records.num_drawn[rows])
        first = torch.zeros(2, len(rows), dtype=torch.float64, device=self._cache.keys.device)
        sampled, _ = self._ahead.together(StepRows(slots, cached, cached), first, uniforms.repeat(count, 1))
        return sampled.tolist()

    def _resume_admitted(self, admitted: Sequence[Prompt], sampled_before: Mapping[int, Beginning]) -> list[Prompt]:
        """Return the admitted prompts for which nothing has been sampled yet. The others are resumed as if they had
        been pre-empted, or have ended; `sampled_before` is by sample id."""
        for prompt in admitted:
            if prompt.draw in sampled_before:
                resumed = sampled_before[prompt.draw].of(prompt, self._flight.turn + 1)
                if isinstance(resumed, Response):
                    self._flight.ended.append(resumed)
                else:
                    self.seating.pause(resumed)
                    self._flight.carry(resumed)
        return [prompt for prompt in admitted if prompt.draw not in sampled_before]

    def _process_sampled(self, group: LiveGroup, version: int, stream: Listener | None) -> Sequence[Response]:
        """Append the tokens sampled by the forward pass of the group; return the responses that end with them."""
        if group.first_slot not in self._sampled:
            return ()
        sampled = self._sampled.pop(group.first_slot)
        if sampled is None:
            sampled = self._relay.receive_drawn(len(group.live))
        tokens, logprobs = sampled.cpu().numpy()
        responses, freed = group.record(tokens.astype(int), logprobs, version=version, finish=self._finish)
        self.seating.release(freed)
        if self._tool_turns:
            self._tool_turns.begin_calls(group, self.seating)
        if stream is not None:
            stream.tell(group.live, responses)
        return responses

    def _finish(self, group: LiveGroup) -> dict[int, Finish]:
        """Return which live sequences end with the last sampled tokens, and why; one that calls a tool continues if it
        may."""
        finished = self._stopping.finish(group)
        return self._tool_turns.take_calls(group, finished) if self._tool_turns else finished

    def _step_group(self, group: LiveGroup) -> int:
        """Run one decode round of the group and the prefill of what it admits; return how many sequences are new."""
        self.seating.grow(group)
        continuing = group.rows
        answered = self._tool_turns.answered(group, self.seating) if self._tool_turns else ()
        scheduled = self.seating.admit(group, answered)
        if self._tool_turns:
            self._tool_turns.limit(group, scheduled.sequences)
        batches, sampled = scheduled.parts(self._max_prefill_tokens), None
        with self._lockstep.passes(self._passes.count(len(continuing), len(batches))):
            if group.live:
                sampled = self._sampled[group.first_slot] = self.draw_next(group, continuing, scheduled, batches)
        self._prompts.keep_for(self._flight.waiting)
        if sampled is not None:
            self._relay.send_drawn(sampled)
        elif self._tool_turns and not self._sampled:
            self._tool_turns.wait()
        return scheduled.num_begun

    def _multi_step(self, max_rounds: int | None, version: int) -> int:
        """Run decode rounds in which nothing can be admitted and no sequence reaches its length limit; return how many.
        A round that samples an end token is the last, and is left to `_process_sampled`."""
        group = self._flight.groups[0]
        if not self._can_multi_step or not group.live or self.seating.may_admit(group):
            return 0
        sampled = self._sampled[group.first_slot]
        assert sampled is not None, "a single stage has what it sampled"
        count, self._sampled[group.first_slot] = self._ahead.draw(group, sampled, max_rounds, version)
        return count

    @torch.no_grad()
    def draw_next(
        self, group: LiveGroup, continuing: Numbers, admitted: Seated, parts: Sequence[Sequence[Part]]
    ) -> Tensor | None:
        """Return the next tokens of the group and their log-probabilities, [2, B] float64: of the rows that continue,
        then of what was admitted, whose tokens are prefilled in these batches. None before the last stage."""
        records, prefilled = group.records, [admitted.sequences[index] for index in admitted.fed]
        steps = StepRows(group.first_slot + continuing, records.cached(continuing), records.last(continuing))
        logits = self._passes(
            steps, [(sequence.slot, (*sequence.prompt.tokens, *sequence.tokens)) for sequence in prefilled], parts
        )
        if admitted.sequences:
            logits = self._all_logits(logits, len(continuing), admitted)
        return None if logits is None else self._sample_group(logits, group)

    def _all_logits(self, logits: Tensor | None, num_continuing: int, admitted: Seated) -> Tensor | None:
        """Return logits [B, V / tp] of the rows that continue and of all admitted sequences, given those of the rows
        that continue and of the prefilled ones. A sequence that was not prefilled shares the cached prompt of another
        sample. None before the last stage."""
        for index, source in admitted.sources.items():
            sequence = admitted.sequences[index]
            self._cache.share(source, sequence.slot, len(sequence.prompt.tokens))
        prefilled = None if logits is None else logits[num_continuing:]
        admitted_logits = self._prompts.of_all(admitted.sequences, admitted.fed, prefilled)
        if logits is None or admitted_logits is None or not admitted.sources:
            return admitted_logits if logits is None else logits
        return torch.cat((logits[:num_continuing], admitted_logits))

    @torch.no_grad()
    def _recompute_cache(self) -> None:
        """Recompute the keys and values of all live sequences, in prefill batches of the size that memory was planned
        for."""
        live = self._live()
        texts = [
            (sequence.slot, (*sequence.prompt.tokens, *sequence.tokens)[: sequence.num_cached]) for sequence in live
        ]
        batches = list(packs([len(text) for _, text in texts], self._max_prefill_tokens))
        with self._lockstep.passes(self._passes.count(0, len(batches))):
            self._passes(NO_STEPS, texts, batches)
        self._relay.flush()

    def _sample_group(self, logits: Tensor, group: LiveGroup) -> Tensor:
        """Return tokens and log-probabilities [2, B] float64 for all rows of the group, from logits [B, V / tp]."""
        records, rows = group.records, group.rows
        uniforms = self._uniforms.of(group.first_slot + rows, records.draws[rows], records.num_drawn[rows])
        return self._sample(logits, uniforms)

    @torch.inference_mode()
    def _sample(self, shards: Tensor, uniforms: Tensor) -> Tensor:
        """Return tokens and log-probabilities [2, B] float64, sampled from logits [B, V / tp] with uniform numbers [B].
        Runs on the last stage."""
        logits = _gather_vocabulary(shards, self._mesh)[:, : self._spec.vocab_size]
        tokens, logprobs = self._sampling.draw(logits, uniforms.to(logits.device))
        return torch.stack([tokens.double(), logprobs.double()])


def _to_host(sampled: Tensor | None) -> object:
    """Copy the sampled tokens to the host, on the last stage."""
    return sampled if sampled is None else sampled.tolist()


def _is_alone(mesh: Mesh) -> bool:
    """True if no other pipeline stage and no other replica waits for this one, so that it may run ahead."""
    return mesh.layout.pp == 1 and mesh.layout.expert_replicas == 1


def _gather_vocabulary(logits: Tensor, mesh: Mesh) -> Tensor:
    """Return logits [B, V], gathered from the shards [B, V / tp] of the tensor-parallel group."""
    if mesh.layout.tp == 1:
        return logits
    shards = [torch.empty_like(logits) for _ in range(mesh.layout.tp)]
    dist.all_gather(shards, logits.contiguous(), group=mesh.groups.tp)
    return torch.cat(shards, dim=-1)
