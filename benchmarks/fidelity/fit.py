"""Fits the constants of one law to the rows that its family names, and prints them as lines of `data/efficiency.yaml`.

    python -m benchmarks.fidelity.fit --data DIR --family hopper --law gemm

A law has few constants and many rows: half of the rows, drawn with a fixed seed, are fitted; the error on the other
half is printed beside. The files are edited by hand, with the date, so that a change of a constant is a reviewed one.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from benchmarks.fidelity.primitives import attention_seconds, device_of, gemm_seconds, kernels_of, latency
from benchmarks.fidelity.rows import Row, Skip, read_rows, row_files
from benchmarks.fidelity.simplex import minimise
from benchmarks.fidelity.training import question
from meshwright.cost_models.pretraining import iteration_seconds
from meshwright.profiles.efficiency import Efficiency, efficiency_of

Predict = Callable[[Efficiency], float]

_MAX_ROWS = 1500
"""Rows that are fitted; more change the constants by less than their spread over seeds."""

_FILES = {"ampere": ("a100",), "hopper": ("h100", "h200")}
_DEVICE = {"ampere": "a100-80gb", "hopper": "h200"}


@dataclass(frozen=True, kw_only=True)
class Law:
    """Constants that are fitted together, and what turns a row into a prediction and a measurement."""

    constants: tuple[str, ...]
    files: tuple[str, ...]  # of each device, or of the folder where they have no device in their name
    ask: Callable[[str, Row], tuple[Predict, float]]


def _gemm(stem: str, row: Row) -> tuple[Predict, float]:
    return lambda efficiency: gemm_seconds(kernels_of(device_of(stem), efficiency), row), latency(row)


def _attention(stem: str, row: Row) -> tuple[Predict, float]:
    return lambda efficiency: attention_seconds(kernels_of(device_of(stem), efficiency), row), latency(row)


def _iteration(_stem: str, row: Row) -> tuple[Predict, float]:
    if not row["dataset"].startswith("vtrain"):
        raise Skip("not fitted")
    asked = question(row)
    return (
        lambda efficiency: iteration_seconds(asked.iteration, asked.cluster, "bf16", efficiency).total,
        asked.measured,
    )


LAWS = {
    "gemm": Law(
        constants=(
            "gemm_flops",
            "gemm_bytes",
            "gemm_prologue",
            "gemm_split",
            "gemm_tile_cost",
            "gemm_ridge",
            "kernel_seconds",
        ),
        files=("primitives/{}_gemm_bf16",),
        ask=_gemm,
    ),
    "attention": Law(
        constants=(
            "attention_flops",
            "attention_tile",
            "attention_tail",
            "attention_bytes",
            "attention_ridge",
            "attention_seconds",
        ),
        files=("primitives/{}_attention_context_bf16",),
        ask=_attention,
    ),
    "decoding": Law(
        constants=(
            "decoding_bytes",
            "decoding_block",
            "decoding_row_seconds",
            "decoding_head_seconds",
            "decoding_ridge",
            "decoding_seconds",
        ),
        files=("primitives/{}_attention_generation_bf16",),
        ask=_attention,
    ),
    "training": Law(
        constants=("sustained", "elementwise_bytes"),
        files=("megatron_training", "megatron_training_vtrain_single_node"),
        ask=_iteration,
    ),
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fidelity.fit", description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--family", choices=sorted(_FILES), required=True)
    parser.add_argument("--law", choices=sorted(LAWS), required=True)
    parser.add_argument("--rounds", type=int, default=150, help="steps of the simplex")
    arguments = parser.parse_args()
    law, start = LAWS[arguments.law], efficiency_of("cuda", _DEVICE[arguments.family])
    asked = list(_asked(law, arguments.family, arguments.data))
    random.Random(0).shuffle(asked)
    half = len(asked) // 2
    fitted, kept = asked[: min(half, _MAX_ROWS)], asked[half:]
    found = fit(law.constants, fitted, start, rounds=arguments.rounds)
    for name in law.constants:
        print(f"    {name}: {getattr(found, name):.4g}")
    for what, rows in (("fitted", fitted), ("kept", kept)):
        print(f"# {what}: {len(rows)} rows, mean error {error(rows, start):.4f} before, {error(rows, found):.4f} after")
    return 0


def fit(
    constants: Sequence[str], rows: Sequence[tuple[Predict, float]], start: Efficiency, *, rounds: int
) -> Efficiency:
    """The constants that minimise the mean absolute logarithm of predicted over measured."""

    def with_values(values: NDArray[np.float64]) -> Efficiency:
        return Efficiency.model_validate(start.model_dump() | dict(zip(constants, values.tolist(), strict=True)))

    def loss(values: NDArray[np.float64]) -> float:
        try:
            efficiency = with_values(values)
        except ValidationError:
            return float("inf")
        return float(np.mean([abs(np.log(predict(efficiency) / measured)) for predict, measured in rows]))

    best, _ = minimise(loss, [getattr(start, name) for name in constants], rounds=rounds)
    return with_values(best)


def error(rows: Sequence[tuple[Predict, float]], efficiency: Efficiency) -> float:
    """Mean absolute relative error."""
    return float(np.mean([abs(predict(efficiency) / measured - 1) for predict, measured in rows]))


def _asked(law: Law, family: str, directory: Path) -> Iterator[tuple[Predict, float]]:
    files = row_files(directory)
    for stem in dict.fromkeys(name.format(device) for device in _FILES[family] for name in law.files):
        for row in read_rows(files[stem]):
            try:
                yield law.ask(stem, row)
            except Skip:
                continue


if __name__ == "__main__":
    sys.exit(main())
