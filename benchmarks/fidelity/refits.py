"""Weights from a trainer to what generates: broadcast whole to a loader, or sent in parts to where they are read."""

from __future__ import annotations

import re
from dataclasses import replace

from benchmarks.fidelity.hardware import cluster_of
from benchmarks.fidelity.rows import Row, Skip, count, number
from benchmarks.fidelity.score import Answer
from benchmarks.fidelity.shapes import model_named
from meshwright.cost_models.analytic import AnalyticModel
from meshwright.cost_models.protocol import RefitQuery
from meshwright.profiles.frameworks import EngineName, engine_named
from meshwright.profiles.layout import Layout
from meshwright.profiles.lengths import LengthSpec
from meshwright.profiles.workload import Workload

_WHOLE = ("nccl full broadcast", "nccl broadcast", "nccl", "trainer to inference, tensor by tensor")
_IN_PLACE = ("nccl reshard", "p2p rdma (mooncake)")
"""Transports that give whole tensors to a loader, and parts of tensors to where they are read."""

_GPUS = {"A100/A800 80GB": "A100-80GB", "GB300": "GB200"}
_NETWORKS = {"GB300": "ib-xdr-800"}
"""What stands for a device where links alone are asked, and the fabric of one whose links differ: a GB300 has 800 Gb/s
(NVIDIA GB300 NVL72 datasheet, 2025)."""

_FIRST_STEP = 3
"""Of MLPerf's runs: the first compiles, and the second waits for the first new responses."""
_UNSAID = {"transport": "nccl broadcast", "gpu": "H100", "rollout_layout": "", "precision": "BF16"}
"""Of the table whose rows have models and ranks alone: verl's one-step-off-policy recipe on Hopper nodes."""

_ANY = Workload(batch_size=1, prompt=LengthSpec(max=1, fixed=1), response=LengthSpec(max=1, fixed=1))
"""What is generated is no part of it."""


def loaded(_stem: str, row: Row) -> Answer:
    """Seconds of a synchronisation through a loader."""
    if _said(row, "transport").lower() not in _WHOLE:
        raise Skip(f"transport {_said(row, 'transport')} is none of whole tensors")
    return _answer(row, "vllm", Layout(dp=count(row, "rollout_ranks")))


def in_place(_stem: str, row: Row) -> Answer:
    """Seconds of a synchronisation that writes weights where they are read."""
    if _said(row, "transport").lower() not in _IN_PLACE:
        raise Skip(f"transport {_said(row, 'transport')} is none of parts of tensors")
    tp = re.search(r"TP(\d+)", _said(row, "rollout_layout"))
    if tp is None:
        raise Skip("layout of the engine not stated")
    dp, rest = divmod(count(row, "rollout_ranks"), int(tp[1]))
    if rest:
        raise Skip("the replicas do not fill the ranks")
    return _answer(row, "meshwright-graph", Layout(tp=int(tp[1]), dp=dp))


def within_step(_stem: str, row: Row) -> Answer:
    """Seconds of the synchronisation in a step of MLPerf's runs, through vLLM's loader."""
    if count(row, "step") < _FIRST_STEP:
        raise Skip(f"a step before step {_FIRST_STEP}")
    columns = {"trainer_ranks": "train_gpus", "total_sync_s": "weight_sync_s", "rollout_layout": "gen_layout"}
    told = {name: row[column] for name, column in columns.items()}
    return _answer({**row, **told}, "vllm", Layout(dp=count(row, "gen_gpus")))


def _answer(row: Row, engine: EngineName, target: Layout) -> Answer:
    """Between ranks that are apart; of the trainer its number of ranks alone matters here.

    An engine of more ranks than key heads repeats them.
    """
    precision = _said(row, "precision")
    if not precision.startswith("BF16"):
        raise Skip(f"precision {precision} is made on the way" if precision else "precision not published")
    source, named = Layout(dp=count(row, "trainer_ranks")), model_named(row["model"])
    model = replace(named, num_kv_heads=max(named.num_kv_heads, target.tp))
    gpu = _said(row, "gpu")
    cluster = cluster_of(_GPUS.get(gpu, gpu), source.num_ranks + target.num_ranks, _NETWORKS.get(gpu))
    asked = AnalyticModel(cluster, _ANY, "bf16", engine=engine_named(engine))
    cost = asked.refit_seconds(RefitQuery(model=model, source=source, target=target, overlap=0, generates=True))
    label = f"{row['model']} {source.num_ranks} -> {target.num_ranks} {gpu} {_said(row, 'transport')}"
    return Answer(label=label, measured=number(row, "total_sync_s"), predicted=cost.total, terms=cost)


def _said(row: Row, column: str) -> str:
    return row[column] if column in row else _UNSAID[column]
