"""Prompts, the sequences in the slots and their responses: admission, progress and release, on the host.

Every rank of a replica keeps the same groups of slots by recording the same sampled tokens, so that no message is
needed to agree on admission.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from meshwright.planner.simulation.slot_groups import SlotGroup
from meshwright.profiles.stages import TOLD
from meshwright.runtime.generation.records import NO_LIMIT, Numbers, Reals, Records

if TYPE_CHECKING:
    from meshwright.runtime.generation.stopping import DecodedText, StopStrings


Age: TypeAlias = tuple[int, int, int]
"""What orders sequences by when they began: of two, the younger one's is larger."""


class Finish(StrEnum):
    """Why a response ended."""

    EOS = "eos"
    STOP = "stop"
    """A stop string was completed."""
    LENGTH = "length"
    """The response is truncated: it reached the longest that was allowed."""
    CALL = "call"
    """A turn of the response calls a tool; the response goes on, or is truncated where it may not."""


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """`row` identifies the sequence within the prompt batch of `step`; `draw` seeds its sampling, wherever it runs."""

    row: int
    draw: int
    tokens: tuple[int, ...]
    step: int = 0
    max_response: int | None = None
    """Tokens after which this response ends by length, where they are fewer than the generator's own limit."""


@dataclass(frozen=True, kw_only=True)
class Partial:
    """What was drawn for a prompt so far, by a sequence that has no slot. Tokens, log-probabilities and versions are
    of one length."""

    prompt: Prompt
    tokens: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    versions: tuple[int, ...] = ()
    """Of the weights that drew each token; never falls, but for what a tool told, which has `TOLD`. Where a cache is
    kept over a change of weights, what tokens attended to is in part of older ones: the log-probabilities are those
    that were sampled, and of no one version."""
    first_turn: int = 0
    """The generator's turn in which the first token was drawn."""

    @property
    def row(self) -> int:
        """Of its prompt."""
        return self.prompt.row

    @property
    def num_drawn(self) -> int:
        """Tokens but for those that a tool told."""
        return len(self.versions) - self.versions.count(TOLD)

    @property
    def step(self) -> int:
        """Of the prompt batch that its prompt came in."""
        return self.prompt.step

    @property
    def age(self) -> Age:
        return self.first_turn, self.step, self.row


@dataclass(frozen=True, kw_only=True)
class Response(Partial):
    """What was drawn for a prompt, and why it ended."""

    finish: Finish


@dataclass(frozen=True, kw_only=True)
class Beginning:
    """What was drawn for a prompt before a run was resumed under another plan. Of one length, as a response's."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    finish: Finish | None
    """None where it goes on."""

    def of(self, prompt: Prompt, turn: int) -> Partial | Response:
        """What goes on with its prompt, admitted again in a turn of the generator, or has ended."""
        drawn = Partial(
            prompt=prompt, tokens=self.tokens, logprobs=self.logprobs, versions=self.versions, first_turn=turn
        )
        return Response(**vars(drawn), finish=self.finish) if self.finish else drawn


@dataclass(kw_only=True, eq=False)
class LiveSequence:
    """A sequence in a slot; what it has drawn is among the records of its group."""

    prompt: Prompt
    slot: int
    records: Records
    row: int
    """Of the records."""
    first_turn: int = 0
    texts: dict[StopStrings, DecodedText] = field(default_factory=dict)
    """Kept where strings are watched for; made again from the tokens where it is missing."""

    @property
    def step(self) -> int:
        return self.prompt.step

    @property
    def num_drawn(self) -> int:
        return int(self.records.num_drawn[self.row])

    @property
    def tokens(self) -> list[int]:
        return self.records.tokens(self.row)

    @property
    def last_token(self) -> int:
        return int(self.records.last(np.array([self.row]))[0])

    @property
    def num_cached(self) -> int:
        """Tokens whose keys and values are in the cache: all but the last one drawn."""
        return len(self.prompt.tokens) + self.num_drawn - 1

    @property
    def age(self) -> Age:
        return self.first_turn, self.prompt.step, self.prompt.row

    def kept(self) -> Partial:
        """What is left of it without its slot."""
        return Partial(**self._drawn())

    def ended(self, finish: Finish) -> Response:
        return Response(**self._drawn(), finish=finish)

    def _drawn(self) -> dict[str, Any]:
        records = self.records
        drawn = (tuple(values(self.row)) for values in (records.tokens, records.logprobs, records.versions))
        names = "tokens", "logprobs", "versions"
        return {"prompt": self.prompt, "first_turn": self.first_turn, **dict(zip(names, drawn, strict=True))}


class LiveGroup(SlotGroup[LiveSequence]):
    """A group whose sequences have their tokens."""

    def __init__(self, first_slot: int, num_slots: int) -> None:
        super().__init__(first_slot, num_slots)
        self.records = Records(num_slots)
        self._rows: Numbers = np.zeros(0, dtype=np.int64)
        self._joined: list[int] = []
        """Rows of sequences that are live since `rows` was asked."""
        self._free = list(range(num_slots))  # a heap

    @property
    def rows(self) -> Numbers:
        """Of the live sequences among the records."""
        if self._joined:
            self._rows, self._joined = np.concatenate((self._rows, self._joined)), []
        return self._rows

    @property
    def is_full(self) -> bool:
        return not self._free

    @property
    def next_slot(self) -> int:
        """That the next sequence gets."""
        return self.first_slot + self._free[0]

    def seat(self, partial: Partial) -> LiveSequence:
        """Lets a sequence go on, or begin, in the next slot."""
        row, prompt = heapq.heappop(self._free), partial.prompt
        most = NO_LIMIT if prompt.max_response is None else prompt.max_response
        self.records.begin(row, num_prompt=len(prompt.tokens), most=most, draw=prompt.draw)
        if partial.tokens:
            self.records.extend(row, partial.tokens, partial.logprobs, partial.versions)
        seated = LiveSequence(
            prompt=prompt,
            slot=self.first_slot + row,
            records=self.records,
            row=row,
            first_turn=partial.first_turn,
        )
        self.live.append(seated)
        self._joined.append(row)
        return seated

    def record(
        self,
        tokens: Numbers,
        logprobs: Reals,
        *,
        version: int,
        finish: Callable[[LiveGroup], Mapping[int, Finish]],
    ) -> tuple[list[Response], list[int]]:
        """Appends one token, drawn by policy `version`, to every live sequence.

        `finish` says which end now, by their place among the live ones, and why. Returns what ended, in the order of
        the live ones, and the slots that are free again.
        """
        self.records.add(self.rows, tokens, logprobs, version)
        finished = finish(self)
        if not finished:
            return [], []
        responses = [self.live[index].ended(why) for index, why in sorted(finished.items())]
        return responses, self.leave(finished)

    def leave(self, indices: Mapping[int, object] | Sequence[int]) -> list[int]:
        """Takes out live sequences by their place among them; the slots that are free again."""
        left = self._take_out(indices)
        for row in left:
            heapq.heappush(self._free, row)
        return [self.first_slot + row for row in left]

    def park(self, sequence: LiveSequence) -> None:
        """A live sequence keeps its slot and draws nothing until it goes on."""
        self._take_out([self.live.index(sequence)])

    def go_on(self, parked: LiveSequence) -> None:
        """It draws again, behind the live ones."""
        self.live.append(parked)
        self._joined.append(parked.row)

    def free(self, parked: LiveSequence) -> int:
        """Its slot, which is free again."""
        heapq.heappush(self._free, parked.row)
        return parked.slot

    def _take_out(self, indices: Mapping[int, object] | Sequence[int]) -> list[int]:
        """Live sequences by their place among them; their rows."""
        kept = np.ones(len(self.live), dtype=bool)
        kept[list(indices)] = False
        left: list[int] = self.rows[~kept].tolist()
        self._keep(kept.tolist())
        self._rows = self.rows[kept]
        return left


def packs(rows: Sequence[int], most: int) -> Iterator[list[tuple[int, int, int]]]:
    """Rows of so many tokens packed together, at most `most` tokens each: (row, first, end) of every part of a row.

    A row that does not fit goes on in the next pack.
    """
    pack: list[tuple[int, int, int]] = []
    left = most
    for row, length in enumerate(rows):
        first = 0
        while first < length:
            end = min(length, first + left)
            pack.append((row, first, end))
            left -= end - first
            first = end
            if not left:
                yield pack
                pack, left = [], most
    if pack:
        yield pack
