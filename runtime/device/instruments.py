"""Measurements of a device while it is profiled: time, memory, clock rate and temperature.

Everything that differs between a CPU and a CUDA device is here, as functions that a test can replace.
"""

from __future__ import annotations

import math
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meshwright.profiles.errors import RunFailed
from meshwright.profiles.harness import DeviceState, Timer, clock_timer, event_timer
from meshwright.runtime.device import host, used_memory

_SECONDS_BETWEEN_QUERIES = 5.0
"""A query of the driver takes a tenth of a second; clock rate and temperature change more slowly."""

_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "cannot allocate memory")
"""Messages of torch's CUDA allocator, its CPU allocator, and the system's."""


@dataclass(frozen=True, kw_only=True)
class Instruments:
    """Measuring functions of a device.

    `reset_peak` returns the bytes in use, `peak_bytes` the maximum since then; `release` empties the allocator's cache.
    """

    timer: Timer
    reset_peak: Callable[[], int]
    peak_bytes: Callable[[], int]
    release: Callable[[], None]
    conditions: Callable[[], DeviceState]


def instruments() -> Instruments:
    """Return the instruments of the device that this process computes on."""
    on_cuda = host.on_cuda()
    return Instruments(
        timer=event_timer(_event) if on_cuda else clock_timer(time.perf_counter, host.synchronise),
        reset_peak=used_memory.reset_peak,
        peak_bytes=used_memory.peak_bytes,
        release=used_memory.release,
        conditions=Thermometer(query_device, clock=time.monotonic) if on_cuda else DeviceState,
    )


class Thermometer:
    """Clock rate and temperature of the device, queried again only after some seconds."""

    def __init__(self, query: Callable[[str], list[str]], *, clock: Callable[[], float]) -> None:
        self._query, self._clock = query, clock
        self._queried_at, self._conditions = -math.inf, DeviceState()

    def __call__(self) -> DeviceState:
        if self._clock() - self._queried_at >= _SECONDS_BETWEEN_QUERIES:
            values = [_integer(text) for text in self._query("clocks.sm,temperature.gpu")]
            self._conditions = DeviceState(*values) if len(values) == 2 else DeviceState()
            self._queried_at = self._clock()
        return self._conditions


def query_device(fields: str, run: Callable[..., Any] = subprocess.run) -> list[str]:
    """Return nvidia-smi's values of these fields for this process's device; empty if it is absent or fails."""
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits", f"--id={_device_id()}"]
    try:
        result = run(command, capture_output=True, text=True, check=False, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [text.strip() for text in result.stdout.strip().split(",")] if result.returncode == 0 else []


def why_failed(error: Exception) -> str | None:
    """Return the reason to record for a timed pass that raised `error`; None if the device is not the cause."""
    first = str(error).splitlines()[0] if str(error) else type(error).__name__
    if isinstance(error, torch.OutOfMemoryError | MemoryError) or any(s in str(error).lower() for s in _OUT_OF_MEMORY):
        return f"out of memory: {first}"
    return first if isinstance(error, RunFailed | FloatingPointError) else None


def is_finite(output: object) -> bool:
    """Return True if every number in an output is finite: tensors [...], floats, nested lists and mappings."""
    if isinstance(output, Tensor):
        return bool(torch.isfinite(output).all())
    if isinstance(output, float):
        return math.isfinite(output)
    if isinstance(output, Mapping):
        return all(is_finite(value) for value in output.values())
    return all(is_finite(value) for value in output) if isinstance(output, Iterable) else True


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)


def _device_id() -> str:
    """Return the UUID of this process's device, which CUDA_VISIBLE_DEVICES does not change, or 0 without a device."""
    if not host.num_cuda_devices():
        return "0"
    return f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"


def _integer(text: str) -> int | None:
    return int(text) if text.lstrip("-").isdigit() else None
