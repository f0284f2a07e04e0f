"""Weights from a trainer to what generates: broadcast whole to a loader, or sent in parts to where they are read."""

from __future__ import annotations

import re
from dataclasses import replace

from benchmarks.fidelity.assumed import assumed
from benchmarks.fidelity.hardware import cluster_of
from benchmarks.fidelity.rows import Row, Skip, count, number
from benchmarks.fidelity.score import Answer
from benchmarks.fidelity.shapes import model_named
from meshwright.cost_models.analytic import AnalyticModel
from meshwright.cost_models.cost import Tally
from meshwright.cost_models.protocol import RefitQuery
from meshwright.profiles.frameworks import Engine, engine_named, framework_named
from meshwright.profiles.layout import Layout
from meshwright.profiles.lengths import LengthSpec
from meshwright.profiles.workload import Workload

_WHOLE = (
    "nccl full broadcast",
    "nccl broadcast",
    "nccl broadcast, bucketed",
    "nccl broadcast, a tensor at a time",
    "nccl",
    "trainer to inference, tensor by tensor",
)
_IN_PLACE = ("nccl reshard", "nccl reshard (presumed)", "p2p rdma (mooncake)")
"""Transports that give whole tensors to a loader, and parts of tensors to where they are read."""

_SHARDING = ("fsdp", "torchtitan", "veomni")
"""Parts of the names of trainers that shard weights over replicas."""

_GPUS = {"A100/A800 80GB": "A100-80GB", "H100-80GB": "H100", "H100 (4x8, 400 Gb/s IB)": "H100"}
"""What stands for a device where links alone are asked."""

_FIRST_STEP = 3
"""Of MLPerf's runs: the first compiles, and the second waits for the first new responses."""
_UNSAID = {"transport": "nccl broadcast", "gpu": "H100", "rollout_layout": "", "precision": "BF16"}
"""Of the table whose rows have models and ranks alone: verl's one-step-off-policy recipe on Hopper nodes."""

_ANY = Workload(batch_size=1, prompt=LengthSpec(max=1, fixed=1), response=LengthSpec(max=1, fixed=1))
"""What is generated is no part of it."""


def loaded(_stem: str, row: Row) -> Answer:
    """Seconds of a synchronisation through a loader."""
    engine = engine_named("vllm")
    if _is_tensor_by_tensor(row):
        refit = engine.refit.model_copy(update={"tensor_seconds": assumed().transfers.tensor_by_tensor_seconds})
        engine = engine.model_copy(update={"refit": refit})
    return _answer(row, engine, Layout(dp=count(row, "rollout_ranks")))


def is_loaded(row: Row) -> bool:
    """Whether whole tensors go to a loader."""
    return _said(row, "transport").lower() in _WHOLE


def is_in_place(row: Row) -> bool:
    """Whether parts of tensors go to where they are read."""
    return _said(row, "transport").lower() in _IN_PLACE


def otherwise(_stem: str, row: Row) -> Answer:
    """No answer: a transport that is not priced."""
    raise Skip(f"transport {_said(row, 'transport')} is not priced")


def _is_tensor_by_tensor(row: Row) -> bool:
    """Whether tensors are not put together in buckets; of verl's table, without its checkpoint engine."""
    told = _said(row, "transport")
    return "tensor" in told or ("transport" not in row and row.get("checkpoint_engine") == "False")


def in_place(_stem: str, row: Row) -> Answer:
    """Seconds of a synchronisation that writes weights where they are read."""
    tp = re.search(r"TP(\d+)", _said(row, "rollout_layout"))
    if tp is None:
        raise Skip("layout of the engine not stated")
    dp, rest = divmod(count(row, "rollout_ranks"), int(tp[1]))
    if rest:
        raise Skip("the replicas do not fill the ranks")
    start = assumed().transfers.reshard_start_seconds
    return _answer(row, engine_named("meshwright-graph"), Layout(tp=int(tp[1]), dp=dp), start=start)


def within_step(_stem: str, row: Row) -> Answer:
    """Seconds of the synchronisation in a step of MLPerf's runs, through vLLM's loader."""
    if count(row, "step") < _FIRST_STEP:
        raise Skip(f"a step before step {_FIRST_STEP}")
    columns = {"trainer_ranks": "train_gpus", "total_sync_s": "weight_sync_s", "rollout_layout": "gen_layout"}
    told = {name: row[column] for name, column in columns.items()}
    return _answer({**row, **told}, engine_named("vllm"), Layout(dp=count(row, "gen_gpus")))


def _answer(row: Row, engine: Engine, target: Layout, start: float = 0.0) -> Answer:
    """Between ranks that are apart; of the trainer its number of ranks alone matters here.

    An engine of more ranks than key heads repeats them.
    """
    precision = _said(row, "precision")
    if not precision.startswith("BF16"):
        raise Skip(f"precision {precision} is made on the way" if precision else "precision not published")
    source, named = Layout(dp=count(row, "trainer_ranks")), model_named(row["model"])
    model = replace(named, num_kv_heads=max(named.num_kv_heads, target.tp))
    gpu = _said(row, "gpu")
    cluster = cluster_of(_GPUS.get(gpu, gpu), source.num_ranks + target.num_ranks)
    trainer = framework_named("verl-fsdp" if _is_sharding(row) else "megatron-core")
    asked = AnalyticModel(cluster, _ANY, "bf16", framework=trainer, engine=engine)
    tally = Tally()
    tally.add("start", start)
    query = RefitQuery(model=model, source=source, target=target, overlap=0, generates=True)
    cost = asked.refit_seconds(query) + tally.cost()
    label = f"{row['model']} {source.num_ranks} -> {target.num_ranks} {gpu} {_said(row, 'transport')}"
    return Answer(label=label, measured=number(row, "total_sync_s"), predicted=cost.total, terms=cost)


def _is_sharding(row: Row) -> bool:
    return any(part in row.get("trainer_layout", "").lower() for part in _SHARDING)


def _said(row: Row, column: str) -> str:
    return row[column] if column in row else _UNSAID[column]
