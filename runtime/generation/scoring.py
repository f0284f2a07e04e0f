"""Scores responses that arrive in chunks, for a stage that streams from generation.

The keys and values of a row stay in a cache between its chunks, so every token goes through the model once. Rows of
different lengths are batched.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from meshwright.profiles.packing import num_blocks_for
from meshwright.runtime.model.cached_forward import forward_cached
from meshwright.runtime.model.kv_cache import PagedCache
from meshwright.runtime.model.logprobs import token_logprobs
from meshwright.runtime.model.mesh import Mesh
from meshwright.runtime.model.model_shard import Decoder
from meshwright.runtime.model.pipeline_p2p import PipelineLink


@dataclass
class _Row:
    slot: int
    num_cached: int = 0
    held: list[int] = field(default_factory=list)
    """Tokens that wait for the next one, whose log-probability they predict."""
    answers: list[Tensor] = field(default_factory=list)


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
        self._cache = PagedCache(
            num_layers=len(model.decoder.layers),
            num_blocks=max_rows * num_blocks_for(max_tokens),
            num_rows=max_rows,
            num_kv_heads=model.spec.num_kv_heads // mesh.layout.tp,
            max_tokens=max_tokens,
            head_dim=model.spec.head_dim,
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
        """Return the values of all tokens of the row, [S] fp32 as from `forward_logprobs` or `forward_scalars`, and
        forget the row.

        None before the last stage. A score is the last of the values.
        """
        self._relay.flush()
        state = self._rows.pop(row)
        heapq.heappush(self._free, state.slot)
        self._cache.tables.release(state.slot)
        if not self._mesh.is_last_stage:
            return None
        padding = [] if self._model.spec.scalar_head else [torch.zeros(1, device=self._device)]
        return torch.cat([*state.answers, *padding])

    def _feed(self, row: int, tokens: Sequence[int]) -> list[int]:
        """Return the tokens to run now; for log-probabilities they include the last one, which is only a target."""
        if row not in self._rows:
            assert self._free, f"more than {len(self._rows)} rows are in progress"
            self._rows[row] = _Row(slot=heapq.heappop(self._free))
        state = self._rows[row]
        feed = [*state.held, *tokens]
        assert state.num_cached + len(feed) <= self._max_tokens, f"row {row} has more than {self._max_tokens} tokens"
        if not self._model.spec.scalar_head:
            state.held = feed[-1:]
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
        answers = output if scalar else self._logprobs(output, torch.cat([tokens[1:] for tokens in tokens_of_rows]))
        for state, answer in zip(states, answers[0].split(lengths), strict=True):
            state.answers.append(answer)

    def _logprobs(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return log-probabilities [1, S] from logits [S, 1, V / tp] and the S tokens that follow."""
        answers, _ = token_logprobs(
            logits,
            targets.to(self._device).unsqueeze(0),
            self._mesh.groups.tp,
            vocab_size=self._model.spec.vocab_size,
            temperature=self._temperature,
        )
        return answers
