"""How long an exchange takes, measured between real ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import pytest

from meshwright.profiles.table import Exchange
from meshwright.runtime.profiling.collective_benchmarks import measure_exchange
from tests.runtime.ranks import run_on_ranks


def measured(operation: Literal["all_reduce", "send_receive"], num_bytes: int) -> list[float | None]:
    """Seconds by a clock on which every call takes 4 s."""

    def timer(body: Callable[[], object]) -> float:
        body()
        return 4.0

    exchange = Exchange(operation=operation, num_ranks=2, num_bytes=num_bytes)
    return [found.seconds for found in measure_exchange(exchange, timer, repeats=2)]


@pytest.mark.parametrize("num_bytes", [2**12, 2**20])
def test_a_message_takes_half_of_the_way_there_and_back(num_bytes: int) -> None:
    assert run_on_ranks(2, measured, "send_receive", num_bytes) == [[2.0], [2.0]]


def test_a_collective_takes_all_of_its_call() -> None:
    assert run_on_ranks(2, measured, "all_reduce", 2**12) == [[4.0], [4.0]]
