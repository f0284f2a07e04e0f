"""Bytes of what a rank keeps of a role from step to step, and which of them wait in host memory."""

from __future__ import annotations

from meshwright.cost_models.cost import Cost, Tally
from meshwright.cost_models.params import StagePart
from meshwright.cost_models.question import Call
from meshwright.profiles.errors import BadInput
from meshwright.profiles.schedule import Offload
from meshwright.profiles.stages import TRAIN_STAGE

_GRADIENT_BYTES = 4
"""Megatron's DistributedDataParallel keeps and reduces gradients in fp32 (`grad_reduce_in_fp32`)."""

_MOMENT_BYTES = 8
"""Adam's two fp32 moments per parameter."""

_MAIN_WEIGHT_BYTES = 4
"""The fp32 weight that the optimizer updates when the model computes in bf16."""


def weights(num_params: float, element_bytes: int) -> Cost:
    """The weight copy of a rank that holds `num_params` parameters."""
    tally = Tally()
    tally.add("weights", num_params * element_bytes)
    return tally.cost()


def optimizer_state(call: Call, part: StagePart, element_bytes: int) -> Cost:
    """What a training stage keeps beside its weights: fp32 gradients whole, and optimizer state over dp x cp.

    That of an expert is divided over the dp/ep replicas that hold it. Context-parallel ranks hold the same weights, and
    share the state as replicas do. Without experts, and with the weights, it is 2 + 4 + (4 + 8)/(dp x cp) bytes per
    parameter in bf16, 4 + 4 + 8/(dp x cp) in fp32 (Megatron-core, docs of the distributed optimizer; Rajbhandari et
    al., ZeRO stage 1, arXiv:1910.02054, section 5.1).
    """
    tally = Tally()
    if call.stage.trains:
        tally.add("gradients", part.num_params * _GRADIENT_BYTES)
        num_params, sharers = part.replicated_params(call.layout.ep), call.layout.dp * call.layout.cp
        if element_bytes < _MAIN_WEIGHT_BYTES:
            tally.add("main weights", num_params * _MAIN_WEIGHT_BYTES / sharers)
        tally.add("moments", num_params * _MOMENT_BYTES / sharers)
    return tally.cost()


def offloaded(call: Call, part: StagePart, element_bytes: int) -> Cost:
    """What waits in host memory while the stage does not run; raises BadInput where the stage has no such state."""
    stage, offload = call.stage, call.schedule.offload
    if offload is Offload.WEIGHTS:
        if stage.role in TRAIN_STAGE:
            raise BadInput(f"{stage.name}: offload=weights is for roles that are not trained; use none.")
        return weights(part.num_params, element_bytes)
    if offload is Offload.OPTIMIZER:
        if not stage.trains:
            raise BadInput(f"{stage.name}: offload=optimizer is for stages that train; use none.")
        return optimizer_state(call, part, element_bytes)
    return Cost()
