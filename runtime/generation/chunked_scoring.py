"""A stage that scores responses while they are generated: its turn, from what streams in to the rows of a batch."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from meshwright.runtime.generation.scoring import ChunkScorer
from meshwright.runtime.messages.chunk_transport import ChunkReader


@dataclass(frozen=True, kw_only=True)
class Scored:
    """What one rank of the stage made of a turn. `answers` are by row of the batch, [S] fp32 for the tokens of each
    delivered sequence of its replica, None before the last pipeline stage."""

    answers: Mapping[int, Tensor | None]
    num_tokens: int  # that went through the model
    starved_seconds: float  # waiting for more of them


class ChunkedStage:
    """One rank of the stage.

    Sequences that stay in flight keep their keys and values for the next turn; where none does, the memory for them
    is given back.
    """

    def __init__(self, reader: ChunkReader, build: Callable[[], ChunkScorer]) -> None:
        self._reader, self._build = reader, build
        self._scorer: ChunkScorer | None = None
        self._begun: set[int] = set()
        self._ended: dict[int, Tensor | None] = {}

    def run(self) -> Scored:
        """Reads until every owner of the stream has ended its turn."""
        scorer = self._scorer or self._build()
        num_tokens, starved_seconds, found = 0, 0.0, {}
        asked = time.perf_counter()
        for message in self._reader.passes():
            starved_seconds += time.perf_counter() - asked
            scorer.extend({chunk.sequence: chunk.tokens for chunk in message.chunks})
            num_tokens += sum(len(chunk.tokens) for chunk in message.chunks)
            self._begun.update(chunk.sequence for chunk in message.chunks)
            for chunk in message.chunks:
                if chunk.is_last:
                    self._ended[chunk.sequence] = scorer.finish(chunk.sequence)
                    self._begun.remove(chunk.sequence)
            found = {row: self._ended.pop(sequence) for sequence, row in (message.delivered or {}).items()}
            asked = time.perf_counter()
        self._scorer = scorer if self._begun else None
        return Scored(answers=found, num_tokens=num_tokens, starved_seconds=starved_seconds)
