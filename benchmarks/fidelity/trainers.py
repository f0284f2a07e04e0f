"""Steps of a trainer by itself, and the memory they take: whole models and low-rank adapters under FSDP.

FSDP shards weights over replicas and gathers them layer by layer beside the computing. A step is asked for as data
parallelism of a framework that does so, and its memory on one GPU alone, where nothing is sharded.
"""

from __future__ import annotations

from dataclasses import replace

from benchmarks.fidelity.assumed import assumed
from benchmarks.fidelity.hardware import cluster_of
from benchmarks.fidelity.intervals import UNSHIFTED, Doubt, Shift
from benchmarks.fidelity.pretraining import Iteration, iteration_memory, iteration_seconds
from benchmarks.fidelity.rows import Row, Skip, count, looked_up, number
from benchmarks.fidelity.score import Answer
from benchmarks.fidelity.shapes import has_experts, model_named
from meshwright.cost_models.cost import Cost, Tally
from meshwright.profiles.efficiency import AttentionKernel
from meshwright.profiles.frameworks import framework_named
from meshwright.profiles.hardware import Cluster
from meshwright.profiles.layout import Layout
from meshwright.profiles.model_parts.adapter import Adapter
from meshwright.profiles.schedule import Recompute, Schedule

_KERNELS: dict[str, AttentionKernel] = {"flash_attention_2": "flash-2", "flash_attention_3": "native"}
_GIB = 2**30


def trainer_step(_stem: str, row: Row) -> Answer:
    """Seconds inside a step: forward, backward and update, without what the trainer does between steps."""
    asked, cluster = _question(row)

    def seconds(shift: Shift) -> Cost:
        shifted = replace(asked, framework=shift.framework(asked.framework))
        return iteration_seconds(shifted, shift.cluster(cluster), "bf16") + around.cost()

    around = Tally()
    around.add("reinforcement", assumed().prime_rl.reinforcement_seconds if row["type"] == "rl" else 0.0)
    cost = seconds(UNSHIFTED)
    return Answer(
        label=_label(row),
        measured=number(row, "step_time_mean_s"),
        predicted=cost.total,
        terms=cost,
        ask=lambda shift: seconds(shift).total,
        doubt=Doubt(device=cluster.device.name, has_experts=asked.model.experts is not None, shards_weights=True),
    )


def trainer_memory(_stem: str, row: Row) -> Answer:
    """Peak bytes of a step on one GPU."""
    asked, cluster = _question(row)
    if cluster.num_ranks > 1:
        raise Skip("weights divided over replicas (FSDP) are not a layout here")
    held = iteration_memory(asked, cluster, "bf16")
    measured = number(row, "peak_mem_gib") * _GIB
    return Answer(label=_label(row), measured=measured, predicted=held.peak_bytes, terms=held.resident + held.transient)


def _question(row: Row) -> tuple[Iteration, Cluster]:
    """What the row asks; skips it where that is no question for this cost model."""
    if row["success"] != "True":
        raise Skip("the run failed")
    if row["activation_memory"] != "full recompute":
        raise Skip("activations in host memory are not priced")
    model = model_named(row["model"])
    if row["lora_rank"] and has_experts(row["model"]):
        raise Skip("adapters of experts are not priced")
    if rank := count(row, "lora_rank", 0):
        model = replace(model, adapter=Adapter(rank=rank, alpha=float(rank)))
    num_ranks = count(row, "num_gpus")
    asked = Iteration(
        model=model,
        layout=Layout(dp=num_ranks),
        schedule=Schedule(recompute=Recompute.FULL),
        batch_size=num_ranks * count(row, "micro_batches_per_gpu"),
        num_tokens=count(row, "seq_len"),
        framework=framework_named("prime-rl").model_copy(
            update={"attention_kernel": looked_up(_KERNELS, row["attention"], "attention")}
        ),
    )
    return asked, cluster_of(row["gpu"], num_ranks)


def _label(row: Row) -> str:
    kind = f"adapter of rank {row['lora_rank']}" if row["lora_rank"] else "all weights"
    return f"{row['system']} {row['type']} {row['model']} {row['num_gpus']} x {row['gpu']} {row['seq_len']} {kind}"
