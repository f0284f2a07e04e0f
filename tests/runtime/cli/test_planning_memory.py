"""Planning ends with one sentence before it takes a machine's memory."""

from __future__ import annotations

import signal

import pytest

from meshwright.profiles.errors import Infeasible
from meshwright.runtime.cli.call import limit_memory


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # raised in a callback of the collector
def test_what_takes_more_than_it_may_is_stopped() -> None:
    taken: list[list[int]] = []

    def take() -> None:
        with limit_memory(2**30):
            while len(taken) < 10_000:
                taken.append(list(range(100_000)))

    with pytest.raises(Infeasible, match=r"no plan was found within 1\.0 GiB"):
        take()
    assert len(taken) < 10_000


def test_what_takes_less_is_left_alone_and_nothing_stays_behind() -> None:
    before = signal.getsignal(signal.SIGVTALRM)
    with limit_memory():
        assert sum(range(3_000_000)) > 0
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0.0, 0.0)
    assert signal.getsignal(signal.SIGVTALRM) == before


def test_what_was_held_before_does_not_count() -> None:
    held = bytearray(2**28)
    held[:: 2**12] = b"x" * len(held[:: 2**12])  # every page is resident
    with limit_memory(2**27):
        assert sum(range(30_000_000)) > 0  # longer than the time between two checks
    assert len(held) == 2**28
