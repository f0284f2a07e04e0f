"""A judge behind a URL: samples go there as JSON by POST, and scores come back.

A judge is a stranger. A call has one deadline from the look-up of its name to the last byte of its answer, an answer
has a greatest size, no answer leads elsewhere, and nothing but http and https is spoken. After no connection, no answer
in time, a status of 429 or from 500 on, and an answer that has no scores another call may be answered (`retries.py`);
any other status is final.
"""

from __future__ import annotations

import http.client
import json
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from meshwright.runtime.environment.samples import (
    FailedForNowError,
    RewardError,
    RewardSample,
    checked_scores,
    reason_of,
)

_MOST_ANSWER_BYTES = 2**24
_TOO_MANY, _OWN_FAULT = 429, 500
_AWAY = (_TOO_MANY, 502, 503, 504)
"""Statuses that speak of the server, or of one behind it, and not of what it was asked."""


class Judge:
    """Scores samples by asking a server: {"samples": [...]} is answered by {"scores": [...]}, in their order."""

    def __init__(self, url: str, *, timeout_seconds: float) -> None:
        self._url, self._timeout = url, timeout_seconds

    def score(self, samples: Sequence[RewardSample]) -> list[float]:
        """Makes one call. Raises FailedForNowError for what another call may change, else RewardError."""
        asked = json.dumps({"samples": [sample.message for sample in samples]}).encode()
        try:
            return checked_scores(_scores(self._answer(asked)), len(samples))
        except urllib.error.HTTPError as error:
            if error.code != _TOO_MANY and error.code < _OWN_FAULT:
                raise RewardError(f"{self._url} answered with status {error.code}{_elsewhere(error)}") from None
            reason, is_away = f"status {error.code}", error.code in _AWAY
        except (OSError, http.client.HTTPException) as error:
            reason, is_away = reason_of(error), True
        except Exception as error:
            reason, is_away = reason_of(error), False
        raise FailedForNowError(f"{self._url} gave no scores: {reason}", is_away=is_away)

    def close(self) -> None:
        """Nothing is kept between calls."""

    def _answer(self, asked: bytes) -> bytes:
        """What a call was answered. Raises TimeoutError where it takes too long, and what the call itself raises."""
        call = _Call(self._url, asked, self._timeout)
        call.join(self._timeout)
        if call.is_alive():
            call.cut()
            raise TimeoutError(f"no answer within {self._timeout:g} s")
        if call.error is not None:
            raise call.error
        return call.answer


class _Call(threading.Thread):
    """One call, in a thread of its own: whoever waits for it waits no longer than he likes, whatever it waits for."""

    def __init__(self, url: str, asked: bytes, timeout: float) -> None:
        super().__init__(name="judge", daemon=True)
        self.answer = b""
        self.error: Exception | None = None
        self._timeout, self._sockets = timeout, list[socket.socket]()
        self._request = urllib.request.Request(url, asked, {"Content-Type": "application/json"}, method="POST")
        self.start()

    def run(self) -> None:
        try:
            with _opener(self._sockets).open(self._request, timeout=self._timeout) as answer:
                self.answer = answer.read(_MOST_ANSWER_BYTES + 1)
            if len(self.answer) > _MOST_ANSWER_BYTES:
                raise ValueError(f"an answer of more than {_MOST_ANSWER_BYTES} bytes")
        except Exception as error:
            if isinstance(error, urllib.error.HTTPError):
                error.close()
            self.error = error

    def cut(self) -> None:
        """Ends the connection, and the thread with it."""
        for connected in self._sockets:
            with suppress(OSError):
                socket.socket.shutdown(connected, socket.SHUT_RDWR)


def _opener(sockets: list[socket.socket]) -> urllib.request.OpenerDirector:
    """Opens http and https alone, follows nothing, and puts the sockets that it opens into the list."""

    class Http(http.client.HTTPConnection):
        def connect(self) -> None:
            super().connect()
            sockets.append(self.sock)

    class Https(http.client.HTTPSConnection):
        def connect(self) -> None:
            super().connect()
            sockets.append(self.sock)

    class HttpHandler(urllib.request.HTTPHandler):
        def http_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
            return self.do_open(Http, request)

    class HttpsHandler(urllib.request.HTTPSHandler):
        def https_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
            return self.do_open(Https, request)

    found = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.ProxyHandler(),
        HttpHandler(),
        HttpsHandler(),
        urllib.request.HTTPDefaultErrorHandler(),
        urllib.request.HTTPErrorProcessor(),
        urllib.request.UnknownHandler(),
    ):
        found.add_handler(handler)
    return found


def _elsewhere(error: urllib.error.HTTPError) -> str:
    """The way out, where an answer leads to another place."""
    place = error.headers.get("Location")
    return (
        ""
        if place is None
        else f" and leads to {reason_of(RewardError(place))}; name that URL in the job, if you trust it"
    )


def _scores(answer: bytes) -> Any:
    message = json.loads(answer)
    return message.get("scores") if isinstance(message, dict) else None
