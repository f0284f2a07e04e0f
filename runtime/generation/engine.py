"""The generation engine: continuous batching over tensor- and pipeline-parallel ranks.

With p pipeline stages, p groups of slots are in flight: while one group's token is on its way through the later stages,
the first stage works on the next group. All ranks of a replica do the same in the same order; activations go forward
from stage to stage, and the sampled tokens go from the last stage back to the others. Between two turns no message is
on its way, and sequences in flight keep their tokens, keys and values while the weights may change under them.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.planner.simulation.flight import Delivery, Everything, Flight
from meshwright.profiles.model_shape import ModelSpec
from meshwright.runtime.generation.chunking import Listener
from meshwright.runtime.generation.cuda_graphs import Replayed, can_replay
from meshwright.runtime.generation.decoding import DecodeStep, Decoding
from meshwright.runtime.generation.in_flight_state import InFlight
from meshwright.runtime.generation.sampling import Sampling, uniforms
from meshwright.runtime.generation.shared_prompts import Parted, SharedPrompts
from meshwright.runtime.generation.slots import Beginning, LiveGroup, LiveSequence, Prompt, Response, packs
from meshwright.runtime.generation.stopping import Stopping, StopStrings
from meshwright.runtime.model.cached_forward import forward_continued
from meshwright.runtime.model.expert_sync import Lockstep
from meshwright.runtime.model.kv_cache import SlotCache
from meshwright.runtime.model.mesh import Mesh
from meshwright.runtime.model.model_shard import Decoder
from meshwright.runtime.model.pipeline_p2p import Relay

_HASHED_AT_ONCE = 128
"""Positions whose uniform numbers are hashed together."""


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
        eos_tokens: frozenset[int],
        temperature: float,
        seed: int,
        top_k: int = 0,
        top_p: float = 1.0,
        stop_strings: StopStrings | None = None,
        recomputes_cache: bool = False,
        group_size: int = 1,
    ) -> None:
        """`num_slots` sequences at most are decoded at a time, each at most `max_tokens` long with its prompt.

        The distribution that is sampled is `Sampling`'s; responses end as `Stopping` says. Sequences in flight keep the
        keys and values of older weights, so that what is drawn next is of no one version, or, with `recomputes_cache`,
        get those of the new ones. Of `group_size` rows of one prompt the first is prefilled.
        """
        self._recomputes_cache, self._cached_version = recomputes_cache, -1
        self._most_packed = num_slots * max(1, max_tokens - max_response)
        parameter = next(model.parameters())
        self._model, self._spec, self._mesh = model, spec, mesh
        self._stopping = Stopping(eos_tokens=eos_tokens, max_response=max_response, strings=stop_strings)
        self._sampling, self._seed = Sampling(temperature=temperature, top_k=top_k, top_p=top_p), seed
        self._device, self._dtype = parameter.device, parameter.dtype
        self._flight: Flight[Prompt, LiveGroup, Response] = Flight(LiveGroup.cut(num_slots, mesh.layout.pp))
        self._cache = SlotCache(
            num_layers=len(model.decoder.layers),
            num_slots=num_slots,
            num_kv_heads=spec.num_kv_heads // mesh.layout.tp,
            max_tokens=max_tokens,
            head_dim=spec.head_dim,
            dtype=self._dtype,
            device=self._device,
        )
        step = DecodeStep(model, mesh, self._cache)
        self._step: Decoding = Replayed(step, model, self._flight.groups) if can_replay(model) else step
        self._relay = Relay(mesh, self._device)
        self._prompts = SharedPrompts(group_size)
        self._lockstep = Lockstep(model, mesh)
        self._begun: dict[int, Beginning] = {}
        """By draw, of prompts that wait for a slot: what was drawn for them before."""
        self._drawn: dict[int, Tensor | None] = {}
        """By first slot of each group that is being advanced: its draws [2, B], which only the last stage has yet."""

    def generate(self, prompts: Sequence[Prompt], *, version: int = 0) -> tuple[Response, ...]:
        """The responses in order of step and row, all drawn by policy `version`, with nothing else in flight.

        Every rank of the replica must call with the same prompts.
        """
        assert not self.in_flight, "a turn has left sequences in flight"
        return self.turn(prompts, version=version, delivery=Everything())

    @property
    def in_flight(self) -> tuple[Prompt, ...]:
        """The prompts admitted and not delivered: ended, live, then waiting ones."""
        ended = [response.prompt for response in self._flight.ended]
        return (*ended, *(sequence.prompt for _, sequence in self._slots()), *self._flight.waiting)

    def kept(self) -> InFlight:
        """What is in flight between two turns."""
        flight = self._flight
        return InFlight(
            turn=flight.turn,
            live=tuple(tuple(replace(sequence, text=None) for sequence in group.live) for group in flight.groups),
            waiting=tuple(flight.waiting),
            ended=tuple(flight.ended),
            cached=tuple(self._cache.read(slot, sequence.num_cached) for slot, sequence in self._slots()),
        )

    @property
    def begun(self) -> Mapping[int, Beginning]:
        """By draw, what was drawn before for prompts that wait."""
        return self._begun

    def resume(self, kept: InFlight, begun: Mapping[int, Beginning]) -> None:
        """Takes over what a generator of the same kind had in flight, of which some that waits was begun before."""
        for group, live in zip(self._flight.groups, kept.live, strict=True):
            group.live = list(live)
        self._flight.resume(kept.turn, kept.waiting, kept.ended)
        for (slot, _), (keys, values) in zip(self._slots(), kept.cached, strict=True):
            self._cache.write(slot, keys, values)
        self._begun = dict(begun)

    def _slots(self) -> list[tuple[int, LiveSequence]]:
        """Each live sequence with its slot."""
        return [
            (group.first_slot + index, sequence)
            for group in self._flight.groups
            for index, sequence in enumerate(group.live)
        ]

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
        waiting = self._admit_again(admitted, begun or {})
        self._model.eval()
        self._step.begin_turn()
        self._prompts.forget()
        if self._recomputes_cache and version != self._cached_version:
            self._recompute(self._slots())
            self._relay.flush()
        self._cached_version = version
        delivered = self._flight.play(
            waiting,
            delivery,
            learn=lambda group: self._learn(group, version, stream),
            advance=self._advance,
            least_rounds=least_rounds,
        )
        self._relay.flush()
        self._lockstep.finish()
        return delivered

    def _admit_again(self, admitted: Sequence[Prompt], begun: Mapping[int, Beginning]) -> list[Prompt]:
        """Takes what was drawn before for prompts that are admitted to the next turn; those that have to wait."""
        turn = self._flight.turn + 1
        again = {draw: replace(one, first_turn=turn) for draw, one in begun.items()}
        self._flight.ended += [again[p.draw].response(p) for p in admitted if p.draw in again and again[p.draw].finish]
        self._begun |= {draw: one for draw, one in again.items() if one.finish is None}
        return [prompt for prompt in admitted if prompt.draw not in again or prompt.draw in self._begun]

    def _learn(self, group: LiveGroup, version: int, stream: Listener | None) -> Sequence[Response]:
        """Records the tokens that the group was being advanced by; what ended with them."""
        if group.first_slot not in self._drawn:
            return ()
        drawn = self._drawn.pop(group.first_slot)
        if drawn is None:
            drawn = self._relay.receive_drawn(len(group.live))
        tokens, logprobs = drawn.tolist()
        responses, moves = group.record(map(int, tokens), logprobs, version=version, finish=self._stopping.finish)
        for move in moves:
            self._cache.move(move.source, move.target, move.num_tokens)
        if stream is not None:
            stream.tell(group.live, responses)
        return responses

    def _advance(self, group: LiveGroup) -> int:
        """One token for every live sequence of the group and the first token of every admitted one, of which there are
        so many."""
        continuing, admitted = list(group.live), group.admit(self._flight.waiting, self._flight.turn)
        if begun := [one for one in admitted if one.prompt.draw in self._begun]:
            admitted = [one for one in admitted if one.prompt.draw not in self._begun]
            self._take_over(group, continuing, begun, admitted)
            continuing += begun
        first_slot, drawn = group.first_slot + len(continuing), []
        parted = self._prompts.parted(admitted, first_slot, self._slots()) if admitted else Parted((), ())
        with self._lockstep.passes(bool(continuing) + bool(parted.fresh)):
            if continuing:
                drawn.append(self.decode(group.first_slot, continuing))
            if admitted:
                drawn.append(self.prefill(first_slot, admitted, parted))
        self._prompts.keep_for(self._flight.waiting)
        if drawn:
            tokens = torch.cat(drawn, dim=1) if self._mesh.is_last_stage else None
            if tokens is not None:
                self._relay.send_drawn(tokens)
            self._drawn[group.first_slot] = tokens
        return len(admitted)

    def _take_over(
        self,
        group: LiveGroup,
        live: Sequence[LiveSequence],
        begun: Sequence[LiveSequence],
        fresh: Sequence[LiveSequence],
    ) -> None:
        """Sequences that were begun before get their tokens, and keys and values under the present weights."""
        for sequence in begun:
            sequence.take_over(self._begun.pop(sequence.prompt.draw))
            self._flight.num_live[sequence.first_turn] += 1
        group.live = [*live, *begun, *fresh]
        first = group.first_slot + len(live)
        self._recompute(list(enumerate(begun, start=first)))

    @torch.no_grad()
    def prefill(self, first_slot: int, admitted: Sequence[LiveSequence], parted: Parted | None = None) -> Tensor:
        """Caches the prompts of sequences in consecutive slots and draws their first tokens, [2, B] as `_draw`.

        Where it is `parted` some get a copy of what another one has cached.
        """
        parted = parted or Parted(tuple(range(len(admitted))), ())
        output = self._cache_prompts(first_slot, [(index, admitted[index]) for index in parted.fresh])
        for source, target, num_tokens in parted.copies:
            self._cache.move(source, target, num_tokens)
        if not self._mesh.is_last_stage:
            if output is not None:
                self._relay.send_hidden(output)
            self._prompts.of_all(admitted, parted.fresh, None)
            return _nothing_drawn(admitted)
        logits = self._prompts.of_all(admitted, parted.fresh, None if output is None else output.squeeze(1))
        assert logits is not None
        return self._drawn_from(logits, admitted)

    def _cache_prompts(self, first_slot: int, fresh: Sequence[tuple[int, LiveSequence]]) -> Tensor | None:
        """Keys and values of prompts, each at its place behind the first slot; what the last stage says of their last
        tokens, elsewhere the hidden states to send, nothing where there is none."""
        if not fresh:
            return None
        prompts, slots = [one.prompt.tokens for _, one in fresh], [first_slot + index for index, _ in fresh]
        rows = self._cache.continue_rows(slots, [0] * len(prompts), [len(prompt) for prompt in prompts])
        tokens = torch.tensor(list(itertools.chain(*prompts)), device=self._device)
        return forward_continued(self._model, self._mesh, self._relay, tokens, rows, ends_only=True)

    @torch.no_grad()
    def _recompute(self, slots: Sequence[tuple[int, LiveSequence]]) -> None:
        """Keys and values of live sequences anew: packed prefills of their tokens, none of them of more tokens than the
        prompts of all slots may have together, which memory was planned for."""
        live = dict(slots)
        for pack in packs([(slot, one.num_cached) for slot, one in slots], self._most_packed):
            texts = [(*live[slot].prompt.tokens, *live[slot].tokens)[first:end] for slot, first, end in pack]
            rows = self._cache.continue_rows([s for s, _, _ in pack], [f for _, f, _ in pack], [len(t) for t in texts])
            tokens = torch.tensor(list(itertools.chain(*texts)), device=self._device)
            with self._lockstep.passes(1):
                output = forward_continued(self._model, self._mesh, self._relay, tokens, rows, ends_only=True)
            if not self._mesh.is_last_stage:
                self._relay.send_hidden(output)

    @torch.no_grad()
    def decode(self, first_slot: int, live: Sequence[LiveSequence]) -> Tensor:
        """Draws one more token for sequences in consecutive slots, [2, B] as `_draw`."""
        cached = [sequence.num_cached for sequence in live]
        inputs = self._receive_hidden(len(live))
        if inputs is None:
            inputs = torch.tensor([sequence.tokens[-1] for sequence in live], device=self._device)
        lengths = torch.tensor(cached, device=self._device)
        return self._draw(self._step(inputs, first_slot, lengths, max(cached)), live)

    def _receive_hidden(self, *shape: int) -> Tensor | None:
        """Hidden states [*shape, hidden] from the earlier stage; None on the first."""
        if self._mesh.is_first_stage:
            return None
        return self._relay.receive_hidden((*shape, self._spec.hidden_size), self._dtype)

    def _draw(self, output: Tensor, rows: Sequence[LiveSequence]) -> Tensor:
        """Tokens and log-probabilities [2, B] float64 drawn from logits [B, V / tp].

        Before the last stage `output` are hidden states, which are sent on, and the answer is zeros.
        """
        if not self._mesh.is_last_stage:
            self._relay.send_hidden(output)
            return _nothing_drawn(rows)
        return self._drawn_from(output, rows)

    def _drawn_from(self, output: Tensor, rows: Sequence[LiveSequence]) -> Tensor:
        """As `_draw`, on the last stage."""
        logits = _gather_vocabulary(output, self._mesh)[:, : self._spec.vocab_size]
        drawn, logprobs = self._sampling.draw(logits, self._uniforms(rows).to(logits.device))
        return torch.stack([drawn.double(), logprobs.double()])

    def _uniforms(self, rows: Sequence[LiveSequence]) -> Tensor:
        """The number [B] that decides each row's next token; numbers are hashed many positions at a time."""
        while short := [row for row in rows if len(row.uniforms) <= len(row.tokens)]:
            draws = torch.tensor([[row.prompt.draw] for row in short])
            positions = torch.tensor([[len(row.uniforms)] for row in short]) + torch.arange(_HASHED_AT_ONCE)
            for row, numbers in zip(short, uniforms(self._seed, draws, positions).tolist(), strict=True):
                row.uniforms += numbers
        return torch.tensor([row.uniforms[len(row.tokens)] for row in rows], dtype=torch.float64)


def _nothing_drawn(rows: Sequence[LiveSequence]) -> Tensor:
    """What a stage before the last one knows of the next tokens [2, B]."""
    return torch.zeros(2, len(rows), dtype=torch.float64)


def _gather_vocabulary(logits: Tensor, mesh: Mesh) -> Tensor:
    """Logits [B, V] from the shards [B, V / tp] of the tensor-parallel group."""
    if mesh.layout.tp == 1:
        return logits
    shards = [torch.empty_like(logits) for _ in range(mesh.layout.tp)]
    dist.all_gather(shards, logits.contiguous(), group=mesh.groups.tp)
    return torch.cat(shards, dim=-1)
