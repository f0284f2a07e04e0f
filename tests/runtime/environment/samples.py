"""Samples and reward functions for the tests of the environment."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress

from meshwright.runtime.environment.samples import RewardSample, ToolCall

MODULE = "tests.runtime.environment.samples"


def sample(response: str = "", answer: str | None = None, *, id: str = "0/0") -> RewardSample:
    return RewardSample(id=id, prompt="2 + 2 =", response=response, answer=answer)


def length(samples: Sequence[RewardSample]) -> list[float]:
    """A score for each sample; what it prints is no answer."""
    sys.stdout.write(f"scored {len(samples)}\n")
    return [float(len(one.response)) for one in samples]


def fussy(samples: Sequence[RewardSample]) -> list[float]:
    """Hangs, raises, ends the process or gives too few scores, as a response says."""
    for one in samples:
        if one.response == "hang":
            time.sleep(60)
        if one.response == "raise":
            raise ValueError("no such word")
        if one.response == "end":
            os._exit(3)
    return [1.0 for one in samples if one.response != "few"]


def slow_echo(calls: Sequence[ToolCall]) -> list[str]:
    """A tool that takes its time, and fails at one word."""
    time.sleep(0.2)
    if any(call.sampled == "raise" for call in calls):
        raise ValueError("no such word")
    return [f"{call.sampled}!" for call in calls]


def last_letters(calls: Sequence[ToolCall]) -> list[str]:
    """A tool that says the last letters of the turn again, as many as the turn's number; quick ones and slow ones."""
    time.sleep(0.002 * sum(len(call.sampled) % 4 for call in calls))
    return [call.sampled[-call.turn :] for call in calls]


def restless(samples: Sequence[RewardSample]) -> list[float]:
    """Takes longer than it may, in ways that no thread of its own could end."""
    response = samples[0].response
    if response == "holds the interpreter":
        pow(7, 10**8)
    if response == "is stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    if response == "has children of its own sessions":
        for _ in range(2):
            if not os.fork():
                os.setsid()
                time.sleep(60)
        time.sleep(60)
    return [1.0] * len(samples)


def terminates(samples: Sequence[RewardSample]) -> list[float]:
    """Ends a process of its own with each of the signals that ask for it; the score is how many of them did."""
    found = 0
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        with subprocess.Popen(["sleep", "60"]) as child:
            child.send_signal(number)
            with suppress(subprocess.TimeoutExpired):
                found += child.wait(1.0) == -number
            child.kill()
    return [float(found) for _ in samples]
