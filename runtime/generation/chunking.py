"""Splits responses into chunks of tokens while they are being generated, in plain Python."""

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
    """Why the response ended with this chunk; None if more tokens follow."""


class Listener(Protocol):
    """Receives every decode round of a group of slots."""

    def on_round(self, live: Sequence[LiveSequence], ended: Sequence[Response]) -> None:
        """Receive the sequences that just got a token and are live, and the responses that ended with it."""
        ...


@dataclass(frozen=True)
class Listeners:
    """Several listeners that receive the same rounds."""

    listeners: Sequence[Listener]

    def on_round(self, live: Sequence[LiveSequence], ended: Sequence[Response]) -> None:
        """Pass the round to each of them, in order."""
        for listener in self.listeners:
            listener.on_round(live, ended)


class Chunker:
    """Splits every response into chunks of `chunk_tokens` tokens; the last one may have fewer.

    It remembers what it has handed over, so every period must use the same one.
    """

    def __init__(self, chunk_tokens: int, hand_over: Callable[[Sequence[Chunk], int], None]) -> None:
        """`hand_over` is called with the chunks that one decode round completes, the same on every rank of the replica,
        and the number of sequences that remain live."""
        self.chunk_tokens, self._hand_over = chunk_tokens, hand_over
        self._num_sent: dict[tuple[int, int], int] = {}  # tokens handed over of each response that has not ended

    def on_round(self, live: Sequence[LiveSequence], ended: Iterable[Response]) -> None:
        """Hand over the chunks that this round completes."""
        chunks = [self._chunk(response.prompt, response.tokens, response.finish) for response in ended]
        chunks += [
            self._chunk(sequence.prompt, sequence.tokens, None)
            for sequence in live
            if sequence.num_sampled - self._num_sent.get(_key(sequence.prompt), 0) >= self.chunk_tokens
        ]
        if chunks:
            self._hand_over(chunks, len(live))

    def _chunk(self, prompt: Prompt, tokens: Sequence[int], finish: Finish | None) -> Chunk:
        first = self._num_sent.pop(_key(prompt), 0)
        if finish is None:
            self._num_sent[_key(prompt)] = len(tokens)
        return Chunk(prompt, tuple(tokens[first:]), finish)


def _key(prompt: Prompt) -> tuple[int, int]:
    return prompt.step, prompt.row
