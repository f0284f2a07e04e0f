"""Fits the constants of one law to named rows, and prints them as lines of the data file that holds them.

    python -m benchmarks.fidelity.fit --data DIR --law gemm --of hopper

A law has few constants and many rows: half of the rows, told by a hash of what they say, are fitted; the error on the
other half is printed beside. The files are edited by hand, with the date, so that a change of a constant is a reviewed
one.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from benchmarks.fidelity.assumed import Served, assumed
from benchmarks.fidelity.hardware import cluster_of
from benchmarks.fidelity.inference import is_dense_hopper, serving_point
from benchmarks.fidelity.primitives import (
    OPERATIONS,
    attention_seconds,
    device_of,
    gemm_seconds,
    group_of,
    kernels_of,
    latency,
    message_bytes,
)
from benchmarks.fidelity.realhf import experiment_of
from benchmarks.fidelity.rows import Row, Skip, number, read_rows, row_files
from benchmarks.fidelity.simplex import minimise
from benchmarks.fidelity.training import Question, question
from meshwright.cost_models.collectives import Network
from meshwright.cost_models.pretraining import iteration_seconds
from meshwright.profiles.documents import Document
from meshwright.profiles.efficiency import efficiency_of
from meshwright.profiles.errors import BadInput, suggestion
from meshwright.profiles.frameworks import Framework, framework_named

D = TypeVar("D", bound=Document)
Predict = Callable[[Any], float]
"""Seconds of a row under a family's `Efficiency`, a `Framework`, or an `Engine`, as its law says."""

Asked = tuple[Predict, float]
"""A prediction of a row, and what was measured."""

_MAX_ROWS = 1500
"""Rows that are fitted; more change the constants by less than their spread over seeds."""

_FAMILIES = {"ampere": ("a100",), "hopper": ("h100", "h200")}
_DEVICES = {"ampere": "a100-80gb", "hopper": "h200"}


@dataclass(frozen=True, kw_only=True)
class Law:
    """Constants that are fitted together (dotted where they are nested), and what a row says under them."""

    constants: tuple[str, ...]
    files: tuple[str, ...]  # with {} for the device, once for each of the family
    ask: Callable[[str, Row], tuple[Predict, float]]


class Engine(Document):
    """An engine with a prefix cache, and the load it was measured under."""

    framework: Framework
    served: Served


def _gemm(stem: str, row: Row) -> tuple[Predict, float]:
    return lambda efficiency: gemm_seconds(kernels_of(device_of(stem), efficiency), row), latency(row)


def _attention(stem: str, row: Row) -> tuple[Predict, float]:
    return lambda efficiency: attention_seconds(kernels_of(device_of(stem), efficiency), row), latency(row)


def _collective(stem: str, row: Row) -> tuple[Predict, float]:
    group = group_of(row)
    operation, num_bytes, cluster = OPERATIONS[row["op_name"]], message_bytes(row), cluster_of(device_of(stem), 8)
    return lambda efficiency: Network(cluster, efficiency).seconds(operation, group, num_bytes)[0], latency(row)


def _iteration(_stem: str, row: Row) -> tuple[Predict, float]:
    asked = _vtrain(row)
    return (
        lambda efficiency: iteration_seconds(asked.iteration, asked.cluster, "bf16", efficiency).total,
        asked.measured,
    )


def _host(_stem: str, row: Row) -> tuple[Predict, float]:
    asked = _vtrain(row)

    def predict(framework: Framework) -> float:
        return iteration_seconds(replace(asked.iteration, framework=framework), asked.cluster, "bf16").total

    return predict, asked.measured


def _vtrain(row: Row) -> Question:
    if not row["dataset"].startswith("vtrain"):
        raise Skip("not fitted")
    return question(row)


def _served(_stem: str, row: Row) -> tuple[Predict, float]:
    if not is_dense_hopper(row) or row["backend"] != "trtllm":
        raise Skip("not fitted")
    serving, rows = serving_point(row)
    live = min(rows, serving.slots())

    def predict(framework: Framework) -> float:
        return replace(serving, framework=framework).round_seconds(live).total

    return predict, number(row, "silicon_tpot_ms") / 1e3


def _cached(_stem: str, row: Row) -> tuple[Predict, float]:
    if not is_dense_hopper(row) or row["backend"] != "vllm":
        raise Skip("not fitted")
    serving, rows = serving_point(row)
    live = min(rows, serving.slots())

    def predict(engine: Engine) -> float:
        fresh = engine.served.fresh_prompts_per_second
        asked = replace(serving, framework=engine.framework, fresh_prompts_per_second=fresh)
        return asked.round_seconds(live).total

    return predict, number(row, "silicon_tpot_ms") / 1e3


def _calls(_stem: str, row: Row) -> tuple[Predict, float]:
    if row["system"] != "ReaL-Heuristic":
        raise Skip("not fitted")
    experiment = experiment_of(row)
    return lambda framework: experiment.best(framework).cost.total, number(row, "step_time_s")


_PROTOCOLS = tuple(f"protocols.{i}.{name}" for i in range(3) for name in ("start_seconds", "step", "link_bytes"))
LAWS = {
    "gemm": Law(
        constants=(
            *("gemm_flops", "gemm_bytes", "gemm_prologue", "gemm_split", "gemm_tile_cost", "gemm_ridge"),
            "kernel_seconds",
        ),
        files=("primitives/{}_gemm_bf16",),
        ask=_gemm,
    ),
    "attention": Law(
        constants=tuple(f"attention_{name}" for name in ("flops", "tile", "tail", "bytes", "ridge", "seconds")),
        files=("primitives/{}_attention_context_bf16",),
        ask=_attention,
    ),
    "decoding": Law(
        constants=tuple(
            f"decoding_{name}" for name in ("bytes", "block", "row_seconds", "head_seconds", "ridge", "seconds")
        ),
        files=("primitives/{}_attention_generation_bf16",),
        ask=_attention,
    ),
    "collectives": Law(constants=_PROTOCOLS, files=("primitives/{}_comm",), ask=_collective),
    "training": Law(
        constants=("sustained", "elementwise_bytes", "protocols.2.fabric_bytes"),
        files=("megatron_training", "megatron_training_vtrain_single_node"),
        ask=_iteration,
    ),
    "host": Law(
        constants=("launch_seconds",),
        files=("megatron_training", "megatron_training_vtrain_single_node"),
        ask=_host,
    ),
    "serving": Law(constants=("round_seconds", "row_seconds", "start_share"), files=("serving_points",), ask=_served),
    "cached": Law(
        constants=("framework.round_seconds", "framework.row_seconds", "served.fresh_prompts_per_second"),
        files=("serving_points",),
        ask=_cached,
    ),
    "calls": Law(constants=("launch_seconds", "call_seconds"), files=("rlhf_steps",), ask=_calls),
}
_OF_FRAMEWORKS = ("host", "serving", "cached", "calls")


def main() -> int:
    """The exit code: 0, or 2 for a folder or a name that is not known."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fidelity.fit", description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--law", choices=sorted(LAWS), required=True)
    parser.add_argument(
        "--of", required=True, help=f"a family of devices, or a framework for {', '.join(_OF_FRAMEWORKS)}"
    )
    parser.add_argument("--rounds", type=int, default=150, help="steps of the simplex")
    arguments = parser.parse_args()
    try:
        return _print_fit(arguments.law, arguments.of, arguments.data, arguments.rounds)
    except BadInput as problem:
        print(f"error: {problem}", file=sys.stderr)
        return problem.exit_code


def _print_fit(name: str, owner: str, directory: Path, rounds: int) -> int:
    law = LAWS[name]
    start: Document
    devices: tuple[str, ...]
    if name in _OF_FRAMEWORKS:
        framework, devices = framework_named(owner), ("",)
        start = Engine(framework=framework, served=assumed().served) if name == "cached" else framework
    elif owner in _FAMILIES:
        start, devices = efficiency_of("cuda", _DEVICES[owner]), _FAMILIES[owner]
    else:
        raise BadInput(f"family {owner!r} is not fitted here; {suggestion(owner, _FAMILIES)}")
    halves: tuple[list[Asked], list[Asked]] = ([], [])
    for row, asked in _asked(law, devices, directory):
        halves[is_kept(row)].append(asked)
    random.Random(0).shuffle(halves[0])
    fitted, kept = halves[0][:_MAX_ROWS], halves[1]
    found = fit(law.constants, fitted, start, rounds=rounds)
    for constant in law.constants:
        print(f"    {constant}: {_value(found.model_dump(), constant):.4g}")
    for what, rows in (("fitted", fitted), ("kept", kept)):
        print(f"# {what}: {len(rows)} rows, mean error {error(rows, start):.4f} before, {error(rows, found):.4f} after")
    return 0


def is_kept(row: Row) -> bool:
    """Whether a row is kept aside, never fitted: the same row always is, wherever it stands in a file."""
    text = json.dumps(sorted(row.items()))
    return hashlib.sha256(text.encode()).digest()[0] % 2 == 1


def fit(constants: Sequence[str], rows: Sequence[tuple[Predict, float]], start: D, *, rounds: int) -> D:
    """The constants that minimise the mean absolute logarithm of predicted over measured."""

    def with_values(values: NDArray[np.float64]) -> D:
        tree = start.model_dump(mode="json")
        for constant, value in zip(constants, values.tolist(), strict=True):
            _set_value(tree, constant, value)
        return type(start).model_validate_json(json.dumps(tree))

    def loss(values: NDArray[np.float64]) -> float:
        try:
            document = with_values(values)
        except ValidationError:
            return float("inf")
        return float(np.mean([abs(np.log(predict(document) / measured)) for predict, measured in rows]))

    first = [_value(start.model_dump(), constant) for constant in constants]
    best, _ = minimise(loss, first, rounds=rounds)
    return with_values(best)


def error(rows: Sequence[tuple[Predict, float]], document: Document) -> float:
    """Mean absolute relative error."""
    return float(np.mean([abs(predict(document) / measured - 1) for predict, measured in rows]))


def _value(tree: Any, constant: str) -> float:
    for part in constant.split("."):
        tree = tree[int(part)] if part.isdigit() else tree[part]
    return float(tree)


def _set_value(tree: Any, constant: str, value: float) -> None:
    *path, last = constant.split(".")
    for part in path:
        tree = tree[int(part)] if part.isdigit() else tree[part]
    tree[last] = value


def _asked(law: Law, devices: Sequence[str], directory: Path) -> Iterator[tuple[Row, Asked]]:
    files = row_files(directory)
    for stem in dict.fromkeys(name.format(device) for device in devices for name in law.files):
        for row in read_rows(files[stem]):
            try:
                yield row, law.ask(stem, row)
            except Skip:
                continue


if __name__ == "__main__":
    sys.exit(main())
