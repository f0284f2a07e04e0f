"""A decoder's forward pass that computes on the weights of megatron's modules: decode steps of one token per row, and
packed rows of several tokens each.

A decode step or a short prefill is so little arithmetic that megatron's modules around it would take most of its time.
The results are those of the modules, which training uses; a test compares the two.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from meshwright.profiles.model_shape import ModelSpec
from meshwright.runtime.inference.attention import (
    GatheredAttention,
    PackedAttention,
    PackedReads,
    PagedAttention,
    PrefillAttention,
    PrefillReads,
    StepReads,
    TableReads,
)
from meshwright.runtime.inference.decode_layer import (
    DecodeLayer,
    Norm,
    RotaryAttention,
    RotatedAttention,
    Scratch,
    StepAttention,
    StepStates,
    Weight,
    allocate_scratch,
    set_read_ahead,
)
from meshwright.runtime.inference.step_states import PackedStates, SteppedStates, SteppedThenPackedStates
from meshwright.runtime.model.attention import (
    VarlenKernel,
    growth_of_queries,
    has_local_angles,
    torch_varlen_kernel,
)
from meshwright.runtime.model.block_attention import BlockAttention, plan_block_reads
from meshwright.runtime.model.gated_delta import GatedDelta
from meshwright.runtime.model.kernel_choice import can_read_pages
from meshwright.runtime.model.kv_cache import PagedCache
from meshwright.runtime.model.limited_attention import attention_limits, has_limits
from meshwright.runtime.model.mesh import Mesh
from meshwright.runtime.model.model_shard import Decoder
from meshwright.runtime.model.padded_attention import PaddedAttention, PaddedReads
from meshwright.runtime.model.recurrent_states import RecurrentStates, state_indices


class DecodeRunner(Protocol):
    """A pipeline stage's part of the decode steps; each computes one more token for every row of a group."""

    def refresh_weights(self) -> None:
        """Prepare for the steps of a period; call it before the first, since weights may have moved."""

    def __call__(self, inputs: Tensor, reads: StepReads) -> Tensor:
        """Return logits [B, V / tp] of the padded vocabulary on the last stage, hidden states [B, hidden] before it.

        `inputs` are tokens [B] on the first stage, on the host or the device, and the hidden states of the previous
        stage on the others; `reads` is what the rows read of the cache, on the host. Logits are valid until the next
        step.
        """

    def multi_step(self, reads: TableReads) -> Callable[[Tensor], Tensor]:
        """Return a function that runs successive steps of the same rows: it takes tokens [B] on the device and returns
        logits [B, V / tp]. There must be one pipeline stage. `reads` is what the first step reads, with the blocks of
        all steps."""


class DecodeStep:
    """Decode steps that read the model's own parameters, so that they see weight updates."""

    def __init__(self, model: Decoder, mesh: Mesh, cache: PagedCache) -> None:
        """The model must be a language model without sequence parallelism; its keys and values are in `cache`."""
        assert not model.config.sequence_parallel
        assert not model.spec.scalar_head
        self._model, self._mesh, self.cache = model, mesh, cache
        self._layers = [DecodeLayer(layer, model, mesh) for layer in model.decoder.layers]
        by_kernel = model.kernels.decode == "paged"
        self._norm = Norm(model.decoder.final_layernorm, by_kernel=by_kernel) if mesh.is_last_stage else None
        self._are_fetched = set_read_ahead(self._layers, self._head_weight() if mesh.is_last_stage else None)
        mixers = [layer.self_attention for layer in model.decoder.layers]
        self._deltas = [mixer for mixer in mixers if isinstance(mixer, GatedDelta)]
        self._limits = [mixer.core_attention.limits for mixer in mixers if not isinstance(mixer, GatedDelta)]
        self._numbers = _numbers_by_kind(self._layers)
        """The number of each layer among those of its kind, with attention or with a state."""
        like = next(model.parameters())
        kinds = [
            _rotary_kind(model.spec, number)
            for number, layer in zip(model.layers, self._layers, strict=True)
            if not layer.has_state
        ]
        tables = [
            tuple(angles.flatten(1) for angles in model.cache_rotary.table(cache.max_tokens, like, is_local=is_local))
            for is_local in (False, *([True] if has_local_angles(model.spec) else []))
        ]
        self._signed_angles = [_signed(cos, sin) for cos, sin in tables]
        """[positions, 2, D] of all layers, or of those without and with a window: cos and sin, with the sine of the low
        half negated, as a head is rotated by x cos + (x with its halves swapped) sin."""
        halves = [tuple(angles.chunk(2, dim=-1)[0].contiguous() for angles in table) for table in tables]
        unrotated = torch.ones_like(halves[0][0]), torch.zeros_like(halves[0][1])
        self._angles = [unrotated if kind is None else (halves[kind][0], halves[kind][1]) for kind in kinds]
        """Cosines and sines [positions, D / 2] of each layer."""
        self._rotary_kinds = kinds
        self._largest_scratch: Scratch | None = None
        self._padded_attention = PaddedAttention(cache, self._queries_per_group)
        self._block_attention: BlockAttention | None = None
        self.refresh_weights()

    def refresh_weights(self) -> None:
        """Look up the weights again: a parameter that moved is the same object at another address."""
        self._padded_attention.reset()
        for layer in self._layers:
            layer.refresh_weights()
        if self._mesh.is_first_stage:
            self._embedding: Tensor = self._model.embedding.word_embeddings.weight.detach()
        if self._norm is not None:
            self._norm.refresh_weight()
            weight = self._head_weight()
            self._head_product, self._num_logits = Weight(weight, reads_ahead=self._are_fetched), len(weight)

    @property
    def reads_by_tables(self) -> bool:
        """True if steps take block tables on a CPU too: for a model with a window in some layers, or capped scores."""
        return has_limits(self._model.spec)

    @property
    def returns_logits(self) -> bool:
        """True on the last pipeline stage."""
        return self._norm is not None

    @torch.inference_mode()
    def __call__(self, inputs: Tensor, reads: StepReads) -> Tensor:
        inputs = inputs.to(self.cache.keys.device)
        hidden = self._embed(inputs) if self._mesh.is_first_stage else inputs.clone()
        scratch = self._scratch_for(hidden)
        if isinstance(reads, TableReads):
            reads = reads.to(self.cache.keys.device)
        mixers = _Mixers(
            self._attention(reads, scratch) if self.cache.has_layers else None,
            None if self.cache.states is None else self._stepped_states(reads, self.cache.states),
        )
        for index, layer in zip(self._numbers, self._layers, strict=True):
            layer.attend(hidden, scratch, index, mixers.of(layer))
            layer.feed_forward(hidden, scratch)
        return hidden if self._norm is None else self._head(self._norm(hidden, scratch))

    def multi_step(self, reads: TableReads) -> Callable[[Tensor], Tensor]:
        """Return a function that maps tokens [B] on the device to logits [B, V / tp], one step after another."""
        reads = reads.to(self.cache.keys.device)

        def step(tokens: Tensor) -> Tensor:
            logits = self(tokens, reads)
            reads.lengths.add_(1)
            return logits

        return step

    def _attention(self, reads: StepReads, scratch: Scratch) -> StepAttention:
        """Return the attention over what this step reads of the cache."""
        if isinstance(reads, TableReads) and self._model.kernels.decode == "paged":
            assert can_read_pages(self._model.spec), "the kernel does not compute this attention"
            return PagedAttention(self.cache, reads, self._angles, self._limits, self._queries_per_group)
        return self._rotary_attention(scratch, self._rotated_attention(reads), reads.lengths)

    def _stepped_states(self, reads: StepReads, kept: RecurrentStates) -> SteppedStates:
        """Return the states that this step continues."""
        if isinstance(reads, TableReads):
            return SteppedStates(self._deltas, kept, reads.states.long())
        return SteppedStates(self._deltas, kept, state_indices(reads.rows.tolist(), kept.states.device))

    def _rotary_attention(self, scratch: Scratch, attention: RotatedAttention, positions: Tensor) -> RotaryAttention:
        """Return attention that rotates heads by the angles of positions [B], which are copied to the scratch."""
        scratch.set_angles([angles.index_select(0, positions) for angles in self._signed_angles])
        spec, scales = self._model.spec, None
        if spec.query_growth:
            scales = growth_of_queries(spec.query_growth, positions).to(scratch.heads.dtype)
        epsilon = spec.norm_epsilon if spec.rotated_norm else None
        return RotaryAttention(scratch, attention, self._rotary_kinds, norm_epsilon=epsilon, query_scales=scales)

    def _rotated_attention(self, reads: StepReads) -> RotatedAttention:
        """Return the attention for heads that are already rotated."""
        if isinstance(reads, TableReads):
            return GatheredAttention(self.cache, reads, self._limits)
        assert not self.reads_by_tables, "attention by blocks has no limits"
        if isinstance(reads, PaddedReads):
            return self._padded_attention.prepare(reads)
        if self._block_attention is None or not self._block_attention.advance_to(reads):
            self._block_attention = BlockAttention(self.cache, plan_block_reads(self.cache.tables, reads))
        return self._block_attention

    @property
    def _queries_per_group(self) -> int:
        """Query heads per key-value head."""
        return self._model.spec.cached_heads(self._mesh.layout.tp).queries_per_key

    def _scratch_for(self, hidden: Tensor) -> Scratch:
        """Return scratch tensors for these hidden states: on a CPU a view on those of earlier steps if they have enough
        rows; on a GPU new ones, which a CUDA graph keeps."""
        num_rows = len(hidden)
        if self._largest_scratch is None or self._largest_scratch.num_rows < num_rows or hidden.is_cuda:
            self._largest_scratch = self._scratch = allocate_scratch(num_rows, self._model, self._mesh)
        elif self._scratch.num_rows != num_rows:
            self._scratch = self._largest_scratch.first_rows(num_rows)
        return self._scratch

    def _head(self, normed: Tensor) -> Tensor:
        """Return logits [B, V / tp] from normed hidden states [B, hidden]."""
        logits = normed.new_empty(len(normed), self._num_logits)
        self._head_product.into(logits, normed)
        scale, cap = self._model.spec.logits_scale, self._model.spec.logits_cap
        if scale != 1.0:
            logits.mul_(scale)
        return logits.div_(cap).tanh_().mul_(cap) if cap else logits

    def _head_weight(self) -> Tensor:
        tied = self._model.share_embeddings_and_output_weights
        weight: Tensor = self._model.shared_embedding_or_output_weight() if tied else self._model.output_layer.weight
        return weight

    def _embed(self, tokens: Tensor) -> Tensor:
        """Return hidden states [B, hidden] of tokens [B] in a new tensor."""
        if self._mesh.layout.tp == 1 and self._model.spec.embedding_scale == 1.0:
            return self._embedding.index_select(0, tokens)
        return self._model.embedding(tokens.unsqueeze(1), None).squeeze(0)


def _rotary_kind(spec: ModelSpec, layer: int) -> int | None:
    """The index of the table of a layer's rotary angles; None if the layer has no rotary embedding."""
    if layer in spec.unrotated_layers:
        return None
    return int(has_local_angles(spec) and attention_limits(spec, layer).window > 0)


def _signed(cos: Tensor, sin: Tensor) -> Tensor:
    """Cosines and signed sines [positions, 2, D] from both [positions, D]."""
    low, high = sin.chunk(2, dim=-1)
    return torch.stack((cos, torch.cat((-low, high), dim=-1)), dim=1)


class PackedStep(DecodeStep):
    """Decode steps, and passes over packed rows with the same layers: on a CPU over any rows, on a GPU over
    whole prompts of which nothing is cached yet."""

    @property
    def can_prefill(self) -> bool:
        """True if there are kernels for `prefill`; none caps scores or continues states."""
        kernels = self._model.kernels
        has_kernels = kernels.decode == "paged" and kernels.attention == "varlen" and not self.cache.states
        return has_kernels and not self._model.spec.attention_cap

    @torch.inference_mode()
    def prefill(self, inputs: Tensor, reads: PrefillReads) -> Tensor:
        """Prefill S tokens of packed rows that have nothing in the cache, with Triton kernels.

        Returns logits [A, V / tp] of the padded vocabulary for the tokens in `reads.output_tokens` on the last stage,
        hidden states [S, hidden] before it.

        `inputs` are tokens [S] on the first stage and the hidden states of the previous stage on the others; both they
        and the reads are on the device.
        """
        hidden = self._embed(inputs) if self._mesh.is_first_stage else inputs.clone()
        scratch = allocate_scratch(len(hidden), self._model, self._mesh)
        cache = PrefillAttention(
            self.cache,
            reads,
            angles=self._angles,
            limits=self._limits,
            num_queries=self._queries_per_group,
            kernel=self._varlen,
        )
        return self._through_layers(hidden, scratch, _Mixers(cache, None), reads.output_tokens)

    def _through_layers(self, hidden: Tensor, scratch: Scratch, mixers: _Mixers, outputs: Tensor) -> Tensor:
        """Return logits of the tokens at the positions `outputs` on the last stage, the hidden states of all tokens
        before it."""
        for index, layer in zip(self._numbers, self._layers, strict=True):
            attended = layer.attention_output(hidden, scratch, index, mixers.of(layer))
            if self._norm is not None and layer is self._layers[-1]:
                # All keys and values are cached by now, and no logits of other tokens are needed.
                hidden, attended = hidden.index_select(0, outputs), attended.index_select(0, outputs)
                scratch = scratch.first_rows(len(outputs))
            layer.project(hidden, attended)
            layer.feed_forward(hidden, scratch)
        return hidden if self._norm is None else self._head(self._norm(hidden, scratch))

    @cached_property
    def _varlen(self) -> VarlenKernel:
        return torch_varlen_kernel()

    @torch.inference_mode()
    def packed(
        self, inputs: Tensor, reads: PackedReads, output_positions: Tensor, step: StepReads | None = None
    ) -> Tensor:
        """Run S tokens of packed rows, after the C single tokens of a decode step. Return logits [C + A, V / tp] of the
        padded vocabulary for all C tokens and for those at the positions `output_positions` [A] among the S, on the
        last stage; hidden states [C + S, hidden] before it.

        `inputs` are tokens [C + S] on the first stage and the hidden states of the previous stage, which are
        overwritten, on the others.
        """
        hidden = self._embed(inputs) if self._mesh.is_first_stage else inputs
        if step is not None:
            num_steps = len(step.lengths)
            output_positions = torch.cat((torch.arange(num_steps), output_positions + num_steps))
        scratch = allocate_scratch(len(hidden), self._model, self._mesh)
        mixers = _Mixers(
            self._packed_attention(reads, step, scratch) if self.cache.has_layers else None,
            None if self.cache.states is None else self._packed_states(reads, step, self.cache.states),
        )
        return self._through_layers(hidden, scratch, mixers, output_positions)

    def _packed_attention(self, reads: PackedReads, step: StepReads | None, scratch: Scratch) -> StepAttention:
        """Return the attention of packed rows after the single tokens of a step, if there is one."""
        positions, num_steps = reads.positions, 0
        if step is not None:
            positions, num_steps = torch.cat((step.lengths.long(), positions)), len(step.lengths)
        rotated: RotatedAttention = PackedAttention(self.cache, reads, scratch.rotated[num_steps:], self._limits)
        if step is not None:
            rotated = _StepThenPacked(self._rotated_attention(step), rotated, num_steps)
        return self._rotary_attention(scratch, rotated, positions)

    def _packed_states(self, reads: PackedReads, step: StepReads | None, kept: RecurrentStates) -> StepStates:
        """Return the states of packed rows after those of the rows of a step, if there is one."""
        assert reads.states is not None
        packed = PackedStates(self._deltas, kept, reads.states)
        if step is None:
            return packed
        return SteppedThenPackedStates(self._stepped_states(step, kept), packed, len(step.lengths))


class _Mixers(NamedTuple):
    """The attention and the states of a pass; None for a kind of layers that the stage does not have."""

    attention: StepAttention | None
    states: StepStates | None

    def of(self, layer: DecodeLayer) -> StepAttention | StepStates:
        """The attention or the states, whichever this layer has."""
        mixer = self.states if layer.has_state else self.attention
        assert mixer is not None
        return mixer


def _numbers_by_kind(layers: Sequence[DecodeLayer]) -> list[int]:
    """The number of each layer among those of its kind, with attention or with a state."""
    return [
        sum(earlier.has_state == layer.has_state for earlier in layers[:number]) for number, layer in enumerate(layers)
    ]


class _StepThenPacked:
    """Attention in a pass in which the single tokens of a decode step come before packed rows."""

    def __init__(self, step: RotatedAttention, packed: RotatedAttention, num_stepped: int) -> None:
        self._step, self._packed, self._num_step_tokens = step, packed, num_stepped

    def attend(self, layer: int, query: Tensor, new: Tensor) -> Tensor:
        num_step_tokens = self._num_step_tokens
        stepped = self._step.attend(layer, query[:num_step_tokens], new[:num_step_tokens])
        return torch.cat((stepped, self._packed.attend(layer, query[num_step_tokens:], new[num_step_tokens:])))
