"""What a thread waits for, from its stack: a collective with its ranks, a message, or a line of code."""

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
"""Files, or folders of them, in which a rank waits for another one without a call of torch's that is a collective."""
_PEERS = ("source", "src", "dst", "peer")
"""What functions that send and receive call the other rank."""


class Whereabouts(NamedTuple):
    """Where a thread is, in words, and whether it is there for the sake of another rank."""

    told: str
    is_for_others: bool


def main_wait() -> Whereabouts:
    """Of the main thread of this process."""
    ident = threading.main_thread().ident
    frame = sys._current_frames().get(ident) if ident is not None else None
    return wait_of(frame) if frame is not None else Whereabouts("nowhere", is_for_others=False)


def wait_of(frame: FrameType) -> Whereabouts:
    """Of the thread whose innermost frame this is."""
    place = f"{frame.f_code.co_name} ({Path(frame.f_code.co_filename).name}:{frame.f_lineno})"
    stack, found = [frame], frame
    while found.f_back is not None:
        found = found.f_back
        stack.append(found)
    # A collective of objects is made of others, so the outermost one is what was called.
    calls = [one for one in stack if one.f_code.co_filename.endswith(_COLLECTIVES)]
    if calls:
        return Whereabouts(f"{calls[-1].f_code.co_name} {_partners(calls[-1])}", is_for_others=True)
    message = next((one for one in stack[:2] if any(part in one.f_code.co_filename for part in _MESSAGES)), None)
    if message:
        return Whereabouts(f"{place} {_partners(message)}".strip(), is_for_others=True)
    return Whereabouts(place, is_for_others=False)


def _partners(frame: FrameType) -> str:
    """The other ranks of a call, as far as its arguments tell."""
    peer = next((value for name in _PEERS if isinstance(value := frame.f_locals.get(name), int)), None)
    if peer is not None:
        return f"with rank {peer}"
    group = frame.f_locals.get("group") or dist.group.WORLD
    try:
        ranks = dist.get_process_group_ranks(group)
    except (ValueError, KeyError, RuntimeError, AttributeError):
        return ""
    return f"of ranks {', '.join(map(str, ranks))}" if len(ranks) <= 16 else f"of {len(ranks)} ranks from {ranks[0]} on"
