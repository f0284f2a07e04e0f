"""A pass over packed rows of several tokens each, on the weights of megatron's modules, as a decode step is.

If slots are refilled one by one, a prefill has the tokens of a prompt or two, and megatron's modules around it would
take most of its time. Rows that take a decode step in the same round come before the packed rows in the pass: the
layers are the same, and only what attention reads differs. The results are those of the modules; a test compares the
two.
"""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from meshwright.runtime.generation.decode_layer import (
    RotaryAttention,
    RotatedAttention,
    Scratch,
    StepAttention,
    allocate_scratch,
)
from meshwright.runtime.generation.decoding import DecodeStep
from meshwright.runtime.generation.packed_attention import PackedAttention, PackedReads
from meshwright.runtime.generation.prefill import PrefillAttention, PrefillReads
from meshwright.runtime.generation.table_attention import StepReads
from meshwright.runtime.model.varlen_attention import VarlenKernel, torch_varlen_kernel


class PackedStep(DecodeStep):
    """Decode steps, and passes over packed rows with the same layers: on a CPU over any rows, on a GPU over prompts
    that start."""

    @property
    def can_prefill(self) -> bool:
        """True if there are kernels for `prefill`."""
        kernels = self._model.kernels
        return kernels.decode == "paged" and kernels.attention == "varlen"

    @torch.inference_mode()
    def prefill(self, inputs: Tensor, reads: PrefillReads) -> Tensor:
        """Prefill S tokens of packed rows that start, with Triton kernels. Return logits [A, V / tp] of the padded
        vocabulary for the tokens in `reads.asked` on the last stage, hidden states [S, hidden] before it.

        `inputs` are tokens [S] on the first stage and the hidden states of the previous stage on the others; both they
        and the reads are on the device.
        """
        hidden = self._embed(inputs) if self._mesh.is_first_stage else inputs.clone()
        room = allocate_scratch(len(hidden), self._model, self._mesh)
        cache = PrefillAttention(self.cache, reads, self._angles, self._queries_per_group, self._varlen)
        return self._through_layers(hidden, room, cache, reads.output_tokens)

    def _through_layers(self, hidden: Tensor, room: Scratch, cache: StepAttention, outputs: Tensor) -> Tensor:
        """Return logits of the tokens at the positions `outputs` on the last stage, the hidden states of all tokens
        before it."""
        for index, layer in enumerate(self._layers):
            attended = layer.attention_output(hidden, room, index, cache)
            if self._norm is not None and layer is self._layers[-1]:
                # All keys and values are cached by now, and no logits of other tokens are needed.
                hidden, attended = hidden.index_select(0, outputs), attended.index_select(0, outputs)
                room = room.first_rows(len(outputs))
            layer.project(hidden, attended)
            layer.feed_forward(hidden, room)
        return hidden if self._norm is None else self._head(self._norm(hidden, room))

    @cached_property
    def _varlen(self) -> VarlenKernel:
        return torch_varlen_kernel()

    @torch.inference_mode()
    def packed(
        self, inputs: Tensor, reads: PackedReads, output_positions: Tensor, step: StepReads | None = None
    ) -> Tensor:
        """Run S tokens of packed rows, after the C single tokens of a decode step. Return logits [C + A, V / tp] of the
        padded vocabulary for all C tokens and for those at the positions `asked` [A] among the S, on the last stage;
        hidden states [C + S, hidden] before it.

        `inputs` are tokens [C + S] on the first stage and the hidden states of the previous stage, which are
        overwritten, on the others.
        """
        hidden = self._embed(inputs) if self._mesh.is_first_stage else inputs
        positions, attention = reads.positions, None
        if step is not None:
            positions, attention = torch.cat((step.lengths, positions)), self._rotated_attention(step)
            output_positions = torch.cat((torch.arange(len(step.lengths)), output_positions + len(step.lengths)))
        room = allocate_scratch(len(hidden), self._model, self._mesh)
        room.set_angles(self._signed_angles.index_select(0, positions))
        packed = PackedAttention(self.cache, reads, room.rotated[len(hidden) - len(reads.positions) :])
        rotated_attention = (
            packed if attention is None else _StepThenPacked(attention, packed, len(hidden) - len(reads.positions))
        )
        return self._through_layers(hidden, room, RotaryAttention(room, rotated_attention), output_positions)


class _StepThenPacked:
    """Attention in a pass in which the single tokens of a decode step come before packed rows."""

    def __init__(self, step: RotatedAttention, packed: PackedAttention, num_stepped: int) -> None:
        self._step, self._packed, self._num_step_tokens = step, packed, num_stepped

    def attend(self, layer: int, query: Tensor, new: Tensor) -> Tensor:
        num_step_tokens = self._num_step_tokens
        stepped = self._step.attend(layer, query[:num_step_tokens], new[:num_step_tokens])
        return torch.cat((stepped, self._packed.attend(layer, query[num_step_tokens:], new[num_step_tokens:])))
