"""Peak memory of this process, on its device or, on a CPU, in its resident set.

On a CPU the allocator's cached memory is returned to the system before each measurement, or reusing it would go
unnoticed. File-backed pages of the resident set do not count: they are the code of libraries, mapped at first use and
shared by all ranks of a host. A plan has no term for them, and the first step of a run maps tens of MiB of them.
"""

from __future__ import annotations

import ctypes
import gc
from contextlib import suppress
from functools import cache
from pathlib import Path

import torch

from meshwright.runtime.device import host

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"  # proc(5): resets the peak resident set size to the current one


def reset_peak() -> int:
    """Reset the peak and return the bytes in use now."""
    if host.on_cuda():
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    trim_host_memory()
    _CLEAR.write_text(_RESET_PEAK)
    return bytes_in_use()


def bytes_in_use() -> int:
    """Return the bytes that this process has on its device or, on a CPU, in its resident set without file pages."""
    return torch.cuda.memory_allocated() if host.on_cuda() else _resident("VmRSS") - _resident("RssFile")


def resident_bytes(process: int) -> int:
    """Return the resident bytes of another process, without pages of files; 0 if it has ended."""
    with suppress(FileNotFoundError, ProcessLookupError, StopIteration):
        status = Path(f"/proc/{process}/status")
        return _resident("VmRSS", status) - _resident("RssFile", status)
    return 0


def peak_bytes() -> int:
    """Return the most bytes in use since the last reset; on a CPU without the file pages mapped now."""
    if host.on_cuda():
        return torch.cuda.max_memory_allocated()
    return _resident("VmHWM") - _resident("RssFile")


def tensor_bytes() -> int:
    """Return the bytes of all tensors of this process, each storage once.

    Tensors that the garbage collector was told to freeze are not found. Those without memory of their own do not count:
    meta tensors, and the stand-ins that torch.compile traces with.
    """
    tensors = (one for one in gc.get_objects() if issubclass(type(one), torch.Tensor))
    storages = (one.untyped_storage() for one in tensors)
    return sum({one.data_ptr(): one.nbytes() for one in storages if one.device.type == "cpu"}.values())


def trim_host_memory() -> None:
    """Return the free pages of the host's allocator to the system."""
    _libc().malloc_trim(0)


def release() -> None:
    """Return the allocator's cached memory to the device or, on a CPU, to the system."""
    gc.collect()
    if host.on_cuda():
        torch.cuda.empty_cache()
    else:
        trim_host_memory()


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL("libc.so.6")


def _resident(field: str, status: Path = _STATUS) -> int:
    line = next(line for line in status.read_text().splitlines() if line.startswith(f"{field}:"))
    return int(line.split()[1]) * 1024
