"""A judge behind a URL: samples are sent as JSON by POST, and scores are returned.

A judge is not trusted. One deadline covers a call from name resolution to the last byte of the answer, answers are
limited in size, redirects are not followed, and only http and https are allowed. A call is retried (`worker_pool.py`)
after a failed connection, a timeout, a status of 429 or at least 500, and an answer without scores; any other status is
final.
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
    RewardError,
    RewardSample,
    TemporaryRewardError,
    printable_reason,
    validate_scores,
)

_MAX_ANSWER_BYTES = 2**24
_TOO_MANY_REQUESTS, _SERVER_ERROR = 429, 500
_UNAVAILABLE = (_TOO_MANY_REQUESTS, 502, 503, 504)
"""Statuses of a server, or of one behind it, that is unavailable for any request."""


class Judge:
    """Scores samples by HTTP: the request {"samples": [...]} is answered by {"scores": [...]} in the same order."""

    def __init__(self, url: str, *, timeout_seconds: float) -> None:
        self._url, self._timeout = url, timeout_seconds

    def score(self, samples: Sequence[RewardSample]) -> list[float]:
        """Make one call. Raises TemporaryRewardError for a failure that a retry may resolve, else RewardError."""
        body = json.dumps({"samples": [sample.message for sample in samples]}).encode()
        try:
            return validate_scores(_scores(self._answer(body)), len(samples))
        except urllib.error.HTTPError as error:
            if error.code != _TOO_MANY_REQUESTS and error.code < _SERVER_ERROR:
                raise RewardError(f"{self._url} answered with status {error.code}{_redirect_hint(error)}") from None
            reason, is_unreachable = f"status {error.code}", error.code in _UNAVAILABLE
        except (OSError, http.client.HTTPException) as error:
            reason, is_unreachable = printable_reason(error), True
        except Exception as error:
            reason, is_unreachable = printable_reason(error), False
        raise TemporaryRewardError(f"{self._url} gave no scores: {reason}", is_unreachable=is_unreachable)

    def close(self) -> None:
        """Do nothing, because no connection is kept between calls."""

    def _answer(self, body: bytes) -> bytes:
        """Make a call and return the body of its answer. Raises TimeoutError, and errors of the call."""
        call = _Call(self._url, body, self._timeout)
        call.join(self._timeout)
        if call.is_alive():
            call.shut_down()
            raise TimeoutError(f"no answer within {self._timeout:g} s")
        if call.error is not None:
            raise call.error
        return call.answer


class _Call(threading.Thread):
    """One HTTP call in a separate thread, so that the caller can stop waiting at any point of it."""

    def __init__(self, url: str, body: bytes, timeout: float) -> None:
        super().__init__(name="judge", daemon=True)
        self.answer = b""
        self.error: Exception | None = None
        self._timeout, self._sockets = timeout, list[socket.socket]()
        self._request = urllib.request.Request(url, body, {"Content-Type": "application/json"}, method="POST")
        self.start()

    def run(self) -> None:
        try:
            with _opener(self._sockets).open(self._request, timeout=self._timeout) as answer:
                self.answer = answer.read(_MAX_ANSWER_BYTES + 1)
            if len(self.answer) > _MAX_ANSWER_BYTES:
                raise ValueError(f"an answer of more than {_MAX_ANSWER_BYTES} bytes")
        except Exception as error:
            if isinstance(error, urllib.error.HTTPError):
                error.close()
            self.error = error

    def shut_down(self) -> None:
        """Shut the connection down, which also ends the thread."""
        for connection in self._sockets:
            with suppress(OSError):
                socket.socket.shutdown(connection, socket.SHUT_RDWR)


def _opener(sockets: list[socket.socket]) -> urllib.request.OpenerDirector:
    """Return an opener for http and https that follows no redirects and appends the sockets it opens to the list."""

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

    opener = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.ProxyHandler(),
        HttpHandler(),
        HttpsHandler(),
        urllib.request.HTTPDefaultErrorHandler(),
        urllib.request.HTTPErrorProcessor(),
        urllib.request.UnknownHandler(),
    ):
        opener.add_handler(handler)
    return opener


def _redirect_hint(error: urllib.error.HTTPError) -> str:
    """Return what to add to a message about a redirect; empty for other answers."""
    location = error.headers.get("Location")
    return (
        ""
        if location is None
        else f" and redirects to {printable_reason(RewardError(location))}; name that URL in the job, if you trust it"
    )


def _scores(answer: bytes) -> Any:
    message = json.loads(answer)
    return message.get("scores") if isinstance(message, dict) else None
