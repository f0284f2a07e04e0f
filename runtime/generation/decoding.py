"""One more token for every row: a decoder's forward pass on single tokens, straight on the weights of its modules.

A decode step of a small batch is so little arithmetic that megatron's modules around it would take most of its time,
and attention over a paged cache needs no copy of keys and values when blocks meet the queries of their rows. The
numbers are those of the modules, which training goes through; a test holds the two together.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from meshwright.runtime.generation.decode_layer import (
    DecodeLayer,
    Norm,
    Scratch,
    StepAttention,
    TurnedAttention,
    Turning,
    Weight,
    are_fetched,
    room_for,
)
from meshwright.runtime.generation.table_attention import GatheredAttention, PagedAttention, StepReads, TableReads
from meshwright.runtime.model.block_attention import BlockAttention
from meshwright.runtime.model.block_reads import block_reads
from meshwright.runtime.model.kv_cache import PagedCache
from meshwright.runtime.model.mesh import Mesh
from meshwright.runtime.model.model_shard import Decoder
from meshwright.runtime.model.padded_attention import PaddedAttention, PaddedReads


class Decoding(Protocol):
    """A pipeline stage's part of the decode steps, one more token for every row of a group in each."""

    def begin_turn(self) -> None:
        """To be called before the steps of a turn: weights may have moved since the last."""

    def __call__(self, inputs: Tensor, reads: StepReads) -> Tensor:
        """Logits [B, V / tp] of the padded vocabulary on the last stage, hidden states [B, hidden] before it.

        `inputs` are tokens [B] on the first stage, on the host or the device, and the hidden states of the earlier
        stage after it; `reads` is what of the cache they read, on the host. Logits last until the next step.
        """

    def successive(self, reads: TableReads) -> Callable[[Tensor], Tensor]:
        """Steps of the same rows, one after the other, of the only stage: each takes tokens [B] on the device and
        answers with logits [B, V / tp]. `reads` is what the first reads, with the blocks of all of them."""


class DecodeStep:
    """Decode steps on the model's own parameters, so that refits are seen."""

    def __init__(self, model: Decoder, mesh: Mesh, cache: PagedCache) -> None:
        """For a language model without sequence parallelism, whose keys and values are in `cache`."""
        assert not model.config.sequence_parallel
        assert not model.spec.scalar_head
        self._model, self._mesh, self.cache = model, mesh, cache
        self._layers = [DecodeLayer(layer, model, mesh) for layer in model.decoder.layers]
        by_kernel = model.kernels.decode == "paged"
        self._norm = Norm(model.decoder.final_layernorm, by_kernel=by_kernel) if mesh.is_last_stage else None
        self._are_fetched = are_fetched(self._layers, self._head_weight() if mesh.is_last_stage else None)
        cos, sin = (angles.flatten(1) for angles in model.rotary.table(cache.max_tokens, next(model.parameters())))
        low, high = sin.chunk(2, dim=-1)
        self._turns = torch.stack((cos, torch.cat((-low, high), dim=-1)), dim=1)
        """[positions, 2, D]: the sine of the low half is negated, as a head is turned by x cos + (x with its halves
        swapped) sin."""
        self._angles = cos.chunk(2, dim=-1)[0].contiguous(), high.contiguous()
        self._whole: Scratch | None = None
        self._side_by_side = PaddedAttention(cache, self._queries_per_group)
        self._in_place: BlockAttention | None = None
        self.begin_turn()

    def begin_turn(self) -> None:
        """A parameter that moved is still the same parameter, elsewhere."""
        self._side_by_side.forget()
        for layer in self._layers:
            layer.begin_turn()
        if self._mesh.is_first_stage:
            self._embedding: Tensor = self._model.embedding.word_embeddings.weight.detach()
        if self._norm is not None:
            self._norm.look()
            weight = self._head_weight()
            self._of_head, self._num_logits = Weight(weight, is_fetched=self._are_fetched), len(weight)

    @property
    def answers_with_logits(self) -> bool:
        """Whether no later stage takes what it answers."""
        return self._norm is not None

    @torch.inference_mode()
    def __call__(self, inputs: Tensor, reads: StepReads) -> Tensor:
        inputs = inputs.to(self.cache.keys.device)
        hidden = self._embed(inputs) if self._mesh.is_first_stage else inputs.clone()
        room = self._room_for(hidden)
        attention = self._attention(reads, room)
        for index, layer in enumerate(self._layers):
            layer.attend(hidden, room, index, attention)
            layer.feed_forward(hidden, room)
        return hidden if self._norm is None else self._head(self._norm(hidden, room))

    def successive(self, reads: TableReads) -> Callable[[Tensor], Tensor]:
        """What answers with logits [B, V / tp] to tokens [B] on the device, one step after another."""
        reads = reads.to(self.cache.keys.device)

        def step(tokens: Tensor) -> Tensor:
            answer = self(tokens, reads)
            reads.lengths.add_(1)
            return answer

        return step

    def _attention(self, reads: StepReads, room: Scratch) -> StepAttention:
        """Over what of the cache this step reads."""
        if isinstance(reads, TableReads):
            reads = reads.to(self.cache.keys.device)
            if self._model.kernels.decode == "paged":
                return PagedAttention(self.cache, reads, self._angles, self._queries_per_group)
        room.place(self._turns.index_select(0, reads.lengths))
        return Turning(room, self._turned_attention(reads))

    def _turned_attention(self, reads: StepReads) -> TurnedAttention:
        """The same of heads that are turned."""
        if isinstance(reads, TableReads):
            return GatheredAttention(self.cache, reads)
        if isinstance(reads, PaddedReads):
            return self._side_by_side.at(reads)
        if self._in_place is None or not self._in_place.goes_on(reads):
            self._in_place = BlockAttention(self.cache, block_reads(self.cache.tables, reads))
        return self._in_place

    @property
    def _queries_per_group(self) -> int:
        """That meet a key-value head."""
        return self._model.spec.num_heads // self._model.spec.num_kv_heads

    def _room_for(self, hidden: Tensor) -> Scratch:
        """On a CPU in the place of earlier steps, where they had as many rows; of a recorded step it is a part."""
        num_rows = len(hidden)
        if self._whole is None or self._whole.num_rows < num_rows or hidden.is_cuda:
            self._whole = self._room = room_for(num_rows, self._model, self._mesh)
        elif self._room.num_rows != num_rows:
            self._room = self._whole.first(num_rows)
        return self._room

    def _head(self, normed: Tensor) -> Tensor:
        """Logits [B, V / tp] from normed hidden states [B, hidden]."""
        logits = normed.new_empty(len(normed), self._num_logits)
        self._of_head.into(logits, normed)
        return logits

    def _head_weight(self) -> Tensor:
        tied = self._model.share_embeddings_and_output_weights
        weight: Tensor = self._model.shared_embedding_or_output_weight() if tied else self._model.output_layer.weight
        return weight

    def _embed(self, tokens: Tensor) -> Tensor:
        """Hidden states [B, hidden] of tokens [B], which nothing else holds."""
        if self._mesh.layout.tp == 1 and self._model.spec.embedding_scale == 1.0:
            return self._embedding.index_select(0, tokens)
        return self._model.embedding(tokens.unsqueeze(1), None).squeeze(0)
