"""Inference engines: offline throughput, request latency, and serving points."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace

from benchmarks.fidelity.assumed import assumed
from benchmarks.fidelity.hardware import cluster_of
from benchmarks.fidelity.rows import Row, Skip, count, looked_up, number, stated
from benchmarks.fidelity.score import Answer
from benchmarks.fidelity.serving import Serving
from benchmarks.fidelity.shapes import model_named
from meshwright.cost_models.cost import Cost
from meshwright.profiles.efficiency import Efficiency
from meshwright.profiles.errors import BadInput
from meshwright.profiles.frameworks import engine_named, framework_named
from meshwright.profiles.layout import Layout, layers_per_stage

_PRECISIONS = {"FP8": "fp8", "FP16": "bf16", "FP16 (presumed)": "bf16", "FP4": "fp4", "fp8": "fp8", "fp4": "fp4"}
_ENGINES = {
    **{name: engine_named(name).framework for name in ("trtllm", "vllm", "sglang")},
    "TensorRT-LLM": "tensorrt-llm",
    "FasterTransformer": "fastertransformer",
}
_PREFIX_CACHED = ("vllm",)
"""Engines whose serving points repeat prompts that are still cached (see `assumed.yaml`)."""

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
        cost = serving.batch_seconds(count(row, "batch_size"))
        return _answer(row, serving, measured=value / 1e3, predicted=cost.total, cost=cost)
    if row["per_gpu_or_total"] == "per_gpu":
        value *= serving.layout.num_ranks
    if row["batch_size"] == _SATURATED:
        cost = serving.round_seconds(serving.slots())
        rate = serving.offline_rate(_num_requests(row))
    else:
        rows = count(row, "batch_size")
        cost = serving.batch_seconds(rows)
        rate = rows * serving.response_tokens / cost.total
    return _answer(row, serving, measured=value, predicted=rate, cost=cost)


def _num_requests(row: Row) -> int:
    """Requests of an offline run where its notes tell; otherwise so many that the last wave does not count."""
    stated = re.match(r"(\d+) requests", row["notes"])
    return int(stated[1]) if stated else _MANY_REQUESTS


def serving_point(row: Row) -> tuple[Serving, int]:
    """The replica of a serving point, and the requests in flight."""
    serving = _serving(row, count(row, "tp_size"), count(row, "pp_size"), count(row, "isl"), count(row, "osl"))
    return serving, count(row, "batch_size")


def time_per_token(_stem: str, row: Row, point: Point = serving_point) -> Answer:
    """Seconds between two tokens of a request when `batch_size` requests are in flight."""
    serving, rows = point(row)
    cost = serving.round_seconds(min(rows, serving.slots()))
    measured = number(row, "silicon_tpot_ms") / 1e3
    return Answer(label=_label(row, serving, rows), measured=measured, predicted=cost.total, terms=cost)


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


def is_dense_hopper(row: Row) -> bool:
    return (
        row["moe_ep_size"] in ("1", "")
        and row["moe_tp_size"] in ("1", row["tp_size"])
        and (
            row["model_path"].startswith(("Qwen/Qwen3-32B", "meta-llama/", "nvidia/Llama"))
            and row["system"] in ("h100_sxm", "h200_sxm")
        )
    )


def _serving(row: Row, tp: int, pp: int, prompt_tokens: int, response_tokens: int) -> Serving:
    gpu = stated(row, "gpu", "system")
    precision = looked_up(_PRECISIONS, row["precision"], "precision")
    model = model_named(stated(row, "model", "model_path"))
    cluster = cluster_of(gpu, tp * pp)
    try:
        model.shard(tp)
    except BadInput:
        raise Skip("tensor parallelism does not divide the model") from None
    try:
        layers_per_stage(model, pp)
    except BadInput:
        raise Skip("layers are dealt to pipeline stages otherwise than here") from None
    fresh = assumed().served.fresh_prompts_per_second if row.get("backend") in _PREFIX_CACHED else math.inf
    return Serving(
        model=model,
        layout=Layout(tp=tp, pp=pp),
        cluster=cluster,
        precision=precision,
        framework=framework_named(looked_up(_ENGINES, stated(row, "backend", "engine").partition(" ")[0], "engine")),
        prompt_tokens=prompt_tokens,
        response_tokens=response_tokens,
        fresh_prompts_per_second=fresh,
    )


def _answer(row: Row, serving: Serving, *, measured: float, predicted: float, cost: Cost) -> Answer:
    return Answer(
        label=_label(row, serving, row["batch_size"]),
        measured=measured,
        predicted=predicted,
        terms=cost,
        rate=row["metric"] == "throughput",
    )


def _label(row: Row, serving: Serving, rows: object) -> str:
    gpu = stated(row, "gpu", "system")
    return f"{serving.model.name} {gpu} {serving.layout} {serving.prompt_tokens}+{serving.response_tokens} x {rows}"
