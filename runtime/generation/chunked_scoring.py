"""One rank of a stage that scores responses while they are generated: from the stream of chunks to the rows of a
batch."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from meshwright.runtime.generation.scoring import ChunkScorer
from meshwright.runtime.messages.chunk_transport import ChunkReader


@dataclass(frozen=True, kw_only=True)
class Scored:
    """The result of one period on one rank. `answers` maps a row of the batch to a tensor [S] fp32 with a value per
    token, for each delivered sequence of its replica; None before the last pipeline stage."""

    values: Mapping[int, Tensor | None]
    num_tokens: int  # run through the model
    starved_seconds: float  # spent waiting for chunks


class ChunkedStage:
    """One rank of the stage.

    Sequences that stay in flight keep their keys and values for the next period; if none does, the cache is freed.
    """

    def __init__(self, reader: ChunkReader, build: Callable[[], ChunkScorer]) -> None:
        self._reader, self._build = reader, build
        self._scorer: ChunkScorer | None = None
        self._in_flight: set[int] = set()
        self._ended: dict[int, Tensor | None] = {}

    def run(self) -> Scored:
        """Score chunks until every sender of the stream has ended its period."""
        scorer = self._scorer or self._build()
        num_tokens, starved_seconds, delivered = 0, 0.0, {}
        start = time.perf_counter()
        for message in self._reader.messages():
            starved_seconds += time.perf_counter() - start
            scorer.extend({chunk.sequence: chunk.tokens for chunk in message.chunks})
            num_tokens += sum(len(chunk.tokens) for chunk in message.chunks)
            self._in_flight.update(chunk.sequence for chunk in message.chunks)
            for chunk in message.chunks:
                if chunk.is_last:
                    self._ended[chunk.sequence] = scorer.finish(chunk.sequence)
                    self._in_flight.remove(chunk.sequence)
            delivered = {row: self._ended.pop(sequence) for sequence, row in (message.delivered or {}).items()}
            start = time.perf_counter()
        self._scorer = scorer if self._in_flight else None
        return Scored(values=delivered, num_tokens=num_tokens, starved_seconds=starved_seconds)
