"""A node without models, as a process: `python -m tests.runtime.agent ADDRESS:PORT NODE_RANK WORK WHAT`."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace

import torch.distributed as dist

from meshwright.profiles.errors import MeshwrightError
from meshwright.runtime.launch.launch import MESSAGES_ONLY, launch
from meshwright.runtime.launch.rendezvous import Rendezvous


def tell_rank() -> tuple[int, int]:
    dist.barrier()
    return dist.get_rank(), int(os.environ["LOCAL_RANK"])


def work_forever() -> None:
    sys.stdout.write("at work\n")
    sys.stdout.flush()
    while True:
        dist.barrier()


def main(endpoint: str, node_rank: str, work: str, what: str) -> int:
    number = int(node_rank) if node_rank != "none" else None
    place = replace(Rendezvous.parse(endpoint, 2, number), timeout_seconds=120.0 if what != "wait" else 2.0)
    entry = work_forever if what == "work" else tell_rank
    try:
        results = launch(entry, num_ranks=2, rendezvous=place, setup=MESSAGES_ONLY, work=work)
    except MeshwrightError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    sys.stdout.write(json.dumps(results))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
