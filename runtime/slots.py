"""Which sequence sits in which slot: admission, progress and release, in plain Python.

A group is a contiguous run of slots whose live sequences advance together, one token a round. Every rank of a replica
keeps the same groups by recording the same sampled tokens, so that no message is needed to agree on admission.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum


class Finish(StrEnum):
    """Why a response ended."""

    EOS = "eos"
    LENGTH = "length"


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """`row` identifies the sequence within its step; `draw` seeds its sampling, whatever rank generates it."""

    row: int
    draw: int
    tokens: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Response:
    row: int
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish: Finish


@dataclass(kw_only=True)
class LiveSequence:
    """A prompt and what has been generated for it."""

    prompt: Prompt
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    @property
    def num_cached(self) -> int:
        """Tokens whose keys and values are in the cache: all but the last one drawn."""
        return len(self.prompt.tokens) + len(self.tokens) - 1


@dataclass(frozen=True)
class SlotMove:
    """The sequence in slot `source` goes to slot `target`, with its first `num_tokens` cached tokens."""

    source: int
    target: int
    num_tokens: int


class SlotGroup:
    """Slots [first_slot, first_slot + num_slots); the live sequences occupy the first of them."""

    def __init__(self, first_slot: int, num_slots: int) -> None:
        self.first_slot = first_slot
        self.num_slots = num_slots
        self.live: list[LiveSequence] = []

    @property
    def num_free(self) -> int:
        return self.num_slots - len(self.live)

    def admit(self, waiting: deque[Prompt]) -> Sequence[LiveSequence]:
        """Moves prompts from the front of `waiting` into free slots and returns their sequences, in slot order."""
        admitted = [LiveSequence(prompt=waiting.popleft()) for _ in range(min(self.num_free, len(waiting)))]
        self.live.extend(admitted)
        return admitted

    def record(
        self, tokens: Iterable[int], logprobs: Iterable[float], *, eos_token: int, max_response: int
    ) -> tuple[list[Response], list[SlotMove]]:
        """Appends one token to every live sequence; returns what ended and the moves that fill the freed slots."""
        for sequence, token, logprob in zip(self.live, tokens, logprobs, strict=True):
            sequence.tokens.append(token)
            sequence.logprobs.append(logprob)
        finished = [_finish(s, eos_token, max_response) for s in self.live]
        responses = [_response(s, f) for s, f in zip(self.live, finished, strict=True) if f]
        return responses, self._compact([f is not None for f in finished])

    def _compact(self, ended: list[bool]) -> list[SlotMove]:
        """Fills each freed slot with the last live sequence, so that live sequences stay contiguous."""
        moves = []
        for index in range(len(self.live)):
            while ended and ended[-1]:
                ended.pop()
                self.live.pop()
            if index >= len(self.live):
                break
            if ended[index]:
                last = len(self.live) - 1
                moves.append(SlotMove(self.first_slot + last, self.first_slot + index, self.live[last].num_cached))
                self.live[index], ended[index] = self.live.pop(), ended.pop()
        return moves


def cut_slots(num_slots: int, num_groups: int) -> list[SlotGroup]:
    """`num_slots` slots as `num_groups` contiguous groups of nearly equal size."""
    bounds = [num_slots * i // num_groups for i in range(num_groups + 1)]
    return [SlotGroup(a, b - a) for a, b in itertools.pairwise(bounds)]


def _finish(sequence: LiveSequence, eos_token: int, max_response: int) -> Finish | None:
    if sequence.tokens[-1] == eos_token:
        return Finish.EOS
    return Finish.LENGTH if len(sequence.tokens) >= max_response else None


def _response(sequence: LiveSequence, finish: Finish) -> Response:
    return Response(
        row=sequence.prompt.row,
        tokens=tuple(sequence.tokens),
        logprobs=tuple(sequence.logprobs),
        finish=finish,
    )
