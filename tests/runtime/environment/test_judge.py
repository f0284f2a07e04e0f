"""A judge is asked in one call, which says whether another might be answered."""

from __future__ import annotations

import time

import pytest

from meshwright.runtime.environment.judge import Judge
from meshwright.runtime.environment.samples import RewardError, TemporaryRewardError
from tests.runtime.environment.samples import sample
from tests.runtime.environment.servers import Judged, free_port, hanging, judge


def asked(url: str, timeout_seconds: float = 5.0) -> Judge:
    return Judge(url, timeout_seconds=timeout_seconds)


def test_samples_are_scored_in_their_order() -> None:
    with judge(Judged()) as url:
        assert asked(url).score([sample("a"), sample("bbb")]) == [1.0, 3.0]


@pytest.mark.parametrize(("status", "is_away"), [(429, True), (500, False), (502, True), (503, True), (504, True)])
def test_what_another_call_may_change_says_whether_the_judge_was_there(status: int, is_away: bool) -> None:
    judged = Judged()
    judged.statuses = [status]
    with judge(judged) as url:
        with pytest.raises(TemporaryRewardError, match=f"gave no scores: status {status}$") as raised:
            asked(url).score([sample("a")])
        assert raised.value.is_unreachable == is_away
        assert asked(url).score([sample("a")]) == [1.0]


def test_what_no_other_call_would_change_is_final() -> None:
    judged = Judged()
    judged.statuses = [404]
    with judge(judged) as url, pytest.raises(RewardError, match="answered with status 404") as raised:
        asked(url).score([sample("a")])
    assert not isinstance(raised.value, TemporaryRewardError)


@pytest.mark.parametrize("score", [float("nan"), "one"])
def test_an_answer_without_numbers_is_no_answer(score: object) -> None:
    judging = judge(Judged(), score=lambda _: score)  # type: ignore[arg-type,return-value]
    with judging as url, pytest.raises(TemporaryRewardError, match="gave no scores") as raised:
        asked(url).score([sample("a")])
    assert not raised.value.is_unreachable


def test_a_server_that_is_slow_is_given_up_on_after_its_time() -> None:
    with hanging() as url:
        begun = time.monotonic()
        with pytest.raises(TemporaryRewardError, match="TimeoutError") as raised:
            asked(url, timeout_seconds=0.2).score([sample("a")])
        assert time.monotonic() - begun < 1.5
    assert raised.value.is_unreachable


def test_where_nobody_listens_the_judge_is_away() -> None:
    with pytest.raises(TemporaryRewardError, match="refused") as raised:
        asked(f"http://127.0.0.1:{free_port()}/score").score([sample("a")])
    assert raised.value.is_unreachable
