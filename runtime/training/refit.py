"""Weight synchronisation (refit) from one layout to another: on the same ranks, on nested ones or on disjoint pools.

Megatron plans which slices go where. The transfers are made here, because Megatron's end in a barrier of the world,
and a pool that takes no part in a refit has other work to do.

On CPUs, a source whose pool has no rank in common with the target's does not wait for the target: it starts to send its
weights as soon as they are updated, and goes on with its other work. On a GPU a send would occupy the device until the
target receives, so both sides run the refit together.
https://github.com/NVIDIA/Megatron-LM/blob/core_v0.16.1/megatron/core/resharding/execution.py
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.resharding.planner import build_centralized_reshard_plan
from megatron.core.resharding.utils import TransferOp
from torch import Tensor, nn

from meshwright.runtime.device import host
from meshwright.runtime.model.adapters import is_trained_parameter
from meshwright.runtime.model.fp8_linears import named_quantised_weights, quantise_received
from meshwright.runtime.model.hf_checkpoint import EMBEDDING, OUTPUT, expert_of
from meshwright.runtime.model.mesh import Mesh, group_of
from meshwright.runtime.model.model_shard import ModelChunks, model_chunks_of, named_global_parameters
from meshwright.runtime.training.versions import Version

BUCKET_BYTES = 64 * 2**20
"""Largest message of weights between two ranks, unless a single slice is larger."""

Slices = tuple[slice, ...]


@dataclass(frozen=True, kw_only=True)
class SliceTransfer:
    """The transfer of a slice of a parameter, named as in the whole model, between two ranks of the world."""

    parameter: str
    source: int
    target: int
    source_slices: Slices
    target_slices: Slices
    dtype: torch.dtype
    """The dtype of the target; the source converts."""


class RefitCopy:
    """Copies a source model's weights into a target model of the same shape, converted to its dtype."""

    def __init__(
        self,
        source: ModelChunks | None,
        source_mesh: Mesh,
        target: ModelChunks | None,
        target_mesh: Mesh,
        *,
        number: int = 0,
        versions: tuple[Version, Version] | None = None,
    ) -> None:
        """Plans the transfers. Collective over the world; a rank passes None for the side whose mesh it is not in.

        Refits that may run at the same time need different numbers. `versions` are the source's and the target's; every
        message of weights carries its version.
        """
        self._number = number
        self._version, self._target_version = versions or (Version("source"), Version("target"))
        self._sends_ahead = not host.on_cuda() and not {*source_mesh.ranks} & {*target_mesh.ranks}
        self._sending: Future[None] | None = None
        self._is_sent = False
        self._source, self._target = _Side(source, source_mesh), _Side(target, target_mesh, tied_twice=True)
        plan = build_centralized_reshard_plan(self._source, self._target)
        ranks = sorted({*source_mesh.ranks, *target_mesh.ranks})
        self._group = group_of(ranks)
        per_rank: list[list[SliceTransfer]] = [[]] * len(ranks)
        if dist.get_rank() in ranks:
            receives = [
                _choose_source(op, source_mesh, target_mesh, self._target.dtype, self._target.num_experts)
                for op in plan.recv_ops
            ]
            dist.all_gather_object(per_rank, receives, group=self._group)
        self._split_transfers([transfer for transfers in per_rank for transfer in transfers])

    def _split_transfers(self, transfers: Sequence[SliceTransfer]) -> None:
        """Keeps this rank's transfers: copies within the rank, and buckets by peer, the same on both sides."""
        rank = dist.get_rank()
        sends: dict[int, list[SliceTransfer]] = defaultdict(list)
        receives: dict[int, list[SliceTransfer]] = defaultdict(list)
        for transfer in transfers:
            if transfer.source == rank != transfer.target:
                sends[transfer.target].append(transfer)
            if transfer.target == rank != transfer.source:
                receives[transfer.source].append(transfer)
        self._copies = [transfer for transfer in transfers if transfer.source == transfer.target == rank]
        self._sends = {peer: _buckets(sends[peer], self._source.outgoing) for peer in sends}
        self._receives = {peer: _buckets(receives[peer], self._target.sized) for peer in receives}

    @property
    def num_messages(self) -> int:
        """Number of messages that this rank sends or receives in one run."""
        return sum(len(buckets) for buckets in (*self._sends.values(), *self._receives.values()))

    def start_send(self) -> None:
        """Starts to send the present weights in a thread, if the source need not wait for the target.

        The next `run` then has nothing to do, and the weights must not change before `wait` has returned.
        """
        if self._sends_ahead and self._sends:
            sender = ThreadPoolExecutor(max_workers=1, initializer=torch.set_num_threads, initargs=(1,))
            self._sending, self._is_sent = sender.submit(self._exchange_all), True
            sender.shutdown(wait=False)

    def wait(self) -> None:
        """Waits for the send that `start_send` started; raises its error, if any."""
        if self._sending is not None:
            self._sending.result()
            self._sending = None

    def run(self) -> None:
        """Copies the present weights, unless `start_send` has sent them already.

        The ranks of both meshes call it; on others it does nothing.
        """
        if self._is_sent:
            self._is_sent = False
            return
        self._exchange_all()

    @torch.no_grad()
    def _exchange_all(self) -> None:
        versions: list[int] = []
        for transfer in self._copies:
            self._target.incoming(transfer).copy_(self._source.outgoing(transfer))
            versions.append(self._source_version)
        num_rounds = max((len(buckets) for buckets in (*self._sends.values(), *self._receives.values())), default=0)
        for number in range(num_rounds):
            versions += self._exchange(
                {peer: buckets[number] for peer, buckets in self._sends.items() if number < len(buckets)},
                {peer: buckets[number] for peer, buckets in self._receives.items() if number < len(buckets)},
            )
        self._target.quantise()
        self._target_version.set_version(versions)

    @property
    def _source_version(self) -> int:
        assert self._version.number is not None, "weights that are trained were loaded"
        return self._version.number

    def _exchange(
        self, sends: Mapping[int, list[SliceTransfer]], receives: Mapping[int, list[SliceTransfer]]
    ) -> list[int]:
        """Sends one bucket to each peer and receives one from each; returns the versions received.

        A message is the slices of a bucket as one flat tensor, followed by the bits of their version.
        """
        messages, received = [], []
        for peer, bucket in sends.items():
            slices = [self._source.outgoing(transfer).flatten().to(transfer.dtype) for transfer in bucket]
            flat = torch.cat([*slices, _version_bits(self._source_version, slices[0])])
            messages.append(dist.P2POp(dist.isend, flat, peer, group=self._group, tag=self._number))
        for peer, bucket in receives.items():
            views = [self._target.incoming(transfer) for transfer in bucket]
            sizes = [*(view.numel() for view in views), len(_version_bits(0, views[0]))]
            buffer = views[0].new_empty(sum(sizes))
            messages.append(dist.P2POp(dist.irecv, buffer, peer, group=self._group, tag=self._number))
            received.append((views, buffer.split(sizes)))
        for work in dist.batch_isend_irecv(messages):
            work.wait()
        for views, (*slices, _) in received:
            for view, values in zip(views, slices, strict=True):
                view.copy_(values.view(view.shape))
        return [int(parts[-1].clone().view(torch.int64)) for _, parts in received]


def _version_bits(version: int, like: Tensor) -> Tensor:
    """The bits of an int64 version, reinterpreted as elements of the dtype of `like`."""
    return torch.tensor([version], device=like.device).view(like.dtype)


class _Side:
    """The source or target model of a refit in the form of Megatron's planner: parameters named as in the whole
    model."""

    def __init__(self, model: ModelChunks | None, mesh: Mesh, *, tied_twice: bool = False) -> None:
        """With `tied_twice` the copy of a tied embedding on the last stage is listed too, under the same name."""
        self.pg_collection = mesh.groups if mesh.is_member else ProcessGroupCollection()
        experts = model_chunks_of(model)[0].spec.experts if model is not None else None
        self.num_experts = experts.num_experts if experts else 0
        self.dtype: torch.dtype = model.config.params_dtype if model is not None else torch.float32
        self._parameters: dict[str, nn.Parameter] = {}
        self._quantised = dict(named_quantised_weights(model)) if model is not None else {}
        self._received: dict[str, Tensor] = {}
        for name, parameter in named_global_parameters(model) if model is not None else ():
            assert model is not None
            if not is_trained_parameter(model.spec, name):
                continue  # frozen weights are the same in every copy
            if name == OUTPUT and model_chunks_of(model)[-1].share_embeddings_and_output_weights:
                if tied_twice:
                    self._parameters[EMBEDDING] = parameter
            else:
                self._parameters[name] = parameter
        self._parameters |= {name: weight.meta_parameter for name, weight in self._quantised.items()}

    def named_parameters(self, recurse: bool = True) -> Iterable[tuple[str, nn.Parameter]]:
        assert recurse
        return self._parameters.items()

    def named_modules(self) -> Iterable[tuple[str, nn.Module]]:
        """Returns no modules: the planner would take layer numbers from them, which the names have already."""
        return ()

    def outgoing(self, transfer: SliceTransfer) -> Tensor:
        return self._parameters[transfer.parameter].data[transfer.source_slices]

    def incoming(self, transfer: SliceTransfer) -> Tensor:
        """The view to write a received slice to; for an 8-bit weight a buffer, until all of the weight is received."""
        name = transfer.parameter
        if name not in self._quantised:
            return self._parameters[name].data[transfer.target_slices]
        if name not in self._received:
            quantised = self._quantised[name]
            self._received[name] = torch.empty_like(quantised.meta_parameter, device=quantised.device)
        return self._received[name][transfer.target_slices]

    def sized(self, transfer: SliceTransfer) -> Tensor:
        """A tensor of the size of the received slice, for counting its bytes."""
        return self._parameters[transfer.parameter].data[transfer.target_slices]

    def quantise(self) -> None:
        """Converts the received 8-bit weights to 8-bit floats, and frees the buffers."""
        if self._received:
            received = {name: self._received[name] for name in self._quantised}
            quantise_received(received, self._quantised, self.pg_collection.tp)
            self._received.clear()


def _choose_source(
    op: TransferOp, source_mesh: Mesh, target_mesh: Mesh, dtype: torch.dtype, num_experts: int
) -> SliceTransfer:
    """The transfer for a slice that this rank needs, from itself if it holds it, else spread over source replicas.

    The planner may name the same replica for all targets; every other replica that holds the same shard, and every
    context-parallel rank of one, can serve it as well. Of a parameter of an expert that is not sharded, the planner
    names a rank of any replica, which may hold other experts; it is served by ranks that hold the expert.
    """
    rank, expert = dist.get_rank(), expert_of(op.param_name)
    if expert is not None and all(part == slice(None) for part in op.peer_slice):
        holders = source_mesh.expert_holders(op.peer_rank, expert * source_mesh.layout.ep // num_experts)
    else:
        holders = source_mesh.holders(op.peer_rank, of_experts=expert is not None)
    target_replica = target_mesh.dp_rank * target_mesh.layout.cp + target_mesh.cp_rank
    return SliceTransfer(
        parameter=op.param_name,
        source=rank if rank in holders else holders[target_replica % len(holders)],
        target=rank,
        source_slices=op.peer_slice,
        target_slices=op.my_slice,
        dtype=dtype,
    )


def _buckets(transfers: Sequence[SliceTransfer], view: Callable[[SliceTransfer], Tensor]) -> list[list[SliceTransfer]]:
    """Splits the transfers between two ranks, in order, into buckets of at most `BUCKET_BYTES` or one transfer."""
    buckets: list[list[SliceTransfer]] = []
    num_bytes = BUCKET_BYTES
    for transfer in transfers:
        size = view(transfer).numel() * transfer.dtype.itemsize
        if num_bytes + size > BUCKET_BYTES:
            buckets.append([])
            num_bytes = 0
        buckets[-1].append(transfer)
        num_bytes += size
    return buckets
