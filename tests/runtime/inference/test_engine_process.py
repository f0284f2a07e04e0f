"""An engine in a process beside a rank: its weights and rounds, and the sentences for its end, silence and refusals."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from meshwright.profiles.errors import RunFailed
from meshwright.runtime.inference import engine_process, engine_server
from meshwright.runtime.inference.engine_process import (
    EngineAdapter,
    EngineProcess,
    EngineSettings,
    Request,
    RequestSampling,
)
from meshwright.runtime.inference.engine_server import MessageError, read_message, write_message
from tests.runtime.inference import counting_server
from tests.runtime.inference.counting_server import MODULUS

SERVER = Path(counting_server.__file__)
SETTINGS = EngineSettings(
    model="counting",
    config={"vocab_size": MODULUS},
    dtype="float32",
    max_tokens=64,
    num_slots=4,
    max_round_tokens=64,
    block_tokens=32,
    cache_bytes=2**20,
    temperature=1.0,
)
SAMPLING = RequestSampling(is_greedy=False, top_k=0, top_p=1.0, seed=1, max_tokens=3, end_tokens=(99,))


def request_of(*tokens: int, name: str = "a") -> Request:
    return Request(id=name, tokens=tokens, sampling=SAMPLING)


def start(directory: Path, settings: EngineSettings = SETTINGS, answer_seconds: float = 20.0) -> EngineProcess:
    return EngineProcess(
        Path(sys.executable),
        settings,
        log=directory / "engine.log",
        rank=3,
        server=SERVER,
        answer_seconds=answer_seconds,
    )


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[EngineProcess]:
    process = start(tmp_path)
    process.wait_until_ready()
    yield process
    process.close()


@pytest.fixture(scope="module")
def lasting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    """An engine of all tests that send weights: with the first of them the process imports torch."""
    process = start(tmp_path_factory.mktemp("lasting"))
    process.wait_until_ready()
    yield process
    process.close()


@pytest.fixture
def sockets() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


def test_a_round_returns_tokens_log_probabilities_and_ends(lasting: EngineProcess) -> None:
    engine = lasting
    engine.take_weights(0, [("bias", torch.tensor([5]))])
    first = engine.step([request_of(1, 2), request_of(91, 3, name="b")])
    assert [(row.id, row.tokens, row.logprobs, row.has_ended) for row in first] == [
        ("a", [8], [-0.5], False),
        ("b", [99], [-0.5], True),  # an end token
    ]
    assert [[row.tokens for row in engine.step()] for _ in range(2)] == [[[16]], [[32]]]
    assert engine.step() == []


def test_an_aborted_request_gets_no_more_tokens(engine: EngineProcess) -> None:
    engine.step([request_of(1), request_of(2, name="b")])
    assert [row.id for row in engine.step(aborted=["a"])] == ["b"]


def test_an_engine_samples_only_while_it_has_its_cache(engine: EngineProcess) -> None:
    assert engine.sleep() == SETTINGS.cache_bytes
    engine.wake()
    assert [row.id for row in engine.step([request_of(1)])] == ["a"]
    engine.step(aborted=["a"])
    engine.sleep()
    with pytest.raises(RunFailed, match="refused: AssertionError: it has no cache"):
        engine.step([request_of(1)])


def test_weights_of_several_buckets_and_types_arrive_whole(
    lasting: EngineProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_process, "BUCKET_BYTES", 100)
    tensors = {
        "integers": torch.arange(7),
        "larger than a bucket": torch.ones(10, 10),
        "halves": torch.full((3, 5), 2.0, dtype=torch.bfloat16).t(),
        "a number": torch.tensor(4.0),
    }
    lasting.take_weights(6, tensors.items())
    total = sum(int(tensor.sum()) for tensor in tensors.values())
    assert lasting.version == 6
    assert lasting.step([request_of(0)])[0].tokens == [total % MODULUS]
    lasting.step(aborted=["a"])


def test_an_adapter_replaces_the_one_before_it_and_leaves_the_weights_below_it(tmp_path: Path) -> None:
    adapter = EngineAdapter(rank=2, alpha=4.0, modules=("qkv_proj",))
    process = start(tmp_path, replace(SETTINGS, adapter=adapter))
    process.wait_until_ready()
    process.take_base_weights([("bias", torch.tensor([50]))])
    assert process.version == -1
    for version, value in enumerate((3, 4)):
        process.take_weights(version, [("lora", torch.tensor([value]))])
        assert process.step([request_of(0)], ["a"] if version else [])[0].tokens == [50 + value]
    assert process.version == 1
    process.close()


def test_a_start_says_what_runs(tmp_path: Path) -> None:
    process = start(tmp_path)
    assert str(process.wait_until_ready("1.2.")) == "counting 1.2.3 (none)"
    process.close()


@pytest.mark.parametrize(
    ("token", "says"),
    [
        (counting_server.DIES, "was ended by SIGKILL, which the kernel sends when memory runs out;"),
        (counting_server.STARVES, "ran out of memory (MemoryError); plan for more memory or fewer generation_slots;"),
        (
            counting_server.COMPILES,
            "ran out of memory (RuntimeError: could not create a primitive); plan for more memory",
        ),
        (counting_server.MAPS, "ran out of memory (OSError: [Errno 12] Cannot allocate memory); plan for more memory"),
        (counting_server.GROWS, "ran out of memory (RuntimeError: DefaultCPUAllocator: can't allocate memory"),
        (counting_server.EXITS, "ended with exit code 7"),
        (counting_server.REFUSES, "refused: ValueError: a prompt that it does not take"),
        (counting_server.IS_NEWER, "sent a message of version 2 of the format, and this side has version 1"),
        (counting_server.GARBLES, "sent b'HTTP' begins no message"),
    ],
)
def test_a_failure_is_one_sentence_that_names_the_rank_and_the_log(
    engine: EngineProcess, token: int, says: str
) -> None:
    with pytest.raises(RunFailed, match=re.escape(f"the engine of rank 3 {says}")) as failure:
        engine.step([request_of(token)])
    assert "engine.log" in str(failure.value)
    assert "\n" not in str(failure.value)


def test_an_engine_that_hangs_is_ended(tmp_path: Path) -> None:
    process = start(tmp_path, answer_seconds=0.5)
    process.wait_until_ready()
    with pytest.raises(RunFailed, match=r"did not answer within 0\.5 s and was ended"):
        process.step([request_of(counting_server.HANGS)])
    with pytest.raises(RunFailed, match="was ended by SIGKILL"):
        process.step()


def test_refused_weights_say_why(tmp_path: Path) -> None:
    process = start(tmp_path, replace(SETTINGS, model="frozen"))
    process.wait_until_ready()
    with pytest.raises(RunFailed, match="refused: ValueError: its weights are frozen"):
        process.take_weights(0, [("weight", torch.zeros(3))])


def test_a_weight_that_is_refused_is_named(tmp_path: Path) -> None:
    process = start(tmp_path)
    process.wait_until_ready()
    tensors = [("known", torch.zeros(3)), (counting_server.UNKNOWN, torch.zeros(3))]
    with pytest.raises(RunFailed, match="refused: ValueError: the weight unknown was not taken, AssertionError;"):
        process.take_weights(0, tensors)


def test_an_engine_that_cannot_start_says_why(tmp_path: Path) -> None:
    process = start(tmp_path, replace(SETTINGS, model="broken"))
    with pytest.raises(RunFailed, match="refused: ValueError: its model is broken"):
        process.wait_until_ready()


def test_an_engine_of_another_version_is_refused(tmp_path: Path) -> None:
    process = start(tmp_path)
    with pytest.raises(RunFailed, match=r"is counting 1\.2\.3, and meshwright runs 0\.9\."):
        process.wait_until_ready("0.9.")


def test_a_missing_interpreter_is_named(tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match="cannot be started with /no/python: No such file"):
        EngineProcess(Path("/no/python"), SETTINGS, log=tmp_path / "log")


def test_tokens_of_other_weights_than_the_last_are_refused(engine: EngineProcess) -> None:
    engine._version = 5  # as if a message had been lost
    with pytest.raises(RunFailed, match="has weights of version -1, and version 5 was sent"):
        engine.step([request_of(1)])


def test_the_process_ends_with_its_rank() -> None:
    code = (
        "import os, signal, socket, subprocess, sys\n"
        "ours, theirs = socket.socketpair(); number = str(theirs.fileno())\n"
        "command = [sys.executable, '-I', sys.argv[1], number, number, str(os.getpid())]\n"
        "print(subprocess.Popen(command, pass_fds=[theirs.fileno()]).pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", code, SERVER], stdout=subprocess.PIPE, text=True, check=False)
    assert done.returncode == -signal.SIGKILL
    process, deadline = Path(f"/proc/{int(done.stdout)}"), time.monotonic() + 10
    while process.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not process.exists()


def test_an_engine_does_not_inherit_what_makes_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "MASTER_ADDR", "TORCHELASTIC_RUN_ID", "PYTHONPATH", "HOME"):
        monkeypatch.setenv(name, "x")
    environment = engine_process._environment(os.environ, num_threads=2)
    assert not {"RANK", "MASTER_ADDR", "TORCHELASTIC_RUN_ID", "PYTHONPATH"} & {*environment}
    assert (environment["HOME"], environment["OMP_NUM_THREADS"]) == ("x", "2")


def test_a_message_arrives_as_it_was_sent_however_it_is_split(sockets: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = sockets
    write_message(ours, "step", add=[{"id": "é", "tokens": list(range(1000))}], abort=[])
    sent = theirs.recv(2**20)

    def send_bytes() -> None:
        for byte in sent:
            ours.sendall(bytes([byte]))

    sender = threading.Thread(target=send_bytes)
    sender.start()
    message = read_message(theirs)
    sender.join()
    assert message == {"kind": "step", "add": [{"id": "é", "tokens": list(range(1000))}], "abort": []}


@pytest.mark.parametrize(
    ("sent", "says"),
    [
        (engine_server._HEADER.pack(b"MWEN", 1, 2**31), "2147483648 bytes is longer than"),
        (engine_server._HEADER.pack(b"MWEN", 7, 2) + b"{}", "version 7"),
        (engine_server._HEADER.pack(b"MWEN", 1, 2) + b"{]", "no JSON"),
        (engine_server._HEADER.pack(b"MWEN", 1, 2) + b"{}", "without a kind"),
        (b"GET / HTTP", "begins no message"),
    ],
)
def test_what_is_no_message_is_refused(sent: bytes, says: str, sockets: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = sockets
    ours.sendall(sent)
    with pytest.raises(MessageError, match=says):
        read_message(theirs)


def test_a_message_that_is_too_long_is_not_sent(
    sockets: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_server, "MAX_MESSAGE_BYTES", 10)
    with pytest.raises(MessageError, match="longer than the 10"):
        write_message(sockets[0], "step", add=[])
