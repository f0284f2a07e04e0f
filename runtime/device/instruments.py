"""What a device is watched with while bodies run on it: a timer, its memory, its clock and temperature.

All that differs between a CPU and a CUDA device is here, as functions that a test can replace.
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
from meshwright.profiles.harness import Conditions, Timer, clock_timer, event_timer
from meshwright.runtime.device import host, used_memory

_SECONDS_BETWEEN_QUERIES = 5.0
"""Asking the driver takes a tenth of a second; clock and temperature change more slowly."""

_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "cannot allocate memory")
"""How torch's allocators say so: the one for CUDA, the one for CPUs, and the system's."""


@dataclass(frozen=True, kw_only=True)
class Instruments:
    """`reset_peak` returns the bytes in use, `peak_bytes` the most since then; `release` empties the allocator."""

    timer: Timer
    reset_peak: Callable[[], int]
    peak_bytes: Callable[[], int]
    release: Callable[[], None]
    conditions: Callable[[], Conditions]


def instruments() -> Instruments:
    """Those of the device that this process computes on."""
    on_cuda = host.on_cuda()
    return Instruments(
        timer=event_timer(_mark) if on_cuda else clock_timer(time.perf_counter, host.synchronise),
        reset_peak=used_memory.reset_peak,
        peak_bytes=used_memory.peak_bytes,
        release=used_memory.release,
        conditions=Thermometer(query_device, clock=time.monotonic) if on_cuda else Conditions,
    )


class Thermometer:
    """Conditions asked for again only when the last answer is some seconds old."""

    def __init__(self, query: Callable[[str], list[str]], *, clock: Callable[[], float]) -> None:
        self._query, self._clock = query, clock
        self._asked, self._known = -math.inf, Conditions()

    def __call__(self) -> Conditions:
        if self._clock() - self._asked >= _SECONDS_BETWEEN_QUERIES:
            answer = [_whole(text) for text in self._query("clocks.sm,temperature.gpu")]
            self._known = Conditions(*answer) if len(answer) == 2 else Conditions()
            self._asked = self._clock()
        return self._known


def query_device(fields: str, run: Callable[..., Any] = subprocess.run) -> list[str]:
    """What nvidia-smi answers for these fields of this process's device; nothing where it is absent or refuses."""
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits", f"--id={_identity()}"]
    try:
        found = run(command, capture_output=True, text=True, check=False, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [text.strip() for text in found.stdout.strip().split(",")] if found.returncode == 0 else []


def why_failed(error: Exception) -> str | None:
    """The reason to record for a body that raised; None for an error that is not the device's."""
    first = str(error).splitlines()[0] if str(error) else type(error).__name__
    if isinstance(error, torch.OutOfMemoryError | MemoryError) or any(s in str(error).lower() for s in _OUT_OF_MEMORY):
        return f"out of memory: {first}"
    return first if isinstance(error, RunFailed | FloatingPointError) else None


def is_finite(output: object) -> bool:
    """Whether every number that a body returned is finite, in tensors, lists and mappings of any depth."""
    if isinstance(output, Tensor):
        return bool(torch.isfinite(output).all())
    if isinstance(output, float):
        return math.isfinite(output)
    if isinstance(output, Mapping):
        return all(is_finite(value) for value in output.values())
    return all(is_finite(value) for value in output) if isinstance(output, Iterable) else True


def _mark() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)


def _identity() -> str:
    """The device of this process by its own name, which CUDA_VISIBLE_DEVICES does not change; the first without one."""
    if not host.num_cuda_devices():
        return "0"
    return f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"


def _whole(text: str) -> int | None:
    return int(text) if text.lstrip("-").isdigit() else None
