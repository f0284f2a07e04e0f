"""The stage functions that run a model: forward passes over micro-batches, and a training step.

The executor runs these functions and the profiler times them. Micro-batches go through Megatron's pipeline schedules,
which with one pipeline stage are a plain loop. Every rank of a replica passes the same micro-batches in the same order.
For how rows are split into them see `profiles.packing.micro_batches`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.distributed import DistributedDataParallel
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.optimizer import OptimizerConfig
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from torch import Tensor, nn

from meshwright.runtime.device import host
from meshwright.runtime.messages.sampling_masks import concatenated_sets
from meshwright.runtime.model.context_parallel import num_padding_tokens, num_tokens_of_rank, sequence_shard
from meshwright.runtime.model.distributions import VocabShard, top_distributions
from meshwright.runtime.model.logprobs import token_logprobs
from meshwright.runtime.model.mesh import Mesh
from meshwright.runtime.model.model_shard import Decoder, ModelChunks, model_chunks_of
from meshwright.runtime.model.stage_passes import ExpertLockstep
from meshwright.runtime.training.losses import MAXIMUM, LossShare
from meshwright.runtime.training.optimizers import clip_gradients, distributed_optimizers, set_learning_rate
from meshwright.runtime.training.replica_overlap import Buckets, ReplicaExchange, ddp_config


@dataclass(frozen=True)
class MicroBatch:
    """Packed rows that go through the model together, without padding between them."""

    tokens: Tensor
    """Tokens of all rows, [T] int64."""
    next_tokens: Tensor
    """The token after each token, [T]; meaningless at the last token of a row."""
    lengths: tuple[int, ...]
    """Tokens of each row; they sum to T."""
    fields: Mapping[str, Tensor] = field(default_factory=dict)
    """Per-token inputs of a loss by name, [T] or [T, k] each; a forward pass needs none."""
    kept: Tensor | None = None
    """The sampling mask of each token's next token, [T, K] int32, with -1 in free places; None where none is kept."""

    @classmethod
    def pack(
        cls,
        rows: Iterable[Tensor],
        fields: Mapping[str, Iterable[Tensor]] | None = None,
        kept: Sequence[Tensor] = (),
    ) -> Self:
        """Packs rows: the tokens of each row, [T_row], for every field the values of each row, [T_row], and the
        sampling masks of each row, [T_row, K_row], if there are any."""
        rows = tuple(rows)
        packed = {name: torch.cat(tuple(values)) for name, values in (fields or {}).items()}
        tokens = torch.cat(rows)
        return cls(
            tokens, F.pad(tokens[1:], (0, 1)), tuple(map(len, rows)), packed, concatenated_sets(kept) if kept else None
        )

    def shard(self, mesh: Mesh) -> MicroBatch:
        """This rank's shard under context parallelism, zero where padded; without it, the micro-batch itself."""
        shard = sequence_shard(self.lengths, mesh)
        if shard is None:
            return self
        fields = {name: shard.select(values) for name, values in self.fields.items()}
        kept = None if self.kept is None else shard.select(self.kept, padding=-1)
        return MicroBatch(shard.select(self.tokens), shard.select(self.next_tokens), (shard.num_tokens,), fields, kept)

    def kept_on(self, device: torch.device) -> Tensor | None:
        """The sampling masks [1, T, K] int64 on a device; None where none are kept."""
        return None if self.kept is None else self.kept.to(device).long().unsqueeze(0)

    def split_rows(self, values: Tensor) -> tuple[Tensor, ...]:
        """Splits values [T], one for each token, into those of each row."""
        return values.split(self.lengths)


OutputFunction = Callable[[Tensor, MicroBatch], Any]
"""A function that the last pipeline stage applies to the model's output for a micro-batch."""


def forward_logprobs(
    model: Decoder, mesh: Mesh, micro_batches: Sequence[MicroBatch], *, temperature: float = 1.0
) -> list[Tensor]:
    """Log-probabilities [T] fp32 of each micro-batch, on the ranks of the last pipeline stage; elsewhere an empty list.

    Element t of a row is log p(token t + 1 | tokens up to t); the last element of a row has no next token and is zero.
    With sampling masks, p is the distribution over the set of each position.
    """

    return _forward(model, mesh, micro_batches, _logprobs_output(model, mesh, temperature))


def _logprobs_output(model: Decoder, mesh: Mesh, temperature: float) -> Callable[[Tensor, MicroBatch], Tensor]:
    """A function of the logits of a micro-batch that returns the log-probabilities [T] of its next tokens."""

    def logprobs(logits: Tensor, micro_batch: MicroBatch) -> Tensor:
        shard = micro_batch.shard(mesh)
        next_logprobs, _ = token_logprobs(
            logits,
            shard.next_tokens.to(logits.device).unsqueeze(0),
            mesh.groups.tp,
            vocab_size=model.spec.vocab_size,
            temperature=temperature,
            kept=shard.kept_on(logits.device),
        )
        ends = torch.tensor(micro_batch.lengths, device=logits.device).cumsum(0) - 1
        return _unshard(next_logprobs[0], micro_batch, mesh).index_fill(0, ends, 0.0)

    return logprobs


class TokenDistributions(NamedTuple):
    """A teacher's outputs for the tokens of a micro-batch: log-probabilities [T] fp32, as those of `forward_logprobs`,
    and for each of R chosen positions, in order and in host memory, the likeliest tokens [R, k] int32 and the
    log-probabilities [R, k + 1] fp32 of `runtime.model.distributions.top_distributions`."""

    logprobs: Tensor
    tokens: Tensor
    top_logprobs: Tensor


CHOSEN = "chosen"
"""Field of a micro-batch that marks the positions whose distributions are computed, [T] bool."""


def forward_distributions(
    model: Decoder, mesh: Mesh, micro_batches: Sequence[MicroBatch], *, top_k: int, temperature: float = 1.0
) -> list[TokenDistributions]:
    """The distributions of each micro-batch at its `CHOSEN` positions, on the ranks of the last pipeline stage;
    elsewhere an empty list."""

    def distributions(logits: Tensor, micro_batch: MicroBatch) -> TokenDistributions:
        flat, device = logits.flatten(0, 1), logits.device
        chosen = micro_batch.shard(mesh).fields[CHOSEN].nonzero().squeeze(-1).to(device)
        shard = VocabShard.of(flat, mesh.groups.tp, model.spec.vocab_size, temperature)
        found = top_distributions(flat, chosen, shard, top_k)
        everywhere = (values.new_zeros(len(flat), values.shape[1]) for values in found)
        tokens, top_logprobs = (
            _unshard(whole.index_copy_(0, chosen, values), micro_batch, mesh)[
                micro_batch.fields[CHOSEN].to(device)
            ].cpu()
            for whole, values in zip(everywhere, found, strict=True)
        )
        return TokenDistributions(logprobs(logits, micro_batch), tokens, top_logprobs)

    logprobs = _logprobs_output(model, mesh, temperature)
    return _forward(model, mesh, micro_batches, distributions)


def forward_scalars(model: Decoder, mesh: Mesh, micro_batches: Sequence[MicroBatch]) -> list[Tensor]:
    """Outputs [T] fp32 of the scalar head for each micro-batch: values or scores.

    Only ranks of the last pipeline stage return them; elsewhere the list is empty.
    """
    return _forward(model, mesh, micro_batches, lambda values, micro_batch: _unshard(values[0], micro_batch, mesh))


def _unshard(values: Tensor, micro_batch: MicroBatch, mesh: Mesh) -> Tensor:
    """Values [T] of all tokens, gathered from the shards of the context-parallel ranks."""
    shard = sequence_shard(micro_batch.lengths, mesh)
    return shard.gather_values(values) if shard else values


def _forward(model: Decoder, mesh: Mesh, micro_batches: Sequence[MicroBatch], output: OutputFunction) -> list[Any]:
    training = model.training
    model.eval()
    try:
        with torch.no_grad(), ExpertLockstep(model, mesh).passes(len(micro_batches)):
            return run_schedule([model], mesh, micro_batches, output, forward_only=True)
    finally:
        model.train(training)


def run_schedule(
    chunks: Sequence[nn.Module],
    mesh: Mesh,
    micro_batches: Sequence[MicroBatch],
    output: OutputFunction,
    *,
    forward_only: bool,
) -> list[Any]:
    """Runs the micro-batches through the pipeline; returns the results of `output` on ranks of the last pipeline stage.

    On other ranks the list is empty. Several chunks run in Megatron's interleaved schedule, which needs a number of
    micro-batches that is a multiple of the pipeline stages. Unless `forward_only`, `output` returns the loss, a token
    count that is not used, and what to keep.
    """
    if not micro_batches:
        return []

    def step(remaining: Iterator[MicroBatch], model: nn.Module) -> tuple[Tensor, Callable[..., Any]]:
        micro_batch = next(remaining)
        result = model(micro_batch.tokens.to(host.device()).unsqueeze(0), micro_batch.lengths)
        reduce = _freeing(output) if forward_only else output
        return result, lambda result, **_: reduce(result, micro_batch)

    config: Any = chunks[0].config
    sizes = {num_tokens_of_rank(micro_batch.lengths, mesh) for micro_batch in micro_batches}
    length = max(sizes)
    # Pipeline stages send the shape of every message only if micro-batches differ in length.
    config.variable_seq_lengths = len(sizes) > 1
    vpp = mesh.layout.vpp if mesh.layout.vpp > 1 else None
    run = get_forward_backward_func(pp_size=mesh.layout.pp, vp_size=vpp)
    results: list[Any] = run(
        forward_step_func=step,
        data_iterator=[iter(micro_batches) for _ in chunks] if vpp else iter(micro_batches),
        model=list(chunks) if vpp else chunks[0],
        num_microbatches=len(micro_batches),
        seq_length=(length + num_padding_tokens(length, mesh.layout)) * mesh.layout.cp,  # megatron divides it by cp
        micro_batch_size=1,
        forward_only=forward_only,
        collect_non_loss_data=forward_only,
        p2p_communicator=P2PCommunicator(mesh.groups.pp, config) if mesh.layout.pp > 1 else None,
        pg_collection=mesh.groups,
    )
    return results


def _freeing(output: OutputFunction) -> OutputFunction:
    """Wraps `output` so that the model's output is freed after the call.

    Megatron would hold it until the next micro-batch has its own, so the logits of both would be in memory together.
    https://github.com/NVIDIA/Megatron-LM/blob/core_v0.16.1/megatron/core/pipeline_parallel/schedules.py#L596
    """

    def output_and_free(result: Tensor, micro_batch: MicroBatch) -> Any:
        reduced = output(result, micro_batch)
        result.data = result.new_empty(0)  # storage that `reduced` is a view of stays alive
        return reduced

    return output_and_free


LossFunction = Callable[[Tensor, MicroBatch], LossShare]
"""A function that returns the share of this rank's tokens of a micro-batch in the loss and the metrics, already divided
by the denominator of the whole minibatch."""

UpdateCondition = Callable[[Mapping[str, float]], bool]
"""A function that decides from the metrics over all micro-batches and replicas if an update is applied."""


class Trainer:
    """A model with AdamW, whose moments and fp32 main weights are sharded over the ranks that hold the same weights.

    Gradients are summed over micro-batches and over those ranks, never averaged: with losses that are shares of one
    global mean, neither the layout nor the micro-batches nor recomputation changes the update.
    """

    def __init__(
        self,
        model: ModelChunks,
        mesh: Mesh,
        *,
        learning_rate: float,
        weight_decay: float = 0.0,
        max_grad_norm: float = 1.0,
        betas: tuple[float, float] = (0.9, 0.95),
        epsilon: float = 1e-8,
        buckets: Buckets | None = None,
    ) -> None:
        """Copies the current weights of `model` as main weights; weight decay excludes norms and biases.

        With `buckets` gradient reduction and weight gathering overlap with computation.
        """
        self.mesh = mesh
        self.model = model
        self.ddp_chunks = tuple(
            DistributedDataParallel(model.config, ddp_config(chunk, buckets), chunk, pg_collection=mesh.groups)
            for chunk in model_chunks_of(model)
        )
        self._exchange = ReplicaExchange(self.ddp_chunks) if buckets else None
        self._has_next_update = False
        if self._exchange:
            contexts = [chunk.no_sync for chunk in self.ddp_chunks]
            model.config.no_sync_func = contexts if len(contexts) > 1 else contexts[0]
        dtype = model.config.params_dtype
        config = OptimizerConfig(
            lr=learning_rate,
            weight_decay=weight_decay,
            adam_beta1=betas[0],
            adam_beta2=betas[1],
            adam_eps=epsilon,
            clip_grad=max_grad_norm,
            params_dtype=dtype,
            bf16=dtype == torch.bfloat16,
            use_distributed_optimizer=True,
        )
        self.optimizers = distributed_optimizers(self.ddp_chunks, mesh, config)
        model.config.finalize_model_grads_func = self._finalize
        self._clear_gradients()

    def set_learning_rate(self, learning_rate: float) -> None:
        """Sets the learning rate of the updates to come."""
        set_learning_rate(self.optimizers, learning_rate)

    @contextmanager
    def successive_updates(self) -> Iterator[None]:
        """Context of consecutive updates, in which an update returns while its weights are still being gathered.

        The next update waits for them layer by layer; nothing else may read the weights inside the context.
        """
        self._has_next_update = True
        yield
        self._has_next_update = False
        if self._exchange:
            self._exchange.finish_weights()

    def train_step(
        self, micro_batches: Sequence[MicroBatch], loss: LossFunction, *, condition: UpdateCondition = lambda _: True
    ) -> dict[str, float]:
        """Makes one update from this replica's micro-batches.

        A replica may have none while others have some, except that replicas which share experts have equally many.
        Returns the metrics summed over micro-batches and replicas, and `grad_norm` before clipping; the same on every
        rank. The weights do not change if `condition` rejects the metrics, or if a metric or the norm is not finite.
        """
        sums = self._sum(self.accumulate(micro_batches, loss))
        is_accepted = all(map(math.isfinite, sums.values())) and condition(sums)
        return sums | {"grad_norm": self.update() if is_accepted else self._discard()}

    def accumulate(self, micro_batches: Sequence[MicroBatch], loss: LossFunction) -> list[dict[str, Tensor]]:
        """Adds up gradients over micro-batches and replicas; returns the metrics of each of this rank's micro-batches.

        A metric is a scalar tensor, [].

        With several replicas it may be called only once before each update.
        """
        if micro_batches:
            return run_schedule(
                self.ddp_chunks, self.mesh, micro_batches, _loss_output(loss, self.mesh), forward_only=False
            )
        if self._exchange:
            self._exchange.start_gradients()
        self._finalize(list(self.ddp_chunks))
        return []

    def update(self) -> float:
        """Clips the gradients, steps the optimizer and zeroes the gradients; returns their norm before clipping.

        The step is skipped if the norm is not finite; all ranks agree on that, since it is the norm of the whole model.
        """
        grad_norm = self._clip()
        if self._exchange:
            # Weights of the previous update: a rank without rows ran no forward pass that would have waited for them.
            self._exchange.finish_weights()
        for optimizer in self.optimizers if math.isfinite(grad_norm) else ():
            optimizer.step_with_ready_grads()
        if self._exchange and math.isfinite(grad_norm):
            self._exchange.start_weights()
            if not self._has_next_update:
                self._exchange.finish_weights()
        self._clear_gradients()
        return grad_norm

    def _discard(self) -> float:
        """Zeroes the gradients without a step; returns their norm before clipping."""
        grad_norm = self._clip()
        self._clear_gradients()
        return grad_norm

    def _clip(self) -> float:
        for optimizer in self.optimizers:
            optimizer.prepare_grads()
        return clip_gradients(self.optimizers)

    def _clear_gradients(self) -> None:
        for chunk in self.ddp_chunks:
            chunk.zero_grad_buffer()
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def _finalize(self, model: list[nn.Module], *_: Any, **__: Any) -> None:
        """Sums gradients over replicas, over sequence-parallel ranks and over both copies of tied embeddings.

        Megatron could also divide them by a token count; here the losses are already divided.
        """
        finalize_model_grads(model, None, pg_collection=self.mesh.groups)

    def _sum(self, shares: Sequence[Mapping[str, Tensor]]) -> dict[str, float]:
        """Metrics summed over the mesh in rank order, or their maxima (`MAXIMUM`); of tensor-parallel ranks, which have
        equal metrics, one is counted."""
        local: dict[str, float] = {}
        for share in shares if self.mesh.tp_rank == 0 else ():
            for name, value in share.items():
                local[name] = _combined(name, local.get(name, 0.0), float(value))
        per_rank: list[dict[str, float]] = [{}] * self.mesh.layout.num_ranks
        dist.all_gather_object(per_rank, local, group=self.mesh.groups.intra_dist_opt)
        totals: dict[str, float] = {}
        for sums in per_rank:
            for name, total in sums.items():
                totals[name] = _combined(name, totals.get(name, 0.0), total)
        return totals


def _combined(name: str, one: float, other: float) -> float:
    return max(one, other) if name.startswith(MAXIMUM) else one + other


def _loss_output(loss: LossFunction, mesh: Mesh) -> OutputFunction:
    """The loss in the form of Megatron's schedules: with an unused token count, and the metrics to keep."""

    def output(result: Tensor, micro_batch: MicroBatch) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        share = loss(result, micro_batch.shard(mesh))
        return share.loss, torch.zeros((), dtype=torch.int, device=result.device), share.metrics

    return output
