"""The generation engine: continuous batching over tensor- and pipeline-parallel ranks.

With p pipeline stages, p groups of slots are in flight: while one group's token is on its way through the later stages,
the first stage works on the next group. All ranks of a replica do the same in the same order; activations go forward
from stage to stage, and the sampled tokens go from the last stage back to the others. Between two turns no message is
on its way, and sequences in flight keep their tokens, keys and values while the weights may change under them.
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
    """Draws responses from one replica's copy of a model."""

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
        """`num_slots` sequences at most are decoded at a time, each at most `max_tokens` long with its prompt, in
        `num_blocks` blocks of cache: as many as all could need where no number is given, one longest one at least.

        The distribution that is sampled is `Sampling`'s; responses end as `Stopping` says. Sequences in flight keep the
        keys and values of older weights, so that what is drawn next is of no one version, or, with `recomputes_cache`,
        get those of the new ones. Of `group_size` rows of a prompt one is prefilled. With `tool_turns` tools answer.
        """
        needed = blocks_of(max_tokens)
        num_blocks = num_slots * needed if num_blocks is None else num_blocks
        assert num_blocks >= needed, f"{num_blocks} blocks of cache hold no sequence of {max_tokens} tokens"
        self._recomputes_cache, self._cached_version = recomputes_cache, -1
        self._most_packed = most_packed(-(-num_slots // mesh.layout.pp), max_tokens - max_response)
        parameter = next(model.parameters())
        self._model, self._spec, self._mesh = model, spec, mesh
        calls = tool_turns.call_end if tool_turns else None
        self._stopping = Stopping(eos_tokens=eos_tokens, max_response=max_response, strings=stop_strings, calls=calls)
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
        step, records = PackedStep(model, mesh, self._cache), records_steps and can_replay(model)
        self._step: Decoding = Replayed(step, model) if records else step
        self._prefills = (RecordedPrefills(step, model) if records else Prefills(step)) if step.can_prefill else None
        self._relay = Relay(mesh, parameter.device)
        self._passes = Passes(step, self._step, model, mesh, self._relay, prefills=self._prefills)
        self._prompts, self._lockstep = SharedPrompts(group_size), Lockstep(model, mesh)
        self._drawn: dict[int, Tensor | None] = {}
        """By first slot of each group that is being advanced: its draws [2, B], which only the last stage has yet."""
        self.seating = Seating(self._cache.tables, self._prompts, self._flight)
        self._tool_turns = tool_turns
        self._can_skip = _is_alone(mesh) and not (tool_turns or stop_strings)
        self._ahead = RoundsAhead(
            self._passes, self.seating, self._stopping, self._uniforms, self._choose, looks=not parameter.is_cuda
        )

    def generate(self, prompts: Sequence[Prompt], *, version: int = 0) -> tuple[Response, ...]:
        """The responses in order of step and row, all drawn by policy `version`, with nothing else in flight.

        Every rank of the replica must call with the same prompts.
        """
        assert not self.in_flight, "a turn has left sequences in flight"
        return self.turn(prompts, version=version, delivery=Everything())

    @property
    def in_flight(self) -> tuple[Prompt, ...]:
        """The prompts admitted and not delivered: ended, live, paused, then waiting ones."""
        ended, live = ([one.prompt for one in found] for found in (self._flight.ended, self._live()))
        return (*ended, *live, *(one.prompt for one in self.seating.paused), *self._flight.waiting)

    def kept(self) -> InFlight:
        """What is in flight between two turns."""
        flight, live = self._flight, self._live()
        return InFlight(
            turn=flight.turn,
            live=tuple(tuple(sequence.kept() for sequence in group.live) for group in flight.groups),
            paused=tuple(self.seating.paused),
            waiting=tuple(flight.waiting),
            ended=tuple(flight.ended),
            blocks=tuple(tuple(self._cache.tables.held(one.slot).tolist()) for one in live),
            cached=tuple(self._cache.read(one.slot, one.num_cached) for one in live),
        )

    def resume(self, kept: InFlight) -> None:
        """Takes over what a generator of the same kind had in flight, in the same blocks."""
        for group, live in zip(self._flight.groups, kept.live, strict=True):
            for partial in live:
                group.seat(partial)
        self.seating.paused = list(kept.paused)
        self._flight.resume(kept.turn, kept.waiting, kept.ended, kept.paused)
        for one, blocks, (keys, values) in zip(self._live(), kept.blocks, kept.cached, strict=True):
            self._cache.tables.restore(one.slot, blocks)
            self._cache.write(one.slot, keys, values)

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
        """Draws tokens with policy `version` until `delivery` is satisfied, and for `least_rounds` if something is left
        to draw; what was delivered, in order of step and row.

        The admitted prompts wait, first come first served, for slots; what is not delivered stays in flight for the
        next turn. `stream` hands tokens out as they are drawn. `begun` is by draw what was drawn before for prompts
        that are admitted. Every rank of the replica must call with the same arguments, and every replica that holds
        experts together with this one must call too, with its own.
        """
        waiting = self._carry(admitted, begun or {})
        self._model.eval()
        self._step.begin_turn()
        if self._prefills:
            self._prefills.begin_turn()
        self._prompts.forget()
        if self._tool_turns:
            self._tool_turns.begin()
        if self._recomputes_cache and version != self._cached_version:
            self._recompute()
        self._cached_version = version
        delivered = self._flight.play(
            waiting,
            delivery,
            learn=lambda group: self._learn(group, version, stream),
            advance=self._advance,
            skip=lambda most: 0 if stream else self._skip(most, version),
            least_rounds=least_rounds,
        )
        self._relay.flush()
        if self._tool_turns:
            self._tool_turns.end()
        self._lockstep.finish()
        return delivered

    def prefills(self, lengths: Sequence[int]) -> Callable[[], object]:
        """What draws the first tokens of prompts of so many tokens, with nothing else in flight, and may be called any
        number of times."""
        [group] = self._flight.groups
        seated = []
        for row, length in enumerate(lengths):
            self._cache.tables.take(group.next_slot, length + 1)
            seated.append(group.seat(Partial(prompt=Prompt(row=row, draw=row, tokens=(1,) * length))))
        begun, none = Seated(seated, list(range(len(seated))), {}, len(seated), {}), group.rows[:0]
        return lambda: _told(self.draw_next(group, none, begun, begun.parts(self._most_packed)))

    def steps(self, cached: Sequence[int], shortest: int, longest: int, at_once: int = 1) -> Callable[[], object]:
        """What draws the next token of rows that have so many tokens in the cache, or the next `at_once` without a look
        between them, and lets them go on, with nothing else in flight, any number of times.

        Where a row would get more than `longest` tokens, it ends, and another begins that has the `shortest` cached.
        Where these are the same, all rows stay where they are.
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
            told = self._several(group, at_once) if at_once > 1 else _told(self.draw_next(group, rows, NOBODY, ()))
            if shortest < longest:
                records.num_drawn[rows] += at_once
                ended = rows[records.cached(rows) > longest]
                self.seating.release((group.first_slot + ended).tolist())
                records.num_drawn[ended] = 1
                self.seating.grow(group)
            return told

        return step

    def _several(self, group: LiveGroup, count: int) -> object:
        """The next tokens of all rows of a group, whatever they draw; on the host at the end."""
        records, rows = group.records, group.rows
        slots, cached = group.first_slot + rows, records.cached(rows)
        held = self.seating.grow_ahead(slots, cached, count)
        assert held == count, f"{held} of {count} rounds have blocks"
        numbers = self._uniforms.of(slots, records.draws[rows], records.num_drawn[rows])
        drawn = torch.zeros(2, len(rows), dtype=torch.float64, device=self._cache.keys.device)
        told, _ = self._ahead.together(StepRows(slots, cached, cached), drawn, numbers.repeat(count, 1))
        return told.tolist()

    def _carry(self, admitted: Sequence[Prompt], begun: Mapping[int, Beginning]) -> list[Prompt]:
        """Takes over what was drawn before for prompts that are admitted to the next turn: what goes on does so as if
        it had given way. Those of which nothing was drawn, which wait."""
        for prompt in admitted:
            if prompt.draw in begun:
                again = begun[prompt.draw].of(prompt, self._flight.turn + 1)
                if isinstance(again, Response):
                    self._flight.ended.append(again)
                else:
                    self.seating.pause(again)
                    self._flight.carry(again)
        return [prompt for prompt in admitted if prompt.draw not in begun]

    def _learn(self, group: LiveGroup, version: int, stream: Listener | None) -> Sequence[Response]:
        """Records the tokens that the group was being advanced by; what ended with them."""
        if group.first_slot not in self._drawn:
            return ()
        drawn = self._drawn.pop(group.first_slot)
        if drawn is None:
            drawn = self._relay.receive_drawn(len(group.live))
        tokens, logprobs = drawn.cpu().numpy()
        responses, freed = group.record(tokens.astype(int), logprobs, version=version, finish=self._finish)
        self.seating.release(freed)
        if self._tool_turns:
            self._tool_turns.begin_calls(group, self.seating)
        if stream is not None:
            stream.tell(group.live, responses)
        return responses

    def _finish(self, group: LiveGroup) -> dict[int, Finish]:
        """Which live sequences end with the tokens drawn last; what calls a tool goes on where it may."""
        found = self._stopping.finish(group)
        return self._tool_turns.take_calls(group, found) if self._tool_turns else found

    def _advance(self, group: LiveGroup) -> int:
        """One token for every live sequence of the group and for every admitted one; how many of these begin."""
        self.seating.grow(group)
        continuing = group.rows
        answered = self._tool_turns.answered(group, self.seating) if self._tool_turns else ()
        admitted = self.seating.admit(group, answered)
        if self._tool_turns:
            self._tool_turns.limit(group, admitted.sequences)
        parts, drawn = admitted.parts(self._most_packed), None
        with self._lockstep.passes(self._passes.count(len(continuing), len(parts))):
            if group.live:
                drawn = self._drawn[group.first_slot] = self.draw_next(group, continuing, admitted, parts)
        self._prompts.keep_for(self._flight.waiting)
        if drawn is not None:
            self._relay.send_drawn(drawn)
        elif self._tool_turns and not self._drawn:
            self._tool_turns.wait()
        return admitted.num_begun

    def _skip(self, most: int | None, version: int) -> int:
        """Draws on where nothing can begin, and nobody ends by length; how many rounds. What ends otherwise is left to
        be learned."""
        group = self._flight.groups[0]
        if not self._can_skip or not group.live or self.seating.may_admit(group):
            return 0
        drawn = self._drawn[group.first_slot]
        assert drawn is not None, "a stage alone has what it drew"
        count, self._drawn[group.first_slot] = self._ahead.draw(group, drawn, most, version)
        return count

    @torch.no_grad()
    def draw_next(
        self, group: LiveGroup, continuing: Numbers, admitted: Seated, parts: Sequence[Sequence[Part]]
    ) -> Tensor | None:
        """Tokens and log-probabilities [2, B] float64 of the next tokens of the group: of the rows that continue, and
        of what was admitted, whose tokens are cached in these parts. None before the last stage."""
        records, fed = group.records, [admitted.sequences[index] for index in admitted.fed]
        steps = StepRows(group.first_slot + continuing, records.cached(continuing), records.last(continuing))
        logits = self._passes(steps, [(one.slot, (*one.prompt.tokens, *one.tokens)) for one in fed], parts)
        if admitted.sequences:
            logits = self._of_all(logits, len(continuing), admitted)
        return None if logits is None else self._draw(logits, group)

    def _of_all(self, logits: Tensor | None, num_continuing: int, admitted: Seated) -> Tensor | None:
        """Logits [B, V / tp] of the rows that continue and of all that was admitted, from those of the former and of
        what was fed; what reads another's prompt gets its cache. None before the last stage."""
        for index, source in admitted.sources.items():
            one = admitted.sequences[index]
            self._cache.share(source, one.slot, len(one.prompt.tokens))
        of_fed = None if logits is None else logits[num_continuing:]
        found = self._prompts.of_all(admitted.sequences, admitted.fed, of_fed)
        if logits is None or found is None or not admitted.sources:
            return found if logits is None else logits
        return torch.cat((logits[:num_continuing], found))

    @torch.no_grad()
    def _recompute(self) -> None:
        """Keys and values of all live sequences anew, in packs that memory was planned for."""
        live = self._live()
        texts = [(one.slot, (*one.prompt.tokens, *one.tokens)[: one.num_cached]) for one in live]
        parts = list(packs([len(text) for _, text in texts], self._most_packed))
        with self._lockstep.passes(self._passes.count(0, len(parts))):
            self._passes(NO_STEPS, texts, parts)
        self._relay.flush()

    def _draw(self, output: Tensor, group: LiveGroup) -> Tensor:
        """As `_choose`, for all rows of the group."""
        records, rows = group.records, group.rows
        numbers = self._uniforms.of(group.first_slot + rows, records.draws[rows], records.num_drawn[rows])
        return self._choose(output, numbers)

    @torch.inference_mode()
    def _choose(self, output: Tensor, numbers: Tensor) -> Tensor:
        """Tokens and log-probabilities [2, B] float64 drawn from logits [B, V / tp] by numbers [B], on the last
        stage."""
        logits = _gather_vocabulary(output, self._mesh)[:, : self._spec.vocab_size]
        drawn, logprobs = self._sampling.draw(logits, numbers.to(logits.device))
        return torch.stack([drawn.double(), logprobs.double()])


def _told(drawn: Tensor | None) -> object:
    """What was drawn on the host, on the last stage."""
    return drawn if drawn is None else drawn.tolist()


def _is_alone(mesh: Mesh) -> bool:
    """Whether a stage passes through a model at its own pace: no other stage and no other replica waits for it."""
    return mesh.layout.pp == 1 and mesh.layout.expert_replicas == 1


def _gather_vocabulary(logits: Tensor, mesh: Mesh) -> Tensor:
    """Logits [B, V] from the shards [B, V / tp] of the tensor-parallel group."""
    if mesh.layout.tp == 1:
        return logits
    shards = [torch.empty_like(logits) for _ in range(mesh.layout.tp)]
    dist.all_gather(shards, logits.contiguous(), group=mesh.groups.tp)
    return torch.cat(shards, dim=-1)
