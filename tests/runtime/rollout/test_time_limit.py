"""Calls on a thread of their own answer, raise, or are ended."""

from __future__ import annotations

import itertools
import threading
import time

import pytest

from meshwright.runtime.rollout.prompt_encoding import TimeLimited


def endless() -> None:
    for _ in itertools.count():
        pass


def test_a_call_answers_or_raises_as_without_a_limit() -> None:
    limited = TimeLimited(30.0)
    assert limited.call(lambda: 7) == 7
    with pytest.raises(RecursionError):
        limited.call(lambda: (_ for _ in ()).throw(RecursionError()))
    assert limited.call(lambda: 8) == 8


def test_a_call_without_end_is_ended_and_the_next_one_answers() -> None:
    limited, before = TimeLimited(0.2), threading.active_count()
    with pytest.raises(TimeoutError):
        limited.call(endless)
    assert TimeLimited(30.0).call(lambda: 9) == 9
    deadline = time.monotonic() + 30
    while threading.active_count() > before + 1 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() <= before + 1
