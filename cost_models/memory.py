"""Bytes on the fullest rank of a pool, sized for the longest sequence that the workload can produce.

What stays while other stages run is resident: the weight copy under the term "weights" (which a planner drops where
two stages share one copy), and gradients, fp32 weights and moments of a training stage. Activations, KV cache, logits
and the buffer of a refit are transient. The fuller of the first and the last pipeline stage is answered.
"""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.cost_models.cost import Cost, Memory, Tally
from meshwright.cost_models.params import stage_params
from meshwright.cost_models.pipeline import GRADIENT_BYTES
from meshwright.cost_models.question import Call
from meshwright.profiles.model import ModelSpec
from meshwright.profiles.schedule import Recompute
from meshwright.profiles.stages import TRAIN_STAGE
from meshwright.profiles.workload import Workload

_MOMENT_BYTES = 8
"""Adam's two fp32 moments per parameter."""

_FP32_BYTES = 4

_MAIN_WEIGHT_BYTES = _FP32_BYTES
"""The fp32 weight that the optimizer updates when the model computes in bf16."""

_LOGSUMEXP_BYTES = 4
"""What flash attention keeps per head and token besides its output (Dao et al., arXiv:2205.14135, section 3.1)."""

_LOGIT_CHUNK_ELEMENTS = 2**25
"""Logits that are in fp32 at once when tokens are scored: `runtime.logprobs.CHUNK_ELEMENTS`."""

_LOGIT_CHUNK_COPIES = 4
"""fp32 tensors of a chunk alive at once: logits or their logarithms, exponentials, a product, a gradient."""

_SAMPLING_BYTES = 16
"""fp64 logits and log-probabilities of a token being sampled."""


def memory(call: Call, shard: ModelSpec, workload: Workload, element_bytes: int) -> Memory:
    """Bytes of one stage under one choice; `shard` is `call.model.shard(call.layout.tp)`."""
    first, last = stage_params(call.model, call.layout.tp, call.layout.pp)
    if call.layout.pp == 1:
        return _RankMemory(call, shard, workload, element_bytes, first, True).memory()
    answers = [
        _RankMemory(call, shard, workload, element_bytes, first, False).memory(),
        _RankMemory(call, shard, workload, element_bytes, last, True).memory(),
    ]
    return max(answers, key=lambda answer: answer.peak_bytes)


@dataclass(frozen=True)
class _RankMemory:
    """A rank of the first pipeline stage, of the last, or of the only one, which is the last too."""

    call: Call
    shard: ModelSpec
    workload: Workload
    size: int
    num_params: float
    last: bool

    def memory(self) -> Memory:
        running, refitting = self._running(), self._refitting()
        return Memory(resident=self._resident(), transient=max(running, refitting, key=lambda cost: cost.total))

    @property
    def num_layers(self) -> float:
        return self.call.model.num_layers / self.call.layout.pp

    def _resident(self) -> Cost:
        """Weights, and for training fp32 gradients whole and optimizer state over dp.

        2 + 4 + (4 + 8)/dp bytes per parameter in bf16, 4 + 4 + 8/dp in fp32 (Megatron-core, docs of the distributed
        optimizer; Rajbhandari et al., ZeRO stage 1, arXiv:1910.02054, section 5.1).
        """
        tally, params = Tally(), self.num_params
        tally.add("weights", params * self.size)
        if self.call.stage.trains:
            tally.add("gradients", params * GRADIENT_BYTES)
            if self.size < _MAIN_WEIGHT_BYTES:
                tally.add("main weights", params * _MAIN_WEIGHT_BYTES / self.call.layout.dp)
            tally.add("moments", params * _MOMENT_BYTES / self.call.layout.dp)
        return tally.cost()

    def _running(self) -> Cost:
        if self.call.stage.generates:
            return self._generating()
        return self._training() if self.call.stage.trains else self._forwarding()

    def _refitting(self) -> Cost:
        """A copy of a trained role receives all its weights before it overwrites the old ones."""
        tally, stage = Tally(), self.call.stage
        if stage.role in TRAIN_STAGE and not stage.trains:
            tally.add("refit buffer", self.num_params * self.size)
        return tally.cost()

    def _generating(self) -> Cost:
        """Keys and values of every slot for the longest sequence, the working set of a prefill, and sampling."""
        shard, pp = self.shard, self.call.layout.pp
        slots = min(self.call.schedule.generation_slots, -(-self.workload.batch_size // self.call.layout.dp))
        per_token = 2 * self.num_layers * shard.kv_size * self.size
        group = -(-slots // pp)
        tally = Tally()
        tally.add("kv cache", slots * self.workload.max_tokens * per_token)
        tally.add("working set", group * self.workload.prompt.max * self._working_elements() * self.size)
        if self.last:
            tally.add("logits", group * self.call.model.padded_vocab_size * (self.size + _SAMPLING_BYTES))
        return tally.cost()

    def _forwarding(self) -> Cost:
        tokens = self._micro_batch_tokens()
        tally = Tally()
        tally.add("working set", tokens * self._working_elements() * self.size)
        self._add_logits(tally, tokens, copies=1)
        return tally.cost()

    def _training(self) -> Cost:
        """Activations of every micro-batch in flight, and the logits of one.

        Under 1F1B the first stage holds min(p, m) micro-batches and the last one holds 1 (Narayanan et al.,
        arXiv:2104.04473, section 2.2.1). Full recomputation keeps the input of each layer and works on one layer.
        """
        tokens, layout, schedule = self._micro_batch_tokens(), self.call.layout, self.call.schedule
        rows = -(-self.workload.batch_size // (self.workload.num_minibatches * layout.dp))
        num_batches = -(-rows // schedule.micro_batch_size)
        in_flight = 1 if self.last else min(layout.pp, num_batches)
        layer_bytes = self._layer_bytes()
        tally = Tally()
        if schedule.recompute is Recompute.FULL:
            inputs = self.num_layers * self._whole(self.shard.hidden_size) * self.size
            tally.add("activations", in_flight * tokens * inputs)
            tally.add("working set", tokens * layer_bytes)
        else:
            tally.add("activations", in_flight * tokens * self.num_layers * layer_bytes)
        self._add_logits(tally, tokens, copies=2)
        return tally.cost()

    def _layer_bytes(self) -> float:
        """Bytes per token that one layer keeps for its backward pass.

        Counted as in Korthikanti et al., arXiv:2205.05198, section 4, for this layer: no dropout and no stored
        scores (flash attention), a gated activation, grouped keys and values. Whole on every rank unless sequence
        parallel (equations 2 and 4): the inputs and outputs of both norms. Divided by tp: queries, keys, values,
        attention output, and the gate, the up projection, the activated gate and their product. Selective
        recomputation drops what flash attention keeps, which is little.
        """
        shard = self.shard
        divided = 2 * shard.attention_size + 2 * shard.kv_size + shard.up_size + (1 + shard.gated_mlp) * shard.ffn_size
        kept = 0 if self.call.schedule.recompute is Recompute.SELECTIVE else _LOGSUMEXP_BYTES * shard.num_heads
        return (self._whole(4 * shard.hidden_size) + divided) * self.size + kept

    def _working_elements(self) -> float:
        """Elements per token alive at once in the widest part of one layer without gradients: the gated projection."""
        shard = self.shard
        return self._whole(shard.hidden_size) + shard.hidden_size + shard.up_size + shard.ffn_size

    def _whole(self, elements: float) -> float:
        """This rank's part of what tensor parallelism repeats and sequence parallelism divides."""
        return elements / self.call.layout.tp if self.call.layout.sp else elements

    def _micro_batch_tokens(self) -> int:
        return self.call.schedule.micro_batch_size * self.workload.max_tokens

    def _add_logits(self, tally: Tally, tokens: int, *, copies: int) -> None:
        """Logits of a micro-batch (and their gradient), and a chunk of them in fp32."""
        shard = self.shard
        if not self.last or shard.scalar_head:
            return
        elements = tokens * shard.padded_vocab_size
        chunk_bytes = _FP32_BYTES * _LOGIT_CHUNK_COPIES * min(elements, _LOGIT_CHUNK_ELEMENTS)
        tally.add("logits", elements * copies * self.size + chunk_bytes)
