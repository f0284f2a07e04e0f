"""Diagnosis of what a thread waits for, from its stack: a collective and its ranks, a message, or a line of code."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import torch.distributed as dist

_COLLECTIVES = ("torch/distributed/distributed_c10d.py",)
_MESSAGES = (
    "runtime/messages/",
    "runtime/training/refit.py",
    "megatron/core/pipeline_parallel/",
    "megatron/core/distributed/",
)
"""Files and folders in which a rank waits for another one outside torch's collective calls."""
_PEERS = ("source", "src", "dst", "peer")
"""Argument names for the other rank in functions that send and receive."""


class CodeLocation(NamedTuple):
    """The place in the code where a thread is, and whether it waits there for another rank."""

    description: str
    waits_for_others: bool


def main_thread_location() -> CodeLocation:
    """Return where the main thread of this process is."""
    ident = threading.main_thread().ident
    frame = sys._current_frames().get(ident) if ident is not None else None
    return location_of(frame) if frame is not None else CodeLocation("nowhere", waits_for_others=False)


def location_of(frame: FrameType) -> CodeLocation:
    """Return where the thread is whose innermost frame this is."""
    place = f"{frame.f_code.co_name} ({Path(frame.f_code.co_filename).name}:{frame.f_lineno})"
    stack, outer = [frame], frame
    while outer.f_back is not None:
        outer = outer.f_back
        stack.append(outer)
    # Collectives of objects call other collectives, so the outermost call is the one to name.
    calls = [one for one in stack if one.f_code.co_filename.endswith(_COLLECTIVES)]
    if calls:
        return CodeLocation(f"{calls[-1].f_code.co_name} {_partners(calls[-1])}", waits_for_others=True)
    message = next((one for one in stack[:2] if any(part in one.f_code.co_filename for part in _MESSAGES)), None)
    if message:
        return CodeLocation(f"{place} {_partners(message)}".strip(), waits_for_others=True)
    return CodeLocation(place, waits_for_others=False)


def _partners(frame: FrameType) -> str:
    """Return the other ranks of a call as far as its arguments name them, else an empty string."""
    peer = next((value for name in _PEERS if isinstance(value := frame.f_locals.get(name), int)), None)
    if peer is not None:
        return f"with rank {peer}"
    group = frame.f_locals.get("group") or dist.group.WORLD
    try:
        ranks = dist.get_process_group_ranks(group)
    except (ValueError, KeyError, RuntimeError, AttributeError):
        return ""
    return f"of ranks {', '.join(map(str, ranks))}" if len(ranks) <= 16 else f"of {len(ranks)} ranks from {ranks[0]} on"
