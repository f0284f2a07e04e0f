"""Calls that fail for now are made again, for so long in all that no sample of any worker waits longer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from meshwright.planner.job.rewards_and_tools import Reward
from meshwright.planner.plan.plan import Plan
from meshwright.planner.program.durations import failing_call_seconds
from meshwright.runtime.environment.judge import Judge
from meshwright.runtime.environment.samples import JudgeUnreachableError, RewardError, TemporaryRewardError
from meshwright.runtime.environment.worker_pool import RetryBudget, RewardAnswer, RewardWorkers
from tests.planner.program.test_deadlines import rewarding
from tests.runtime.environment.samples import sample
from tests.runtime.environment.servers import Judged, free_port, hanging, judge

RETRY_SECONDS, TIMEOUT_SECONDS, PAUSES_SECONDS = 0.6, 0.3, 1.5


def asking(url: str, *, num_workers: int, batch_size: int = 1, retry_seconds: float = RETRY_SECONDS) -> RewardWorkers:
    return RewardWorkers(
        "judge",
        lambda: Judge(url, timeout_seconds=TIMEOUT_SECONDS),
        num_workers=num_workers,
        batch_size=batch_size,
        failure_score=-1.0,
        retry_seconds=retry_seconds,
    )


def waiting_for(
    url: str, *, num_workers: int, batch_size: int, num_samples: int
) -> tuple[Plan, tuple[Reward, ...], None]:
    """What a watchdog knows of as many samples of a replica."""
    reward = Reward(
        name="judge", url=url, batch_size=batch_size, timeout_seconds=TIMEOUT_SECONDS, retry_seconds=RETRY_SECONDS
    )
    return rewarding(num_workers=num_workers, batch_size=2 * num_samples), (reward,), None


def scores_of(crew: RewardWorkers, responses: list[str]) -> list[float]:
    found = [crew.score(sample(text, id=f"0/{row}")) for row, text in enumerate(responses)]
    return [answer.result(30.0).score for answer in found]


def failing(statuses: list[bool]) -> Callable[[], str]:
    """A call that fails for now as often as there are statuses, each of which says whether nobody was there."""

    def call() -> str:
        if statuses:
            raise TemporaryRewardError("not now", is_unreachable=statuses.pop(0))
        return "answered"

    return call


def test_what_fails_for_now_is_asked_again_with_growing_pauses() -> None:
    pauses: list[float] = []
    assert RetryBudget(10.0, sleep=pauses.append).call_with_retries(failing([True, False, True]), 0.0) == "answered"
    assert pauses == [0.1, 0.2, 0.4]


def test_what_is_not_for_now_is_asked_once() -> None:
    asked: list[int] = []

    def call() -> None:
        asked.append(1)
        raise RewardError("never")

    with pytest.raises(RewardError, match=r"^never$"):
        RetryBudget(10.0).call_with_retries(call, 0.0)
    assert len(asked) == 1


def test_whoever_answers_somebody_is_not_away() -> None:
    retries = RetryBudget(0.0)
    with pytest.raises(JudgeUnreachableError):
        retries.call_with_retries(failing([True] * 9), 0.0)

    def call() -> None:
        retries.call_with_retries(failing([]), 0.0)
        raise TemporaryRewardError("nothing came in time", is_unreachable=True)

    with pytest.raises(TemporaryRewardError):
        retries.call_with_retries(call, 0.0)


@contextmanager
def refusing() -> Iterator[str]:
    yield f"http://127.0.0.1:{free_port()}/score"


@contextmanager
def broken() -> Iterator[str]:
    judged = Judged()
    judged.statuses = [500] * 10_000
    with judge(judged) as url:
        yield url


@pytest.mark.parametrize(
    ("away", "tries_seconds"),
    [(refusing, 0.01), (hanging, TIMEOUT_SECONDS), (broken, 0.05)],
    ids=["refuses", "hangs", "breaks"],
)
@pytest.mark.parametrize("batch_size", [1, 4])
def test_a_judge_that_is_away_is_given_up_for_all_that_is_queued_at_once(
    away: Callable[[], Iterator[str]], tries_seconds: float, batch_size: int
) -> None:
    """Where every call waited by itself, the last of 12 samples would wait for six times as long."""
    with away() as url:  # type: ignore[attr-defined]
        crew, begun = asking(url, num_workers=2, batch_size=batch_size), time.monotonic()
        assert scores_of(crew, ["a"] * 12) == [-1.0] * 12
        calls = 12 / batch_size / 2 + (6 if away is broken and batch_size > 1 else 0)
        seconds = time.monotonic() - begun
        assert seconds < RETRY_SECONDS + PAUSES_SECONDS + (calls + 2) * tries_seconds
        assert seconds < failing_call_seconds(*waiting_for(url, num_workers=2, batch_size=batch_size, num_samples=12))
        begun = time.monotonic()
        assert scores_of(crew, ["a"]) == [-1.0]
        assert time.monotonic() - begun < tries_seconds + PAUSES_SECONDS, "it is still away, and is asked once"
        crew.close()


def test_a_judge_that_comes_back_has_lost_nothing_and_may_be_away_again() -> None:
    port = free_port()
    crew = asking(f"http://127.0.0.1:{port}/score", num_workers=3, batch_size=2, retry_seconds=5.0)
    for _ in range(2):
        found: list[RewardAnswer] = []
        answers = [crew.score(sample("a" * number)) for number in range(8)]
        waiting = threading.Thread(target=lambda: found.extend(one.result(20.0) for one in answers))  # noqa: B023
        waiting.start()
        time.sleep(0.3)
        with judge(Judged(), port=port):
            waiting.join(20.0)
        assert [one.score for one in found] == list(range(8))
    crew.close()


def test_after_it_was_given_up_one_answer_takes_it_on_again() -> None:
    port = free_port()
    crew = asking(f"http://127.0.0.1:{port}/score", num_workers=2)
    assert scores_of(crew, ["a", "b"]) == [-1.0, -1.0]
    with judge(Judged(), port=port):
        assert scores_of(crew, ["a", "bb"]) == [1.0, 2.0]
    answer = crew.score(sample("abc"))
    time.sleep(0.2)
    with judge(Judged(), port=port):
        assert answer.result(10.0).score == 3.0
    crew.close()


def test_a_sample_that_a_judge_breaks_at_fails_alone_however_it_was_batched() -> None:
    def score(asked: dict[str, object]) -> float:
        return float("nan") if asked["response"] == "bad" else 1.0

    with judge(Judged(), score=score) as url:
        crew, begun = asking(url, num_workers=1, batch_size=4), time.monotonic()
        texts = ["first", "a", "bad", "b", "bad", "c", "bad"]
        assert scores_of(crew, texts) == [-1.0 if text == "bad" else 1.0 for text in texts]
        assert time.monotonic() - begun < 2 * RETRY_SECONDS, "three that fail take no longer than one"
        crew.close()
