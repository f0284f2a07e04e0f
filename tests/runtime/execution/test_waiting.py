"""Where a rank waits is told from its stack: in a collective and with whom, for a message, or in no such thing."""

from __future__ import annotations

import sys
import threading
import time
from typing import Any

import torch
import torch.distributed as dist

from meshwright.runtime.execution.watchdog import CodeLocation, location_of, main_thread_location
from meshwright.runtime.messages.transport import Transport
from tests.runtime.ranks import run_on_ranks


def _seen_in(kind: str) -> CodeLocation | None:
    """Where rank 0 is while it waits for rank 1, which comes a while later."""
    found: list[CodeLocation] = []
    group = dist.new_group([0, 1], backend="gloo")
    transport = Transport(dist.group.WORLD)  # type: ignore[arg-type]
    dist.barrier()
    if dist.get_rank() == 1:
        time.sleep(1.0)
    looking = threading.Timer(0.5, lambda: found.append(main_thread_location()))
    looking.start()
    _wait(kind, group, transport)
    looking.join()
    return found[0] if dist.get_rank() == 0 else None


def _wait(kind: str, group: Any, transport: Transport) -> None:
    if kind == "objects":
        dist.all_gather_object([None, None], 1, group=group)
    elif kind == "message" and dist.get_rank() == 0:
        transport.receive(1, 5)
    elif kind == "message":
        transport.send(torch.zeros(3, dtype=torch.uint8), 0, 5)
        transport.flush()
    else:
        dist.barrier(group=group)


def test_a_collective_is_told_with_its_ranks_and_one_of_objects_by_its_own_name() -> None:
    assert run_on_ranks(2, _seen_in, "barrier")[0] == CodeLocation("barrier of ranks 0, 1", waits_for_others=True)
    assert run_on_ranks(2, _seen_in, "objects")[0] == CodeLocation(
        "all_gather_object of ranks 0, 1", waits_for_others=True
    )


def test_a_message_is_told_with_the_rank_it_comes_from() -> None:
    found = run_on_ranks(2, _seen_in, "message")[0]
    assert found is not None
    assert found.waits_for_others
    assert found.description.startswith("receive (transport.py:")
    assert found.description.endswith(") with rank 1")


def test_any_other_place_is_a_function_and_its_line() -> None:
    frame = sys._getframe()
    told = f"test_any_other_place_is_a_function_and_its_line (test_waiting.py:{frame.f_lineno + 1})"
    assert location_of(frame) == CodeLocation(told, waits_for_others=False)
