"""Profiles tensor-parallel shards of Llama-3.1-8B and Qwen2.5-1.5B here, and scores them by operators NVIDIA measured.

    python -m benchmarks.accelerator.shards --out DIR --device h200 [--minutes 8]

Each model has a job on eight ranks of the device, so its profile has the shards of every tp that divides it: 1, 2, 4
and 8 of the first, 1 and 2 of the second, which has two heads of keys and values. The same points are then added up
from the operators that `aiconfigurator-core` carries for the device. The profiles are DIR/<model>/table.json.
"""

from __future__ import annotations

import argparse
import datetime
import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from benchmarks.accelerator.jobs import SIZES
from benchmarks.fidelity.score import Answer, Bar, Score
from meshwright.cost_models.measurements.imported import BODIES, imported_table
from meshwright.planner.plan.job import read_job, resolve
from meshwright.profiles.aiconfigurator import read_operators
from meshwright.profiles.algorithms import PPO_GRAPH
from meshwright.profiles.cluster import Cluster, of_one_kind
from meshwright.profiles.table import Body, Table
from meshwright.runtime.profiling.profiling import profile_job

_COMMON: dict[str, Any] = {"hidden_act": "silu", "max_position_embeddings": 131072}
MODELS: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": _COMMON
    | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
    },
    "qwen2.5-1.5b": _COMMON
    | SIZES["1.5B"]
    | {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": True,
    },
}
"""https://huggingface.co/meta-llama/Llama-3.1-8B and https://huggingface.co/Qwen/Qwen2.5-1.5B, config.json of each."""


def main() -> None:
    about = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.accelerator.shards", description=about)
    parser.add_argument("--out", type=Path, required=True, help="directory for the jobs and their tables")
    parser.add_argument("--device", default="h200", help="the device of this machine, as jobs name it")
    parser.add_argument("--minutes", type=float, default=8.0, help="time to profile both")
    asked = parser.parse_args()
    print("| model | body | points | median error | mean | 90th percentile | bias |")
    print("|---|---|---|---|---|---|---|")
    for name in MODELS:
        directory = asked.out / name
        facts = resolve(read_job(write_job(directory, name, asked.device)), directory)
        table = profile_job(facts, directory / "table.json", minutes=asked.minutes / len(MODELS))
        for score in against(table, _added_up(table, of_one_kind(facts.cluster, "compare"), facts.precision)):
            errors = f"{score.median:.1%} | {score.mean:.1%} | {score.p90:.1%} | {score.bias:+.1%}"
            print(f"| {name} | {score.name} | {score.used} | {errors} |", flush=True)


def write_job(directory: Path, name: str, device: str) -> Path:
    """A job with four models of one shape, on a node of eight of the device."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(MODELS[name]), encoding="utf-8")
    job = {
        "models": {role.value: {"path": "."} for role in PPO_GRAPH.roles},
        "cluster": {"device": device, "nodes": 1, "ranks_per_node": 8, "network": "ib-ndr-400"},
        "precision": "bf16",
        "workload": {
            "batch_size": 256,
            "prompt": {"max": 1024, "fixed": 1024},
            "response": {"max": 2048, "fixed": 1024},
        },
    }
    path = directory / "job.yaml"
    path.write_text(yaml.safe_dump(job), encoding="utf-8")
    return path


def _added_up(table: Table, cluster: Cluster, precision: str) -> Table:
    """The table's points from the operators of its device."""
    wanted = [measurement.point for measurement in table.measurements if measurement.point.body in BODIES]
    operators, date = read_operators(cluster.device.name), datetime.date.today().isoformat()
    return imported_table(operators, wanted, cluster, precision, date)


def against(measured: Table, added_up: Table) -> Iterable[Score]:
    """The second table's times as predictions of the first's, point by point where both have one, for each body."""
    predicted = {m.point: m.seconds for m in added_up.measurements if m.seconds}
    for body in (*BODIES, None):
        answers = tuple(
            Answer(label=str(m.point), measured=m.seconds, predicted=seconds)
            for m in measured.measurements
            if body in (None, m.point.body) and m.seconds and (seconds := predicted.get(m.point))
        )
        yield Score(name=_name(body), bar=Bar(), answers=answers, skipped=Counter())


def _name(body: Body | None) -> str:
    return body.value if body else "all"


if __name__ == "__main__":
    main()
