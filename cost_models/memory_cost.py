"""Peak memory of a stage: bytes on the fullest rank of its pool, sized for the longest sequence of the workload.

Resident, while other stages run: the weight copy under the term "weights" (which a planner drops if two stages share
one copy), gradients, fp32 weights and moments of a training stage, and the KV cache of a generation whose sequences
stay in flight between periods. Transient: activations, logits, any other KV cache, the buffer of a refit, and whatever
is offloaded to the host. A KV cache of bounded size is sized for the blocks that it holds.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

from meshwright.cost_models.cost import WEIGHTS, Cost, Memory, Tally
from meshwright.cost_models.micro_batches import context_parallel_tokens
from meshwright.cost_models.params import StagePart, micro_batches_in_flight, stage_parts
from meshwright.cost_models.protocol import Bytes, Call
from meshwright.profiles.errors import BadInput
from meshwright.profiles.model_parts.fp8_weights import SCALE_BYTES, linears_of
from meshwright.profiles.model_shape import ModelSpec
from meshwright.profiles.packing import BLOCK_TOKENS, max_prefill_tokens, num_blocks_for
from meshwright.profiles.schedule import Offload, Recompute, Schedule
from meshwright.profiles.workload import Workload

_FP32_BYTES = 4
"""Bytes of an element that is always in fp32, whatever the model computes in."""

_LOGSUMEXP_BYTES = 4
"""Bytes that flash attention keeps per head and token beyond its output (Dao et al., arXiv:2205.14135, section 3.1)."""

_LOGIT_CHUNK_ELEMENTS = 2**25
"""Logits held in fp32 at once when tokens are scored: `runtime.model.logprobs.CHUNK_ELEMENTS`."""

_LOGIT_CHUNK_COPIES = 4
"""fp32 tensors of a chunk alive at once: logits or their logarithms, exponentials, a product, a gradient."""

_SAMPLING_BYTES = 16
"""fp64 logits and log-probabilities of a token being sampled."""

_GATHERED_COPIES = 2, 3
"""Copies of the gathered keys and values alive at once, forward and in training: as they arrive, in sequence order, and
(training) their gradient."""


class LayoutMemory:
    """Bytes of one stage on one layout under any schedule; `shard` is `call.model.shard(call.layout.tp)`."""

    def __init__(self, call: Call, shard: ModelSpec, workload: Workload, element_bytes: int) -> None:
        parts = stage_parts(call.model, call.layout.tp, call.layout.pp, call.layout.expert_replicas, call.layout.vpp)
        copied = max(part.num_params for part in parts)
        self._ranks = tuple(
            _RankMemory(call, shard, workload, element_bytes, part=part, copied=copied) for part in parts
        )

    def bytes(self, schedule: Schedule) -> Bytes:
        """Return the same totals as `memory`, without terms."""
        per_rank = [rank.bytes(schedule) for rank in self._ranks]
        if len(per_rank) == 1:
            return per_rank[0]
        fullest = max(per_rank, key=lambda of_rank: math.ceil(of_rank.peak))
        return fullest._replace(host=max([of_rank.host for of_rank in per_rank]))

    def memory(self, call: Call) -> Memory:
        """Return the memory of the fullest pipeline stage, with the largest host memory of any stage."""
        per_rank = [rank.memory(call) for rank in self._ranks]
        fullest = max(per_rank, key=lambda of_rank: of_rank.peak_bytes)
        host = max((of_rank.host for of_rank in per_rank), key=lambda cost: cost.total)
        return fullest if fullest.host is host else replace(fullest, host=host)


class _State(NamedTuple):
    """Weights and optimizer state: terms and bytes that stay on the device, and those offloaded to the host."""

    resident: Cost
    offloaded: Cost
    resident_bytes: float
    weights_bytes: float
    offloaded_bytes: tuple[float, ...]


class _WorkingMemory(NamedTuple):
    """Bytes of a stage besides its state: `cached` between its runs, and `running` only during one."""

    cached: float
    running: list[float]


class _RankMemory:
    """Memory of a rank of one pipeline stage.

    The weight copy counts as `copied` parameters, those of the fullest pipeline stage: a stage that shares the copy may
    be fullest on another rank.
    """

    def __init__(
        self, call: Call, shard: ModelSpec, workload: Workload, size: int, *, part: StagePart, copied: float
    ) -> None:
        self._call = call
        self._stage, self._model, self._layout = call.stage, call.model, call.layout
        self._shard, self._workload, self._size = shard, workload, size
        self._part, self._copied = part, copied
        self._rows = -(-workload.batch_size // call.layout.dp)
        self._block_bytes = BLOCK_TOKENS * shard.cached_elements * size  # of one layer
        experts, layout = shard.experts, call.layout
        # The load of the busiest expert rank over the mean (loads follow a power law), for the longest sequences of all
        # replicas that share experts.
        tokens = workload.max_tokens * layout.expert_replicas
        self._expert_imbalance = experts.imbalance(tokens, layout.ep) if experts else 1.0
        self._working_bytes = self._working_elements() * size
        self._layer_bytes = {kind: self._bytes_of_layer(kind) for kind in Recompute}
        self._refit_buffer = self._make_refit_buffer()
        self._states: dict[Offload, _State] = {}
        self._working_memories: dict[tuple[int, int, int, Recompute], _WorkingMemory] = {}

    def memory(self, call: Call) -> Memory:
        schedule = call.schedule
        state, cache, running = self._state(schedule.offload), self._cache(schedule), self._transient_memory(schedule)
        resident, transient = Cost(), running.cost()
        if schedule.keeps_in_flight:
            resident = cache.cost()
        else:
            transient = cache.cost() + transient
        if self._refit_buffer.total > transient.total:
            transient = self._refit_buffer.cost()
        return Memory(resident=state.resident + resident, transient=state.offloaded + transient, host=state.offloaded)

    def bytes(self, schedule: Schedule) -> Bytes:
        """Return the same totals as `memory`."""
        state, (cached, running) = self._state(schedule.offload), self._working_memory(schedule)
        transient = math.fsum((*state.offloaded_bytes, *running))
        return Bytes(state.resident_bytes + cached, state.weights_bytes, transient, math.fsum(state.offloaded_bytes))

    def _working_memory(self, schedule: Schedule) -> _WorkingMemory:
        """Return the bytes besides the state, which do not depend on offload."""
        if self._stage.generates:
            return self._make_working_memory(schedule)
        pass_key = schedule.micro_batch_size, schedule.micro_batch_tokens, schedule.chunk_tokens
        cached = self._working_memories.get((*pass_key, schedule.recompute))
        if cached is None:
            cached = self._working_memories[*pass_key, schedule.recompute] = self._make_working_memory(schedule)
        return cached

    def _make_working_memory(self, schedule: Schedule) -> _WorkingMemory:
        cached, running, cache = 0.0, self._transient_memory(schedule).amounts, self._cache(schedule).amounts
        if schedule.keeps_in_flight:
            cached = math.fsum(cache)
        else:
            running += cache
        refit_bytes = self._refit_buffer.amounts
        if refit_bytes and refit_bytes[0] > math.fsum(running):
            running = refit_bytes
        return _WorkingMemory(cached, running)

    def _state(self, offload: Offload) -> _State:
        cached = self._states.get(offload)
        if cached is None:
            cached = self._states[offload] = self._make_state(offload)
        return cached

    def _make_state(self, offload: Offload) -> _State:
        offloaded = offloaded_state(self._call, offload, self._part, self._size)
        state = self._weights() + optimizer_state(self._call, self._part, self._size)
        names = {term.name for term in offloaded.terms}
        resident = Cost(tuple(term for term in state.terms if term.name not in names))
        return _State(
            resident=resident,
            offloaded=offloaded,
            resident_bytes=resident.total,
            weights_bytes=resident.amount(WEIGHTS),
            offloaded_bytes=tuple(term.amount for term in offloaded.terms),
        )

    def _weights(self) -> Cost:
        """Return the weight copy of this rank; 8-bit copies are never shared and count this stage's parameters."""
        if not self._stage.is_quantised:
            return weight_copy(self._copied, self._size)
        linears = linears_of(self._shard)
        quantised = self._part.num_layers * linears.num_weights
        tally = Tally()
        tally.add(WEIGHTS, (self._part.num_params - quantised) * self._size + quantised)
        tally.add("weight scales", self._part.num_layers * linears.num_outputs * SCALE_BYTES)
        return tally.cost()

    def _make_refit_buffer(self) -> Tally:
        """Return the receive buffer of a refit: all trained weights arrive before they overwrite the old ones."""
        tally = Tally()
        if self._stage.needs_refit:
            tally.add("refit buffer", self._part.trained.num_params * self._size)
        return tally

    def _transient_memory(self, schedule: Schedule) -> Tally:
        if self._stage.generates:
            return self._generation_memory(schedule)
        return self._training_memory(schedule) if self._stage.trains else self._forward_memory(schedule)

    def _cache(self, schedule: Schedule) -> Tally:
        """Return the KV cache: blocks for the sequences in flight, or, for a stage that streams, blocks for as many
        sequences of maximum length as it has rows; plus one spare block."""
        tally = Tally()
        if self._stage.generates:
            tally.add("kv cache", self._cache_bytes(self._blocks(schedule), self._slots(schedule)))
        elif schedule.chunk_tokens:
            blocks = self._rows * num_blocks_for(self._workload.max_tokens)
            tally.add("kv cache", self._cache_bytes(blocks, self._rows))
        return tally

    def _cache_bytes(self, num_blocks: int, num_rows: int) -> float:
        """Return the bytes of the KV cache.

        Layers with a sliding window keep only the blocks of a row that the window touches (vLLM, hybrid KV cache
        manager).
        """
        part, window = self._part, self._shard.window
        full_blocks = (part.num_layers - part.num_window_layers) * (num_blocks + 1)
        window_blocks = min(num_blocks, num_rows * (num_blocks_for(window.num_tokens) + 1)) + 1 if window else 0
        return (full_blocks + part.num_window_layers * window_blocks) * self._block_bytes

    def _blocks(self, schedule: Schedule) -> int:
        return self._workload.cache_need(schedule, self._layout.dp).blocks

    def _slots(self, schedule: Schedule) -> int:
        """Return the number of slots that can hold a sequence."""
        in_flight = schedule.batches_in_flight * self._rows - (-schedule.overcommit // self._layout.dp)
        return min(schedule.generation_slots, in_flight)

    def _generation_memory(self, schedule: Schedule) -> Tally:
        """Return the larger of a prefill's working set and that of attention in a decode step, plus sampling."""
        group = -(-self._slots(schedule) // self._layout.pp)
        prefill = max_prefill_tokens(group, self._workload.prompt.max) * self._working_bytes
        tally = Tally()
        tally.add("working set", max(prefill, self._blocks(schedule) * self._decode_attention_bytes()))
        if self._part.is_last:
            tally.add("logits", group * self._model.padded_vocab_size * (self._size + _SAMPLING_BYTES))
        return tally

    def _decode_attention_bytes(self) -> float:
        """Return the bytes per KV block in a decode step of one layer.

        They are a contiguous copy of its keys and values, scores in fp32 and in the model's type, and two fp32 sums of
        values.
        """
        shard = self._shard
        scores = BLOCK_TOKENS * shard.num_heads * (_FP32_BYTES + self._size)
        sums = 2 * shard.num_heads * shard.head_dim * _FP32_BYTES
        return BLOCK_TOKENS * shard.cached_elements * self._size + scores + sums

    def _forward_memory(self, schedule: Schedule) -> Tally:
        tokens = self._micro_batch_tokens(schedule)
        tally = Tally()
        tally.add("working set", tokens * self._working_bytes)
        self._add_gathered(tally, tokens, trains=False)
        self._add_logits(tally, tokens, copies=1)
        return tally

    def _training_memory(self, schedule: Schedule) -> Tally:
        """Return the activations of every micro-batch in flight, and the logits of one.

        `micro_batches_in_flight` counts micro-batches as if every row were the longest: a token cap may make more of
        them, with fewer tokens together. Full recomputation keeps the input of each layer, and all activations of one.
        """
        tokens, layout, longest = self._micro_batch_tokens(schedule), self._layout, self._workload.max_tokens
        rows = -(-self._workload.batch_size // (self._workload.num_minibatches * layout.dp))
        num_batches = -(-rows * longest // schedule.max_tokens(longest))
        in_flight = micro_batches_in_flight(layout, self._part.num_behind, num_batches)
        layer_bytes = self._layer_bytes[schedule.recompute]
        tally = Tally()
        if schedule.recompute is Recompute.FULL:
            inputs = self._part.num_layers * self._replicated_elements(self._shard.hidden_size) * self._size
            tally.add("activations", in_flight * tokens * inputs)
            tally.add("working set", tokens * layer_bytes)
        else:
            tally.add("activations", in_flight * tokens * self._part.num_layers * layer_bytes)
        self._add_gathered(tally, tokens, trains=True)
        self._add_logits(tally, tokens, copies=2)
        return tally

    def _bytes_of_layer(self, recompute: Recompute) -> float:
        """Return the bytes per token that one layer keeps for its backward pass.

        Counted as in Korthikanti et al., arXiv:2205.05198, section 4, for this layer: no dropout and no stored scores
        (flash attention), a gated activation, grouped keys and values. Replicated on every rank, unless sequence
        parallel (equations 2 and 4): the inputs and outputs of both norms. Divided by tp: queries, keys, values,
        attention output, and the gate, the up projection, the activated gate and their product. Experts count with the
        widths of those that one token is routed to, on the rank to which most tokens are routed. Selective
        recomputation drops what flash attention keeps, which is little. An adapter adds its low-rank activations on
        every rank; the inputs of its first matmuls are kept already.
        """
        shard = self._shard
        attention_bytes = 0 if recompute is Recompute.SELECTIVE else _LOGSUMEXP_BYTES * shard.num_heads
        sharded_elements = shard.attention_elements + (2 + 2 * shard.gated_mlp) * shard.active_ffn_size(
            self._expert_imbalance
        )
        adapter_elements = len(shard.adapted_linears) * (shard.adapter.rank if shard.adapter else 0)
        return (
            self._replicated_elements(4 * shard.hidden_size)
            + self._dispatched_elements()
            + sharded_elements
            + adapter_elements
        ) * self._size + attention_bytes

    def _working_elements(self) -> float:
        """Return the elements per token alive at once in the gated MLP, the widest part of a forward pass."""
        shard = self._shard
        mlp = (2 + shard.gated_mlp) * shard.active_ffn_size(self._expert_imbalance)
        return self._replicated_elements(shard.hidden_size) + shard.hidden_size + self._dispatched_elements() + mlp

    def _dispatched_elements(self) -> float:
        """Return the elements per token dispatched to its experts and combined from them.

        Sharded experts have them on every tensor-parallel rank, whole experts only on the rank of the expert.
        """
        experts = self._shard.experts
        copied = 2 * self._expert_imbalance * experts.experts_per_token * self._shard.hidden_size if experts else 0
        return copied / self._layout.fold_size

    def _replicated_elements(self, elements: float) -> float:
        """Return this rank's share of elements that tensor parallelism replicates and sequence parallelism divides."""
        return elements / self._layout.tp if self._layout.sp else elements

    def _micro_batch_tokens(self, schedule: Schedule) -> int:
        """Return the most tokens of a rank in one pass.

        A pass has whole sequences, their context-parallel shards, or prompts and chunks.
        """
        workload = self._workload
        if schedule.micro_batch_tokens:  # the cap is on the tokens of all context-parallel ranks together
            return context_parallel_tokens(schedule.micro_batch_tokens, self._layout.cp)
        chunk = min(schedule.chunk_tokens, workload.response.max)
        longest = (
            max(chunk, workload.prompt.max) if chunk else context_parallel_tokens(workload.max_tokens, self._layout.cp)
        )
        return schedule.max_tokens(longest)

    def _add_gathered(self, tally: Tally, tokens: int, *, trains: bool) -> None:
        """Add the gathered keys and values of one layer from all context-parallel ranks.

        They are not kept: the backward pass gathers them again.
        """
        if self._layout.cp > 1:
            elements = tokens * self._layout.cp * self._shard.cached_elements
            tally.add("gathered keys and values", elements * self._size * _GATHERED_COPIES[trains])

    def _add_logits(self, tally: Tally, tokens: int, *, copies: int) -> None:
        """Add the logits of a micro-batch (and their gradient), and one chunk of them in fp32."""
        shard = self._shard
        if not self._part.is_last or shard.scalar_head:
            return
        elements = tokens * shard.padded_vocab_size
        chunk_bytes = _FP32_BYTES * _LOGIT_CHUNK_COPIES * min(elements, _LOGIT_CHUNK_ELEMENTS)
        tally.add("logits", elements * copies * self._size + chunk_bytes)


_GRADIENT_BYTES = 4
"""Megatron's DistributedDataParallel keeps and reduces gradients in fp32 (`grad_reduce_in_fp32`)."""

_MOMENT_BYTES = 8
"""Adam's two fp32 moments per parameter."""

_MAIN_WEIGHT_BYTES = 4
"""The fp32 weight that the optimizer updates when the model computes in bf16."""


def weight_copy(num_params: float, element_bytes: int) -> Cost:
    """Return the weight copy of a rank that holds `num_params` parameters."""
    tally = Tally()
    tally.add(WEIGHTS, num_params * element_bytes)
    return tally.cost()


def optimizer_state(call: Call, part: StagePart, element_bytes: int) -> Cost:
    """Return what a training stage keeps besides its weights: whole fp32 gradients, and optimizer state over dp x cp.

    The state of an expert is divided over the replicas that hold it. Context-parallel ranks hold the same weights, and
    share the state as replicas do. Without experts, and with the weights, it is 2 + 4 + (4 + 8)/(dp x cp) bytes per
    parameter in bf16, 4 + 4 + 8/(dp x cp) in fp32 (Megatron-core, docs of the distributed optimizer; Rajbhandari et
    al., ZeRO stage 1, arXiv:1910.02054, section 5.1). With an adapter only its parameters have gradients and state.
    """
    tally, part = Tally(), part.trained
    if call.stage.trains:
        tally.add("gradients", part.num_params * _GRADIENT_BYTES)
        num_params, sharers = part.replicated_params(call.layout.expert_replicas), call.layout.dp * call.layout.cp
        if element_bytes < _MAIN_WEIGHT_BYTES:
            tally.add("main weights", num_params * _MAIN_WEIGHT_BYTES / sharers)
        tally.add("moments", num_params * _MOMENT_BYTES / sharers)
    return tally.cost()


def offloaded_state(call: Call, offload: Offload, part: StagePart, element_bytes: int) -> Cost:
    """Return what is offloaded while the stage does not run. Raises BadInput if the stage has no such state."""
    stage = call.stage
    if offload is Offload.WEIGHTS:
        if stage.is_trained:
            raise BadInput(f"{stage.name}: offload=weights is for roles that are not trained; use none.")
        return weight_copy(part.num_params, element_bytes)
    if offload is Offload.OPTIMIZER:
        if not stage.trains:
            raise BadInput(f"{stage.name}: offload=optimizer is for stages that train; use none.")
        return optimizer_state(call, part, element_bytes)
    return Cost()
