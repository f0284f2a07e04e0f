"""A crew scores every sample it is given, so many at a time, and says which one failed."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import pytest

from meshwright.runtime.environment.samples import RewardError, RewardSample
from meshwright.runtime.environment.worker_pool import RewardWorkers
from tests.runtime.environment.samples import sample


class Slow:
    """Takes a while for a call, and refuses one response."""

    batches: list[int]
    lock = threading.Lock()

    def score(self, samples: Sequence[RewardSample]) -> list[float]:
        time.sleep(0.02)
        with self.lock:
            self.batches.append(len(samples))
        if any(one.response == "bad" for one in samples):
            raise RewardError("it is bad")
        return [float(len(one.response)) for one in samples]

    def close(self) -> None:
        pass


@pytest.fixture(autouse=True)
def _fresh() -> None:
    Slow.batches = []


def test_as_many_calls_are_under_way_as_there_are_workers() -> None:
    crew, begun = RewardWorkers("slow", Slow, num_workers=8), time.monotonic()
    answers = [crew.score(sample("a" * n)) for n in range(16)]
    assert [answer.result(5.0).score for answer in answers] == list(range(16))
    assert 0.04 <= time.monotonic() - begun < 0.2
    crew.close()


def test_what_waits_is_handed_over_together_up_to_the_batch() -> None:
    crew = RewardWorkers("slow", Slow, num_workers=1, batch_size=4)
    answers = [crew.score(sample("a")) for _ in range(9)]
    assert [answer.result(5.0).score for answer in answers] == [1.0] * 9
    assert sum(Slow.batches) == 9
    assert max(Slow.batches) == 4
    crew.close()


def test_of_a_batch_that_fails_the_sample_is_told_and_the_others_are_scored() -> None:
    crew = RewardWorkers("slow", Slow, num_workers=1, batch_size=4)
    answers = [crew.score(sample(text, id=f"7/{row}")) for row, text in enumerate(("first", "a", "bad", "b"))]
    assert [answers[row].result(5.0).score for row in (0, 1, 3)] == [5.0, 1.0, 1.0]
    with pytest.raises(RewardError, match=r"^reward slow of sample 7/2: it is bad$"):
        answers[2].result(5.0)
    crew.close()


def test_a_sample_that_fails_is_paid_what_the_job_says_and_it_is_told(capfd: pytest.CaptureFixture[str]) -> None:
    crew = RewardWorkers("slow", Slow, num_workers=1, failure_score=-1.0)
    assert crew.score(sample("bad", id="7/2")).result(5.0).score == -1.0
    assert "reward slow of sample 7/2: it is bad; it gets its failure_score, -1" in capfd.readouterr().err
    crew.close()


def test_an_answer_says_how_long_it_took_from_when_it_was_asked_for() -> None:
    crew = RewardWorkers("slow", Slow, num_workers=1)
    first, second = crew.score(sample("a")), crew.score(sample("b"))
    assert 0.02 <= first.result(5.0).seconds < second.result(5.0).seconds
    crew.close()
