"""Servers and functions that answer as nobody should: what a judge, a tool or a reward may meet."""

from __future__ import annotations

import itertools
import math
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

from meshwright.runtime.environment.samples import RewardSample, ToolCall

MODULE = "tests.runtime.environment.hostile"
DEEP = "[" * 100_000
_PAUSE_SECONDS = 0.05


def _body(body: str | bytes, status: str = "200 OK", *headers: str) -> bytes:
    content = body if isinstance(body, bytes) else body.encode()
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(content)}", "Connection: close", *headers, "", ""]
    return "\r\n".join(lines).encode() + content


def _chunked(body: str | bytes) -> bytes:
    content = body if isinstance(body, bytes) else body.encode()
    return b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (len(content), content)


BODIES: dict[str, str | bytes] = {
    "400 digits": '{"scores": [%s]}' % ("9" * 400),
    "5,000 digits": '{"scores": [%s]}' % ("9" * 5000),
    "a great exponent": '{"scores": [1e999]}',
    "no number": '{"scores": [NaN]}',
    "without end": '{"scores": [-Infinity]}',
    "a text": '{"scores": ["1"]}',
    "a truth": '{"scores": [true]}',
    "nothing": '{"scores": [null]}',
    "a list of lists": '{"scores": [[1]]}',
    "an object": '{"scores": {"0": 1}}',
    "too many": '{"scores": [1, 2]}',
    "none": '{"scores": []}',
    "a list": "[1]",
    "a number": "1",
    "empty": "",
    "deep lists": DEEP,
    "deep objects": '{"a":' * 100_000,
    "deep scores": '{"scores": [' + DEEP + "]}",
    "no JSON": "scores: 1",
    "cut JSON": '{"scores": [1',
    "a mark in front": b'\xef\xbb\xbf{"scores": "a"}',
    "no UTF-8": b'{"scores": ["\xff\xfe"]}',
    "UTF-16": '{"scores": ["a"]}'.encode("utf-16"),
    "a lone surrogate": '{"scores": ["\\ud800"]}',
    "zeros": bytes(1000),
    "escapes": '{"scores": ["\\u001b[2J"]}',
    "a page": "<html>login</html>",
    "17 MiB": b'{"scores": [1], "a": "' + b"a" * (17 * 2**20) + b'"}',
}
"""Answers that are no score, in a good response of HTTP."""

STATUSES = (
    "100 Continue",
    "204 No Content",
    "300 Many",
    "304 Same",
    "401 Who",
    "404 None",
    "429 Later",
    "500 Own",
    "599 Odd",
    "999 X",
)

RAW: dict[str, bytes] = {
    "nothing at all": b"",
    "no HTTP": b"hello\r\n\r\n",
    "HTTP/9.9": b"HTTP/9.9 200 OK\r\n\r\n{}",
    "a status that is none": b"HTTP/1.1 abc OK\r\n\r\n",
    "a negative length": b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\n{}",
    "a length that is none": b"HTTP/1.1 200 OK\r\nContent-Length: many\r\n\r\n{}",
    "a length too great": b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{}",
    "a great length": b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999999\r\n\r\n{}",
    "a chunk that is none": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n{}",
    "a chunk that is cut": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nff\r\n{}",
    "a great chunk": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nffffffffffff\r\n{}",
    "a long line": b"HTTP/1.1 200 " + b"a" * 100_000 + b"\r\n\r\n{}",
    "200 headers": b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 200 + b"\r\n{}",
    "a long header": b"HTTP/1.1 200 OK\r\na: " + b"b" * 100_000 + b"\r\n\r\n{}",
    "zeros": bytes(100_000),
    "binary": bytes(range(256)) * 40,
}
"""What is no response of HTTP."""

REDIRECTS = ("/again", "http://127.0.0.2:9/", "file:///etc/passwd", "ftp://127.0.0.1/", "data:,1", "//127.0.0.1:9", "")

_HEAD = b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n"
_CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


def _slowly(head: bytes, part: bytes) -> Callable[[], Iterator[bytes]]:
    def parts() -> Iterator[bytes]:
        yield head
        for _ in range(1000):
            time.sleep(_PAUSE_SECONDS)
            yield part

    return parts


STREAMS: dict[str, Callable[[], Iterator[bytes]]] = {
    "a byte at a time": _slowly(_HEAD, b" "),
    "a header at a time": _slowly(b"HTTP/1.1 200 OK\r\n", b"a: b\r\n"),
    "a letter of a header at a time": _slowly(b"HTTP/1.1 200 OK\r\nlong: ", b"a"),
    "the status line at a time": _slowly(b"HTTP/1.1 200 ", b"a"),
    "a chunk at a time": _slowly(_CHUNKED, b"1\r\n \r\n"),
    "a letter of a chunk at a time": _slowly(_CHUNKED, b"0"),
    "one continue after the other": _slowly(b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    "silence": _slowly(b"", b""),
    "silence behind the head": _slowly(_HEAD, b""),
    "without end": lambda: itertools.chain([b"HTTP/1.1 200 OK\r\n\r\n"], itertools.repeat(bytes(2**16), 2000)),
    "chunks without end": lambda: itertools.chain(
        [_CHUNKED], itertools.repeat(b"ffff\r\n" + bytes(65535) + b"\r\n", 2000)
    ),
    "headers without end": lambda: itertools.chain(
        [b"HTTP/1.1 200 OK\r\n"], itertools.repeat(b"a: b\r\n" * 1000, 2000)
    ),
}
"""Answers that take long, each of whose reads is quick."""


def answers() -> dict[str, Callable[[], Iterator[bytes]]]:
    """All of them by name: what a server sends after it was asked."""
    found: dict[str, bytes] = {f"body: {name}": _body(body) for name, body in BODIES.items()}
    found |= {f"chunks: {name}": _chunked(body) for name, body in BODIES.items()}
    found |= {f"status: {status}": _body("{}", status) for status in STATUSES}
    found |= {
        f"{status} to {place!r}": _body("", f"{status} Elsewhere", f"Location: {place}")
        for status in (301, 302, 303, 307, 308)
        for place in REDIRECTS
    }
    found |= {f"raw: {name}": content for name, content in RAW.items()}
    every: dict[str, Callable[[], Iterator[bytes]]] = {
        name: lambda c=content: iter([c]) for name, content in found.items()
    }  # type: ignore[misc]
    return every | {f"stream: {name}": parts for name, parts in STREAMS.items()}


@contextmanager
def server(parts: Callable[[], Iterator[bytes]], family: int = socket.AF_INET) -> Iterator[tuple[str, list[bytes]]]:
    """Its URL, and what it was asked; it answers every connection alike."""
    asked: list[bytes] = []
    with socket.socket(family) as listening:
        listening.bind(("127.0.0.1" if family == socket.AF_INET else "::1", 0))
        listening.listen(64)

        def answer(connection: socket.socket) -> None:
            with connection, suppress(OSError):
                connection.settimeout(5.0)
                asked.append(connection.recv(2**16))
                for part in parts():
                    connection.sendall(part)
                connection.shutdown(socket.SHUT_WR)
                while connection.recv(2**16):  # to close on what was not read would reset what was sent
                    pass

        def accept() -> None:
            with suppress(OSError):
                while True:
                    threading.Thread(target=answer, args=(listening.accept()[0],), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}/score", asked
        listening.shutdown(socket.SHUT_RDWR)


class SurlyError(Exception):
    """An exception that cannot say what it is."""

    def __str__(self) -> str:
        raise RuntimeError("no")


def _hang() -> object:
    time.sleep(60)


def _spin() -> object:
    while True:
        pass


def _hold() -> object:
    return len(str(7 ** (10**8)))


def _raise(error: BaseException) -> Callable[[], object]:
    def act() -> object:
        raise error

    return act


def _end(number: int) -> Callable[[], object]:
    return lambda: os.kill(os.getpid(), number)


def _descend() -> object:
    return _descend()


def _leave_behind() -> object:
    if not os.fork():
        os.setsid()
        time.sleep(60)
    os._exit(0)


def _close_files() -> object:
    os.closerange(0, 64)
    return "closed"


def _write_everywhere() -> object:
    for number in range(3, 64):
        with suppress(OSError):
            os.write(number, b"[1]\n{}\n")
    time.sleep(60)


def _deep() -> object:
    found: list[object] = []
    for _ in range(100_000):
        found = [found]
    return found


ACTS: dict[str, Callable[[], object]] = {
    "it hangs": _hang,
    "it spins": _spin,
    "it holds the interpreter": _hold,
    "it is stopped": _end(signal.SIGSTOP),
    "it is killed": _end(signal.SIGKILL),
    "it is terminated": _end(signal.SIGTERM),
    "it breaks": _end(signal.SIGSEGV),
    "it leaves": lambda: os._exit(0),
    "it exits": lambda: sys.exit(0),
    "it leaves a child": _leave_behind,
    "it closes its files": _close_files,
    "it writes into every file": _write_everywhere,
    "it calls itself": _descend,
    "a lone surrogate": _raise(ValueError("\ud800")),
    "escapes": _raise(ValueError("\x1b[2J")),
    "a long reason": _raise(ValueError("a" * 10**7)),
    "a surly exception": _raise(SurlyError()),
    "an interrupt": _raise(KeyboardInterrupt()),
    "the end of a generator": _raise(GeneratorExit()),
    "no memory": _raise(MemoryError()),
    "no files": _raise(OSError(24, "Too many open files")),
    "a group": _raise(ExceptionGroup("many", [ValueError("a"), ValueError("b")])),
}
"""What a function does in place of answering."""

REWARDS: dict[str, Callable[[], object]] = {
    **ACTS,
    "no list": lambda: None,
    "a text": lambda: ["one"],
    "no number": lambda: [math.nan],
    "without end": lambda: [math.inf],
    "more than fp32 holds": lambda: [1e300],
    "400 digits": lambda: [10**400],
    "too many": lambda: [1.0, 2.0],
    "too few": list,
    "a complex number": lambda: [1j],
    "nothing": lambda: [None],
    "deep": _deep,
}

TOOLS: dict[str, Callable[[], object]] = {
    **ACTS,
    "17 MiB": lambda: ["a" * (17 * 2**20)],
    "2 MiB": lambda: ["a" * 2**21],
    "half a character": lambda: ["\udc80"],
    "too many answers": lambda: ["a", "b"],
    "no answer": list,
    "no list": lambda: None,
}


def reward(samples: Sequence[RewardSample]) -> object:
    """Scores what is well, and does what any other response says."""
    return [1.0] if samples[0].response == "well" else REWARDS[samples[0].response]()


def tool(calls: Sequence[ToolCall]) -> object:
    """Answers what is well, and does what any other call says."""
    return ["well"] if calls[0].sampled == "well" else TOOLS[calls[0].sampled]()
