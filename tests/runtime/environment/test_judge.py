"""A judge is asked again while it fails for now, and not where asking again would change nothing."""

from __future__ import annotations

import socket
import threading
import time

import pytest

from meshwright.runtime.environment.judge import Judge
from meshwright.runtime.environment.samples import RewardError
from tests.runtime.environment.samples import sample
from tests.runtime.environment.servers import Judged, judge


def asked(url: str, retry_seconds: float = 10.0, timeout_seconds: float = 5.0) -> tuple[Judge, list[float]]:
    pauses: list[float] = []
    return Judge(url, timeout_seconds=timeout_seconds, retry_seconds=retry_seconds, sleep=pauses.append), pauses


def test_samples_are_scored_in_their_order() -> None:
    with judge(Judged()) as url:
        assert asked(url)[0].score([sample("a"), sample("bbb")]) == [1.0, 3.0]


def test_what_fails_for_now_is_asked_again_with_growing_pauses() -> None:
    judged = Judged()
    judged.statuses = [503, 429, 500]
    with judge(judged) as url:
        one, pauses = asked(url)
        assert one.score([sample("a")]) == [1.0]
    assert pauses == [0.1, 0.2, 0.4]


def test_what_no_other_call_would_change_is_asked_once() -> None:
    judged = Judged()
    judged.statuses = [404]
    with judge(judged) as url, pytest.raises(RewardError, match="answered with status 404"):
        asked(url)[0].score([sample("a")])


@pytest.mark.parametrize("score", [float("nan"), "one"])
def test_an_answer_without_numbers_is_no_answer(score: object) -> None:
    judging = judge(Judged(), score=lambda _: score)  # type: ignore[arg-type,return-value]
    with judging as url, pytest.raises(RewardError, match="gave no scores"):
        asked(url, retry_seconds=0.05)[0].score([sample("a")])


def test_a_server_that_is_slow_is_given_up_on_after_its_time() -> None:
    with judge(Judged(), seconds=lambda: 2.0) as url:
        begun = time.monotonic()
        with pytest.raises(RewardError, match="at last TimeoutError"):
            asked(url, retry_seconds=0.0, timeout_seconds=0.2)[0].score([sample("a")])
        assert time.monotonic() - begun < 1.5


def test_a_server_that_comes_back_has_lost_nothing() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    found: list[list[float]] = []
    one = Judge(f"http://127.0.0.1:{port}/score", timeout_seconds=5.0, retry_seconds=30.0)
    asking = threading.Thread(target=lambda: found.append(one.score([sample("abc")])))
    asking.start()
    time.sleep(0.3)
    with judge(Judged(), port=port):
        asking.join(20.0)
    assert found == [[3.0]]
