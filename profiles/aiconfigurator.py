"""Single operators as NVIDIA's aiconfigurator-core measured them, read from the tables that the package carries.

The package (Apache-2.0) is an optional extra and is only read, never imported or run: its parquet files hold GEMMs,
attention and NCCL collectives per system, engine and engine version. Nothing is fetched, converted to a device that
was not measured, or filled in; making stages of operators is a cost model's business.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from meshwright.profiles.errors import BadInput, suggestion

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

ENGINE = "vllm"
"""Its GEMMs are those of torch, which this project's runtime calls too."""

PRECISION = "bf16"
"""The only one read: the runtime computes in it."""

_NCCL = "nccl"
_ELEMENT_BYTES = 2
_MILLISECOND = 1e-3


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


class Message(NamedTuple):
    """The key of a collective, as `table.Exchange`."""

    operation: str
    num_ranks: int
    num_bytes: int


@dataclass(frozen=True, kw_only=True)
class Operators:
    """Seconds of operators on one device, in bf16."""

    device: str  # as this project names it
    system: str  # as the package names it
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


def read_operators(device: str) -> Operators:
    """What the installed package knows of a device of `SYSTEMS`. Raises BadInput when it is not installed."""
    version = package_version()
    if version is None:
        raise BadInput(f"{PACKAGE} is not installed; install it with `pip install 'meshwright[aiconfigurator]'`.")
    system = SYSTEMS[device]
    folder = _folder() / "data" / system
    current = _current_version(system)
    nccl = max((path.name for path in (folder / "comm" / _NCCL).iterdir()), key=_numbers)
    attention = folder / "attention" / ENGINE / current
    return Operators(
        device=device,
        system=system,
        versions={PACKAGE: version, ENGINE: current, _NCCL: nccl},
        gemms=dict(_gemms(_rows(folder / "gemm" / ENGINE / current / "gemm_perf.parquet", gemm_dtype="bfloat16"))),
        prompts=_by_heads(_rows(attention / "context_attention_perf.parquet", attn_dtype="bfloat16"), "isl"),
        decoding=_by_heads(_rows(attention / "generation_attention_perf.parquet", attn_dtype="bfloat16"), "step"),
        collectives=dict(_collectives(_rows(folder / "comm" / _NCCL / nccl / "nccl_perf.parquet", nccl_dtype="half"))),
    )


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


def _current_version(system: str) -> str:
    """The version of the engine that the package calls current for a system."""
    slots = yaml.safe_load((_folder() / "query_versions.yaml").read_text(encoding="utf-8"))
    found = slots["overrides"].get(system, {}).get(ENGINE) or slots["defaults"][ENGINE]
    return str(found["current"])


def _rows(path: Path, **wanted: str) -> list[dict[str, Any]]:
    """The rows of a file in which these columns have these values."""
    from pyarrow import parquet  # noqa: PLC0415 - it comes with the extra

    filters = [(column, "=", value) for column, value in wanted.items()] or None
    rows: list[dict[str, Any]] = parquet.read_table(path, filters=filters).to_pylist()
    return rows


def _gemms(rows: list[dict[str, Any]]) -> Iterator[tuple[Gemm, float]]:
    for row in rows:
        yield Gemm(row["m"], row["k"], row["n"]), row["latency"] * _MILLISECOND


def _by_heads(rows: list[dict[str, Any]], length: str) -> dict[HeadCounts, dict[Attention, float]]:
    """Attention over all cached tokens, the quickest of the engine's kernels; `length` names the column of tokens."""
    found: dict[HeadCounts, dict[Attention, float]] = {}
    for row in rows:
        if row["kv_cache_dtype"] == "bfloat16" and not row["window_size"]:
            heads = HeadCounts(row["num_heads"], row["num_key_value_heads"], row["head_dim"])
            key, seconds = Attention(row["batch_size"], row[length]), row["latency"] * _MILLISECOND
            known = found.setdefault(heads, {})
            known[key] = min(seconds, known.get(key, seconds))
    return found


def _collectives(rows: list[dict[str, Any]]) -> Iterator[tuple[Message, float]]:
    """Collectives of 16-bit numbers; sizes are counted in elements of the whole tensor."""
    for row in rows:
        if row["op_name"] in ("all_reduce", "all_gather", "reduce_scatter"):
            message = Message(row["op_name"], row["num_gpus"], row["message_size"] * _ELEMENT_BYTES)
            yield message, row["latency"] * _MILLISECOND


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdigit())
