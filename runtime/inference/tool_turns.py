"""Multi-turn rollouts in a generator: which sequences wait for a tool, and how they continue after its answer.

One rank of a replica calls the tool. Before each decode round it sends the other ranks the new answers, so that all of
them resume the same sequences in the same round. Which round that is depends on the clock; which tokens are sampled
does not, as a token's random number depends only on its sequence and position.

With several batches in flight, a rollout runs to a certain turn in each period (`cost_models.period_ends.WholeTurns`).
It calls its tool at the end of that turn and gives up its slot and cache: another sequence may need the slot before the
period can end, and what it samples next comes from the new weights alone. It continues in the next period, when its
tool has answered.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.cost_models.period_ends import DeliveryRule, WholeTurns
from meshwright.profiles.errors import RunFailed
from meshwright.profiles.stages import TOOL_TOKEN_VERSION
from meshwright.runtime.environment.samples import RewardError, ToolCall
from meshwright.runtime.environment.worker_pool import ToolAnswer, ToolWorkers
from meshwright.runtime.inference.chunk_streaming import SampledSequence
from meshwright.runtime.inference.scheduler import Scheduler
from meshwright.runtime.inference.slots import Finish, LiveGroup, LiveSequence, PartialResponse, Prompt
from meshwright.runtime.inference.stopping import StopStrings
from meshwright.runtime.model.mesh import Mesh


@dataclass(frozen=True, kw_only=True)
class TurnLimits:
    """Limits of a rollout: its turns, the `sampled` tokens of a turn, the tokens of a tool's `answer`, and all tokens
    after the prompt (`response`)."""

    num_turns: int
    sampled: int
    answer: int
    response: int


class RolloutTurn(NamedTuple):
    """The turn that a rollout is in: its number from 1, and the index of its first token after the prompt."""

    number: int = 1
    first: int = 0


BuildToolCall: TypeAlias = Callable[[Prompt, Sequence[int], RolloutTurn], ToolCall]
"""Builds the tool call of a turn that has just ended, from the prompt and all tokens after it."""


class TurnSequence(SampledSequence, Protocol):
    """A rollout that is being sampled, by whatever engine."""

    def to_partial(self) -> PartialResponse:
        """Return its prompt and its tokens so far."""
        ...


class _Suspended(NamedTuple):
    """A sequence that waits for a tool in its slot, with the number of its cached tokens."""

    group: LiveGroup
    sequence: LiveSequence
    num_cached: int


class ToolTurns:
    """The tool turns on one rank; `tools` is None on the ranks of a replica that do not call the tool."""

    def __init__(
        self,
        mesh: Mesh,
        device: torch.device,
        tools: ToolWorkers | None,
        *,
        call_end: StopStrings,
        limits: TurnLimits,
        keeps_cache: bool,
        describe: BuildToolCall,
        encode: Callable[[str], tuple[int, ...]],
    ) -> None:
        """A turn that completes the string `call_end` calls the tool. With `keeps_cache` a sequence that waits keeps
        its slot and cache."""
        self.call_end = call_end
        self.num_calls, self.seconds = 0, 0.0
        """The number of calls that were answered on this rank since `take_counts`, and the sum of the seconds that they
        took."""
        self._tools, self._limits, self._keeps_cache = tools, limits, keeps_cache
        self._describe, self._encode = describe, encode
        self._new_calls: list[LiveSequence] = []
        self._turns: dict[int, RolloutTurn] = {}
        """The turn of rollouts that are past their first, by sample id."""
        self._pending: set[int] = set()
        """The sample ids whose tool has not answered."""
        self._suspended: dict[int, _Suspended] = {}
        self._without_slot: dict[int, PartialResponse] = {}
        self._held: list[PartialResponse] = []
        """Rollouts whose tool has answered, and which continue in the next period."""
        self._delivery: DeliveryRule | None = None
        self._answers: dict[int, tuple[int, ...]] = {}
        """Answers, by sample id, to sequences that keep their slot until the next decode round of their slot group."""
        self._answered_calls: queue.SimpleQueue[tuple[int, Future[ToolAnswer]]] = queue.SimpleQueue()
        self._waits = False
        self._messages = _Messages(mesh, device)

    @property
    def in_flight(self) -> tuple[Prompt, ...]:
        """The prompts of the rollouts that are between two turns and have no slot."""
        return tuple(partial.prompt for partial in (*self._held, *self._without_slot.values()))

    def begin_period(self, delivery: DeliveryRule) -> list[PartialResponse]:
        """Start a period of the generator that ends by this rule; return the rollouts that continue in it."""
        self._delivery = delivery
        continued, self._held = self._held, []
        return continued

    def end_period(self) -> None:
        """Complete all sends, at the end of a period."""
        self._messages.flush()

    def snapshot(self) -> tuple[tuple[PartialResponse, ...], dict[int, tuple[int, int]]]:
        """Wait until every tool has answered; return the rollouts that continue in the next period, and the turns of
        all rollouts that are past their first. Only valid between two periods, and on all ranks of a replica."""
        while self._pending:
            self._waits = True
            continued = self.take_answers()
            assert not continued, "a rollout has not reached the last turn of the period"
        self._messages.flush()
        return tuple(self._held), {sample_id: (turn.number, turn.first) for sample_id, turn in self._turns.items()}

    def restore(self, turns: Mapping[int, tuple[int, int]]) -> None:
        """Restore the turns of a snapshot; its rollouts are queued by the generator."""
        self._turns = {sample_id: RolloutTurn(*turn) for sample_id, turn in turns.items()}

    def take_counts(self) -> tuple[int, float]:
        """Return `num_calls` and `seconds`, and start counting again."""
        counts = self.num_calls, self.seconds
        self.num_calls, self.seconds = 0, 0.0
        return counts

    def limit(self, group: LiveGroup, sequences: Sequence[LiveSequence]) -> None:
        """Limit the sampled tokens of sequences that have just been scheduled to those of one turn."""
        max_tokens = group.records.max_tokens
        for sequence in sequences:
            max_tokens[sequence.row] = self.max_tokens(sequence)

    def max_tokens(self, sequence: TurnSequence) -> int:
        """Return the number of tokens after the prompt with which the turn of a sequence ends."""
        end = self._turn(sequence).first + self._limits.sampled
        return end if sequence.prompt.max_response is None else min(end, sequence.prompt.max_response)

    def has_turn_left(self, sequence: TurnSequence) -> bool:
        """Return True if a sequence may call the tool: it has a turn and a token left after the answer."""
        return self._turn(sequence).number < self._limits.num_turns and sequence.num_sampled + 1 < self._limits.response

    def end(self, sequence: TurnSequence) -> None:
        """Forget the turn of a sequence that has ended."""
        self._turns.pop(sequence.prompt.sample_id, None)

    def take_calls(self, group: LiveGroup, finished: dict[int, Finish]) -> dict[int, Finish]:
        """Return which live sequences end, by index. A sequence that calls a tool is removed from
        `finished`, and waits from `begin_calls` on, if it has turns and tokens left; otherwise it is truncated."""
        for index in [index for index, why in finished.items() if why is Finish.CALL]:
            sequence = group.live[index]
            if self.has_turn_left(sequence):
                self._new_calls.append(sequence)
                del finished[index]
            else:
                finished[index] = Finish.LENGTH
        for index in finished:
            self.end(group.live[index])
        return finished

    def begin_calls(self, group: LiveGroup, scheduler: Scheduler) -> int:
        """Call the tool for the sequences that `take_calls` removed, which stop being live; return how many of them
        continue in the next period only."""
        num_held = 0
        for sequence in self._new_calls:
            is_held = self._is_held(sequence.prompt, self._turn(sequence).number + 1)
            num_held += is_held
            if self._keeps_cache and not is_held:
                group.suspend(sequence)
                self._suspended[sequence.prompt.sample_id] = _Suspended(group, sequence, sequence.num_cached)
                self._begin_call(sequence)
            else:
                self.call_without_slot(sequence)
                scheduler.release(group.remove([group.live.index(sequence)]))
        self._new_calls.clear()
        return num_held

    def call_without_slot(self, sequence: TurnSequence) -> bool:
        """Call the tool for a sequence that gives up its slot; return True if it continues in the next period only."""
        self._without_slot[sequence.prompt.sample_id] = sequence.to_partial()
        self._begin_call(sequence)
        return self._is_held(sequence.prompt, self._turn(sequence).number + 1)

    def _is_held(self, prompt: Prompt, turn: int) -> bool:
        """Return True if a rollout samples a turn in the next period and not in this one."""
        return isinstance(self._delivery, WholeTurns) and turn > self._delivery.last_turn(prompt.step)

    def _begin_call(self, sequence: TurnSequence) -> None:
        sample_id = sequence.prompt.sample_id
        self._pending.add(sample_id)
        if self._tools:
            called = self._describe(sequence.prompt, sequence.tokens, self._turn(sequence))
            self._call(self._tools, sample_id, called)

    def take_answers(self) -> list[PartialResponse]:
        """Return the sequences without a slot that were answered since the last call, with their answers.

        Answers to sequences with a slot are kept for `resume_answered`, and sequences that continue in the next period
        for `begin_period`.
        """
        continued = list[PartialResponse]()
        for sample_id, tokens in self._exchange():
            self._pending.remove(sample_id)
            if sample_id in self._without_slot:
                partial = self._without_slot.pop(sample_id)
                tool_tokens = self._accept_answer(sample_id, len(partial.tokens), tokens)
                answered = self._with_tool_tokens(partial, tool_tokens)
                is_held = self._is_held(partial.prompt, self._turns[sample_id].number)
                (self._held if is_held else continued).append(answered)
            else:
                self._answers[sample_id] = tokens
        return continued

    def resume_answered(self, group: LiveGroup, scheduler: Scheduler) -> list[tuple[LiveSequence, int]]:
        """Return the sequences of a group that continue in their slots, each with the number of its cached tokens. A
        sequence without a slot is queued for one."""
        for partial in self.take_answers():
            scheduler.pause(partial)
        resumed = []
        for sample_id in [
            sample_id
            for sample_id, suspended in self._suspended.items()
            if suspended.group is group and sample_id in self._answers
        ]:
            _, sequence, cached = self._suspended.pop(sample_id)
            tool_tokens = self._accept_answer(sample_id, sequence.num_sampled, self._answers.pop(sample_id))
            sequence.records.extend(
                sequence.row, tool_tokens, (0.0,) * len(tool_tokens), (TOOL_TOKEN_VERSION,) * len(tool_tokens)
            )
            sequence.texts.clear()
            if scheduler.resume_suspended(group, sequence):
                resumed.append((sequence, cached))
        return resumed

    def wait_for_answer(self) -> None:
        """Make the next `resume_answered` wait for an answer, since nothing can be sampled before."""
        self._waits = bool(self._pending) and not self._answers

    def _turn(self, sequence: TurnSequence) -> RolloutTurn:
        return self._turns.get(sequence.prompt.sample_id, RolloutTurn())

    def _accept_answer(self, sample_id: int, num_tokens: int, answer: tuple[int, ...]) -> tuple[int, ...]:
        """Return the part of an answer that fits after `num_tokens` tokens with room for one more token, and start the
        next turn after it."""
        tool_tokens = answer[: self._limits.response - num_tokens - 1]
        self._turns[sample_id] = RolloutTurn(
            self._turns.get(sample_id, RolloutTurn()).number + 1, num_tokens + len(tool_tokens)
        )
        return tool_tokens

    @staticmethod
    def _with_tool_tokens(partial: PartialResponse, tool_tokens: tuple[int, ...]) -> PartialResponse:
        return replace(
            partial,
            tokens=partial.tokens + tool_tokens,
            logprobs=partial.logprobs + (0.0,) * len(tool_tokens),
            versions=partial.versions + (TOOL_TOKEN_VERSION,) * len(tool_tokens),
            kept=partial.kept + (b"",) * len(tool_tokens) if partial.kept else (),
        )

    def _call(self, tools: ToolWorkers, sample_id: int, call: ToolCall) -> None:
        answer = tools.call(call)
        answer.add_done_callback(lambda done: self._answered_calls.put((sample_id, done)))

    def _exchange(self) -> list[tuple[int, tuple[int, ...]]]:
        """Return the answers since the last call, by sample id; the same on all ranks of the replica."""
        if not self._pending:
            return []
        if self._messages.is_caller:
            answers = list(self._new_answers())
            self._messages.send(answers)
        else:
            answers = self._messages.receive()
        self._waits = False
        return answers

    def _new_answers(self) -> Iterator[tuple[int, tuple[int, ...]]]:
        """Yield the answers that have arrived. Raises RunFailed if a call failed."""
        while self._waits or not self._answered_calls.empty():
            sample_id, done = self._answered_calls.get()
            try:
                answer = done.result()
            except RewardError as error:
                raise RunFailed(
                    f"{error}; set the tool's failure_answer to continue after failures, and run again with --resume"
                ) from None
            self._waits = False
            self.num_calls, self.seconds = self.num_calls + 1, self.seconds + answer.seconds
            yield sample_id, self._encode(answer.text)[: self._limits.answer]


class _Messages:
    """Messages from the rank of a replica that calls the tool to the others; sends do not block."""

    def __init__(self, mesh: Mesh, device: torch.device) -> None:
        alone = mesh.layout.tp * mesh.layout.pp == 1
        self._ranks = [] if alone else dist.get_process_group_ranks(mesh.groups.mp)
        self._device = device
        self.is_caller = alone or dist.get_rank() == self._ranks[0]
        self._pending_sends: list[tuple[dist.Work, Tensor]] = []

    def send(self, answers: Sequence[tuple[int, tuple[int, ...]]]) -> None:
        """Send, for each answer, its sample id, its number of tokens and its tokens."""
        numbers = [number for sample_id, tokens in answers for number in (sample_id, len(tokens), *tokens)]
        for rank in self._ranks[1:]:
            self._send([len(numbers)], rank)
            if numbers:
                self._send(numbers, rank)

    def receive(self) -> list[tuple[int, tuple[int, ...]]]:
        """Wait for the next answers."""
        size = int(self._receive(1))
        numbers, answers = iter(self._receive(size).tolist() if size else ()), []
        for sample_id in numbers:
            answers.append((sample_id, tuple(next(numbers) for _ in range(next(numbers)))))
        return answers

    def flush(self) -> None:
        """Wait until all sends are complete."""
        for work, _ in self._pending_sends:
            work.wait()
        self._pending_sends.clear()

    def _send(self, numbers: Sequence[int], rank: int) -> None:
        message = torch.tensor(numbers, dtype=torch.int64, device=self._device)
        work = dist.isend(message, rank)
        assert work is not None
        self._pending_sends = [(sent, buffer) for sent, buffer in self._pending_sends if not sent.is_completed()]
        self._pending_sends.append((work, message))

    def _receive(self, size: int) -> Tensor:
        message = torch.empty(size, dtype=torch.int64, device=self._device)
        dist.recv(message, self._ranks[0])
        return message
