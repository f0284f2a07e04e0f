"""The laws whose constants are fitted: which constants, to which rows, and what a row says under them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.fidelity.assumed import VTrain, assumed
from benchmarks.fidelity.experts import experts_seconds, is_whole, measured_device
from benchmarks.fidelity.hardware import cluster_of
from benchmarks.fidelity.inference import engine, is_dense_hopper, serving_point
from benchmarks.fidelity.installed import EXPERTS
from benchmarks.fidelity.pairs import pairs, scaled_of, synchronous
from benchmarks.fidelity.pretraining import iteration_seconds
from benchmarks.fidelity.primitives import (
    OPERATIONS,
    attention_seconds,
    device_of,
    framework_exchange,
    gemm_seconds,
    group_of,
    kernels_of,
    latency,
    message_bytes,
)
from benchmarks.fidelity.realhf import experiment_of
from benchmarks.fidelity.rows import Row, Skip, count, number
from benchmarks.fidelity.training import Question, is_dense, question, stalls
from meshwright.cost_models.communication import ALL_REDUCE, SEND_RECEIVE, Group, Network
from meshwright.profiles.documents import Document
from meshwright.profiles.efficiency import Efficiency, efficiency_of
from meshwright.profiles.errors import BadInput, suggestion
from meshwright.profiles.frameworks import Framework, framework_named

Predict = Callable[[Any], float]
"""What a row says under the document that holds its law's constants."""

Asked = tuple[Predict, float]
"""A prediction of a row, and what was measured."""

Rows = Iterable[tuple[str, Row]]

_FAMILIES = {"ampere": ("a100",), "hopper": ("h100", "h200")}
_DEVICES = {"ampere": "a100-80gb", "hopper": "h200", "blackwell": "gb200", "pcie": "l40s"}
_SWITCH_BYTES = 2**22
"""From here on switches reduce; smaller tensors go round a ring."""


def _gemm(stem: str, row: Row) -> Asked:
    return lambda efficiency: gemm_seconds(kernels_of(device_of(stem), efficiency), row), latency(row)


def _attention(stem: str, row: Row) -> Asked:
    return lambda efficiency: attention_seconds(kernels_of(device_of(stem), efficiency), row), latency(row)


def _grouped(stem: str, row: Row) -> Asked:
    if not is_whole(row):
        raise Skip("not fitted")
    return lambda efficiency: experts_seconds(measured_device(stem), row, efficiency), latency(row)


def _collective(stem: str, row: Row) -> Asked:
    if row["op_name"] == "alltoall":
        raise Skip("not fitted")
    group = group_of(row)
    operation, num_bytes, cluster = OPERATIONS[row["op_name"]], message_bytes(row), cluster_of(device_of(stem), 8)
    return lambda efficiency: Network(cluster, efficiency).seconds(operation, group, num_bytes)[0], latency(row)


def _switch(stem: str, row: Row) -> Asked:
    if row["op_name"] != "all_reduce" or message_bytes(row) < _SWITCH_BYTES:
        raise Skip("not fitted")
    return _collective(stem, row)


def _peer(stem: str, row: Row) -> Asked:
    if row.get("backend") != "vllm_graph":
        raise Skip("not fitted")
    group, num_bytes, cluster = Group(count(row, "num_gpus"), 8), message_bytes(row), cluster_of(device_of(stem), 8)

    def predict(efficiency: Efficiency) -> float:
        return Network(cluster, efficiency, peer_reductions=True).seconds(ALL_REDUCE, group, num_bytes)[0]

    return predict, latency(row)


def _message(gpu: str) -> Callable[[str, Row], Asked]:
    """Of one GPU; the file holds several."""

    def ask(_stem: str, row: Row) -> Asked:
        if row["op"] != "send_recv" or row["gpu"] != gpu:
            raise Skip("not fitted")
        found, group, num_bytes, measured = framework_exchange(row)
        cluster = cluster_of(found, 8)
        return lambda efficiency: Network(cluster, efficiency).seconds(SEND_RECEIVE, group, num_bytes)[0], measured

    return ask


def _iteration(_stem: str, row: Row) -> Asked:
    return _trained(_vtrain(row))


def _weak(_stem: str, row: Row) -> Asked:
    if not row["dataset"].startswith("mcore_h100"):
        raise Skip("not fitted")
    return _trained(question(row))


def _trained(asked: Question) -> Asked:
    return (
        lambda efficiency: iteration_seconds(asked.iteration, asked.cluster, "bf16", efficiency).total,
        asked.measured,
    )


def _without_peers(_stem: str, row: Row) -> Asked:
    if row["gpu"] != "L40S" or count(row, "TP") == 1:
        raise Skip("not fitted")
    return lambda efficiency: engine("", row, efficiency).predicted, number(row, "value")


def _host(_stem: str, row: Row) -> Asked:
    asked = _vtrain(row)

    def predict(framework: Framework) -> float:
        return iteration_seconds(replace(asked.iteration, framework=framework), asked.cluster, "bf16").total

    return predict, asked.measured


def _stall(_stem: str, row: Row) -> Asked:
    asked = _vtrain(row)
    layout = asked.iteration.layout
    if layout.pp == 1 or layout.tp == 1:
        raise Skip("not fitted")
    computing = iteration_seconds(asked.iteration, asked.cluster, "bf16").total

    def predict(vtrain: VTrain) -> float:
        return computing + stalls(asked.iteration, asked.cluster, vtrain).total

    return predict, asked.measured


def _host_of_tests(_stem: str, row: Row) -> Asked:
    if not is_dense(row):
        raise Skip("not fitted")
    asked = question(row)

    def predict(framework: Framework) -> float:
        paced = asked.iteration.framework.model_copy(update={"launch_seconds": framework.launch_seconds})
        return iteration_seconds(replace(asked.iteration, framework=paced), asked.cluster, "bf16").total

    return predict, asked.measured


def _blackwell(_stem: str, row: Row) -> Asked:
    if row["gpu"] != "DGX-GB200" or not is_dense(row):
        raise Skip("not fitted")
    return _trained(question(row))


def _vtrain(row: Row) -> Question:
    if not row["dataset"].startswith("vtrain"):
        raise Skip("not fitted")
    return question(row)


def _served(_stem: str, row: Row) -> Asked:
    if not is_dense_hopper(row) or row["backend"] != "trtllm":
        raise Skip("not fitted")
    serving, rows = serving_point(row)
    live = min(rows, serving.slots())

    def predict(framework: Framework) -> float:
        return replace(serving, framework=framework).round_seconds(live).total

    return predict, number(row, "silicon_tpot_ms") / 1e3


def _calls(_stem: str, row: Row) -> Asked:
    if row["system"] != "ReaL-Heuristic":
        raise Skip("not fitted")
    experiment = experiment_of(row)
    return lambda framework: experiment.best(framework).cost.total, number(row, "step_time_s")


def _pools(_stem: str, row: Row) -> Asked:
    if row["system"] != "veRL":
        raise Skip("not fitted")
    scaled, before = scaled_of(row), number(synchronous(row), "step_time_s")
    return lambda verl: before / scaled.seconds(verl).total, before / number(row, "step_time_s")


def _family(owner: str) -> Document:
    if owner not in _DEVICES:
        raise BadInput(f"family {owner!r} is not fitted here; {suggestion(owner, _DEVICES)}")
    return efficiency_of("cuda", _DEVICES[owner])


def _of_vtrain(owner: str) -> Document:
    if owner != "vtrain":
        raise BadInput(f"stalls of {owner!r} are not fitted here; use vtrain.")
    return assumed().vtrain


def _of_verl(owner: str) -> Document:
    if owner != "verl":
        raise BadInput(f"pools of {owner!r} are not fitted here; use verl.")
    return assumed().verl


@dataclass(frozen=True, kw_only=True)
class Law:
    """Constants that are fitted together (dotted where they are nested), and the rows that tell them."""

    constants: tuple[str, ...]
    files: tuple[str, ...]  # with {} for the device, once for each of the family
    ask: Callable[[str, Row], Asked]
    start: Callable[[str], Document] = _family
    """The document of a family of devices or of a framework, with the constants as they are today."""
    joined: Callable[[Rows], Rows] = lambda rows: rows

    def stems(self, owner: str) -> tuple[str, ...]:
        """The files of rows that are read, without suffix."""
        devices = _FAMILIES.get(owner, ("",))
        return tuple(dict.fromkeys(name.format(device) for device in devices for name in self.files))


def _of(part: str, names: str) -> tuple[str, ...]:
    """Constants of one part of a document."""
    return tuple(f"{part}.{name}" for name in names.split())


_PROTOCOLS = tuple(name for i in range(3) for name in _of(f"protocols.{i}", "start_seconds step link_bytes"))
_TRAINING = ("megatron_training", "megatron_training_vtrain_single_node")
LAWS = {
    "gemm": Law(
        constants=(*_of("gemm", "flops bytes prologue split tile_cost ridge"), "kernel_seconds"),
        files=("primitives/{}_gemm_bf16",),
        ask=_gemm,
    ),
    "grouped": Law(
        constants=_of("grouped", "flops bytes prologue ridge seconds"),
        files=(EXPERTS,),
        ask=_grouped,
    ),
    "attention": Law(
        constants=_of("attention", "flops tile tail bytes ridge seconds"),
        files=("primitives/{}_attention_context_bf16",),
        ask=_attention,
    ),
    "decoding": Law(
        constants=_of("decoding", "bytes block row_seconds head_seconds ridge seconds join_seconds saturation"),
        files=("primitives/{}_attention_generation_bf16",),
        ask=_attention,
    ),
    "collectives": Law(constants=_PROTOCOLS, files=("primitives/{}_comm",), ask=_collective),
    "switch": Law(constants=_of("multicast", "start_seconds link_bytes"), files=("primitives/{}_comm",), ask=_switch),
    "peer": Law(constants=_of("peer", "start_seconds step link_bytes"), files=("primitives/{}_comm",), ask=_peer),
    **{
        f"message {gpu}": Law(
            constants=_of("message", "start_seconds link_bytes"),
            files=("primitives/vidur_network",),
            ask=_message(f"{gpu.upper()} DGX"),
        )
        for gpu in ("a100", "h100")
    },
    "without peers": Law(
        constants=_of("protocols.1", "start_seconds link_bytes"), files=("inference",), ask=_without_peers
    ),
    "weak scaling": Law(constants=("sustained",), files=("megatron_training",), ask=_weak),
    "training": Law(
        constants=("sustained", "elementwise_bytes", "protocols.2.fabric_bytes"), files=_TRAINING, ask=_iteration
    ),
    "host": Law(constants=("launch_seconds",), files=_TRAINING, ask=_host, start=framework_named),
    "host of Megatron-core": Law(
        constants=("launch_seconds",), files=("megatron_ci",), ask=_host_of_tests, start=framework_named
    ),
    "blackwell": Law(constants=("sustained",), files=("megatron_training",), ask=_blackwell),
    "stall": Law(constants=("stall_seconds",), files=("megatron_training",), ask=_stall, start=_of_vtrain),
    "serving": Law(
        constants=("round_seconds", "row_seconds", "start_share"),
        files=("serving_points",),
        ask=_served,
        start=framework_named,
    ),
    "calls": Law(
        constants=("launch_seconds", "call_seconds"), files=("rlhf_steps",), ask=_calls, start=framework_named
    ),
    "pools": Law(
        constants=("work_share", "alone_share"), files=("rlhf_steps",), ask=_pools, start=_of_verl, joined=pairs
    ),
}
