"""A call that blocks is waited for where signals are heard, and no longer than was said."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from meshwright.runtime.launch.rendezvous_handler import call_in_thread


def test_what_a_call_returns_or_raises_comes_back() -> None:
    assert call_in_thread(lambda: 3) == 3
    with pytest.raises(ZeroDivisionError):
        call_in_thread(lambda: 1 // 0)


def test_a_call_that_takes_longer_is_left_to_itself() -> None:
    over = threading.Event()
    with pytest.raises(TimeoutError, match=r"no answer within 0.2 s"):
        call_in_thread(over.wait, 0.2)
    over.set()


def test_a_signal_ends_the_wait_while_the_call_goes_on() -> None:
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # a launch leaves one of its own
    over, begun = threading.Event(), time.monotonic()
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        call_in_thread(over.wait)
    assert time.monotonic() - begun < 2.0
    over.set()
    signal.signal(signal.SIGINT, handler)
