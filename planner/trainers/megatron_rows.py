"""Rows for the parallel degrees of Megatron-core; verl, NeMo-RL and SkyRL have their keys under different prefixes."""

from __future__ import annotations

from meshwright.planner.trainers import writes
from meshwright.planner.trainers.table import Read, Row

MEGATRON_SIZES = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
}
"""Megatron-core's names of the degrees of a layout."""


def degree_rows(stage: str, prefix: str, read_layout: Read, *, has_sp: bool = True) -> tuple[Row, ...]:
    """The degrees of a stage. All of them together are read as a layout, by the row of tensor parallelism.

    `has_sp` says whether the trainer has a key for sequence parallelism.
    """
    layout, with_tp, of_experts = f"placements.{stage}.layout", "read with tp", writes.with_experts(stage)
    sp = Row(f"{prefix}.sequence_parallel", f"{layout}.sp", None, note=with_tp)
    return (
        Row(f"{prefix}.{MEGATRON_SIZES['tp']}", f"{layout}.tp", read_layout),
        Row(f"{prefix}.{MEGATRON_SIZES['pp']}", f"{layout}.pp", None, note=with_tp),
        Row(f"{prefix}.{MEGATRON_SIZES['cp']}", f"{layout}.cp", None, note=with_tp),
        *((sp,) if has_sp else ()),
        Row(f"{prefix}.{MEGATRON_SIZES['ep']}", f"{layout}.ep", None, of_experts, note=with_tp),
        Row(f"{prefix}.{MEGATRON_SIZES['etp']}", f"{layout}.etp", None, of_experts, note=with_tp),
    )


def end_layer_rows(stage: str, prefix: str) -> tuple[Row, ...]:
    """The layers of the first and the last stage of an uneven pipeline."""
    return tuple(
        Row(
            f"{prefix}.num_layers_in_{end}_pipeline_stage",
            f"placements.{stage}.layout.pp",
            None,
            writes.end_layers(stage, index),
        )
        for index, end in enumerate(("first", "last"))
    )
