"""A judge on this machine: an HTTP server whose calls take as long as a distribution says."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from benchmarks.rewards.words import share_of_letters
from meshwright.profiles.environment.latency import LatencySpec
from meshwright.runtime.environment.judge import Judge
from meshwright.runtime.environment.samples import RewardSample


class Calls:
    """How long calls take, and whose samples were scored."""

    def __init__(self, latency: LatencySpec) -> None:
        self._found = latency.resolve()
        self.scored: list[str] = []

    def seconds(self, sample: str) -> float:
        """Of the call about a sample, always the same."""
        return random.Random(sample).choices(self._found.seconds, self._found.probabilities)[0]


@contextmanager
def served(calls: Calls) -> Iterator[str]:
    """The URL of a judge, while it is there."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            told = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            samples = [RewardSample.from_message(message) for message in told["samples"]]
            time.sleep(max(calls.seconds(sample.id) for sample in samples))
            answer = json.dumps({"scores": share_of_letters(samples)}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)
            calls.scored += [sample.id for sample in samples]

        def log_message(self, *_: object) -> None:
            """Nothing is told of a call."""

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 256

    with Server(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/score"
        server.shutdown()


def seconds_at_once(latency: LatencySpec, num_samples: int, steps: int) -> list[float]:
    """The seconds that a server takes for the samples of each step, if they are all asked about at once."""
    taken = []
    with served(Calls(latency)) as url, ThreadPoolExecutor(num_samples) as pool:
        judge = Judge(url, timeout_seconds=1000.0)
        for step in range(steps):
            samples = [RewardSample(id=f"{step}/{row}", prompt="", response="a") for row in range(num_samples)]
            begun = time.monotonic()
            list(pool.map(lambda sample: judge.score([sample]), samples))
            taken.append(time.monotonic() - begun)
    return taken
