"""Training iterations: what a row asks, and seconds for an answer."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from benchmarks.fidelity.hardware import cluster_of
from benchmarks.fidelity.pretraining import Iteration, iteration_seconds
from benchmarks.fidelity.rows import Row, Skip, count, number
from benchmarks.fidelity.score import Answer
from benchmarks.fidelity.shapes import gpt_of, model_named
from meshwright.cost_models.cost import Tally
from meshwright.profiles.frameworks import Framework, framework_named
from meshwright.profiles.hardware import Cluster
from meshwright.profiles.layout import Layout
from meshwright.profiles.model_shape import ModelSpec
from meshwright.profiles.schedule import Recompute, Schedule

_VTRAIN_FABRIC = "ib-800-per-node"
_FRAMEWORKS = {
    "vtrain": "megatron-deepspeed",
    "mcore": "megatron-core",
    "nemo": "nemo-2023",
    "mlm": "megatron-core",
    "": "megatron-2021",
}
_SIXTEEN_BIT = ("bf16", "fp16 mixed", "mixed 16-bit (presumed)", "amp_bf16", "BF16")


class Question(NamedTuple):
    """A row as the cost model is asked, with the seconds that were measured."""

    iteration: Iteration
    cluster: Cluster
    measured: float


def iteration(_stem: str, row: Row) -> Answer:
    """One iteration; the measurement is its seconds, published or derived from the published rate."""
    if row["layers"] == "1":
        return _one_layer(row)
    asked, cluster, measured = question(row)
    cost = iteration_seconds(asked, cluster, "bf16")
    model, mbs = asked.model, asked.schedule.micro_batch_size
    shape = f"{model.num_layers}x{model.hidden_size}"
    setting = f"{shape} {asked.num_tokens} {cluster.num_ranks} {asked.batch_size}"
    return Answer(
        label=f"{row['dataset']} {model.name} {shape} {asked.layout} mbs{mbs} gbs{asked.batch_size}",
        measured=measured,
        predicted=cost.total,
        terms=cost,
        setting=setting if row["dataset"].startswith("vtrain") else "",
    )


def _one_layer(row: Row) -> Answer:
    """Forward and backward of a layer alone: what the second layer of a model adds, without its update."""
    batch = {**row, "gbs": row["mbs"]}
    asked, cluster, measured = question(batch)
    one = iteration_seconds(asked, cluster, "bf16")
    two = iteration_seconds(replace(asked, model=replace(asked.model, num_layers=2)), cluster, "bf16")
    before = {term.name: term.amount for term in one.terms}
    tally = Tally()
    for term in two.terms:
        if term.name != "optimizer":
            tally.add(term.name, term.amount - before[term.name])
    cost = tally.cost()
    label = f"{row['model']}, {row['recompute']}, {asked.layout}"
    return Answer(label=label, measured=measured, predicted=cost.total, terms=cost)


def question(row: Row) -> Question:
    """What the row asks; skips it when that is not a question for this cost model."""
    if row["precision"] not in _SIXTEEN_BIT:
        raise Skip(f"precision {row['precision']} is not priced in training")
    if row.get("FSDP", "") not in ("", "0", "n/a"):
        raise Skip("sharded data parallelism (FSDP) is not a layout here")
    num_ranks, batch_size, num_tokens = count(row, "num_gpus"), count(row, "gbs"), count(row, "seq_len")
    asked = Iteration(
        model=_model(row),
        layout=_layout(row, num_ranks),
        schedule=Schedule(micro_batch_size=count(row, "mbs", 1), recompute=_recompute(row["recompute"])),
        batch_size=batch_size,
        num_tokens=num_tokens,
        framework=_framework(row["dataset"]),
    )
    network = _VTRAIN_FABRIC if row["dataset"].startswith("vtrain") else None
    cluster = cluster_of(row["gpu"], num_ranks, network)
    return Question(asked, cluster, _measured(row, batch_size, num_tokens, num_ranks))


def _framework(dataset: str) -> Framework:
    """Kernels and optimizer of the code that each set was measured with, as its source says."""
    return framework_named(next(name for prefix, name in _FRAMEWORKS.items() if dataset.startswith(prefix)))


def _model(row: Row) -> ModelSpec:
    return gpt_of(row) if row["hidden"] else model_named(row["model"])


def _layout(row: Row, num_ranks: int) -> Layout:
    tp, pp, cp = count(row, "TP"), count(row, "PP"), count(row, "CP", 1)
    dp = count(row, "DP", num_ranks // (tp * pp * cp))
    if tp * pp * cp * dp != num_ranks:
        raise Skip("tp x pp x cp x dp is not the number of GPUs")
    if count(row, "gbs") % (dp * count(row, "mbs", 1)):
        raise Skip("the global batch is not whole micro-batches")
    ep, vpp = count(row, "EP", 1), count(row, "VPP", 1) if pp > 1 else 1
    return Layout(tp=tp, pp=pp, dp=dp, cp=cp, ep=ep, vpp=vpp, sp=tp > 1 and _sequence_parallel(row))


def _sequence_parallel(row: Row) -> bool:
    stated = row["recompute"].lower()
    return "sequence parallel" in stated or "sp" in stated.split() or row["dataset"].startswith("mcore")


def _recompute(stated: str) -> Recompute:
    if stated.startswith("full"):
        return Recompute.FULL
    return Recompute.SELECTIVE if stated.startswith("selective") and "0 layers" not in stated else Recompute.NONE


def _measured(row: Row, batch_size: int, num_tokens: int, num_ranks: int) -> float:
    """Seconds of the iteration; from FLOPs per second by the formula of the set where only that was published."""
    if row["iter_time_s"]:
        return number(row, "iter_time_s")
    if row["tokens_per_s_per_gpu"]:
        return batch_size * num_tokens / (number(row, "tokens_per_s_per_gpu") * num_ranks)
    if row["dataset"].startswith("mcore"):
        model = gpt_of(row)
        return _megatron_flops(model, batch_size, num_tokens) / (number(row, "TFLOPs_per_gpu") * 1e12 * num_ranks)
    raise Skip("neither seconds nor tokens per second published")


def _megatron_flops(model: ModelSpec, batch_size: int, num_tokens: int) -> float:
    """Model FLOPs of an iteration as Megatron-LM counts them (Narayanan et al., arXiv:2104.04473, equation 3, with
    72 in place of 96: nothing recomputed)."""
    layers, hidden = model.num_layers, model.hidden_size
    share = 1 + num_tokens / (6 * hidden) + model.vocab_size / (12 * layers * hidden)
    return 72 * batch_size * num_tokens * layers * hidden**2 * share
