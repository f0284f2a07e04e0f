"""Bytes on the fullest rank of a pool, sized for the longest sequence that the workload can produce.

What stays while other stages run is resident: the weight copy under the term "weights" (which a planner drops where
two stages share one copy), gradients, fp32 weights and moments of a training stage, and the KV cache of a generation
that runs on from turn to turn. Activations, logits, any other KV cache and the buffer of a refit are transient, and so
is what is offloaded to the host. The fuller of the first and the last pipeline stage is answered.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from meshwright.cost_models.cost import Cost, Memory, Tally
from meshwright.cost_models.params import stage_params
from meshwright.cost_models.question import Call
from meshwright.cost_models.state import offloaded, optimizer_state, weights
from meshwright.profiles.model import ModelSpec
from meshwright.profiles.schedule import Recompute
from meshwright.profiles.stages import TRAIN_STAGE
from meshwright.profiles.workload import Workload

_FP32_BYTES = 4

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
    host = max((answer.host for answer in answers), key=lambda cost: cost.total)
    return replace(max(answers, key=lambda answer: answer.peak_bytes), host=host)


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
        away = offloaded(self.call, self.num_params, self.size)
        kept = weights(self.num_params, self.size) + optimizer_state(self.call, self.num_params, self.size)
        cache, running, refitting = self._cache(), self._running(), self._refitting()
        if self._runs_on:
            kept += cache
        else:
            running = cache + running
        names = {term.name for term in away.terms}
        resident = Cost(tuple(term for term in kept.terms if term.name not in names))
        transient = max(running, refitting, key=lambda cost: cost.total)
        return Memory(resident=resident, transient=away + transient, host=away)

    @property
    def _runs_on(self) -> bool:
        """Whether sequences of a generation stay in their slots between turns."""
        return self.call.schedule.batches_in_flight > 1 or self.call.schedule.overcommit > 0

    @property
    def num_layers(self) -> float:
        return self.call.model.num_layers / self.call.layout.pp

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

    def _cache(self) -> Cost:
        """Keys and values for the longest sequence: of every slot, or of every row of a stage that streams."""
        schedule, tally = self.call.schedule, Tally()
        rows = self._slots() if self.call.stage.generates else self._rows() if schedule.chunk_tokens else 0
        per_token = self.num_layers * self.shard.cached_elements * self.size
        tally.add("kv cache", rows * self.workload.max_tokens * per_token)
        return tally.cost()

    def _rows(self) -> int:
        """Sequences of a batch on one replica."""
        return -(-self.workload.batch_size // self.call.layout.dp)

    def _slots(self) -> int:
        """Slots that can hold a sequence."""
        schedule = self.call.schedule
        in_flight = schedule.batches_in_flight * self._rows() - (-schedule.overcommit // self.call.layout.dp)
        return min(schedule.generation_slots, in_flight)

    def _generating(self) -> Cost:
        """The working set of a prefill, and sampling."""
        group = -(-self._slots() // self.call.layout.pp)
        tally = Tally()
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
        attention output, and the gate, the up projection, the activated gate and their product. Experts count as
        what one token passes of them. Selective recomputation drops what flash attention keeps, which is little.
        """
        shard = self.shard
        kept = 0 if self.call.schedule.recompute is Recompute.SELECTIVE else _LOGSUMEXP_BYTES * shard.num_heads
        divided = shard.attention_elements + (2 + 2 * shard.gated_mlp) * shard.active_ffn_size
        return (self._whole(4 * shard.hidden_size) + self._routed() + divided) * self.size + kept

    def _working_elements(self) -> float:
        """Elements per token alive at once in the widest part of one layer without gradients: the gated projection."""
        shard = self.shard
        mlp = (2 + shard.gated_mlp) * shard.active_ffn_size
        return self._whole(shard.hidden_size) + shard.hidden_size + self._routed() + mlp

    def _routed(self) -> float:
        """Elements per token that are copied to its experts and come back from them, whole on every rank."""
        experts = self.shard.experts
        return 2 * experts.experts_per_token * self.shard.hidden_size if experts else 0

    def _whole(self, elements: float) -> float:
        """This rank's part of what tensor parallelism repeats and sequence parallelism divides."""
        return elements / self.call.layout.tp if self.call.layout.sp else elements

    def _micro_batch_tokens(self) -> int:
        """Tokens of one pass at its longest: whole sequences, or prompts and chunks of a stage that streams."""
        schedule, workload = self.call.schedule, self.workload
        chunk = min(schedule.chunk_tokens, workload.response.max)
        return schedule.micro_batch_size * (max(chunk, workload.prompt.max) if chunk else workload.max_tokens)

    def _add_logits(self, tally: Tally, tokens: int, *, copies: int) -> None:
        """Logits of a micro-batch (and their gradient), and a chunk of them in fp32."""
        shard = self.shard
        if not self.last or shard.scalar_head:
            return
        elements = tokens * shard.padded_vocab_size
        chunk_bytes = _FP32_BYTES * _LOGIT_CHUNK_COPIES * min(elements, _LOGIT_CHUNK_ELEMENTS)
        tally.add("logits", elements * copies * self.size + chunk_bytes)
