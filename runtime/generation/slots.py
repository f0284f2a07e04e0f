"""Prompts, the sequences in the slots and their responses: admission, progress and release, in plain Python.

Every rank of a replica keeps the same groups of slots by recording the same sampled tokens, so that no message is
needed to agree on admission.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from meshwright.planner.simulation.slot_groups import SlotGroup, SlotMove

if TYPE_CHECKING:
    from meshwright.runtime.generation.stopping import DecodedText


class Finish(StrEnum):
    """Why a response ended."""

    EOS = "eos"
    STOP = "stop"
    """A stop string was completed."""
    LENGTH = "length"
    """The response is truncated: it reached the longest that was allowed."""


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
class Response:
    """What was drawn for a prompt, and why it ended. Tokens, log-probabilities and versions are of one length."""

    prompt: Prompt
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    """Of the weights that drew each token; never falls. Where a cache is kept over a change of weights, what they
    attended to is in part of older ones: the log-probabilities are those that were sampled, and of no one version."""
    finish: Finish
    first_turn: int
    """The generator's turn in which the first token was drawn."""

    @property
    def row(self) -> int:
        """Of its prompt."""
        return self.prompt.row

    @property
    def step(self) -> int:
        """Of the prompt batch that its prompt came in."""
        return self.prompt.step


@dataclass(frozen=True, kw_only=True)
class Beginning:
    """What was drawn for a prompt before a run was resumed under another plan. Of one length, as a response's."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    finish: Finish | None
    """None where it goes on."""
    first_turn: int = 0
    """The generator's turn in which its prompt was admitted again."""

    def response(self, prompt: Prompt) -> Response:
        """What has ended, as the answer to its prompt."""
        assert self.finish is not None, "it goes on"
        return Response(
            prompt=prompt,
            tokens=self.tokens,
            logprobs=self.logprobs,
            versions=self.versions,
            finish=self.finish,
            first_turn=self.first_turn,
        )


@dataclass(kw_only=True)
class LiveSequence:
    """A prompt and what has been generated for it."""

    prompt: Prompt
    first_turn: int = 0
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    uniforms: list[float] = field(default_factory=list)
    """Numbers that decide this sequence's tokens by position, as far as they have been hashed."""
    text: DecodedText | None = None
    """Kept where stop strings are watched for; made again from the tokens where it is missing."""

    @property
    def step(self) -> int:
        return self.prompt.step

    @property
    def num_cached(self) -> int:
        """Tokens whose keys and values are in the cache: all but the last one drawn."""
        return len(self.prompt.tokens) + len(self.tokens) - 1

    def take_over(self, begun: Beginning) -> None:
        """Goes on with what was drawn for the prompt before."""
        self.tokens, self.logprobs, self.versions = list(begun.tokens), list(begun.logprobs), list(begun.versions)
        self.first_turn = begun.first_turn


class LiveGroup(SlotGroup[LiveSequence]):
    """A group whose sequences have their tokens."""

    def admit(self, waiting: deque[Prompt], turn: int = 0) -> Sequence[LiveSequence]:
        """Moves prompts from the front of `waiting` into free slots and returns their sequences, in slot order."""
        admitted = [LiveSequence(prompt=prompt, first_turn=turn) for prompt in self._next(waiting)]
        self.live.extend(admitted)
        return admitted

    def record(
        self,
        tokens: Iterable[int],
        logprobs: Iterable[float],
        *,
        version: int,
        finish: Callable[[LiveSequence], Finish | None],
    ) -> tuple[list[Response], list[SlotMove]]:
        """Appends one token, drawn by policy `version`, to every live sequence.

        `finish` says whether and why a sequence ends now. Returns what ended, in slot order, and the moves that fill
        the freed slots.
        """
        finished = []
        for sequence, token, logprob in zip(self.live, tokens, logprobs, strict=True):
            sequence.tokens.append(token)
            sequence.logprobs.append(logprob)
            sequence.versions.append(version)
            finished.append(finish(sequence))
        if not any(finished):
            return [], []
        responses = [_response(s, f) for s, f in zip(self.live, finished, strict=True) if f]
        cached = [sequence.num_cached for sequence in self.live]
        return responses, self._compact(cached, [f is not None for f in finished])


def packs(rows: Iterable[tuple[int, int]], most: int) -> Iterator[list[tuple[int, int, int]]]:
    """Rows of (slot, tokens) packed together, at most `most` tokens each: (slot, first, end) of every part of a row.

    A row that does not fit goes on in the next pack.
    """
    pack: list[tuple[int, int, int]] = []
    left = most
    for slot, length in rows:
        first = 0
        while first < length:
            end = min(length, first + left)
            pack.append((slot, first, end))
            left -= end - first
            first = end
            if not left:
                yield pack
                pack, left = [], most
    if pack:
        yield pack


def _response(sequence: LiveSequence, finish: Finish) -> Response:
    return Response(
        prompt=sequence.prompt,
        tokens=tuple(sequence.tokens),
        logprobs=tuple(sequence.logprobs),
        versions=tuple(sequence.versions),
        finish=finish,
        first_turn=sequence.first_turn,
    )
