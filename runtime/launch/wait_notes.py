"""Messages of a node that waits for other nodes: for which, since when and until when."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

from torch.distributed import DistError

from meshwright.runtime.launch.rendezvous import Rendezvous

_FIRST_SECONDS, _NEXT_SECONDS = 5.0, 60.0
"""Seconds before the first message, which nodes that start together never see, and between two messages."""


@contextmanager
def waiting_messages(note: Callable[[], str]) -> Iterator[None]:
    """Context in which `note()` is written to standard error after a while and then regularly, unless it is empty."""
    closed = threading.Event()

    def write() -> None:
        pause = _FIRST_SECONDS
        while not closed.wait(pause):
            with suppress(DistError):  # the store is gone, which the waiting thread notices too
                if message := note():
                    sys.stderr.write(f"{message}\n")
                    sys.stderr.flush()
            pause = _NEXT_SECONDS

    thread = threading.Thread(target=write, name="wait notes", daemon=True)
    thread.start()
    try:
        yield
    finally:
        closed.set()
        thread.join()


def waiting_message(place: Rendezvous, began: float, came: int, missing: Sequence[int]) -> str:
    """Return the message of a node that waits since `began` (of `time.time()`); empty when all nodes have come.

    `came` counts the nodes that have come, itself included; `missing` are the node ranks not yet present, if nodes
    have ranks.
    """
    since, until = (time.strftime("%H:%M:%S", time.localtime(at)) for at in (began, began + place.timeout_seconds))
    missing_ranks = (
        f" (node rank {', '.join(map(str, missing[:8]))}{', ...' if len(missing) > 8 else ''})" if missing else ""
    )
    left = place.nodes - came
    if left <= 0:
        return ""
    nodes = "1 node" if left == 1 else f"{left} nodes"
    return (
        f"waiting at {place.endpoint} for {nodes} of {place.nodes}{missing_ranks} since {since}, until {until}: start "
        "`meshwright run` there with the same --rendezvous."
    )
