"""Offload of a stage's state to host memory while the stage does not run; its device storage is freed meanwhile.

Tensor objects are kept and only their storages are resized, so all views are valid again after a reload; Megatron's
gradient buffers do the same. Megatron's optimizer offload makes new tensors instead, which would no longer be views of
the fp32 weights of a model.
https://github.com/NVIDIA/Megatron-LM/blob/core_v0.16.1/megatron/core/distributed/param_and_grad_buffer.py#L964
https://github.com/NVIDIA/Megatron-LM/blob/core_v0.16.1/megatron/core/optimizer/optimizer.py#L344
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Protocol

import torch
from torch import Tensor, nn

from meshwright.planner.plan.plan import Plan
from meshwright.profiles.schedule import Offload
from meshwright.runtime.device import host
from meshwright.runtime.training.trainer import Trainer
from meshwright.runtime.training.weight_copies import WeightCopy


class OffloadedState(Protocol):
    """State of one stage that is kept in host memory from construction on."""

    def reload(self) -> int:
        """Copies the state to the device; returns the bytes read."""
        ...

    def offload(self) -> int:
        """Writes the state to the host and frees its device storage; returns the bytes written."""
        ...


class OffloadedWeights:
    """The weights of a model that is not trained; the host copy never changes, so nothing is written back."""

    def __init__(self, model: nn.Module) -> None:
        self._weights = [parameter.data for parameter in model.parameters()]
        self._host_copies = [_host_buffer(weight) for weight in self._weights]
        _write(self._weights, self._host_copies)
        _free(self._weights)

    def reload(self) -> int:
        """Copies the weights to the device; returns the bytes read."""
        return _read(self._host_copies, self._weights)

    def offload(self) -> int:
        """Frees the device storage of the weights; returns 0, since nothing is written to the host."""
        _free(self._weights)
        return 0


class OffloadedOptimizer:
    """The fp32 main weights, moments and gradients of a trainer; gradients are zero between updates and not copied."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._state = _optimizer_state(trainer)
        self._host_copies = [_host_buffer(tensor) for tensor in self._state]
        buffers = [
            buffer for chunk in trainer.ddp_chunks for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)
        ]
        self._gradients = [buffer.grad_data for buffer in buffers]
        self.offload()

    def reload(self) -> int:
        """Copies weights and moments to the device and allocates zero gradients; returns the bytes read."""
        for gradient in self._gradients:
            _allocate(gradient)
            gradient.zero_()
        return _read(self._host_copies, self._state)

    def offload(self) -> int:
        """Writes weights and moments to the host and frees all device storage; returns the bytes written."""
        num_bytes = _write(self._state, self._host_copies)
        _free([*self._state, *self._gradients])
        return num_bytes


class OffloadedStages:
    """The offloaded state of one rank, by stage."""

    def __init__(self, plan: Plan, copies: Mapping[str, WeightCopy]) -> None:
        """Offloads every stage whose schedule says so; checkpoints must be loaded into the trainers before."""
        self._offloaded: dict[str, OffloadedState] = {}
        for placement in plan.placements:
            copy, offload = copies[plan.copy_of(placement.stage)], placement.schedule.offload
            if offload is Offload.WEIGHTS and copy.model is not None:
                self._offloaded[placement.stage] = OffloadedWeights(copy.model)
            elif offload is Offload.OPTIMIZER and copy.trainer is not None:
                self._offloaded[placement.stage] = OffloadedOptimizer(copy.trainer)

    @contextmanager
    def reloaded(self, stage: str) -> Iterator[dict[str, float]]:
        """Context in which the stage's state is on the device.

        Yields the bytes and seconds of reload and offload, complete once the context is left.
        """
        facts: dict[str, float] = {}
        offloaded = self._offloaded.get(stage)
        if offloaded is None:
            yield facts
            return
        start = _now()
        facts["num_reload_bytes"] = float(offloaded.reload())
        facts["reload_seconds"] = _now() - start
        yield facts
        start = _now()
        facts["num_offload_bytes"] = float(offloaded.offload())
        facts["offload_seconds"] = _now() - start

    @contextmanager
    def trainers_reloaded(self) -> Iterator[None]:
        """Context in which the state of all trainers is on the device, which saving needs."""
        with ExitStack() as stack:
            for stage, offloaded in self._offloaded.items():
                if isinstance(offloaded, OffloadedOptimizer):
                    stack.enter_context(self.reloaded(stage))
            yield


def _optimizer_state(trainer: Trainer) -> list[Tensor]:
    """Moments and main weights; a model in fp32 has no main weights separate from its parameters."""
    tensors: list[Tensor] = []
    for optimizer in trainer.optimizers:
        tensors += [weight.data for group in optimizer.shard_fp32_from_float16_groups for weight in group]
        tensors += [state[name] for state in optimizer.optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    return tensors


def _host_buffer(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, device="cpu", pin_memory=host.on_cuda())


def _write(tensors: Iterable[Tensor], host_copies: Iterable[Tensor]) -> int:
    """Copies tensors to the host; returns the bytes."""
    num_bytes = 0
    for tensor, on_host in zip(tensors, host_copies, strict=True):
        on_host.copy_(tensor, non_blocking=True)
        num_bytes += on_host.nbytes
    host.synchronise()
    return num_bytes


def _read(host_copies: Iterable[Tensor], tensors: Iterable[Tensor]) -> int:
    """Copies tensors from the host into newly allocated device storage; returns the bytes."""
    num_bytes = 0
    for tensor, on_host in zip(tensors, host_copies, strict=True):
        _allocate(tensor)
        tensor.copy_(on_host, non_blocking=True)
        num_bytes += on_host.nbytes
    return num_bytes


def _free(tensors: Iterable[Tensor]) -> None:
    for tensor in tensors:
        tensor.untyped_storage().resize_(0)


def _allocate(tensor: Tensor) -> None:
    """Allocates the storage of a tensor again that `_free` has freed."""
    assert tensor.storage_offset() == 0
    tensor.untyped_storage().resize_(tensor.nbytes)


def _now() -> float:
    host.synchronise()
    return time.perf_counter()
