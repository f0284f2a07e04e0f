"""A judge to ask: a server on this machine that takes as long as it is told."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Judged:
    """What a server was asked, by id of the sample, and how many calls it had at a time at most."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.statuses: list[int] = []
        """Those to answer the next calls with, before it answers well."""
        self.most_at_a_time = self._at_a_time = 0
        self._lock = threading.Lock()

    @contextmanager
    def call(self) -> Iterator[None]:
        with self._lock:
            self._at_a_time += 1
            self.most_at_a_time = max(self.most_at_a_time, self._at_a_time)
        try:
            yield
        finally:
            with self._lock:
                self._at_a_time -= 1


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128


@contextmanager
def judge(
    judged: Judged,
    score: Callable[[dict[str, Any]], float] = lambda sample: float(len(sample["response"])),
    seconds: Callable[[], float] = lambda: 0.0,
    port: int = 0,
) -> Iterator[str]:
    """Its URL, while it is there."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            with judged.call():
                samples = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["samples"]
                status = judged.statuses.pop(0) if judged.statuses else 200
                time.sleep(seconds())
                answer = json.dumps({"scores": [score(one) for one in samples]}).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)
                judged.asked += [one["id"] for one in samples] if status == 200 else []

        def log_message(self, *_: object) -> None:
            pass

    with _Server(("127.0.0.1", port), Handler) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/score"
        server.shutdown()


@contextmanager
def hanging() -> Iterator[str]:
    """The URL of a server that takes every connection and answers none."""
    with socket.create_server(("127.0.0.1", 0), backlog=128) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}/score"


def free_port() -> int:
    """A port at which nobody listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])
