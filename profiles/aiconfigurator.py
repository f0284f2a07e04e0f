"""Times of single operators, read from the tables of NVIDIA's aiconfigurator-core package.

The package (Apache-2.0) is an optional extra. Its files are read, but its code is never imported: parquet files hold
GEMMs, attention and NCCL collectives per system, engine and engine version. Nothing is downloaded, converted to other
devices or filled in; cost models combine operators into stages.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import yaml

from meshwright.profiles.errors import BadInput, suggestion

K = TypeVar("K")

PACKAGE = "aiconfigurator-core"

SYSTEMS = {
    "a100-80gb": "a100_sxm",
    "h100-sxm": "h100_sxm",
    "h200": "h200_sxm",
    "b200": "b200_sxm",
    "gb200": "gb200",
    "l40s": "l40s",
    "rtx-6000-pro": "rtx_pro_6000_server",
}
"""The package's system name of each device that it has measured."""

ENGINES = ("vllm", "trtllm")
"""Engines whose fp8 GEMMs were timed together with the casts of their inputs."""

DEFAULT_ENGINE = "vllm"
"""The default engine: its bf16 GEMMs are those of torch, which the runtime calls too."""

PRECISION = "bf16"
"""The precision in which the runtime computes."""

_DTYPES = {"bf16": "bfloat16", "fp8": "fp8"}
"""The package's dtype name of each precision that is read."""

_CASTS = ("computescale", "scale_matrix")
"""Kernels that are included in the time of every fp8 GEMM: computing a scale, and casting the inputs."""

_ROUTED = (
    "num_tokens",
    "hidden_size",
    "inter_size",
    "topk",
    "num_experts",
    "moe_tp_size",
    "moe_ep_size",
    "distribution",
)
"""The package's columns for the fields of `RoutedExperts`."""

_NCCL = "nccl"

_ELEMENT_BYTES = 2
"""The package counts collective sizes in 16-bit elements."""

_MILLISECOND = 1e-3
"""The package's latencies are in milliseconds."""


class Gemm(NamedTuple):
    """A matrix product [rows, inner] x [inner, outer]."""

    rows: int
    inner: int
    outer: int


class HeadCounts(NamedTuple):
    """Attention heads on one device: query heads, KV heads, and the size of a head."""

    queries: int
    keys: int
    size: int


class Attention(NamedTuple):
    """Causal attention of `rows` rows: prefill of `tokens` tokens, or one token with `tokens` in the KV cache."""

    rows: int
    tokens: int


class RoutedExperts(NamedTuple):
    """The routed experts of a layer on one rank.

    `tokens` counts those of all `ep` ranks. Each token selects `experts_per_token` of `num_experts` experts;
    `ffn_size` is the width of an expert before it is sharded over `tp`. `distribution` is the package's name of the
    load distribution.
    """

    tokens: int
    hidden_size: int
    ffn_size: int
    experts_per_token: int
    num_experts: int
    tp: int
    ep: int
    distribution: str


class Message(NamedTuple):
    """A collective: operation, ranks and bytes of the whole tensor, like `table.Exchange`."""

    operation: str
    num_ranks: int
    num_bytes: int


@dataclass(frozen=True, kw_only=True)
class Operators:
    """Seconds of operators on one device in one precision; collectives always carry 16-bit elements."""

    device: str  # as this project names it
    system: str  # as the package names it
    precision: str
    versions: Mapping[str, str]  # of the package, the engine and the collective library
    gemms: Mapping[Gemm, float]
    prefill_attention: Mapping[HeadCounts, Mapping[Attention, float]]
    decode_attention: Mapping[HeadCounts, Mapping[Attention, float]]
    collectives: Mapping[Message, float]


def package_version() -> str | None:
    """Return the installed version of the package; None if it is not installed."""
    try:
        return metadata.version(PACKAGE)
    except metadata.PackageNotFoundError:
        return None


def has_operators(device: str) -> bool:
    """True if the package is installed and has operators of this device."""
    return device in SYSTEMS and package_version() is not None


def device_of(name: str) -> str:
    """Return this project's name of a device, given that name or the package's.

    Raises BadInput for a device that the package has not measured.
    """
    names = {**{system: device for device, system in SYSTEMS.items()}, **{device: device for device in SYSTEMS}}
    if name not in names:
        raise BadInput(f"--device {name!r} has no operators in {PACKAGE}; {suggestion(name, names)}")
    return names[name]


def read_operators(
    device: str, *, engine: str = DEFAULT_ENGINE, precision: str = PRECISION, custom_all_reduce: bool = False
) -> Operators:
    """Read the operators of a device in `SYSTEMS` and an engine in `ENGINES`.

    With `custom_all_reduce`, the engine's custom all-reduce is used where it is faster than NCCL. Computing scales
    and casting inputs, which the package includes in the times of fp8 GEMMs, are subtracted: with static scales,
    preceding kernels cast the inputs. Raises BadInput if the package is not installed or lacks a file.
    """
    version = package_version()
    if version is None:
        raise BadInput(f"{PACKAGE} is not installed; install it with `pip install 'meshwright[aiconfigurator]'`.")
    system, dtype = SYSTEMS[device], _DTYPES[precision]
    folder = _folder() / "data" / system
    current = _current_version(system, engine)
    nccl = max((path.name for path in (folder / "comm" / _NCCL).iterdir()), key=_numbers)
    attention = folder / "attention" / engine / current
    reductions = [_rows(folder / "comm" / _NCCL / nccl / "nccl_perf.parquet", nccl_dtype="half")]
    if custom_all_reduce:
        reductions.append(_rows(folder / "comm" / engine / current / "custom_allreduce_perf.parquet"))
    casts = [folder / "quantize" / engine / current / f"{cast}_perf.parquet" for cast in _CASTS]
    return Operators(
        device=device,
        system=system,
        precision=precision,
        versions={PACKAGE: version, engine: current, _NCCL: nccl},
        gemms=_gemms(
            _rows(folder / "gemm" / engine / current / "gemm_perf.parquet", gemm_dtype=dtype),
            [row for path in casts for row in _rows(path, quant_dtype=dtype)] if precision == "fp8" else [],
        ),
        prefill_attention=_by_heads(_rows(attention / "context_attention_perf.parquet", kv_cache_dtype=dtype), "isl"),
        decode_attention=_by_heads(
            _rows(attention / "generation_attention_perf.parquet", kv_cache_dtype=dtype), "step"
        ),
        collectives=_collectives(row for rows in reductions for row in rows),
    )


def read_experts(device: str, *, engine: str) -> dict[RoutedExperts, float]:
    """Read the seconds of an engine's gated bf16 experts, from router scores to the weighted sum of expert outputs.

    Raises BadInput if the package is not installed or lacks the file.
    """
    if package_version() is None:
        raise BadInput(f"{PACKAGE} is not installed; install it with `pip install 'meshwright[aiconfigurator]'`.")
    system = SYSTEMS[device]
    path = _folder() / "data" / system / "moe" / engine / _current_version(system, engine) / "moe_perf.parquet"
    times: dict[RoutedExperts, float] = {}
    for row in _rows(path, moe_dtype=_DTYPES[PRECISION]):
        if "nongated" not in row["kernel_source"]:
            _keep_fastest(times, RoutedExperts._make(row[column] for column in _ROUTED), row["latency"])
    return times


def read_configs() -> dict[str, dict[str, Any]]:
    """Read the Hugging Face configs in the package, by model name, without those of quantised models."""
    configs = {}
    for path in sorted((_folder().parent / "model_configs").glob("*_config.json")):
        name = path.name.removesuffix("_config.json")
        config = json.loads(path.read_text(encoding="utf-8"))
        quantisation = path.with_name(f"{name}_hf_quant_config.json")
        if not (name.endswith("_hf_quant") or quantisation.exists() or "quantization_config" in config):
            configs[name.replace("--", "/")] = config
    return configs


def _folder() -> Path:
    """The folder of the package's tables, found from its metadata so that its code is not imported."""
    return Path(str(metadata.distribution(PACKAGE).locate_file("aiconfigurator_core/systems")))


def _current_version(system: str, engine: str) -> str:
    """The engine version that the package marks as current for a system."""
    versions = yaml.safe_load((_folder() / "query_versions.yaml").read_text(encoding="utf-8"))
    version = versions["overrides"].get(system, {}).get(engine) or versions["defaults"][engine]
    return str(version["current"])


def _rows(path: Path, **equals: str) -> list[dict[str, Any]]:
    """The rows of a parquet file in which these columns have these values."""
    from pyarrow import parquet  # noqa: PLC0415 - it comes with the extra

    if not path.exists():
        raise BadInput(f"{PACKAGE} has no {path.relative_to(_folder())}; profile the device itself.")
    filters = [(column, "=", value) for column, value in equals.items()] or None
    rows: list[dict[str, Any]] = parquet.read_table(path, filters=filters).to_pylist()
    return rows


def _gemms(rows: Iterable[Mapping[str, Any]], casts: Iterable[Mapping[str, Any]]) -> dict[Gemm, float]:
    """GEMM times without the casts of inputs; those that would not be positive are left out."""
    cast_times: dict[tuple[int, int], float] = {}
    for row in casts:
        key = row["m"], row["k"]
        cast_times[key] = cast_times.get(key, 0.0) + row["latency"]
    times: dict[Gemm, float] = {}
    for row in rows:
        gemm_time = row["latency"] - cast_times.get((row["m"], row["k"]), 0.0)
        if gemm_time > 0:
            _keep_fastest(times, Gemm(row["m"], row["k"], row["n"]), gemm_time)
    return times


def _by_heads(rows: Iterable[Mapping[str, Any]], length: str) -> dict[HeadCounts, dict[Attention, float]]:
    """Attention times without a sliding window; `length` names the column of tokens."""
    times: dict[HeadCounts, dict[Attention, float]] = {}
    for row in rows:
        if not row.get("window_size"):
            heads = HeadCounts(row["num_heads"], row["num_key_value_heads"], row["head_dim"])
            _keep_fastest(times.setdefault(heads, {}), Attention(row["batch_size"], row[length]), row["latency"])
    return times


def _collectives(rows: Iterable[Mapping[str, Any]]) -> dict[Message, float]:
    """Times of collectives; the package counts sizes in elements of the whole tensor."""
    times: dict[Message, float] = {}
    for row in rows:
        if row["op_name"] in ("all_reduce", "all_gather", "reduce_scatter"):
            message = Message(row["op_name"], row["num_gpus"], row["message_size"] * _ELEMENT_BYTES)
            _keep_fastest(times, message, row["latency"])
    return times


def _keep_fastest(times: dict[K, float], key: K, milliseconds: float) -> None:
    """Keep the fastest of several kernels for one operator, which the engine would choose."""
    seconds = milliseconds * _MILLISECOND
    times[key] = min(seconds, times.get(key, seconds))


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdigit())
