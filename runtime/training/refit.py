"""Moving weights from one layout to another, between the same ranks, nested ones, or disjoint pools.

Megatron plans which slices go where; the transfers are made here, because megatron's end in a barrier of the world
and a pool that has no part in a refit has other work to do.

Between pools without a common rank the source need not meet the target: it gives its weights away as soon as they are
new and goes on. On a GPU a send would occupy the device until the target comes; there both meet.
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
from meshwright.runtime.model.adapted import is_of_adapter
from meshwright.runtime.model.hf_mapping import EMBEDDING, OUTPUT, expert_of
from meshwright.runtime.model.mesh import Mesh, group_of
from meshwright.runtime.model.model_shard import Held, model_chunks_of, named_in_whole
from meshwright.runtime.model.quantised import quantised_in_whole, take_over
from meshwright.runtime.training.versions import Version

BUCKET_BYTES = 64 * 2**20
"""How much one rank sends to another at once."""

Slices = tuple[slice, ...]


@dataclass(frozen=True, kw_only=True)
class SliceTransfer:
    """A slice of a parameter, named as in the whole model, on its way between two ranks of the world."""

    parameter: str
    source: int
    target: int
    source_slices: Slices
    target_slices: Slices
    dtype: torch.dtype
    """The target's; the source converts."""


class RefitCopy:
    """The copying of a source model's weights into a target model of the same shape, converted to its dtype."""

    def __init__(
        self,
        source: Held | None,
        source_mesh: Mesh,
        target: Held | None,
        target_mesh: Mesh,
        *,
        number: int = 0,
        versions: tuple[Version, Version] | None = None,
    ) -> None:
        """Collective over the world; a rank passes None for the side whose mesh it is not in. Refits that may be under
        way at one time have numbers of their own. `versions` are the source's and the target's; every message of
        weights says of which version they are."""
        self._number = number
        self._version, self._target_version = versions or (Version("source"), Version("target"))
        self._sends_ahead = not host.on_cuda() and not {*source_mesh.ranks} & {*target_mesh.ranks}
        self._giving: Future[None] | None = None
        self._is_given = False
        self._source, self._target = _Side(source, source_mesh), _Side(target, target_mesh, tied_twice=True)
        plan = build_centralized_reshard_plan(self._source, self._target)
        concerned = sorted({*source_mesh.ranks, *target_mesh.ranks})
        self._group = group_of(concerned)
        everyones: list[list[SliceTransfer]] = [[]] * len(concerned)
        if dist.get_rank() in concerned:
            mine = [_nearest(op, source_mesh, target_mesh, self._target.dtype) for op in plan.recv_ops]
            dist.all_gather_object(everyones, mine, group=self._group)
        self._share_out([transfer for transfers in everyones for transfer in transfers])

    def _share_out(self, transfers: Sequence[SliceTransfer]) -> None:
        """Keeps this rank's part: copies within the rank, and buckets by peer, cut alike on both sides."""
        rank = dist.get_rank()
        sends: dict[int, list[SliceTransfer]] = defaultdict(list)
        receipts: dict[int, list[SliceTransfer]] = defaultdict(list)
        for transfer in transfers:
            if transfer.source == rank != transfer.target:
                sends[transfer.target].append(transfer)
            if transfer.target == rank != transfer.source:
                receipts[transfer.source].append(transfer)
        self._copies = [transfer for transfer in transfers if transfer.source == transfer.target == rank]
        self._sends = {peer: _buckets(sends[peer], self._source.outgoing) for peer in sends}
        self._receipts = {peer: _buckets(receipts[peer], self._target.sized) for peer in receipts}

    @property
    def num_messages(self) -> int:
        """Messages that this rank sends or receives in one run."""
        return sum(len(buckets) for buckets in (*self._sends.values(), *self._receipts.values()))

    def give(self) -> None:
        """Begins to send the weights as they are now, where the source need not meet the target: its next `run` has
        nothing to do, and the weights must not change before `settle`."""
        if self._sends_ahead and self._sends:
            sender = ThreadPoolExecutor(max_workers=1, initializer=torch.set_num_threads, initargs=(1,))
            self._giving, self._is_given = sender.submit(self._exchange_all), True
            sender.shutdown(wait=False)

    def settle(self) -> None:
        """Returns when what was given has arrived; raises what went wrong with it."""
        if self._giving is not None:
            self._giving.result()
            self._giving = None

    def run(self) -> None:
        """Copies the weights as they are now, or as they were given. The ranks of both meshes call it; on others it
        does nothing."""
        if self._is_given:
            self._is_given = False
            return
        self._exchange_all()

    @torch.no_grad()
    def _exchange_all(self) -> None:
        found: list[int] = []
        for transfer in self._copies:
            self._target.incoming(transfer).copy_(self._source.outgoing(transfer))
            found.append(self._given_version)
        num_rounds = max((len(buckets) for buckets in (*self._sends.values(), *self._receipts.values())), default=0)
        for number in range(num_rounds):
            found += self._exchange(
                {peer: buckets[number] for peer, buckets in self._sends.items() if number < len(buckets)},
                {peer: buckets[number] for peer, buckets in self._receipts.items() if number < len(buckets)},
            )
        self._target.quantise()
        self._target_version.arrive(found)

    @property
    def _given_version(self) -> int:
        assert self._version.number is not None, "weights that are trained were loaded"
        return self._version.number

    def _exchange(
        self, sends: Mapping[int, list[SliceTransfer]], receipts: Mapping[int, list[SliceTransfer]]
    ) -> list[int]:
        """Sends one bucket to each peer and receives one, each a flat tensor of its slices in order with the bits of
        their version behind them; the versions that came."""
        messages, arriving = [], []
        for peer, bucket in sends.items():
            parts = [self._source.outgoing(transfer).flatten().to(transfer.dtype) for transfer in bucket]
            flat = torch.cat([*parts, _bits(self._given_version, parts[0])])
            messages.append(dist.P2POp(dist.isend, flat, peer, group=self._group, tag=self._number))
        for peer, bucket in receipts.items():
            views = [self._target.incoming(transfer) for transfer in bucket]
            sizes = [*(view.numel() for view in views), len(_bits(0, views[0]))]
            buffer = views[0].new_empty(sum(sizes))
            messages.append(dist.P2POp(dist.irecv, buffer, peer, group=self._group, tag=self._number))
            arriving.append((views, buffer.split(sizes)))
        for work in dist.batch_isend_irecv(messages):
            work.wait()
        for views, (*slices, _) in arriving:
            for view, part in zip(views, slices, strict=True):
                view.copy_(part.view(view.shape))
        return [int(parts[-1].clone().view(torch.int64)) for _, parts in arriving]


def _bits(version: int, like: Tensor) -> Tensor:
    """A version as so many elements of a tensor's type as have its bits; no number of that type is meant."""
    return torch.tensor([version], device=like.device).view(like.dtype)


class _Side:
    """One model of a refit as megatron's planner sees it: parameters named as in the whole model."""

    def __init__(self, model: Held | None, mesh: Mesh, *, tied_twice: bool = False) -> None:
        """With `tied_twice` the copy of a tied embedding on the last stage is a parameter too, of the same name."""
        self.pg_collection = mesh.groups if mesh.is_member else ProcessGroupCollection()
        self.dtype: torch.dtype = model.config.params_dtype if model is not None else torch.float32
        self._parameters: dict[str, nn.Parameter] = {}
        self._quantised = dict(quantised_in_whole(model)) if model is not None else {}
        self._arrived: dict[str, Tensor] = {}
        for name, parameter in named_in_whole(model) if model is not None else ():
            assert model is not None
            if model.spec.adapter and not is_of_adapter(name):
                continue  # what is frozen is the same in every copy
            if name == OUTPUT and model_chunks_of(model)[-1].share_embeddings_and_output_weights:
                if tied_twice:
                    self._parameters[EMBEDDING] = parameter
            else:
                self._parameters[name] = parameter
        self._parameters |= {name: weight.stands_for for name, weight in self._quantised.items()}

    def named_parameters(self, recurse: bool = True) -> Iterable[tuple[str, nn.Parameter]]:
        assert recurse
        return self._parameters.items()

    def named_modules(self) -> Iterable[tuple[str, nn.Module]]:
        """None: the planner would look among them for the layers' numbers, which the names have already."""
        return ()

    def outgoing(self, transfer: SliceTransfer) -> Tensor:
        return self._parameters[transfer.parameter].data[transfer.source_slices]

    def incoming(self, transfer: SliceTransfer) -> Tensor:
        """Where it is to be written: of a weight in 8 bits beside it, until all of it is there."""
        name = transfer.parameter
        if name not in self._quantised:
            return self._parameters[name].data[transfer.target_slices]
        if name not in self._arrived:
            quantised = self._quantised[name]
            self._arrived[name] = torch.empty_like(quantised.stands_for, device=quantised.device)
        return self._arrived[name][transfer.target_slices]

    def sized(self, transfer: SliceTransfer) -> Tensor:
        """A tensor as large as what arrives, to be counted."""
        return self._parameters[transfer.parameter].data[transfer.target_slices]

    def quantise(self) -> None:
        """Makes 8-bit floats of what has arrived for weights in 8 bits, and forgets it."""
        if self._arrived:
            arrived = {name: self._arrived[name] for name in self._quantised}
            take_over(arrived, self._quantised, self.pg_collection.tp)
            self._arrived.clear()


def _nearest(op: TransferOp, source_mesh: Mesh, target_mesh: Mesh, dtype: torch.dtype) -> SliceTransfer:
    """What this rank is to receive, from itself if it can, else from the replica that other replicas do not ask.

    The planner may name the same replica for all; any other that holds the same shard is as good, and so is each
    context-parallel rank of a replica.
    """
    rank = dist.get_rank()
    holders = source_mesh.holders(op.peer_rank, of_experts=expert_of(op.param_name) is not None)
    mine = target_mesh.dp_rank * target_mesh.layout.cp + target_mesh.cp_rank
    return SliceTransfer(
        parameter=op.param_name,
        source=rank if rank in holders else holders[mine % len(holders)],
        target=rank,
        source_slices=op.peer_slice,
        target_slices=op.my_slice,
        dtype=dtype,
    )


def _buckets(transfers: Sequence[SliceTransfer], view: Callable[[SliceTransfer], Tensor]) -> list[list[SliceTransfer]]:
    """The transfers between two ranks, in their order, in buckets of at most `BUCKET_BYTES` or one transfer."""
    buckets: list[list[SliceTransfer]] = []
    held = BUCKET_BYTES
    for transfer in transfers:
        size = view(transfer).numel() * transfer.dtype.itemsize
        if held + size > BUCKET_BYTES:
            buckets.append([])
            held = 0
        buckets[-1].append(transfer)
        held += size
    return buckets
