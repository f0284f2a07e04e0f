"""A worker's process is ended where it hangs, and replaced where it has ended."""

from __future__ import annotations

import time
from collections.abc import Iterator

import psutil
import pytest

from meshwright.runtime.environment.samples import RewardError
from meshwright.runtime.environment.worker import Worker
from tests.runtime.environment.samples import MODULE, sample


@pytest.fixture
def fussy() -> Iterator[Worker]:
    worker = Worker(f"{MODULE}:fussy", 1.0)
    yield worker
    worker.close()


def processes() -> list[psutil.Process]:
    return [
        child
        for child in psutil.Process().children()
        if "meshwright.runtime.environment.worker_process" in child.cmdline()
    ]


def test_a_batch_has_a_score_for_each_sample_however_long_it_is() -> None:
    worker = Worker(f"{MODULE}:length", 10.0)
    assert worker.score([sample("a"), sample("b" * 10**6)]) == [1.0, 1e6]
    assert worker.score([sample("ccc")]) == [3.0]
    worker.close()


def test_a_hang_an_exception_and_an_end_are_told_and_the_next_batch_is_scored(fussy: Worker) -> None:
    for response, told in (("hang", "no answer within 1 s"), ("raise", "no such word"), ("end", "process ended")):
        begun = time.monotonic()
        with pytest.raises(RewardError, match=told):
            fussy.score([sample(response)])
        assert time.monotonic() - begun < 10.0
        assert fussy.score([sample("well")]) == [1.0]
    assert len(processes()) == 1


def test_a_worker_that_was_closed_has_no_process_and_starts_none(fussy: Worker) -> None:
    fussy.score([sample("well")])
    fussy.close()
    with pytest.raises(RewardError, match="closed before the call"):
        fussy.score([sample("well")])
    assert processes() == []
