"""Inference engines: offline throughput, request latency, and serving points."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

from benchmarks.fidelity.assumed import assumed
from benchmarks.fidelity.hardware import cluster_of
from benchmarks.fidelity.intervals import UNSHIFTED, Shift
from benchmarks.fidelity.rows import Row, Skip, count, looked_up, number, stated
from benchmarks.fidelity.score import Answer
from benchmarks.fidelity.serving import Serving
from benchmarks.fidelity.shapes import has_experts, is_known, model_named, shape_key, with_repeated_keys
from meshwright.cost_models.compute import WeightFormats
from meshwright.cost_models.cost import Cost
from meshwright.profiles.efficiency import Efficiency
from meshwright.profiles.errors import BadInput
from meshwright.profiles.frameworks import engine_named, framework_named
from meshwright.profiles.hardware import Device
from meshwright.profiles.layout import Layout, layers_per_stage
from meshwright.profiles.model_shape import ModelSpec

_PRECISIONS = {
    **dict.fromkeys(("fp16", "fp16 (presumed)", "bf16", "float16", "bfloat16"), "bf16"),
    **dict.fromkeys(("fp8", "fp8_block", "fp8_static"), "fp8"),
    **dict.fromkeys(("fp4", "nvfp4"), "fp4"),
    **dict.fromkeys(("int4", "int4_wo", "w4a16"), "w4a16"),
}
_CHECKPOINTS = {"fp8": "fp8", "fp4": "fp4", "nvfp4": "fp4"}
"""Formats that a checkpoint's name states; engines serve others in the 16 bits that they are published in."""

_EXPERT_CHECKPOINTS = {"deepseek-v3": "fp8", "kimi-k2": "int4", "gpt-oss-20b": "fp4", "gpt-oss-120b": "fp4"}
"""Models that are published in fewer bits, under names that do not say so (their config.json)."""

_FOUR_BIT_EXPERTS = {name for name, bits in _EXPERT_CHECKPOINTS.items() if bits.endswith("4")}

_ENGINES = {
    **{name: engine_named(name).framework for name in ("trtllm", "vllm", "sglang")},
    "TensorRT-LLM": "tensorrt-llm",
    "FasterTransformer": "fastertransformer",
    "Megatron": "megatron-core",
}
_DESCRIBED = "TensorRT-LLM 0.17", "TensorRT-LLM 1.0"
_OVERLAPPING = {"trtllm": ((1, 2), "tensorrt-llm-serve-1.2"), "vllm": ((0, 14), "vllm-0.14")}
"""By engine: the first release that hides the time of its host, and its framework."""

Point = Callable[[Row], tuple[Serving, int]]
"""The replica of a serving point, and the requests in flight."""

_MANY_REQUESTS = 10**6
_SATURATED = "in-flight (max)"


def engine(_stem: str, row: Row, efficiency: Efficiency | None = None) -> Answer:
    """Output tokens per second of one replica, or seconds of a request or a prefill."""
    only_first = row["metric"].startswith("TTFT")
    response_tokens = 1 if only_first else count(row, "output_len")
    asked = _serving(row, count(row, "TP"), count(row, "PP"), count(row, "input_len"), response_tokens)
    serving = replace(asked, efficiency=efficiency)
    value = number(row, "value")
    if row["metric"] != "throughput":
        rows = count(row, "batch_size")
        cost = serving.batch_seconds(rows)
        return _answer(row, serving, value / 1e3, cost, lambda shift: serving.shifted(shift).batch_seconds(rows).total)
    if row["per_gpu_or_total"] == "per_gpu":
        value *= serving.layout.num_ranks
    if row["batch_size"] == _SATURATED:
        cost, requests = serving.round_seconds(serving.slots()), _num_requests(row)
        return _answer(row, serving, value, cost, lambda shift: serving.shifted(shift).offline_rate(requests))
    rows = count(row, "batch_size")
    cost, tokens = serving.batch_seconds(rows), rows * serving.response_tokens
    return _answer(row, serving, value, cost, lambda shift: tokens / serving.shifted(shift).batch_seconds(rows).total)


def is_of_described_release(row: Row) -> bool:
    """Whether an offline run is of a release of TensorRT-LLM that its constants describe."""
    return row["engine"].startswith(_DESCRIBED)


def megatron_engine(_stem: str, row: Row) -> Answer:
    """Seconds of a batch in Megatron's own engine, whose requests are spread over replicas."""
    tp, pp = count(row, "TP"), count(row, "PP")
    asked = {"gpu": row["gpu"], "model": row["model"], "precision": "bf16", "engine": "Megatron"}
    serving = _serving(asked, tp, pp, count(row, "input_tokens"), count(row, "output_tokens"))
    rows = -(-count(row, "batch") // count(row, "DP"))
    cost = serving.batch_seconds(rows)
    return Answer(
        label=_label(asked, serving, row["batch"]),
        measured=number(row, "latency_ms") / 1e3,
        predicted=cost.total,
        terms=cost,
        ask=lambda shift: serving.shifted(shift).batch_seconds(rows).total,
        doubt=serving.doubt,
    )


def _num_requests(row: Row) -> int:
    """Requests of an offline run where its notes or the engine's manual tell; otherwise so many that the last wave does
    not count."""
    told = re.match(r"(\d+) requests", row["notes"])
    lengths = f"{row['input_len']}/{row['output_len']}"
    return int(told[1]) if told else assumed().offline.requests.get(lengths, _MANY_REQUESTS)


def serving_point(row: Row) -> tuple[Serving, int]:
    """The replica of a serving point, and the requests in flight."""
    serving = _serving(row, count(row, "tp_size"), count(row, "pp_size"), count(row, "isl"), count(row, "osl"))
    return serving, count(row, "batch_size")


def time_per_token(_stem: str, row: Row, point: Point = serving_point) -> Answer:
    """Seconds between two tokens of a request when `batch_size` requests are in flight."""
    serving, rows = point(row)
    live = min(rows, serving.slots())
    cost = serving.round_seconds(live)
    return Answer(
        label=_label(row, serving, rows),
        measured=number(row, "silicon_tpot_ms") / 1e3,
        predicted=cost.total,
        terms=cost,
        ask=lambda shift: serving.shifted(shift).round_seconds(live).total,
        doubt=serving.doubt,
    )


def rate_per_gpu(_stem: str, row: Row, point: Point = serving_point) -> Answer:
    """Output tokens per second and GPU; layouts and batches of one load compete.

    Skips more requests than the cache holds: some of them wait, which the time between two tokens does not tell.
    """
    serving, rows = point(row)
    if rows > serving.slots():
        raise Skip("more requests than the cache holds, so that some wait")
    cost = serving.round_seconds(rows)
    measured = rows / (number(row, "silicon_tpot_ms") / 1e3) / serving.layout.num_ranks
    setting = " ".join(
        row[c] for c in ("backend", "backend_version", "model_path", "system", "precision", "isl", "osl")
    )
    return Answer(
        label=_label(row, serving, rows),
        measured=measured,
        predicted=rows / cost.total / serving.layout.num_ranks,
        terms=cost,
        setting=f"{setting} {rows}",
        rate=True,
    )


def is_dense(row: Row) -> bool:
    """Whether the model of a serving point is known to have no experts."""
    return is_known(row["model_path"]) and not has_experts(row["model_path"])


def is_hopper(row: Row) -> bool:
    return row["system"] in ("h100_sxm", "h200_sxm")


def is_dense_hopper(row: Row) -> bool:
    return is_dense(row) and is_hopper(row)


def precision_of(row: Row) -> str:
    """The number format of a point: as stated, else of its products, else in which its checkpoint is published."""
    named = row["precision"] or row.get("gemm_quant_mode", "")
    if named:
        return looked_up(_PRECISIONS, named.lower(), "precision")
    path = stated(row, "model", "model_path")
    parts = re.split(r"[-_/ ]", path.lower())
    told = next((_CHECKPOINTS[part] for part in parts if part in _CHECKPOINTS), None)
    published = told or _EXPERT_CHECKPOINTS.get(shape_key(path), "bf16")
    return looked_up(_PRECISIONS, published, "precision")


def _serving(row: Row, tp: int, pp: int, prompt_tokens: int, response_tokens: int) -> Serving:
    gpu = stated(row, "gpu", "system")
    cluster = cluster_of(gpu, tp * pp)
    precision, formats = _formats_of(row, cluster.device)
    model = with_repeated_keys(model_named(stated(row, "model", "model_path")), tp)
    try:
        model.shard(tp)
    except BadInput:
        raise Skip("tensor parallelism does not divide the model") from None
    try:
        layers_per_stage(model, pp)
    except BadInput:
        raise Skip("layers are dealt to pipeline stages otherwise than here") from None
    engine_name = stated(row, "backend", "engine")
    return Serving(
        model=model,
        layout=_layout(row, model, tp, pp),
        cluster=cluster,
        precision=precision,
        framework=framework_named(_framework_name(engine_name, row.get("backend_version", ""))),
        weight_formats=formats,
        prompt_tokens=prompt_tokens,
        response_tokens=response_tokens,
        prompts_are_cached=f"{engine_name} {row.get('backend_version', '')}" in assumed().served.repeated_prompts,
    )


def _framework_name(engine_name: str, version: str) -> str:
    """The framework of an engine's release; an unstated release is costed as the first that is known."""
    name = looked_up(_ENGINES, engine_name.partition(" ")[0], "engine")
    release = re.match(r"(\d+)\.(\d+)", version)
    since, overlapping = _OVERLAPPING.get(engine_name, ((0, 0), name))
    return overlapping if release and (int(release[1]), int(release[2])) >= since else name


def _formats_of(row: Row, device: Device) -> tuple[str, WeightFormats | None]:
    """The precision of a replica, and the formats of its checkpoint's weights where these differ."""
    precision, checkpoints = precision_of(row), assumed().checkpoints
    shape = shape_key(stated(row, "model", "model_path"))
    if shape in _FOUR_BIT_EXPERTS:  # another format that a row states is that of what is multiplied with them
        precision = _PRECISIONS[_EXPERT_CHECKPOINTS[shape]]
    if precision == "fp4" and precision not in device.flops_per_second:
        precision = "w4a16"
    if precision == "fp8" and shape in checkpoints.block_scaled:
        return "bf16", WeightFormats("fp8-block", "fp8")
    if precision in ("fp4", "w4a16") and shape in checkpoints.few_bits_in_experts:
        return "bf16", WeightFormats("bf16", precision)
    return precision, None


def _layout(row: Row, model: ModelSpec, tp: int, pp: int) -> Layout:
    """The layout of a replica; experts are sharded, or whole and divided over its ranks."""
    if "attention data parallel" in row.get("notes", "") or row.get("attention_dp_size", "") not in ("", "1"):
        raise Skip("attention in data parallel beside experts over all ranks is no layout here")
    if model.experts is None:
        return Layout(tp=tp, pp=pp)
    ep, tp_of_experts = count(row, "moe_ep_size", 1), count(row, "moe_tp_size", tp)
    if (ep, tp_of_experts) == (tp, 1):
        return Layout(tp=tp, pp=pp, ep=ep, etp=1)
    if (ep, tp_of_experts) != (1, tp):
        raise Skip("experts both sharded and divided are no layout here")
    return Layout(tp=tp, pp=pp)


def _answer(row: Row, serving: Serving, measured: float, cost: Cost, ask: Callable[[Shift], float]) -> Answer:
    return Answer(
        label=_label(row, serving, row["batch_size"]),
        measured=measured,
        predicted=ask(UNSHIFTED),
        terms=cost,
        rate=row["metric"] == "throughput",
        ask=ask,
        doubt=replace(serving.doubt, is_of_other_release=not is_of_described_release(row)),
    )


def _label(row: Row, serving: Serving, rows: object) -> str:
    gpu = stated(row, "gpu", "system")
    return f"{serving.model.name} {gpu} {serving.layout} {serving.prompt_tokens}+{serving.response_tokens} x {rows}"
