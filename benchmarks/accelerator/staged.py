"""Messages between ranks that compute on one GPU, which NCCL refuses: by way of the host, with gloo.

Every tensor is copied to the host when a message is begun, behind what its stream was asked before, and what came is
copied back when somebody waits for it. What is only moved goes as bytes, so that types do not matter; sums of bf16 and
fp16 are of their values in fp32. Nothing here is fast: it is for what layouts compute, not for how long they take.

torch 2.11 calls some methods by other names than torch 2.13, so these have both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from meshwright.runtime.device import host
from meshwright.runtime.launch.launch import ProcessSetup

BACKEND = "staged"


@dataclass(frozen=True)
class OnOneDevice(ProcessSetup):
    """As for ranks with a device each, but all of them compute on this machine's first."""

    def set_up(self) -> str:
        assert self.kind is not None, "what only sends messages has no device to share"
        host.choose(self.kind, 0)
        host.install()
        return staged_backend()


def staged_backend() -> str:
    """Its name, which torch knows from now on."""
    if BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND, StagedGroup, devices=["cpu", "cuda"])
    return BACKEND


class StagedWork(dist.Work):
    """Messages in transit between hosts, and what brings them back to the device."""

    def __init__(self, works: Sequence[dist.Work], bring_back: Callable[[], object], kept: object = None) -> None:
        """`kept` lives as long as the messages do."""
        super().__init__()
        self._works, self._bring_back, self._kept = tuple(works), bring_back, kept
        self._is_back = False

    def wait(self, *timeout: timedelta) -> bool:
        for work in self._works:
            work.wait(*timeout)
        if not self._is_back:
            self._is_back = True
            self._bring_back()
        return True

    def is_completed(self) -> bool:
        return self._is_back or (all(work.is_completed() for work in self._works) and self.wait())

    def is_success(self) -> bool:
        return self.is_completed()

    def synchronize(self) -> None:
        self.wait()

    def get_future(self) -> Future[Any]:
        self.wait()
        future: Future[Any] = Future()
        future.set_result([])
        return future


class StagedGroup(dist.ProcessGroup):
    """Ranks whose tensors go through the host. Its methods are those of torch's own groups."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._gloo, self._name = dist.ProcessGroupGloo(store, rank, size, timeout=timeout), ""

    @property
    def group_name(self) -> str:
        """That torch has given it, which its own groups ask of a library's."""
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        return BACKEND

    def __repr__(self) -> str:
        return f"{BACKEND} group of {self.size()}, rank {self.rank()}"

    def barrier(self, **_: object) -> dist.Work:
        return StagedWork([self._gloo.barrier()], _nothing)

    def broadcast(self, tensors: Sequence[Tensor], opts: Any) -> dist.Work:
        [tensor] = tensors
        sent = _bytes(tensor)
        return StagedWork([self._gloo.broadcast([sent], opts)], lambda: _put(tensor, sent))

    def allreduce(self, tensors: Sequence[Tensor], opts: Any) -> dist.Work:
        sums = [_summable(tensor) for tensor in tensors]
        works = [self._sum(one, opts.reduceOp) for one in sums if len(one)]
        return StagedWork(works, lambda: [_fill(tensor, one) for tensor, one in zip(tensors, sums, strict=True)])

    allreduce_coalesced = allreduce

    def reduce_scatter(self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any) -> dist.Work:
        """All ranks have all sums, and each takes its own: parts may differ in size."""
        [output], [parts] = outputs, inputs
        flat = [_summable(part) for part in parts]
        whole = torch.cat(flat)
        own = whole.split([len(part) for part in flat])[self.rank()]
        works = [self._sum(whole, opts.reduceOp)] if len(whole) else []
        return StagedWork(works, lambda: _fill(output, own))

    def _reduce_scatter_base(self, output: Tensor, whole: Tensor, opts: Any) -> dist.Work:
        return self.reduce_scatter([output], [whole.reshape(self.size(), output.numel()).unbind()], opts)

    def reduce_scatter_tensor_coalesced(
        self, outputs: Sequence[Tensor], wholes: Sequence[Tensor], opts: Any
    ) -> dist.Work:
        return _together([self._reduce_scatter_base(*pair, opts) for pair in zip(outputs, wholes, strict=True)])

    def allgather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], *_: object) -> dist.Work:
        """Parts may differ in size, as NCCL's may; gloo's may not, so all are as long as the longest."""
        [parts], [mine] = outputs, inputs
        longest = max(_num_bytes(part) for part in parts)
        sent = torch.zeros(longest, dtype=torch.uint8)
        sent[: _num_bytes(mine)] = _bytes(mine)
        came = [torch.empty_like(sent) for _ in parts]
        works = [self._gloo.allgather([came], [sent])] if longest else []
        return StagedWork(works, lambda: [_put(part, one) for part, one in zip(parts, came, strict=True)], sent)

    def _allgather_base(self, output: Tensor, mine: Tensor, *_: object) -> dist.Work:
        assert output.is_contiguous(), "its parts are written where they lie"
        return self.allgather([output.view(self.size(), output.numel() // self.size()).unbind()], [mine])

    def allgather_into_tensor_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], *_: object
    ) -> dist.Work:
        return _together([self._allgather_base(*pair) for pair in zip(outputs, inputs, strict=True)])

    def alltoall_base(
        self, output: Tensor, whole: Tensor, output_splits: Sequence[int], input_splits: Sequence[int], *_: object
    ) -> dist.Work:
        """Rows of the first dimension, as many for each rank as the splits say, or as many for each."""
        sent, came = _bytes(whole), torch.empty(_num_bytes(output), dtype=torch.uint8)
        theirs, mine = (self._byte_splits(*one) for one in ((output, output_splits), (whole, input_splits)))
        works = [self._gloo.alltoall_base(came, sent, theirs, mine)]
        return StagedWork(works, lambda: _put(output, came), sent)

    def alltoall(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], *_: object) -> dist.Work:
        sent = torch.cat([_bytes(one) for one in inputs])
        theirs, mine = ([_num_bytes(one) for one in side] for side in (outputs, inputs))
        came = torch.empty(sum(theirs), dtype=torch.uint8)

        def bring_back() -> None:
            for output, one in zip(outputs, came.split(theirs), strict=True):
                _put(output, one.clone())  # where it may be seen as another type

        return StagedWork([self._gloo.alltoall_base(came, sent, theirs, mine)], bring_back, sent)

    def gather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any) -> dist.Work:
        [mine], parts = inputs, outputs[0] if outputs else ()
        sent, came = _bytes(mine), [torch.empty(_num_bytes(part), dtype=torch.uint8) for part in parts]
        works = [self._gloo.gather([came] if outputs else [], [sent], opts)]
        return StagedWork(works, lambda: [_put(part, one) for part, one in zip(parts, came, strict=True)], sent)

    def scatter(self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any) -> dist.Work:
        [output], sent = outputs, [[_bytes(part) for part in parts] for parts in inputs]
        came = torch.empty(_num_bytes(output), dtype=torch.uint8)
        return StagedWork([self._gloo.scatter([came], sent, opts)], lambda: _put(output, came), sent)

    def send(self, tensors: Sequence[Tensor], rank: int, tag: int) -> dist.Work:
        [tensor] = tensors
        sent = _bytes(tensor)
        return StagedWork([self._gloo.send([sent], rank, tag)], _nothing, sent)

    def recv(self, tensors: Sequence[Tensor], rank: int, tag: int) -> dist.Work:
        [tensor] = tensors
        came = torch.empty(_num_bytes(tensor), dtype=torch.uint8)
        return StagedWork([self._gloo.recv([came], rank, tag)], lambda: _put(tensor, came))

    all_gather_single = _allgather_base
    all_gather_single_coalesced = allgather_into_tensor_coalesced
    reduce_scatter_single = _reduce_scatter_base
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced
    all_to_all_single = alltoall_base

    def _sum(self, summable: Tensor, operation: Any) -> dist.Work:
        """Or another reduction, of a tensor of the host, in place."""
        options = dist.AllreduceOptions()
        options.reduceOp = operation
        return self._gloo.allreduce([summable], options)

    def _byte_splits(self, whole: Tensor, splits: Sequence[int]) -> list[int]:
        """Bytes for each rank of a tensor whose rows are split like this."""
        rows = len(whole)
        of_row = _num_bytes(whole) // rows if rows else 0
        counts = [int(split) for split in splits] or [rows // self.size()] * self.size()
        return [count * of_row for count in counts]


def _together(works: Sequence[dist.Work]) -> dist.Work:
    return StagedWork(works, _nothing)


def _nothing() -> None: ...


def _num_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _on_host(tensor: Tensor) -> Tensor:
    """A flat copy, there when the call returns."""
    return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach()).view(-1)


def _bytes(tensor: Tensor) -> Tensor:
    """A copy on the host, as bytes."""
    return _on_host(tensor).view(torch.uint8)


def _put(tensor: Tensor, came: Tensor) -> None:
    """Bytes of the host into a tensor, which may have fewer."""
    _fill(tensor, came[: _num_bytes(tensor)].view(tensor.dtype))


def _summable(tensor: Tensor) -> Tensor:
    """A copy on the host, of a type that sums well."""
    copy = _on_host(tensor)
    return copy.float() if copy.is_floating_point() and copy.element_size() < torch.float32.itemsize else copy


def _fill(tensor: Tensor, values: Tensor) -> None:
    """As a library of messages would: whoever saved the tensor for a backward pass is not told."""
    tensor.data.copy_(values.view(tensor.shape))
