"""A judge over HTTP: put a model of your own in the place of `score`.

    python examples/functions/judge.py --port 8000

    rewards:
      - {name: judge, url: "http://localhost:8000/score", timeout_seconds: 30, retry_seconds: 600, failure_score: 0}

It is asked by POST with {"samples": [{"id": ..., "prompt": ..., "response": ..., "answer": ...}, ...]} and answers
{"scores": [...]}, a number for each sample in their order. Samples of prompts that are chats also have "messages".
"""

import argparse
import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


def score(sample):
    """How many of the prompt's words the response takes up: between 0 and 1."""
    asked, said = (set(sample[key].lower().split()) for key in ("prompt", "response"))
    return len(asked & said) / max(len(asked), 1)


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        answer = json.dumps({"scores": [score(sample) for sample in asked["samples"]]}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_):
        """A line for each call would be too many."""


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=8000)
    server = ThreadingHTTPServer(("localhost", parser.parse_args().port), Handler)
    print(f"http://localhost:{server.server_address[1]}/score", flush=True)
    server.serve_forever()
