"""What a device is watched with: its driver's answers, its failures, and numbers that are finite."""

from __future__ import annotations

import subprocess
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from meshwright.profiles.errors import RunFailed
from meshwright.profiles.harness import DeviceState
from meshwright.runtime.device.instruments import Thermometer, is_finite, query_device, why_failed


def answers(text: str, code: int = 0) -> Any:
    return lambda *_, **__: SimpleNamespace(stdout=text, returncode=code)


def test_the_driver_is_asked_by_fields() -> None:
    assert query_device("clocks.sm,temperature.gpu", answers("1980, 54\n")) == ["1980", "54"]


@pytest.mark.parametrize("error", [FileNotFoundError(), subprocess.TimeoutExpired("nvidia-smi", 10)])
def test_a_machine_without_a_driver_answers_nothing(error: Exception) -> None:
    def run(*_: object, **__: object) -> None:
        raise error

    assert query_device("driver_version", run) == []
    assert query_device("driver_version", answers("No devices were found", code=6)) == []


def test_conditions_are_asked_for_every_few_seconds_and_what_is_not_told_is_unknown() -> None:
    now, asked = [0.0], []

    def query(fields: str) -> list[str]:
        asked.append(fields)
        return [["1980", "54"], ["1755", "[N/A]"], []][len(asked) - 1]

    thermometer = Thermometer(query, clock=lambda: now[0])
    assert thermometer() == DeviceState(1980, 54)
    now[0] = 1.0
    assert thermometer() == DeviceState(1980, 54)
    now[0] = 10.0
    assert thermometer() == DeviceState(1755, None)
    now[0] = 20.0
    assert thermometer() == DeviceState(None, None)
    assert len(asked) == 3


def test_want_of_memory_and_numbers_that_are_not_finite_are_the_devices_failures() -> None:
    cpu = RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes")
    assert (why_failed(torch.OutOfMemoryError("no room\nat all")) or "") == "out of memory: no room"
    assert (why_failed(cpu) or "").startswith("out of memory: [enforce fail]")
    assert why_failed(RunFailed("the gradient norm is nan")) == "the gradient norm is nan"
    assert why_failed(RuntimeError("shapes do not match")) is None


def test_numbers_are_looked_for_at_any_depth() -> None:
    good, bad = torch.ones(2), torch.tensor([1.0, torch.nan])
    assert is_finite([{"loss": good}, 1.5, None, 3])
    assert not is_finite([{"loss": good, "kl": bad}])
    assert not is_finite([[bad]])
    assert not is_finite(float("inf"))
