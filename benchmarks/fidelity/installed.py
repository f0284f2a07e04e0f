"""Rows that an installed package carries, read where they lie and told as a folder's are; of a folder, the others."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

from benchmarks.fidelity.rows import Row, RowFiles, read_rows
from meshwright.profiles.aiconfigurator import package_version, read_experts

EXPERTS = "aiconfigurator/{}_experts_bf16"
"""Stems of the experts of a layer, by device."""

_DEVICES = {"a100": "a100-80gb", "h100": "h100-sxm", "h200": "h200"}
_EXPERTS = {EXPERTS.format(name): device for name, device in _DEVICES.items()}

_ENGINE = "trtllm"
"""Its experts are grouped products of CUTLASS over sorted tokens, as are those of Megatron-core."""


def installed_stems() -> set[str]:
    """Those whose rows can be read here."""
    return set(_EXPERTS) if package_version() else set()


def rows_of(stem: str, files: RowFiles) -> Iterable[Row]:
    """The rows of a stem, none where neither a folder nor the package has it."""
    if stem in files:
        return (row for path in files[stem] for row in read_rows(path))
    return _rows_of_experts(stem) if stem in installed_stems() else ()


@cache
def _rows_of_experts(stem: str) -> tuple[Row, ...]:
    found = read_experts(_EXPERTS[stem], engine=_ENGINE)
    return tuple(
        {**{name: str(value) for name, value in key._asdict().items()}, "latency_ms": str(1e3 * seconds)}
        for key, seconds in found.items()
    )
