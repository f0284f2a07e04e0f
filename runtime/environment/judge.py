"""A judge behind a URL: samples go there as JSON by POST, and scores come back.

A call that fails for now (no connection, no answer in time, a status of 429 or from 500 on, an answer that is cut) is
made again after a pause that doubles, until it has been tried for as long as the job says; any other status is final.
"""

from __future__ import annotations

import http.client
import json
import math
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from typing import Any

from meshwright.runtime.environment.samples import RewardError, RewardSample

_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.1, 5.0
_MOST_ANSWER_BYTES = 2**24
_TOO_MANY, _OWN_FAULT = 429, 500


class Judge:
    """Scores samples by asking a server: {"samples": [...]} is answered by {"scores": [...]}, in their order."""

    def __init__(
        self, url: str, *, timeout_seconds: float, retry_seconds: float, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._url, self._timeout, self._retry, self._sleep = url, timeout_seconds, retry_seconds, sleep

    def score(self, samples: Sequence[RewardSample]) -> list[float]:
        """Raises RewardError for what no other call would change, and when it was tried for long enough."""
        asked = json.dumps({"samples": [sample.message for sample in samples]}).encode()
        begun, pause = time.monotonic(), _FIRST_PAUSE_SECONDS
        while True:
            try:
                return _scores(self._post(asked), len(samples))
            except urllib.error.HTTPError as error:
                if error.code != _TOO_MANY and error.code < _OWN_FAULT:
                    raise RewardError(f"{self._url} answered with status {error.code}") from None
                reason = f"status {error.code}"
            except (OSError, http.client.HTTPException, ValueError) as error:
                reason = f"{type(error).__name__}: {error}"
            tried = time.monotonic() - begun
            if tried + pause > self._retry:
                raise RewardError(f"{self._url} gave no scores in {tried:.1f} s, at last {reason}")
            self._sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)

    def close(self) -> None:
        """Nothing is kept between calls."""

    def _post(self, asked: bytes) -> Any:
        request = urllib.request.Request(self._url, asked, {"Content-Type": "application/json"}, method="POST")
        with urllib.request.urlopen(request, timeout=self._timeout) as answer:
            return json.loads(answer.read(_MOST_ANSWER_BYTES))


def _scores(message: Any, count: int) -> list[float]:
    """Raises ValueError for anything but so many finite numbers."""
    scores = message.get("scores") if isinstance(message, dict) else None
    if not isinstance(scores, list) or len(scores) != count:
        raise ValueError(f"the answer has no {count} scores")
    found = [float(score) for score in scores if isinstance(score, int | float)]
    if len(found) != count or not all(map(math.isfinite, found)):
        raise ValueError("a score is not a finite number")
    return found
