"""Who waits for other nodes says so: for whom, since when and until when."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

from torch.distributed import DistError

from meshwright.runtime.launch.rendezvous import Rendezvous

_FIRST_SECONDS, _NEXT_SECONDS = 5.0, 60.0
"""Until the first note, for nodes that are started together take that long, and between two."""


@contextmanager
def notes_on_standard_error(note: Callable[[], str]) -> Iterator[None]:
    """Within it a note is written after a while, and again from time to time, where there is one."""
    over = threading.Event()

    def write() -> None:
        pause = _FIRST_SECONDS
        while not over.wait(pause):
            with suppress(DistError):  # the store is gone, which the waiting thread finds too
                if told := note():
                    sys.stderr.write(f"{told}\n")
                    sys.stderr.flush()
            pause = _NEXT_SECONDS

    thread = threading.Thread(target=write, name="wait notes", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def note_of(place: Rendezvous, began: float, came: int, missing: Sequence[int]) -> str:
    """For a node that waits since `began`, in seconds of time.time(), when so many nodes have come, itself among them;
    empty when all have.

    `missing` are the node ranks that nobody has, where nodes have some.
    """
    since, until = (time.strftime("%H:%M:%S", time.localtime(at)) for at in (began, began + place.patience_seconds))
    who = f" (node rank {', '.join(map(str, missing[:8]))}{', ...' if len(missing) > 8 else ''})" if missing else ""
    left = place.nodes - came
    if left <= 0:
        return ""
    nodes = "1 node" if left == 1 else f"{left} nodes"
    return (
        f"waiting at {place.endpoint} for {nodes} of {place.nodes}{who} since {since}, until {until}: start "
        "`meshwright run` there with the same --rendezvous."
    )
