"""A time limit for calls into other people's Python code, which may not end."""

from __future__ import annotations

import ctypes
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class _EndedError(BaseException):
    """Raised in a thread whose call took too long; a BaseException, so that the called code does not catch it as an
    Exception."""


class TimeLimited:
    """Makes calls one after another on a thread of its own, and ends a call that takes longer than `seconds`.

    Only Python code can be ended: a call that never returns from C stays on its thread until the process ends.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] | None = None
        self._thread: threading.Thread | None = None

    def call(self, function: Callable[[], T]) -> T:
        """Return or raise what the function does. Raises TimeoutError if it takes longer than the limit."""
        if self._calls is None:
            self._calls = queue.SimpleQueue()
            self._thread = threading.Thread(target=_serve, args=(self._calls,), daemon=True)
            self._thread.start()
        answer: Future[T] = Future()
        self._calls.put((function, answer))
        try:
            return answer.result(self._seconds)
        except TimeoutError:
            if not answer.done():
                self._end()
            raise

    def _end(self) -> None:
        """Raise an exception in the thread at its next line of Python; later calls get a new thread."""
        assert self._thread is not None
        assert self._thread.ident is not None
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._thread.ident), ctypes.py_object(_EndedError))
        self._calls = self._thread = None


def _serve(calls: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]]) -> None:
    try:
        while True:
            function, answer = calls.get()
            try:
                answer.set_result(function())
            except Exception as error:
                answer.set_exception(error)
    except _EndedError:
        return
