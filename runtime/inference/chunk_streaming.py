"""Streaming of responses in chunks: splitting them while they are generated, and scoring the chunks as they arrive.

The keys and values of a scored row stay in a cache between its chunks, so every token goes through the scoring model
once.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from meshwright.profiles.packing import num_blocks_for
from meshwright.runtime.inference.slots import Finish, Prompt, Response
from meshwright.runtime.messages.streaming import ChunkReader
from meshwright.runtime.model.kv_cache import allocate_cache
from meshwright.runtime.model.logprobs import token_logprobs
from meshwright.runtime.model.mesh import Mesh
from meshwright.runtime.model.model_shard import Decoder
from meshwright.runtime.model.stage_passes import PipelineLink, forward_cached


@dataclass(frozen=True)
class Chunk:
    """The next tokens of one response."""

    prompt: Prompt
    tokens: tuple[int, ...]
    finish: Finish | None
    """Why the response ended with this chunk; None if more tokens follow."""


class SampledSequence(Protocol):
    """A sequence that is being sampled, by whatever engine."""

    @property
    def prompt(self) -> Prompt: ...
    @property
    def tokens(self) -> list[int]: ...
    @property
    def num_sampled(self) -> int:
        """The number of tokens after the prompt, tool tokens included."""
        ...


class Listener(Protocol):
    """Receives the decode rounds of a group of slots."""

    @property
    def needs_each_round(self) -> bool:
        """True if it must receive the tokens of a round before the next one is sampled."""
        ...

    def on_round(self, live: Sequence[SampledSequence], ended: Sequence[Response]) -> None:
        """Receive the sequences that just got a token and are live, and the responses that ended with it."""
        ...

    def on_rounds(self, num_live: int, num_rounds: int) -> None:
        """Receive rounds in which each of `num_live` sequences got a token and none started or ended; it is called
        only if the listener does not need each round."""
        ...


@dataclass(frozen=True)
class Listeners:
    """Several listeners that receive the same rounds."""

    listeners: Sequence[Listener]

    def on_round(self, live: Sequence[SampledSequence], ended: Sequence[Response]) -> None:
        """Pass the round to each of them, in order."""
        for listener in self.listeners:
            listener.on_round(live, ended)

    @property
    def needs_each_round(self) -> bool:
        """True if one of them must receive the tokens of a round before the next one is sampled."""
        return any(listener.needs_each_round for listener in self.listeners)

    def on_rounds(self, num_live: int, num_rounds: int) -> None:
        """Pass the rounds to each of them, in order."""
        for listener in self.listeners:
            listener.on_rounds(num_live, num_rounds)


class Chunker:
    """Splits every response into chunks of `chunk_tokens` tokens; the last one may have fewer.

    It counts the tokens of each response that it has passed on, so one object must serve all periods.
    """

    needs_each_round = True

    def __init__(self, chunk_tokens: int, hand_over: Callable[[Sequence[Chunk], int], None]) -> None:
        """`hand_over` is called with the chunks that one decode round completes, the same on every rank of the replica,
        and the number of sequences that remain live."""
        self.chunk_tokens, self._emit = chunk_tokens, hand_over
        self._num_sent: dict[tuple[int, int], int] = {}  # tokens passed on, of each response that has not ended

    def on_round(self, live: Sequence[SampledSequence], ended: Iterable[Response]) -> None:
        """Pass on the chunks that this round completes."""
        chunks = [self._chunk(response.prompt, response.tokens, response.finish) for response in ended]
        chunks += [
            self._chunk(sequence.prompt, sequence.tokens, None)
            for sequence in live
            if sequence.num_sampled - self._num_sent.get(_key(sequence.prompt), 0) >= self.chunk_tokens
        ]
        if chunks:
            self._emit(chunks, len(live))

    def on_rounds(self, num_live: int, num_rounds: int) -> None:
        """Raise AssertionError: chunks need the tokens of each round."""
        raise AssertionError(f"{num_rounds} rounds of {num_live} sequences came without their tokens")

    def _chunk(self, prompt: Prompt, tokens: Sequence[int], finish: Finish | None) -> Chunk:
        first = self._num_sent.pop(_key(prompt), 0)
        if finish is None:
            self._num_sent[_key(prompt)] = len(tokens)
        return Chunk(prompt, tuple(tokens[first:]), finish)


def _key(prompt: Prompt) -> tuple[int, int]:
    return prompt.step, prompt.row


@dataclass
class _Row:
    slot: int
    num_cached: int = 0
    pending: list[int] = field(default_factory=list)
    """The last token so far, which runs once the next one is known: its logits predict that one."""
    values: list[Tensor] = field(default_factory=list)


class ChunkScorer:
    """Computes log-probabilities of a language model, or the values of a scalar head, for the rows of one replica.

    All ranks of the replica must call the same methods with the same arguments in the same order.
    """

    def __init__(
        self,
        model: Decoder,
        mesh: Mesh,
        *,
        max_rows: int,
        max_tokens: int,
        micro_batch_size: int,
        temperature: float = 1.0,
    ) -> None:
        """At most `max_rows` rows are in progress at a time, each of at most `max_tokens` tokens; `micro_batch_size` of
        them are run together."""
        parameter = next(model.parameters())
        self._model, self._mesh = model, mesh
        self._micro_batch_size, self._temperature = micro_batch_size, temperature
        self._max_tokens = max_tokens
        self._device, self._dtype = parameter.device, parameter.dtype
        self._cache = allocate_cache(
            model.spec,
            model.layers,
            mesh.layout.tp,
            num_blocks=max_rows * num_blocks_for(max_tokens),
            num_rows=max_rows,
            max_tokens=max_tokens,
            dtype=self._dtype,
            device=self._device,
        )
        self._relay = PipelineLink(mesh, self._device)
        self._free = list(range(max_rows))
        """The free slots, a heap."""
        self._rows: dict[int, _Row] = {}

    def extend(self, chunks: Mapping[int, Sequence[int]]) -> None:
        """Run the next tokens of each row; the first chunk of a row starts with its prompt.

        A row is any number that identifies it among those in progress.
        """
        self._model.eval()
        feeds = {row: self._feed(row, tokens) for row, tokens in chunks.items()}
        order = sorted(row for row in feeds if feeds[row])
        for first in range(0, len(order), self._micro_batch_size):
            self._forward(order[first : first + self._micro_batch_size], feeds)

    def finish(self, row: int) -> Tensor | None:
        """Return the values of all tokens of the row, [S] fp32, and forget the row. None except on the last
        stage.

        They equal those of `forward_logprobs` or `forward_scalars` in `runtime/training/trainer.py`. The score of a
        reward model is the last of the values.
        """
        self._relay.flush()
        state = self._rows.pop(row)
        heapq.heappush(self._free, state.slot)
        self._cache.tables.release(state.slot)
        if not self._mesh.is_last_stage:
            return None
        padding = [] if self._model.spec.scalar_head else [torch.zeros(1, device=self._device)]
        return torch.cat([*state.values, *padding])

    def _feed(self, row: int, tokens: Sequence[int]) -> list[int]:
        """Return the tokens to run now; for log-probabilities they include the last one, which is only a target."""
        if row not in self._rows:
            assert self._free, f"more than {len(self._rows)} rows are in progress"
            self._rows[row] = _Row(slot=heapq.heappop(self._free))
        state = self._rows[row]
        feed = [*state.pending, *tokens]
        assert state.num_cached + len(feed) <= self._max_tokens, f"row {row} has more than {self._max_tokens} tokens"
        if not self._model.spec.scalar_head:
            state.pending = feed[-1:]
            return feed if len(feed) > 1 else []
        return feed

    @torch.no_grad()
    def _forward(self, rows: Sequence[int], feeds: Mapping[int, list[int]]) -> None:
        """Run tokens of a few rows through this rank's stage and keep the values that the last stage computes."""
        scalar = self._model.spec.scalar_head
        states = [self._rows[row] for row in rows]
        tokens_of_rows = [torch.tensor(feeds[row]) for row in rows]
        inputs = tokens_of_rows if scalar else [tokens[:-1] for tokens in tokens_of_rows]
        lengths = [len(tokens) for tokens in inputs]
        slots, cached = [state.slot for state in states], [state.num_cached for state in states]
        for slot, start, length in zip(slots, cached, lengths, strict=True):
            self._cache.tables.allocate(slot, start + length)
        view = self._cache.continue_rows(slots, cached, lengths)
        output = forward_cached(self._model, self._mesh, self._relay, torch.cat(inputs).to(self._device), view)
        for state, length in zip(states, lengths, strict=True):
            state.num_cached += length
        if not self._mesh.is_last_stage:
            self._relay.send_hidden(output)
            return
        values = output if scalar else self._logprobs(output, torch.cat([tokens[1:] for tokens in tokens_of_rows]))
        for state, row_values in zip(states, values[0].split(lengths), strict=True):
            state.values.append(row_values)

    def _logprobs(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return log-probabilities [1, S] from logits [S, 1, V / tp] and the S tokens that follow."""
        values, _ = token_logprobs(
            logits,
            targets.to(self._device).unsqueeze(0),
            self._mesh.groups.tp,
            vocab_size=self._model.spec.vocab_size,
            temperature=self._temperature,
        )
        return values


@dataclass(frozen=True, kw_only=True)
class Scored:
    """The result of one period on one rank. `values` maps a row of the batch to a tensor [S] fp32 with a value per
    token, for each delivered sequence of its replica; None before the last pipeline stage."""

    values: Mapping[int, Tensor | None]
    num_tokens: int  # run through the model
    starved_seconds: float  # spent waiting for chunks


class ChunkedStage:
    """One rank of a stage that scores chunks while the responses are generated.

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
