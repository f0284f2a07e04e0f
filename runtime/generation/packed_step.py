"""Several tokens of each row at once: a pass over packed rows straight on the weights, as a decode step is.

Where slots are refilled one by one a prefill has the tokens of a prompt or two, and megatron's modules around it would
take most of its time. Rows that take a decode step in the same round come before them in the pass: layers are the same,
and only what attention reads differs. The numbers are those of the modules; a test holds the two together.
"""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from meshwright.runtime.generation.decode_layer import Scratch, StepAttention, TurnedAttention, Turning, room_for
from meshwright.runtime.generation.decoding import DecodeStep
from meshwright.runtime.generation.packed_attention import PackedAttention, PackedReads
from meshwright.runtime.generation.prefill import PrefillAttention, PrefillReads
from meshwright.runtime.generation.table_attention import StepReads
from meshwright.runtime.model.varlen_attention import VarlenKernel, torch_kernel


class PackedStep(DecodeStep):
    """Decode steps, and with the same layers passes over packed rows: on a CPU of any, on a GPU of those that begin."""

    @property
    def can_prefill(self) -> bool:
        """Whether there are kernels for `prefill`."""
        kernels = self._model.kernels
        return kernels.decode == "paged" and kernels.attention == "varlen"

    @torch.inference_mode()
    def prefill(self, inputs: Tensor, reads: PrefillReads) -> Tensor:
        """Of S tokens of packed rows that begin, by kernels: logits [A, V / tp] of the padded vocabulary of those that
        are asked for on the last stage; hidden states [S, hidden] before it.

        `inputs` are tokens [S] on the first stage and the hidden states of the earlier stage after it; both they and
        the reads are on the device.
        """
        hidden = self._embed(inputs) if self._mesh.is_first_stage else inputs.clone()
        room = room_for(len(hidden), self._model, self._mesh)
        cache = PrefillAttention(self.cache, reads, self._angles, self._queries_per_group, self._varlen)
        return self._through_layers(hidden, room, cache, reads.asked)

    def _through_layers(self, hidden: Tensor, room: Scratch, cache: StepAttention, asked: Tensor) -> Tensor:
        """Logits of the tokens that are `asked` for, by their places, or the hidden states of all."""
        for index, layer in enumerate(self._layers):
            attended = layer.attended(hidden, room, index, cache)
            if self._norm is not None and layer is self._layers[-1]:
                # Every key and value is kept by now, and nobody asks what the model says of other tokens.
                hidden, attended = hidden.index_select(0, asked), attended.index_select(0, asked)
                room = room.first(len(asked))
            layer.project(hidden, attended)
            layer.feed_forward(hidden, room)
        return hidden if self._norm is None else self._head(self._norm(hidden, room))

    @cached_property
    def _varlen(self) -> VarlenKernel:
        return torch_kernel()

    @torch.inference_mode()
    def packed(self, inputs: Tensor, reads: PackedReads, asked: Tensor, step: StepReads | None = None) -> Tensor:
        """Of S tokens of packed rows, behind C single ones of `step`: logits [C + A, V / tp] of the padded vocabulary
        of all C and of those at the `asked` [A] places among the S, on the last stage; hidden states [C + S, hidden]
        before it.

        `inputs` are tokens [C + S] on the first stage and the hidden states of the earlier stage, which change, after
        it.
        """
        hidden = self._embed(inputs) if self._mesh.is_first_stage else inputs
        positions, attention = reads.positions, None
        if step is not None:
            positions, attention = torch.cat((step.lengths, positions)), self._turned_attention(step)
            asked = torch.cat((torch.arange(len(step.lengths)), asked + len(step.lengths)))
        room = room_for(len(hidden), self._model, self._mesh)
        room.place(self._turns.index_select(0, positions))
        packed = PackedAttention(self.cache, reads, room.turned[len(hidden) - len(reads.positions) :])
        behind = packed if attention is None else _BehindStep(attention, packed, len(hidden) - len(reads.positions))
        return self._through_layers(hidden, room, Turning(room, behind), asked)


class _BehindStep:
    """The cache during a pass over packed rows that lie behind the single tokens of a decode step."""

    def __init__(self, step: TurnedAttention, packed: PackedAttention, num_stepped: int) -> None:
        self._step, self._packed, self._num_stepped = step, packed, num_stepped

    def attend(self, layer: int, query: Tensor, new: Tensor) -> Tensor:
        first = self._num_stepped
        stepped = self._step.attend(layer, query[:first], new[:first])
        return torch.cat((stepped, self._packed.attend(layer, query[first:], new[first:])))
