"""How much memory this process has used at most, on its device or, on a CPU, in its resident set.

A CPU's allocator keeps what was freed and would hand it out again unseen, so it returns it before a peak is counted.
Of the resident set, pages of files are left out: they are the code of libraries, which is mapped as it is first used
and which all ranks of a host share. A plan has no term for them, and a first step maps tens of MiB of them.
"""

from __future__ import annotations

import ctypes
import gc
from functools import cache
from pathlib import Path

import torch

from meshwright.runtime.device import host

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"  # proc(5): resets the peak resident set size to the current one


def reset_peak() -> int:
    """Forgets the peak so far; returns the bytes in use now."""
    if host.on_cuda():
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    return_freed()
    _CLEAR.write_text(_RESET_PEAK)
    return bytes_in_use()


def bytes_in_use() -> int:
    """What this process has on its device or, on a CPU, in its resident set."""
    return torch.cuda.memory_allocated() if host.on_cuda() else _resident("VmRSS") - _resident("RssFile")


def peak_bytes() -> int:
    """The most bytes in use since the last reset; on a CPU less what has been mapped of files since they were."""
    if host.on_cuda():
        return torch.cuda.max_memory_allocated()
    return _resident("VmHWM") - _resident("RssFile")


def return_freed() -> None:
    """Gives back to the host what its allocator keeps in pages that hold nothing any more."""
    _libc().malloc_trim(0)


def release() -> None:
    """Gives back to the device what the allocator keeps; after a failure for want of memory."""
    gc.collect()
    if host.on_cuda():
        torch.cuda.empty_cache()
    else:
        return_freed()


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL("libc.so.6")


def _resident(field: str) -> int:
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(f"{field}:"))
    return int(line.split()[1]) * 1024
