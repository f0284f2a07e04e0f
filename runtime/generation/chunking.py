"""Hands out the tokens of responses in chunks while they are being generated, in plain Python."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from meshwright.runtime.generation.slots import Finish, LiveSequence, Prompt, Response


@dataclass(frozen=True)
class Chunk:
    """The next tokens of one response."""

    prompt: Prompt
    tokens: tuple[int, ...]
    finish: Finish | None
    """Why the response ended with this chunk; None while more is to come."""


class Listener(Protocol):
    """What is told of every token round of a group of slots."""

    def tell(self, live: Sequence[LiveSequence], ended: Sequence[Response]) -> None:
        """Sequences that just got a token, and those that ended with it."""
        ...


@dataclass(frozen=True)
class Listeners:
    """Several that are told the same."""

    listeners: Sequence[Listener]

    def tell(self, live: Sequence[LiveSequence], ended: Sequence[Response]) -> None:
        """Tells each of them, in their order."""
        for listener in self.listeners:
            listener.tell(live, ended)


class Chunker:
    """Hands over every response in chunks of `chunk_tokens` tokens or, the last one of a response, fewer.

    It remembers what it handed over, so the same stream is to be given to every turn.
    """

    def __init__(self, chunk_tokens: int, hand_over: Callable[[Sequence[Chunk], int], None]) -> None:
        """`hand_over` gets the chunks that became whole with the same token round, on every rank the same ones, and how
        many sequences go on."""
        self.chunk_tokens, self._hand_over = chunk_tokens, hand_over
        self._handed: dict[tuple[int, int], int] = {}  # tokens handed over of each response that has not ended

    def tell(self, live: Sequence[LiveSequence], ended: Iterable[Response]) -> None:
        """Hands over what is new of sequences that just got a token, of which some ended with it."""
        chunks = [self._chunk(response.prompt, response.tokens, response.finish) for response in ended]
        chunks += [
            self._chunk(sequence.prompt, sequence.tokens, None)
            for sequence in live
            if sequence.num_drawn - self._handed.get(_key(sequence.prompt), 0) >= self.chunk_tokens
        ]
        if chunks:
            self._hand_over(chunks, len(live))

    def _chunk(self, prompt: Prompt, tokens: Sequence[int], finish: Finish | None) -> Chunk:
        first = self._handed.pop(_key(prompt), 0)
        if finish is None:
            self._handed[_key(prompt)] = len(tokens)
        return Chunk(prompt, tuple(tokens[first:]), finish)


def _key(prompt: Prompt) -> tuple[int, int]:
    return prompt.step, prompt.row
