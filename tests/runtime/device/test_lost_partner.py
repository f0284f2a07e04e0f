"""A collective whose partner has ended is told from everything else that goes wrong."""

from __future__ import annotations

import datetime
from traceback import StackSummary

import pytest
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from meshwright.runtime.device.process_groups import lost_rank_error

NOWHERE = StackSummary()
CLOSED = RuntimeError("[../third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1")


def test_errors_of_the_transport_are_of_a_lost_partner() -> None:
    assert lost_rank_error(CLOSED) is CLOSED
    of_nccl = dist.DistBackendError("NCCL communicator was aborted")
    assert lost_rank_error(of_nccl) is of_nccl


def test_a_store_that_nobody_holds_is_a_lost_partner() -> None:
    with pytest.raises(dist.DistError) as caught:
        dist.TCPStore(  # type: ignore[attr-defined]
            "127.0.0.1", 1, is_master=False, timeout=datetime.timedelta(milliseconds=100)
        )
    assert lost_rank_error(caught.value) is caught.value


def test_among_the_errors_of_all_ranks_that_of_a_lost_partner_is_found() -> None:
    cut = EOFError("Ran out of input")
    assert lost_rank_error(CheckpointException("read", {0: (cut, NOWHERE), 1: (CLOSED, NOWHERE)})) is CLOSED
    assert lost_rank_error(CheckpointException("read", {0: (cut, NOWHERE)})) is None


@pytest.mark.parametrize("error", [RuntimeError("size mismatch"), EOFError(), OSError("gloo/ is no directory")])
def test_other_errors_are_not(error: Exception) -> None:
    assert lost_rank_error(error) is None
