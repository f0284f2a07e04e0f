"""Turns of rollouts in a generator: which sequences wait for a tool, and how they go on behind its answer.

One rank of a replica calls the tool. It tells the others what has been answered before a group advances, so that all of
them let the same sequences go on in the same round. Which round that is depends on the clock, and what is drawn does
not: a token's draw depends on its place alone.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.profiles.errors import RunFailed
from meshwright.profiles.stages import TOLD
from meshwright.runtime.environment.samples import RewardError, ToolCall
from meshwright.runtime.environment.tools import ToolAnswer, Tools
from meshwright.runtime.generation.seating import Seating
from meshwright.runtime.generation.slots import Finish, LiveGroup, LiveSequence, Partial, Prompt
from meshwright.runtime.generation.stopping import StopStrings
from meshwright.runtime.model.mesh import Mesh


@dataclass(frozen=True, kw_only=True)
class TurnLimits:
    """Turns of a rollout, tokens that one draws and of an answer, and tokens behind a prompt in all, at most."""

    num_turns: int
    drawn: int
    answer: int
    response: int


class CallingTurn(NamedTuple):
    """The turn that a rollout is in: its number from 1, and its first token behind the prompt."""

    number: int = 1
    first: int = 0


Describe: TypeAlias = Callable[[Prompt, Sequence[int], CallingTurn], ToolCall]
"""The call of a turn that has just ended, from the prompt and all tokens behind it."""


class _Parked(NamedTuple):
    """A sequence that keeps its slot, of which so many tokens are cached."""

    group: LiveGroup
    sequence: LiveSequence
    num_cached: int


class ToolTurnTaking:
    """One rank's; `tools` are with the rank of each replica that calls them."""

    def __init__(
        self,
        mesh: Mesh,
        device: torch.device,
        tools: Tools | None,
        *,
        call_end: StopStrings,
        limits: TurnLimits,
        keeps_cache: bool,
        describe: Describe,
        encode: Callable[[str], tuple[int, ...]],
    ) -> None:
        """A turn that completes `call_end` calls. With `keeps_cache` a sequence that waits keeps its slot."""
        self.call_end = call_end
        self.num_calls, self.seconds = 0, 0.0
        """Calls that this rank has made, and the seconds until they were answered, together."""
        self._tools, self._limits, self._keeps_cache = tools, limits, keeps_cache
        self._describe, self._encode = describe, encode
        self._calling: list[LiveSequence] = []
        self._turns: dict[int, CallingTurn] = {}
        """By draw, of rollouts behind their first turn."""
        self._pending: set[int] = set()
        """Draws whose tool has not answered."""
        self._parked: dict[int, _Parked] = {}
        self._left: dict[int, Partial] = {}
        self._answers: dict[int, tuple[int, ...]] = {}
        """By draw, for sequences whose group has not advanced since."""
        self._done: queue.SimpleQueue[tuple[int, Future[ToolAnswer]]] = queue.SimpleQueue()
        self._waits = False
        self._messages = _Messages(mesh, device)

    def begin(self) -> None:
        """The generator begins a turn, with no rollout under way."""
        assert not self._pending, "rollouts of several turns are delivered in the turn that begins them"
        self._turns.clear()

    def end(self) -> None:
        """Nothing is left to draw."""
        self._messages.flush()

    def limit(self, group: LiveGroup, seated: Sequence[LiveSequence]) -> None:
        """Lets what has just got a slot, or goes on, draw no more in its turn than one may."""
        most = group.records.most
        for one in seated:
            end = self._turn(one).first + self._limits.drawn
            most[one.row] = end if one.prompt.max_response is None else min(end, one.prompt.max_response)

    def take_calls(self, group: LiveGroup, found: dict[int, Finish]) -> dict[int, Finish]:
        """Which live sequences end, by their place: what calls and may go on does not; it waits from `begin_calls`
        on."""
        for index in [index for index, why in found.items() if why is Finish.CALL]:
            one = group.live[index]
            if self._turn(one).number < self._limits.num_turns and one.num_drawn + 1 < self._limits.response:
                self._calling.append(one)
                del found[index]
            else:
                found[index] = Finish.LENGTH
        for index in found:
            self._turns.pop(group.live[index].prompt.draw, None)
        return found

    def begin_calls(self, group: LiveGroup, seating: Seating) -> None:
        """Calls the tool for the sequences that were taken, which leave the live ones."""
        for one in self._calling:
            draw, turn, tokens = one.prompt.draw, self._turn(one), one.tokens
            if self._keeps_cache:
                group.park(one)
                self._parked[draw] = _Parked(group, one, one.num_cached)
            else:
                self._left[draw] = one.kept()
                seating.release(group.leave([group.live.index(one)]))
            self._pending.add(draw)
            if self._tools:
                self._call(self._tools, draw, self._describe(one.prompt, tokens, turn))
        self._calling.clear()

    def answered(self, group: LiveGroup, seating: Seating) -> list[tuple[LiveSequence, int]]:
        """Those of a group that go on in their slots, each with its tokens that are cached. What has left its slot
        waits for another one."""
        for draw, tokens in self._exchange():
            self._pending.remove(draw)
            if draw in self._left:
                partial = self._left.pop(draw)
                seating.pause(self._behind(partial, self._told(draw, len(partial.tokens), tokens)))
            else:
                self._answers[draw] = tokens
        found = []
        for draw in [draw for draw, parked in self._parked.items() if parked.group is group and draw in self._answers]:
            _, one, cached = self._parked.pop(draw)
            told = self._told(draw, one.num_drawn, self._answers.pop(draw))
            one.records.extend(one.row, told, (0.0,) * len(told), (TOLD,) * len(told))
            one.texts.clear()
            if seating.go_on(group, one):
                found.append((one, cached))
        return found

    def wait(self) -> None:
        """Nothing can be drawn before another answer is there."""
        self._waits = bool(self._pending) and not self._answers

    def _turn(self, one: LiveSequence) -> CallingTurn:
        return self._turns.get(one.prompt.draw, CallingTurn())

    def _told(self, draw: int, num_tokens: int, answer: tuple[int, ...]) -> tuple[int, ...]:
        """What of an answer stands behind so many tokens; one more can be drawn. The next turn begins there."""
        told = answer[: self._limits.response - num_tokens - 1]
        self._turns[draw] = CallingTurn(self._turns.get(draw, CallingTurn()).number + 1, num_tokens + len(told))
        return told

    @staticmethod
    def _behind(partial: Partial, told: tuple[int, ...]) -> Partial:
        return replace(
            partial,
            tokens=partial.tokens + told,
            logprobs=partial.logprobs + (0.0,) * len(told),
            versions=partial.versions + (TOLD,) * len(told),
        )

    def _call(self, tools: Tools, draw: int, call: ToolCall) -> None:
        answer = tools.call(call)
        answer.add_done_callback(lambda done: self._done.put((draw, done)))

    def _exchange(self) -> list[tuple[int, tuple[int, ...]]]:
        """By draw, what was answered since the last time, the same on all ranks of the replica."""
        if not self._pending:
            return []
        if self._messages.is_caller:
            found = list(self._new_answers())
            self._messages.send(found)
        else:
            found = self._messages.receive()
        self._waits = False
        return found

    def _new_answers(self) -> Iterator[tuple[int, tuple[int, ...]]]:
        """Raises RunFailed where a call failed."""
        while self._waits or not self._done.empty():
            draw, done = self._done.get()
            try:
                answer = done.result()
            except RewardError as error:
                raise RunFailed(
                    f"{error}; give the tool a failure_answer for what may fail, and run again with --resume"
                ) from None
            self._waits = False
            self.num_calls, self.seconds = self.num_calls + 1, self.seconds + answer.seconds
            yield draw, self._encode(answer.text)[: self._limits.answer]


class _Messages:
    """What one rank of a replica tells the others of it; sends do not wait."""

    def __init__(self, mesh: Mesh, device: torch.device) -> None:
        alone = mesh.layout.tp * mesh.layout.pp == 1
        self._ranks = [] if alone else dist.get_process_group_ranks(mesh.groups.mp)
        self._device = device
        self.is_caller = alone or dist.get_rank() == self._ranks[0]
        self._in_flight: list[tuple[dist.Work, Tensor]] = []

    def send(self, answers: Sequence[tuple[int, tuple[int, ...]]]) -> None:
        """Their draws and numbers of tokens, and the tokens end to end."""
        numbers = [number for draw, tokens in answers for number in (draw, len(tokens), *tokens)]
        for rank in self._ranks[1:]:
            self._send([len(numbers)], rank)
            if numbers:
                self._send(numbers, rank)

    def receive(self) -> list[tuple[int, tuple[int, ...]]]:
        """Waits for what was sent."""
        size = int(self._receive(1))
        numbers, found = iter(self._receive(size).tolist() if size else ()), []
        for draw in numbers:
            found.append((draw, tuple(next(numbers) for _ in range(next(numbers)))))
        return found

    def flush(self) -> None:
        """Waits until everything sent has left."""
        for work, _ in self._in_flight:
            work.wait()
        self._in_flight.clear()

    def _send(self, numbers: Sequence[int], rank: int) -> None:
        message = torch.tensor(numbers, dtype=torch.int64, device=self._device)
        work = dist.isend(message, rank)
        assert work is not None
        self._in_flight = [(sent, kept) for sent, kept in self._in_flight if not sent.is_completed()]
        self._in_flight.append((work, message))

    def _receive(self, size: int) -> Tensor:
        message = torch.empty(size, dtype=torch.int64, device=self._device)
        dist.recv(message, self._ranks[0])
        return message
