"""Training iterations: what a row asks, and seconds or bytes for an answer."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from benchmarks.fidelity.assumed import Adapters, VTrain, assumed
from benchmarks.fidelity.hardware import cluster_of
from benchmarks.fidelity.intervals import UNSHIFTED, Doubt, Shift
from benchmarks.fidelity.pretraining import Iteration, iteration_memory, iteration_seconds, last_stage_memory
from benchmarks.fidelity.recipes import Recipe, recipe_of
from benchmarks.fidelity.rows import Row, Skip, count, looked_up, number
from benchmarks.fidelity.score import Answer
from benchmarks.fidelity.shapes import gpt_of, has_experts, model_named, shape_key
from meshwright.cost_models.communication import groups_of
from meshwright.cost_models.cost import Cost, Tally
from meshwright.profiles.experts import Balance, Experts
from meshwright.profiles.frameworks import Framework, framework_named
from meshwright.profiles.hardware import Cluster
from meshwright.profiles.layout import Layout, divisors
from meshwright.profiles.model_parts.adapter import Adapter
from meshwright.profiles.model_shape import ModelSpec
from meshwright.profiles.schedule import Recompute, Schedule

_VTRAIN_FABRIC = "ib-800-per-node"
_FRAMEWORKS = {
    "vtrain": "megatron-deepspeed",
    "mcore": "megatron-core",
    "dgxc_nemo": "megatron-core",
    "megatron_bridge": "megatron-bridge",
    "nemo": "nemo-2023",
    "mlm": "megatron-core",
    "llmfoundry": "llm-foundry",
    "automodel": "automodel",
    "dgxc_maxtext": "maxtext",
    "korthikanti": "megatron-2021",
    "narayanan": "megatron-2021",
    "megatron_": "megatron-2021",
}
_RECIPES = ("mcore_h100", "mlm", "dgxc_nemo", "megatron_bridge")
"""Sets whose runs have sequence parallelism wherever they have tensor parallelism, and experts that are not sharded."""

_SIXTEEN_BIT = ("bf16", "fp16 mixed", "mixed 16-bit (presumed)", "amp_bf16", "BF16", "FP16")
_LINEAR_FORMATS = {
    **dict.fromkeys(("fp8", "FP8", "FP8-CS", "FP8-MX", "MXFP8", "amp_fp8"), "fp8"),
    "NVFP4": "fp4",
}
"""Number formats of linears in training. Scales of 32 elements cost what those of a tensor do, within a thirtieth."""

_UNSHARDED = ("", "0", "n/a")
_VOCAB, _VOCAB_MULTIPLE = 50257, 128
"""Megatron's CI trains on the GPT-2 vocabulary, padded to this multiple of tp (its `make_vocab_size_divisible_by`)."""

_LOCAL = "local"
_UNFUSED = ("unfused", _LOCAL)
"""Kernels of attention, or layers of Megatron-core's own, which store scores."""

_ENDS = 2
"""Embedding and head, where they count as layers."""

_PEAK = re.compile(r"peak allocated ([\d.]+) GiB")
_GIB = 2**30


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
    if not row["mbs"]:
        asked = _quickest_that_fits(asked, cluster)

    recipe = _recipe(row)

    def seconds(shift: Shift) -> Cost:
        shifted = replace(asked, framework=shift.framework(asked.framework))
        cost = _seconds(shifted, shift.cluster(cluster))
        if recipe and recipe.recompute == "unsaved":
            cost = _without_saved(cost, asked)
        stalled = row["dataset"].startswith("vtrain_multi")
        return cost + stalls(asked, cluster, assumed().vtrain) if stalled else cost

    cost = seconds(UNSHIFTED)
    shape = f"{asked.model.num_layers}x{asked.model.hidden_size}"
    setting = f"{shape} {asked.num_tokens} {cluster.num_ranks} {asked.batch_size}"
    return Answer(
        label=_label(row, asked),
        measured=measured,
        predicted=cost.total,
        terms=cost,
        setting=setting if row["dataset"].startswith("vtrain") else "",
        ask=lambda shift: seconds(shift).total,
        doubt=Doubt(
            device=cluster.device.name,
            has_experts=asked.model.experts is not None,
            has_few_bits=asked.linear_format is not None,
            shards_weights=asked.framework.sharded_weights,
            launch_deviation=asked.framework.launch_deviation,
        ),
    )


def _seconds(asked: Iteration, cluster: Cluster) -> Cost:
    """Seconds of the iteration.

    Where layers do not divide over chunks, each chunk has as many as the fullest. Embedding and head then have the
    places of two layers (Megatron-core, account_for_embedding_in_pipeline_split and its like for the loss, or
    pipeline_model_parallel_layout), and the slowest pipeline stage has neither.
    """
    model, chunks = asked.model, asked.layout.pp * asked.layout.vpp
    num_places = -(-model.num_layers // chunks) * chunks
    if num_places - model.num_layers < _ENDS:
        return iteration_seconds(asked, cluster, "bf16")
    longer = replace(asked, model=replace(model, num_layers=num_places))
    tally = Tally()
    for term in iteration_seconds(longer, cluster, "bf16").terms:
        if term.name != "embedding and head":
            tally.add(term.name, term.amount, term.source)
    return tally.cost()


def _without_saved(cost: Cost, asked: Iteration) -> Cost:
    """Seconds where the projections to queries, keys and values are saved and the last one is not needed again, of
    those of full recomputation: less by their share of a layer's FLOPs."""
    model = asked.model
    (inner, outer), *_ = model.attention_linears
    saved = inner * outer + model.ffn_size * model.hidden_size
    every = sum(inner * outer for inner, outer in model.attention_linears)
    every += model.hidden_size * (model.up_size + model.ffn_size) + asked.num_tokens * model.attention_size
    tally = Tally()
    for term in cost.terms:
        share = 1 - saved / every if term.name == "recomputation" else 1
        tally.add(term.name, share * term.amount, term.source)
    return tally.cost()


def stalls(asked: Iteration, cluster: Cluster, vtrain: VTrain) -> Cost:
    """Seconds by which other replicas on its node delayed every message of a pipeline on vTrain's cluster, where there
    were more replicas than one to a node and tensor parallelism did not fill it."""
    layout, tally = asked.layout, Tally()
    groups, num_batches = groups_of(layout, cluster), asked.batch_size // layout.dp // asked.schedule.micro_batch_size
    tensor, data = groups.tensor, groups.data
    if data.size > tensor.size * data.per_node and layout.pp > 1 and tensor.size > 1 and not layout.sp:
        num_messages = 2 * (num_batches + layout.pp - 1)
        tally.add("stalled messages", num_messages * (data.per_node - 1) * vtrain.stall_seconds)
    return tally.cost()


def _quickest_that_fits(asked: Iteration, cluster: Cluster) -> Iteration:
    """The iteration with the micro-batch size that its team would have found, where none is published."""
    choices = [
        replace(asked, schedule=replace(asked.schedule, micro_batch_size=size))
        for size in divisors(asked.batch_size // asked.layout.dp)
    ]
    fitting = [
        choice
        for choice in choices
        if iteration_memory(choice, cluster, "bf16").peak_bytes <= cluster.device.usable_bytes
    ]
    if not fitting:
        raise Skip("no micro-batch size fits in memory, and none is published")
    return min(fitting, key=lambda choice: iteration_seconds(choice, cluster, "bf16").total)


def peak_memory(_stem: str, row: Row) -> Answer:
    """Peak bytes that one iteration allocates, where a row's notes have them: of the last rank, which writes Megatron's
    log (Megatron-LM, megatron/training/global_vars.py, _set_tensorboard_writer)."""
    peak = _PEAK.search(row.get("notes", ""))
    if peak is None:
        raise Skip("peak memory not published")
    asked, cluster, _ = question(row)
    held = last_stage_memory(asked, cluster, "bf16")
    return Answer(
        label=_label(row, asked),
        measured=float(peak[1]) * _GIB,
        predicted=held.peak_bytes,
        terms=held.resident + held.transient,
    )


def is_dense(row: Row) -> bool:
    """Whether the model of a row has no experts, as far as the row says."""
    return "num-experts=" not in row.get("notes", "") and not has_experts(row["model"])


def is_sixteen_bit(row: Row) -> bool:
    return row["precision"] in _SIXTEEN_BIT


def _label(row: Row, asked: Iteration) -> str:
    model, mbs = asked.model, asked.schedule.micro_batch_size
    shape = f"{model.num_layers}x{model.hidden_size}"
    return f"{row['dataset']} {row['gpu']} {model.name} {shape} {asked.layout} mbs{mbs} gbs{asked.batch_size}"


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
    linear_format = None if is_sixteen_bit(row) else looked_up(_LINEAR_FORMATS, row["precision"], "precision")
    num_ranks = count(row, "num_gpus", assumed().functional_tests.num_gpus if _is_ci(row) else None)
    batch_size, num_tokens = count(row, "gbs"), count(row, "seq_len")
    framework, notes = _framework(row), _stated(row)
    asked = Iteration(
        model=_model(row, notes),
        layout=_layout(row, num_ranks, notes),
        schedule=Schedule(micro_batch_size=count(row, "mbs", 1), recompute=_recompute(row, notes)),
        batch_size=batch_size,
        num_tokens=num_tokens,
        framework=_ci_framework(framework, notes) if _is_ci(row) else framework,
        linear_format=linear_format,
    )
    network = _VTRAIN_FABRIC if row["dataset"].startswith("vtrain") else None
    cluster = cluster_of(row["gpu"], num_ranks, network)
    return Question(asked, cluster, _measured(row, batch_size, num_tokens, num_ranks))


def _is_ci(row: Row) -> bool:
    return row["dataset"].startswith("mcore_ci")


def _stated(row: Row) -> Mapping[str, str]:
    """The settings `name=value` among the notes of a row."""
    return dict(note.split("=", 1) for note in row.get("notes", "").split("; ") if "=" in note)


def _trainer(row: Row) -> str:
    """The code that each set was measured with, as its source says."""
    dataset = row["dataset"]
    name = next((name for prefix, name in _FRAMEWORKS.items() if dataset.startswith(prefix)), None)
    if name is None:
        raise Skip(f"trainer of {dataset} not known")
    return name


def _recipe(row: Row) -> Recipe | None:
    """What the recipe of a row sets besides what its table shows; None where it is not known."""
    return recipe_of(row, _trainer(row), is_eight_bit=not is_sixteen_bit(row))


def _framework(row: Row) -> Framework:
    """Kernels and optimizer of the code that each set was measured with."""
    known, recipe = framework_named(_trainer(row)), _recipe(row)
    if recipe:
        known = recipe.applied_to(known)
    is_sharded = row.get("FSDP", "") not in _UNSHARDED
    return known.model_copy(update={"sharded_weights": True}) if is_sharded else known


def _ci_framework(framework: Framework, notes: Mapping[str, str]) -> Framework:
    """Megatron-core as a functional test sets it: what is overlapped, sharded and fused is off unless stated."""
    return framework.model_copy(
        update={
            "flash_attention": notes.get("attention-backend", notes.get("transformer-impl", _LOCAL)) not in _UNFUSED,
            "sharded_optimizer": "use-distributed-optimizer" in notes,
            "overlapped_reduction": "overlap-grad-reduce" in notes,
            "hidden_exchanges": 0.0,
            "grouped_experts": "moe-grouped-gemm" in notes,
        }
    )


def _model(row: Row, notes: Mapping[str, str]) -> ModelSpec:
    model = _ci_model(row, notes) if _is_ci(row) else _named_model(row)
    if _predicts_further(row):
        model = replace(model, num_layers=model.num_layers + 1)
    if model.experts:
        model = model.with_balance(_balance(row, notes))
    if not row["dataset"].endswith("_lora"):
        return model
    if model.experts:
        raise Skip("adapters of experts are not priced")
    return replace(model, adapter=_adapter(row, assumed().adapters))


def _adapter(row: Row, adapters: Adapters) -> Adapter:
    rank, alpha = adapters.rank, float(adapters.rank)
    if row["dataset"].startswith(adapters.of_queries_keys_and_values):
        return Adapter(rank=rank, alpha=alpha, targets=("linear_qkv",))
    return Adapter(rank=rank, alpha=alpha)


def _predicts_further(row: Row) -> bool:
    """Whether a layer more predicts the token after next, as in Megatron-Bridge's runs of DeepSeek V3 unless they say
    otherwise. Its head is not costed besides: pipelines give it the place of a layer."""
    name = row["model"]
    return row["dataset"].startswith("megatron_bridge") and shape_key(name) == "deepseek-v3" and "w/o MTP" not in name


def _named_model(row: Row) -> ModelSpec:
    return gpt_of(row) if row["hidden"] and row["layers"] else model_named(row["model"])


def _balance(row: Row, notes: Mapping[str, str]) -> Balance | None:
    """What keeps experts even: Megatron-Bridge's benchmarks route at random, unless a row says otherwise."""
    told = row.get("notes", "").lower()
    if "auxiliary loss" in told or notes.get("moe-router-load-balancing-type") == "aux_loss":
        return "auxiliary_loss"
    is_forced = "balanced gate" in told or "forced balance" in told or row["dataset"].startswith("megatron_bridge")
    return "forced" if is_forced else None


def _ci_model(row: Row, notes: Mapping[str, str]) -> ModelSpec:
    """The decoder of a functional test: a GPT, as far as its settings do not say otherwise."""
    kind = notes.get("kind", "")
    if kind not in ("gpt", "moe", "mixtral"):
        raise Skip(f"kind {kind} is no decoder of layers that are alike")
    for name, what in (
        ("multi-latent-attention", "latent attention without its sizes"),
        ("mtp-num-layers", "prediction of several tokens"),
    ):
        if name in notes:
            raise Skip(what)
    multiple = _VOCAB_MULTIPLE * count(row, "TP")
    model = gpt_of({**row, "vocab": row["vocab"] or str(-(-_VOCAB // multiple) * multiple)})
    ffn_size = int(notes.get("ffn-hidden-size", model.ffn_size))
    experts = None
    if "num-experts" in notes:
        experts = Experts(
            num_experts=int(notes["num-experts"]),
            experts_per_token=int(notes.get("moe-router-topk", 2)),
            ffn_size=int(notes.get("moe-ffn-hidden-size", ffn_size)),
        )
    return replace(
        model,
        ffn_size=ffn_size,
        gated_mlp="swiglu" in notes,
        num_kv_heads=int(notes.get("num-query-groups", model.num_kv_heads)),
        tied_embeddings="untie-embeddings-and-output-weights" not in notes,
        experts=experts,
    )


def _layout(row: Row, num_ranks: int, notes: Mapping[str, str]) -> Layout:
    tp, pp, cp = count(row, "TP"), count(row, "PP"), count(row, "CP", 1)
    dp = count(row, "DP", num_ranks // (tp * pp * cp))
    if tp * pp * cp * dp != num_ranks:
        raise Skip("tp x pp x cp x dp is not the number of GPUs")
    if count(row, "gbs") % (dp * count(row, "mbs", 1)):
        raise Skip("the global batch is not whole micro-batches")
    recipe = _recipe(row)
    ep, vpp = count(row, "EP", (recipe and recipe.ep) or 1), count(row, "VPP", 1) if pp > 1 else 1
    stated = int(notes.get("expert-tensor-parallel-size", 1 if row["dataset"].startswith(_RECIPES) else tp))
    etp = stated if ep > 1 else tp
    return Layout(tp=tp, pp=pp, dp=dp, cp=cp, ep=ep, etp=etp, vpp=vpp, sp=tp > 1 and _sequence_parallel(row, notes))


def _sequence_parallel(row: Row, notes: Mapping[str, str]) -> bool:
    stated = row["recompute"].lower()
    is_stated = "sequence parallel" in stated or "sp" in stated.split() or "sequence-parallel" in notes
    return is_stated or row["dataset"].startswith(_RECIPES)


def _recompute(row: Row, notes: Mapping[str, str]) -> Recompute:
    recipe = _recipe(row)
    if recipe and recipe.recompute != "none":
        return Recompute.FULL
    stated = notes.get("recompute-granularity", row["recompute"])
    if stated.startswith("full"):
        return Recompute.FULL
    return Recompute.SELECTIVE if stated.startswith("selective") and "0 layers" not in stated else Recompute.NONE


def _measured(row: Row, batch_size: int, num_tokens: int, num_ranks: int) -> float:
    """Seconds of the iteration; from FLOPs per second by the formula of the set where only that was published."""
    if row["iter_time_s"]:
        return number(row, "iter_time_s")
    if row["tokens_per_s_per_gpu"]:
        return batch_size * num_tokens / (number(row, "tokens_per_s_per_gpu") * num_ranks)
    if row["dataset"].startswith("mcore_h100"):
        model = gpt_of(row)
        return _megatron_flops(model, batch_size, num_tokens) / (number(row, "TFLOPs_per_gpu") * 1e12 * num_ranks)
    raise Skip("neither seconds nor tokens per second published")


def _megatron_flops(model: ModelSpec, batch_size: int, num_tokens: int) -> float:
    """Model FLOPs of an iteration as Megatron-LM counts them (Narayanan et al., arXiv:2104.04473, equation 3, with
    72 in place of 96: nothing recomputed)."""
    layers, hidden = model.num_layers, model.hidden_size
    share = 1 + num_tokens / (6 * hidden) + model.vocab_size / (12 * layers * hidden)
    return 72 * batch_size * num_tokens * layers * hidden**2 * share
