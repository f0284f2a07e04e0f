"""A node that waits for another, as a process: `python -m tests.runtime.launch.waiting_node PORT WHERE`."""

from __future__ import annotations

import os
import sys

from meshwright.runtime.launch import rendezvous_handler
from meshwright.runtime.launch.launch import MESSAGES_ONLY, launch
from meshwright.runtime.launch.rendezvous import Rendezvous

if __name__ == "__main__":
    port, where = sys.argv[1:]
    if where == "is-elsewhere":
        rendezvous_handler.is_local_address = lambda _: False
    place = Rendezvous(nodes=2, port=int(port), timeout_seconds=300.0)
    try:
        launch(print, num_ranks=1, rendezvous=place, setup=MESSAGES_ONLY, may_stop=True)
    except KeyboardInterrupt:
        os._exit(130)  # as the command line does
