"""An engine process without a model: a token is the sum of the weights and of the tokens before it, modulo 100.

Prompts that begin with one of these tokens make it fail. The environment of the process is that of this project.
"""

from __future__ import annotations

import mmap
import os
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from meshwright.runtime.inference import engine_server
from meshwright.runtime.inference.engine_server import Message

DIES, HANGS, REFUSES, EXITS, IS_NEWER, GARBLES, STARVES, GROWS, MAPS, COMPILES = (
    901,
    902,
    903,
    904,
    905,
    906,
    907,
    908,
    909,
    910,
)
RAISED = {
    REFUSES: ValueError("a prompt that it does not take"),
    GROWS: RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8192 bytes."),
    COMPILES: RuntimeError("could not create a primitive"),
}
"""Errors in the words of torch on a CPU and of oneDNN, and one that has nothing to do with memory."""
MODULUS = 100
UNKNOWN = "unknown"
"""The name of a weight that is refused without a reason."""


@dataclass
class CountingEngine:
    settings: Message
    total: int = 0
    base: int = 0
    """The weights below an adapter."""
    requests: dict[str, Message] = field(default_factory=dict)
    is_asleep: bool = False

    def __post_init__(self) -> None:
        if self.settings["model"] == "broken":
            raise ValueError("its model is\nbroken")

    @property
    def facts(self) -> Message:
        return {"engine": "counting", "version": "1.2.3", "kernels": "none"}

    def load(self, tensors: Iterator[tuple[str, Any]]) -> None:
        if self.settings["model"] == "frozen":
            raise ValueError("its weights are frozen")
        self.total = self.base = 0
        for name, tensor in tensors:
            assert name != UNKNOWN
            self.total = self.base = self.total + int(tensor.sum())

    def load_adapter(self, tensors: Iterator[tuple[str, Any]]) -> None:
        self.total = self.base + sum(int(tensor.sum()) for _, tensor in tensors)

    def sleep(self) -> int:
        assert not self.requests
        self.is_asleep = True
        return int(self.settings["cache_bytes"])

    def wake(self) -> None:
        self.is_asleep = False

    def step(self, added: Sequence[Message], aborted: Sequence[str]) -> list[Any]:
        assert not self.is_asleep, "it has no cache"
        for name in aborted:
            del self.requests[name]
        for request in added:
            misbehave(request["tokens"][0])
            self.requests[request["id"]] = {**request, "left": request["sampling"]["max_tokens"]}
        rows = []
        for name, request in [*self.requests.items()]:
            token = (self.total + sum(request["tokens"])) % MODULUS
            request["tokens"].append(token)
            request["left"] -= 1
            has_ended = token in request["sampling"]["end_tokens"] or not request["left"]
            rows.append((name, [token], [-0.5], has_ended))
            if has_ended:
                del self.requests[name]
        return rows


def misbehave(token: int) -> None:
    if token == DIES:
        os.kill(os.getpid(), signal.SIGKILL)
    if token == HANGS:
        time.sleep(600)
    if token == STARVES:
        bytearray(2**62)
    if token == MAPS:
        mmap.mmap(-1, 2**50)
    if token == EXITS:
        os._exit(7)
    if token in RAISED:
        raise RAISED[token]
    if token == IS_NEWER:
        engine_server.PROTOCOL_VERSION = 2
    if token == GARBLES:
        engine_server._MAGIC = b"HTTP"


if __name__ == "__main__":
    engine_server.main(CountingEngine)
