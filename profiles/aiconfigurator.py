"""Single operators as NVIDIA's aiconfigurator-core measured them, read from the tables that the package carries.

The package (Apache-2.0) is an optional extra and is only read, never imported or run: its parquet files hold GEMMs,
attention and NCCL collectives per system, engine and engine version. Nothing is fetched, converted to a device that
was not measured, or filled in; making stages of operators is a cost model's business.
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
"""The package's name of each of our devices whose operators it has measured."""

ENGINES = ("vllm", "trtllm")
"""Those whose products in fp8 were timed together with what casts their inputs."""

ENGINE = "vllm"
"""Its products in bf16 are those of torch, which this project's runtime calls too."""

PRECISION = "bf16"
"""What the runtime computes in."""

_DTYPES = {"bf16": "bfloat16", "fp8": "fp8"}
"""The package's name of each precision that is read."""

_CASTS = ("computescale", "scale_matrix")
"""Kernels that it times within every product in fp8: they find a scale, and cast to it."""

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
"""Its columns of the fields of `Routed`."""

_NCCL = "nccl"

_ELEMENT_BYTES = 2
"""Its sizes of collectives are counted in elements of 16 bits."""

_MILLISECOND = 1e-3
"""Its latencies are in these."""


class Gemm(NamedTuple):
    """[rows, inner] x [inner, outer]."""

    rows: int
    inner: int
    outer: int


class HeadCounts(NamedTuple):
    """Attention heads of one device."""

    queries: int
    keys: int
    size: int


class Attention(NamedTuple):
    """Causal attention: `rows` rows of `tokens` tokens, or of one token that has `tokens` cached besides it."""

    rows: int
    tokens: int


class Routed(NamedTuple):
    """The experts of a layer on one rank: `tokens` of all `ep` ranks, each picking `picked` of `number` experts whose
    width, whole, is `ffn_size`, cut over `tp`; loads are told by the package's name of their distribution."""

    tokens: int
    hidden_size: int
    ffn_size: int
    picked: int
    number: int
    tp: int
    ep: int
    distribution: str


class Message(NamedTuple):
    """The key of a collective, as `table.Exchange`."""

    operation: str
    num_ranks: int
    num_bytes: int


@dataclass(frozen=True, kw_only=True)
class Operators:
    """Seconds of operators on one device, in one precision; collectives are of 16-bit numbers in any."""

    device: str  # as this project names it
    system: str  # as the package names it
    precision: str
    versions: Mapping[str, str]  # of the package, the engine and the collective library
    gemms: Mapping[Gemm, float]
    prompts: Mapping[HeadCounts, Mapping[Attention, float]]
    decoding: Mapping[HeadCounts, Mapping[Attention, float]]
    collectives: Mapping[Message, float]


def package_version() -> str | None:
    """The version that is installed; None where the extra is not."""
    try:
        return metadata.version(PACKAGE)
    except metadata.PackageNotFoundError:
        return None


def knows(device: str) -> bool:
    """Whether operators of this device can be read here."""
    return device in SYSTEMS and package_version() is not None


def device_of(name: str) -> str:
    """Our name of a device that the package has measured, from its name or ours. Raises BadInput for any other."""
    ours = {**{system: device for device, system in SYSTEMS.items()}, **{device: device for device in SYSTEMS}}
    if name not in ours:
        raise BadInput(f"--device {name!r} has no operators in {PACKAGE}; {suggestion(name, ours)}")
    return ours[name]


def read_operators(device: str, *, engine: str = ENGINE, precision: str = PRECISION, peers: bool = False) -> Operators:
    """What the installed package knows of a device of `SYSTEMS` and an engine of `ENGINES`; with `peers`, all-reduces
    are the engine's own where they are quicker. Raises BadInput when it is not installed or lacks a file.

    Products in fp8 are those of weights with static scales, whose inputs the kernels before them cast: what the
    package timed for that besides is taken off.
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
    if peers:
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
        prompts=_by_heads(_rows(attention / "context_attention_perf.parquet", kv_cache_dtype=dtype), "isl"),
        decoding=_by_heads(_rows(attention / "generation_attention_perf.parquet", kv_cache_dtype=dtype), "step"),
        collectives=_collectives(row for rows in reductions for row in rows),
    )


def read_experts(device: str, *, engine: str) -> dict[Routed, float]:
    """Seconds of an engine's experts in bf16, gated, from router scores to sums of what they answer. Raises BadInput
    when the package is not installed or lacks the file."""
    if package_version() is None:
        raise BadInput(f"{PACKAGE} is not installed; install it with `pip install 'meshwright[aiconfigurator]'`.")
    system = SYSTEMS[device]
    path = _folder() / "data" / system / "moe" / engine / _current_version(system, engine) / "moe_perf.parquet"
    found: dict[Routed, float] = {}
    for row in _rows(path, moe_dtype=_DTYPES[PRECISION]):
        if "nongated" not in row["kernel_source"]:
            _keep_quickest(found, Routed._make(row[column] for column in _ROUTED), row["latency"])
    return found


def read_configs() -> dict[str, dict[str, Any]]:
    """The Hugging Face configs that the package carries, by model, of those whose weights are not quantised."""
    found = {}
    for path in sorted((_folder().parent / "model_configs").glob("*_config.json")):
        name = path.name.removesuffix("_config.json")
        config = json.loads(path.read_text(encoding="utf-8"))
        apart = path.with_name(f"{name}_hf_quant_config.json")
        if not (name.endswith("_hf_quant") or apart.exists() or "quantization_config" in config):
            found[name.replace("--", "/")] = config
    return found


def _folder() -> Path:
    """The package's tables; it is found by its record of files, so that its code is not loaded."""
    return Path(str(metadata.distribution(PACKAGE).locate_file("aiconfigurator_core/systems")))


def _current_version(system: str, engine: str) -> str:
    """The version of the engine that the package calls current for a system."""
    slots = yaml.safe_load((_folder() / "query_versions.yaml").read_text(encoding="utf-8"))
    found = slots["overrides"].get(system, {}).get(engine) or slots["defaults"][engine]
    return str(found["current"])


def _rows(path: Path, **wanted: str) -> list[dict[str, Any]]:
    """The rows of a file in which these columns have these values."""
    from pyarrow import parquet  # noqa: PLC0415 - it comes with the extra

    if not path.exists():
        raise BadInput(f"{PACKAGE} has no {path.relative_to(_folder())}; profile the device itself.")
    filters = [(column, "=", value) for column, value in wanted.items()] or None
    rows: list[dict[str, Any]] = parquet.read_table(path, filters=filters).to_pylist()
    return rows


def _gemms(rows: Iterable[Mapping[str, Any]], casts: Iterable[Mapping[str, Any]]) -> dict[Gemm, float]:
    """Products without the casts of their inputs; none that took no longer than those."""
    cast: dict[tuple[int, int], float] = {}
    for row in casts:
        key = row["m"], row["k"]
        cast[key] = cast.get(key, 0.0) + row["latency"]
    found: dict[Gemm, float] = {}
    for row in rows:
        alone = row["latency"] - cast.get((row["m"], row["k"]), 0.0)
        if alone > 0:
            _keep_quickest(found, Gemm(row["m"], row["k"], row["n"]), alone)
    return found


def _by_heads(rows: Iterable[Mapping[str, Any]], length: str) -> dict[HeadCounts, dict[Attention, float]]:
    """Attention over all cached tokens; `length` names the column of tokens."""
    found: dict[HeadCounts, dict[Attention, float]] = {}
    for row in rows:
        if not row.get("window_size"):
            heads = HeadCounts(row["num_heads"], row["num_key_value_heads"], row["head_dim"])
            _keep_quickest(found.setdefault(heads, {}), Attention(row["batch_size"], row[length]), row["latency"])
    return found


def _collectives(rows: Iterable[Mapping[str, Any]]) -> dict[Message, float]:
    """Collectives of 16-bit numbers; sizes are counted in elements of the whole tensor."""
    found: dict[Message, float] = {}
    for row in rows:
        if row["op_name"] in ("all_reduce", "all_gather", "reduce_scatter"):
            message = Message(row["op_name"], row["num_gpus"], row["message_size"] * _ELEMENT_BYTES)
            _keep_quickest(found, message, row["latency"])
    return found


def _keep_quickest(found: dict[K, float], key: K, milliseconds: float) -> None:
    """Of an engine's kernels for one thing it runs the quickest."""
    seconds = milliseconds * _MILLISECOND
    found[key] = min(seconds, found.get(key, seconds))


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdigit())
