"""A replica that generates with an engine in another process beside each of its ranks: which sequences the engine has,
and what they have got.

All ranks of a replica make the same requests of their processes, which share the model and sample the same tokens.

The sequences in flight and the rule that ends a period are those of our own generator (`planner.simulation.flight`).
The engine has requests only while a period runs: what stays in flight is aborted at the end of the period and continues
in the next one, when its keys and values are computed again. So nothing cached under older weights reaches a later
token, and a checkpoint needs the tokens alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.planner.simulation.flight import Flight, SlotGroup
from meshwright.runtime.inference.engine_process import EngineProcess, Request, RequestSampling, Sampled
from meshwright.runtime.inference.in_flight import SequencesInFlight
from meshwright.runtime.inference.replica_engine import Period, ReplicaEngine
from meshwright.runtime.inference.sampling import Sampling, uniforms
from meshwright.runtime.inference.slots import Finish, PartialResponse, Prompt, Response
from meshwright.runtime.inference.stopping import DecodedText, StopStrings
from meshwright.runtime.inference.tool_turns import ToolTurns
from meshwright.runtime.model.adapters import is_adapter_parameter
from meshwright.runtime.model.hf_checkpoint import recipe
from meshwright.runtime.model.mesh import Mesh
from meshwright.runtime.model.model_shard import Decoder, named_global_parameters
from meshwright.runtime.model.weights import stored_adapter

_NUM_SEEDS = 2.0**53
"""Number of different seeds of a request: a uniform random float has 53 bits."""


@dataclass(kw_only=True, eq=False)
class RequestedSequence:
    """A sequence that the engine samples."""

    prompt: Prompt
    first_period: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    texts: dict[StopStrings, DecodedText] = field(default_factory=dict)
    """The decoded text for each set of stop strings; rebuilt from the tokens where it is missing."""

    @classmethod
    def of(cls, partial: PartialResponse) -> RequestedSequence:
        """Return the sequence that continues a partial response."""
        return cls(
            prompt=partial.prompt,
            first_period=partial.first_period,
            tokens=list(partial.tokens),
            logprobs=list(partial.logprobs),
            versions=list(partial.versions),
        )

    @property
    def id(self) -> str:
        """Its name in the engine."""
        return str(self.prompt.sample_id)

    @property
    def num_sampled(self) -> int:
        """The number of tokens after the prompt."""
        return len(self.tokens)

    @property
    def last_token(self) -> int:
        return self.tokens[-1]

    def to_partial(self) -> PartialResponse:
        """Return its prompt and its tokens so far."""
        return PartialResponse(
            prompt=self.prompt,
            first_period=self.first_period,
            tokens=tuple(self.tokens),
            logprobs=tuple(self.logprobs),
            versions=tuple(self.versions),
        )


class ExternalReplica(ReplicaEngine):
    """Samples responses of one replica with the engine process of each rank."""

    def __init__(
        self,
        engine: EngineProcess,
        weights: Callable[[], Iterable[tuple[str, Tensor]]],
        *,
        num_slots: int,
        max_response: int,
        eos_tokens: frozenset[int],
        sampling: Sampling,
        seed: int,
        stop_strings: StopStrings | None = None,
        tool_turns: ToolTurns | None = None,
    ) -> None:
        """`weights` returns the present weights under the names that the engine knows (`refit_tensors`).

        At most `num_slots` sequences are decoded at a time, each with at most `max_response` tokens after its prompt,
        the last of which may be one of `eos_tokens` or complete one of `stop_strings`. The engine has the temperature
        of `sampling`. Sequences that wait for a tool give up their slots.
        """
        self.tool_turns = tool_turns
        self._ends: list[tuple[StopStrings, Finish]] = []
        """The strings that end a turn, and why it ends with them, in order of precedence."""

        if stop_strings:
            self._ends.append((stop_strings, Finish.STOP))
        if tool_turns:
            self._ends.append((tool_turns.call_end, Finish.CALL))
        self._engine, self._weights = engine, weights
        self._max_response, self._eos_tokens, self._sampling, self._seed = max_response, eos_tokens, sampling, seed
        self._group: SlotGroup[RequestedSequence] = SlotGroup(0, num_slots)
        self._flight: Flight[Prompt, SlotGroup[RequestedSequence], Response] = Flight((self._group,))
        self._paused: list[PartialResponse] = []
        """Sequences that have started and are not in the engine."""
        self._rows: list[Sampled] = []
        """What the last round sampled."""
        self._stopped: list[str] = []
        """Requests that ended with a stop string or a call of the tool, of which the engine knows nothing yet."""

    @property
    def in_flight(self) -> tuple[Prompt, ...]:
        """The prompts that are admitted and not delivered: first the ended, then the started and the waiting ones."""
        started = [sequence.prompt for sequence in (*self._flight.ended, *self._paused)]
        return (*started, *(self.tool_turns.in_flight if self.tool_turns else ()), *self._flight.waiting)

    def _run(self, waiting: list[Prompt], period: Period) -> tuple[Response, ...]:
        """Run a period. Raises RunFailed if the engine fails."""
        if period.version != self._engine.version:
            self._engine.take_weights(period.version, self._weights())
        if self.tool_turns:
            self._paused += self.tool_turns.begin_period(period.delivery)
        delivered = self._flight.run_period(
            waiting,
            period.delivery,
            process_sampled=lambda _: self._process_sampled(period),
            step=lambda _: self._step(),
            min_rounds=period.min_rounds,
        )
        if self.tool_turns:
            self.tool_turns.end_period()
        if self._group.live or self._stopped:
            self._engine.step(aborted=[*self._take_stopped(), *(sequence.id for sequence in self._group.live)])
            self._paused = [*(sequence.to_partial() for sequence in self._group.live), *self._paused]
            self._group.live = []
        return delivered

    def _pause(self, partial: PartialResponse) -> None:
        self._paused.append(partial)

    def snapshot(self) -> SequencesInFlight:
        """Return a snapshot of everything in flight; only valid between two periods."""
        held, turns = self.tool_turns.snapshot() if self.tool_turns else ((), {})
        return SequencesInFlight(
            period=self._flight.period,
            live=((),),  # one group of slots, which is empty between two periods
            paused=(*self._paused, *held),
            turns=turns,
            waiting=tuple(self._flight.waiting),
            ended=tuple(self._flight.ended),
            blocks=(),
            cached=(),
        )

    def restore(self, snapshot: SequencesInFlight) -> None:
        self._paused = list(snapshot.paused)
        if self.tool_turns:
            self.tool_turns.restore(snapshot.turns)
        self._flight.resume(snapshot.period, snapshot.waiting, snapshot.ended, snapshot.paused)

    def _step(self) -> int:
        """Fill the free slots, paused sequences first, and run a round; return how many sequences start with it."""
        if self.tool_turns:
            self._paused += self.tool_turns.take_answers()
        waiting: deque[Prompt] = self._flight.waiting
        num_free = self._group.num_slots - len(self._group.live)
        continued, self._paused = self._paused[:num_free], self._paused[num_free:]
        num_new = min(num_free - len(continued), len(waiting))
        started = [PartialResponse(prompt=waiting.popleft(), first_period=self._flight.period) for _ in range(num_new)]
        added = [RequestedSequence.of(partial) for partial in (*continued, *started)]
        self._group.live += added
        self._rows = self._engine.step([self._request(sequence) for sequence in added], self._take_stopped())
        if self.tool_turns and not self._group.live:
            self.tool_turns.wait_for_answer()
        return num_new

    def _take_stopped(self) -> list[str]:
        """Return the requests that have ended and that the engine has to abort."""
        stopped, self._stopped = self._stopped, []
        return stopped

    def _request(self, sequence: RequestedSequence) -> Request:
        prompt, num_sampled = sequence.prompt, sequence.num_sampled
        limit = self._max_response if prompt.max_response is None else min(prompt.max_response, self._max_response)
        if self.tool_turns:
            limit = min(limit, self.tool_turns.max_tokens(sequence))
        # A sequence that continues needs other random numbers than those with which it started.
        uniform = uniforms(self._seed, np.array([prompt.sample_id]), np.array([num_sampled]))[0]
        return Request(
            id=sequence.id,
            tokens=(*prompt.tokens, *sequence.tokens),
            sampling=RequestSampling(
                is_greedy=self._sampling.temperature == 0.0,
                top_k=self._sampling.top_k,
                top_p=self._sampling.top_p,
                seed=int(uniform * _NUM_SEEDS),
                max_tokens=limit - num_sampled,
                end_tokens=tuple(sorted(self._eos_tokens)),
            ),
        )

    def _process_sampled(self, period: Period) -> Sequence[Response]:
        """Append the tokens of the last round; return the responses that end with them, in the order of the slots."""
        if not self._rows:
            return ()
        rows, self._rows = {row.id: row for row in self._rows}, []
        continuing, sampled, ended, turns = [], [], [], self.tool_turns
        for sequence in self._group.live:
            row = rows.get(sequence.id)
            finish = self._append(sequence, row, period.version) if row else None
            if finish is None:
                continuing.append(sequence)
                if row:
                    sampled.append(sequence)
            elif finish is Finish.CALL and turns and turns.has_turn_left(sequence):
                self._flight.num_held += turns.call_without_slot(sequence)
            else:
                ended.append(self._ended(sequence, finish))
        self._group.live = continuing
        if period.stream is not None:
            period.stream.on_round(sampled, ended)
        return ended

    def _ended(self, sequence: RequestedSequence, finish: Finish) -> Response:
        """Return the response of a sequence that has ended; one that has no turn left for a call is truncated."""
        if self.tool_turns:
            self.tool_turns.end(sequence)
        why = Finish.LENGTH if finish is Finish.CALL else finish
        return Response(**vars(sequence.to_partial()), finish=why)

    def _append(self, sequence: RequestedSequence, row: Sampled, version: int) -> Finish | None:
        """Append the tokens of a round, up to the first that ends the turn; return why it ends, if it does."""
        is_greedy = self._sampling.temperature == 0.0  # such a policy gives its token all probability
        for token, logprob in zip(row.tokens, row.logprobs, strict=True):
            sequence.tokens.append(token)
            sequence.logprobs.append(0.0 if is_greedy else logprob)
            sequence.versions.append(version)
            if token in self._eos_tokens:
                return Finish.EOS
            found = next((why for strings, why in self._ends if strings.complete(sequence)), None)
            if found:
                if not row.has_ended:
                    self._stopped.append(sequence.id)
                return found
        return Finish.LENGTH if row.has_ended else None


def refit_tensors(model: Decoder) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors [...] that an engine gets at every refit: those of the adapter if there is one, otherwise all.

    All tensor-parallel ranks iterate together.
    """
    return stored_adapter(model, model.spec, model.mesh) if model.spec.adapter else stored_tensors(model)


def stored_tensors(model: Decoder) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors [...] of a whole model by their names in a Hugging Face checkpoint, one parameter after
    another. Those of an adapter are left out.

    Tensor-parallel ranks gather the shards of one parameter at a time, so all of them iterate together.
    """
    for name, parameter in named_global_parameters(model):
        if is_adapter_parameter(name):
            continue
        stored = recipe(model.spec, name)
        is_whole = model.mesh.layout.tp == 1 or stored.axis is None
        shards = [parameter.detach()] if is_whole else _gathered(parameter.detach(), model.mesh)
        yield from stored.split(shards).items()


def _gathered(shard: Tensor, mesh: Mesh) -> list[Tensor]:
    """Return the shards [rows, ...] of all tensor-parallel ranks, in order."""
    shards = [torch.empty_like(shard) for _ in range(mesh.layout.tp)]
    dist.all_gather(shards, shard.contiguous(), group=mesh.groups.tp)
    return shards
