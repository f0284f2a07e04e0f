"""State that waits in host memory while its stage does not run; its storage on the device is given up meanwhile.

Tensors stay the objects that they are, so that all views of them hold again when their storage is back: megatron's
buffers of gradients do the same. What megatron moves of an optimizer it replaces by new tensors, which would no longer
be views of the fp32 weights of a model.
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
from meshwright.runtime.training.bodies import Trainer
from meshwright.runtime.training.copies import WeightCopy


class Hosted(Protocol):
    """State of one stage, in host memory from its making on."""

    def reload(self) -> int:
        """Brings it to the device; returns the bytes read."""
        ...

    def offload(self) -> int:
        """Gives up its storage on the device; returns the bytes written to the host before."""
        ...


class HostedWeights:
    """The weights of a model that is not trained: what the host holds never changes, so nothing is written back."""

    def __init__(self, model: nn.Module) -> None:
        self._weights = [parameter.data for parameter in model.parameters()]
        self._kept = [_room_for(weight) for weight in self._weights]
        _write(self._weights, self._kept)
        _give_up(self._weights)

    def reload(self) -> int:
        """Brings the weights to the device; returns the bytes read."""
        return _read(self._kept, self._weights)

    def offload(self) -> int:
        """Gives up their storage on the device; returns 0, for nothing is written to the host."""
        _give_up(self._weights)
        return 0


class HostedOptimizer:
    """The fp32 main weights, moments and gradients of a trainer. Gradients are zero between updates: none are kept."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._state = _optimizer_state(trainer)
        self._kept = [_room_for(tensor) for tensor in self._state]
        buffers = [
            buffer for chunk in trainer.ddp_chunks for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)
        ]
        self._gradients = [buffer.grad_data for buffer in buffers]
        self.offload()

    def reload(self) -> int:
        """Brings weights and moments to the device and makes room for gradients; returns the bytes read."""
        for gradient in self._gradients:
            _take_up(gradient)
            gradient.zero_()
        return _read(self._kept, self._state)

    def offload(self) -> int:
        """Writes weights and moments to the host and gives up all storage; returns the bytes written."""
        num_bytes = _write(self._state, self._kept)
        _give_up([*self._state, *self._gradients])
        return num_bytes


class HostMemory:
    """What one rank offloads, by stage."""

    def __init__(self, plan: Plan, copies: Mapping[str, WeightCopy]) -> None:
        """Moves all of it to the host: trainers are to be loaded before."""
        self._hosted: dict[str, Hosted] = {}
        for placement in plan.placements:
            copy, offload = copies[plan.copy_of(placement.stage)], placement.schedule.offload
            if offload is Offload.WEIGHTS and copy.model is not None:
                self._hosted[placement.stage] = HostedWeights(copy.model)
            elif offload is Offload.OPTIMIZER and copy.trainer is not None:
                self._hosted[placement.stage] = HostedOptimizer(copy.trainer)

    @contextmanager
    def reloaded(self, stage: str) -> Iterator[dict[str, float]]:
        """Within it the stage's state is on the device. The facts it gives are complete when it is left."""
        facts: dict[str, float] = {}
        hosted = self._hosted.get(stage)
        if hosted is None:
            yield facts
            return
        start = _now()
        facts["num_reload_bytes"] = float(hosted.reload())
        facts["reload_seconds"] = _now() - start
        yield facts
        start = _now()
        facts["num_offload_bytes"] = float(hosted.offload())
        facts["offload_seconds"] = _now() - start

    @contextmanager
    def trainers_reloaded(self) -> Iterator[None]:
        """Within it the state of all trainers is on the device, as it must be to save it."""
        with ExitStack() as stack:
            for stage, hosted in self._hosted.items():
                if isinstance(hosted, HostedOptimizer):
                    stack.enter_context(self.reloaded(stage))
            yield


def _optimizer_state(trainer: Trainer) -> list[Tensor]:
    """Main weights, which a model in fp32 has none of beside its own, and moments."""
    found: list[Tensor] = []
    for optimizer in trainer.optimizers:
        found += [weight.data for group in optimizer.shard_fp32_from_float16_groups for weight in group]
        found += [state[name] for state in optimizer.optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    return found


def _room_for(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, device="cpu", pin_memory=host.on_cuda())


def _write(tensors: Iterable[Tensor], kept: Iterable[Tensor]) -> int:
    """Copies from the device; returns the bytes."""
    num_bytes = 0
    for tensor, room in zip(tensors, kept, strict=True):
        room.copy_(tensor, non_blocking=True)
        num_bytes += room.nbytes
    host.synchronise()
    return num_bytes


def _read(kept: Iterable[Tensor], tensors: Iterable[Tensor]) -> int:
    """Copies to the device, into storage taken up anew; returns the bytes."""
    num_bytes = 0
    for tensor, room in zip(tensors, kept, strict=True):
        _take_up(tensor)
        tensor.copy_(room, non_blocking=True)
        num_bytes += room.nbytes
    return num_bytes


def _give_up(tensors: Iterable[Tensor]) -> None:
    for tensor in tensors:
        tensor.untyped_storage().resize_(0)


def _take_up(tensor: Tensor) -> None:
    """Storage for a tensor that begins where its storage does and gave it up."""
    assert tensor.storage_offset() == 0
    tensor.untyped_storage().resize_(tensor.nbytes)


def _now() -> float:
    host.synchronise()
    return time.perf_counter()
