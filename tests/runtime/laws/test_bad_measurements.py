"""What a user can get wrong about hardware and models: one sentence each, exit code 2, and nothing is written."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.runtime.command import Call
from tests.runtime.measured import measured_table


@pytest.fixture
def table(job: Path, tmp_path: Path) -> Path:
    return measured_table(job, tmp_path / "table.json")


def edited(path: Path, edit: Callable[[dict[str, Any]], None]) -> Path:
    document = json.loads(path.read_text())
    edit(document)
    path.write_text(json.dumps(document))
    return path


def typed_device(job: Path, folder: Path, **changes: object) -> Path:
    """The job on a device that its user typed in."""
    document = yaml.safe_load(job.read_text())
    device = {
        "name": "ours",
        "kind": "cuda",
        "memory_bytes": 2**36,
        "memory_bytes_per_second": 2.0e12,
        "flops_per_second": {"fp32": 1.0e14, "bf16": 1.0e15},
        "launch_seconds": 5.0e-6,
        "source": "its datasheet",
        **changes,
    }
    document["cluster"] = {"device": device, "ranks_per_node": 2}
    document["models"] = {
        role: {"path": str(job.parent / source["path"])} for role, source in document["models"].items()
    }
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


def refused(call: Call, output: Path, *arguments: object) -> str:
    """The one sentence that the command ends with; nothing is there afterwards."""
    outcome = call(*arguments, "-o", output)
    assert outcome.code == 2
    assert not output.exists()
    assert not list(output.parent.glob(f".{output.name}*"))
    assert outcome.err.startswith("error: ")
    assert outcome.err.count("\n") == 1
    return outcome.err


def test_a_good_table_plans(call: Call, job: Path, table: Path, tmp_path: Path) -> None:
    outcome = call("plan", job, "--profile", table, "-o", tmp_path / "plan.json")
    assert outcome.code == 0
    assert "spread" not in outcome.out


def test_a_plan_says_when_its_table_was_measured_on_a_busy_machine(
    call: Call, job: Path, table: Path, tmp_path: Path
) -> None:
    table.write_text(table.read_text().replace('"spread_seconds": 0.0', '"spread_seconds": 0.7'))
    outcome = call("plan", job, "--profile", table, "-o", tmp_path / "plan.json")
    assert outcome.code == 0
    assert "repeats of the measured costs spread by 70% (median)" in outcome.out


def test_a_table_for_another_device_is_refused(call: Call, job: Path, table: Path, tmp_path: Path) -> None:
    edited(table, lambda document: document["provenance"].update(device="h200"))
    said = refused(call, tmp_path / "plan.json", "plan", job, "--profile", table)
    assert "the table was measured on 'h200' and the cluster has" in said
    assert "profile that device, or plan without a table." in said


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-1.0"])
def test_a_number_in_a_table_that_is_no_time_is_refused(
    call: Call, job: Path, table: Path, tmp_path: Path, number: str
) -> None:
    text = table.read_text().replace('"seconds": 1.0', f'"seconds": {number}', 1)
    table.write_text(text)
    said = refused(call, tmp_path / "plan.json", "plan", job, "--profile", table)
    assert str(table) in said
    line = 1 + text[: text.index(f'"seconds": {number}')].count("\n")
    assert ("seconds" in said) or f"{number} at line {line} is not a finite number" in said


@pytest.mark.parametrize("key", ["memory_bytes_per_second", "memory_bytes"])
def test_a_negative_figure_of_a_typed_device_is_refused(call: Call, job: Path, tmp_path: Path, key: str) -> None:
    said = refused(call, tmp_path / "plan.json", "plan", typed_device(job, tmp_path, **{key: -1}))
    assert f"{key} is -1" in said
    assert "greater than 0" in said


def test_a_negative_bandwidth_of_a_typed_network_is_refused(call: Call, job: Path, tmp_path: Path) -> None:
    path = typed_device(job, tmp_path)
    document = yaml.safe_load(path.read_text())
    document["cluster"]["network"] = {"seconds": 1.0e-6, "bytes_per_second": -1.0e9}
    path.write_text(yaml.safe_dump(document))
    said = refused(call, tmp_path / "plan.json", "plan", path)
    assert "bytes_per_second is -1000000000.0" in said


@pytest.mark.parametrize("command", ["plan", "profile"])
@pytest.mark.parametrize("heads", [None, 0, -4, "four"])
def test_a_model_config_without_heads_is_refused(
    call: Call, job: Path, tmp_path: Path, command: str, heads: object
) -> None:
    config = json.loads((job.parent / "actor" / "config.json").read_text())
    config["num_attention_heads"] = heads
    if heads is None:
        del config["num_attention_heads"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    document = yaml.safe_load(job.read_text())
    document["models"] = {
        role: {"path": str(job.parent / source["path"])} for role, source in document["models"].items()
    } | {"actor": {"path": str(tmp_path / "config.json")}}
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(document))
    said = refused(call, tmp_path / "out.json", command, path)
    assert f"config key 'num_attention_heads' is {heads!r}; it must be a positive integer." in said
