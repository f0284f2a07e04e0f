"""Single kernels and collectives, as measured on one device or one node."""

from __future__ import annotations

from functools import cache

from benchmarks.fidelity.hardware import cluster_of
from benchmarks.fidelity.rows import Row, Skip, count, looked_up, number
from benchmarks.fidelity.score import Answer
from meshwright.cost_models.communication import Group, Network
from meshwright.cost_models.kernels import Heads, Kernels
from meshwright.profiles.efficiency import Efficiency, efficiency_of

_DEVICES = {"a100": "A100", "h100": "H100", "h200": "H200"}
_VIDUR_GPUS = {"A100 DGX": "A100", "H100 DGX": "H100"}
_ELEMENT_BYTES = {"half": 2, "int8": 1, "float": 4}
OPERATIONS = {
    "all_reduce": "all_reduce",
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "send_recv": "send_receive",
    "alltoall": "all_to_all",
}
_FEW_BYTES = 2**16
"""Below this a collective is latency, judged in microseconds and not as a share."""


def gemm(stem: str, row: Row) -> Answer:
    """A bf16 matrix product m x k by k x n."""
    label = " x ".join(row[column] for column in "mnk")
    return Answer(label=label, measured=latency(row), predicted=gemm_seconds(kernels_of(device_of(stem)), row))


def gemm_seconds(kernels: Kernels, row: Row) -> float:
    m, n, k = (count(row, column) for column in "mnk")
    return kernels.gemm(m, k, n)


def attention(stem: str, row: Row) -> Answer:
    """Causal attention of a prompt, or of one token whose row has `step` tokens cached besides it."""
    seconds = attention_seconds(kernels_of(device_of(stem)), row)
    label = f"{row['batch_size']} rows of {row['isl']}, {row['step']} cached, "
    label += f"{row['num_heads']}/{row['num_key_value_heads']} heads of {row['head_dim']}"
    return Answer(label=label, measured=latency(row), predicted=seconds)


def attention_seconds(kernels: Kernels, row: Row) -> float:
    rows, tokens, step = count(row, "batch_size"), count(row, "isl"), count(row, "step", zero=True)
    heads = Heads(count(row, "num_heads"), count(row, "num_key_value_heads"), count(row, "head_dim"))
    return kernels.attention(rows, tokens, step, heads, cache_bytes=2)


def collective(stem: str, row: Row) -> Answer:
    """An NCCL collective of one node."""
    return _exchange(device_of(stem), row["op_name"], group_of(row), message_bytes(row), measured=latency(row))


def is_small(row: Row) -> bool:
    """Whether an NCCL collective is of less than 64 KiB."""
    return message_bytes(row) < _FEW_BYTES


def group_of(row: Row) -> Group:
    """The ranks of an NCCL collective in one node; skips those of other libraries and operations."""
    library = row.get("backend", "NCCL").partition(" ")[0]
    if library != "NCCL":
        raise Skip(f"{library} is not NCCL")
    if row["op_name"] not in OPERATIONS:
        raise Skip(f"{row['op_name']} is not among the operations here")
    return Group(count(row, "num_gpus"), count(row, "num_gpus"))


def message_bytes(row: Row) -> int:
    if "bytes" in row:
        return count(row, "bytes")
    return looked_up(_ELEMENT_BYTES, row["nccl_dtype"], "data type") * count(row, "message_size")


def vidur_collective(_stem: str, row: Row) -> Answer:
    """A collective over one node, timed from a framework."""
    gpu, group, num_bytes, measured = framework_exchange(row)
    return _exchange(gpu, row["op"], group, num_bytes, measured=measured)


def framework_exchange(row: Row) -> tuple[str, Group, int, float]:
    """The GPU, the ranks, the bytes and the seconds of a collective that was timed from a framework."""
    num_ranks, per_node, num_bytes = (count(row, column) for column in ("num_workers", "devices_per_node", "bytes"))
    if num_bytes < _FEW_BYTES:
        raise Skip("less than 64 KiB")
    if num_ranks > per_node:
        raise Skip("the fabric between the nodes is not stated")
    return (
        looked_up(_VIDUR_GPUS, row["gpu"], "device"),
        Group(num_ranks, num_ranks),
        num_bytes,
        number(row, "median_ms") / 1e3,
    )


def _exchange(gpu: str, operation: str, group: Group, num_bytes: int, *, measured: float) -> Answer:
    seconds, _ = _network(gpu).seconds(looked_up(OPERATIONS, operation, "operation"), group, num_bytes)
    return Answer(
        label=f"{gpu} {operation} of {group.size}, {group.per_node} a node, {num_bytes} bytes",
        measured=measured,
        predicted=seconds,
    )


def device_of(stem: str) -> str:
    """The GPU that a file of primitives was measured on."""
    return _DEVICES[stem.removeprefix("primitives/").split("_")[0]]


def latency(row: Row) -> float:
    return number(row, "latency_ms" if "latency_ms" in row else "latency") / 1e3


@cache
def kernels_of(gpu: str, efficiency: Efficiency | None = None, *, sustained: bool = False) -> Kernels:
    """Kernels in bf16, with other constants than the family's when they are given; each alone, or one of many in
    succession."""
    device = cluster_of(gpu, 8).device
    found = efficiency or efficiency_of(device.kind, device.name)
    flops = device.flops_per_second["bf16"] * (found.sustained if sustained else 1)
    return Kernels(device, found, flops_per_second=flops, weight_bytes=2, size=2)


@cache
def _network(gpu: str) -> Network:
    cluster = cluster_of(gpu, 16)
    return Network(cluster, efficiency_of(cluster.device.kind, cluster.device.name))
