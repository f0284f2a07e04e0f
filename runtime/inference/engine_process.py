"""An engine in a process beside a rank, in the interpreter of its own environment: its start, weights, rounds and end.

Everything that goes wrong with the process ends the run with one sentence (`RunFailed`): it ended, it does not answer,
it refuses something, it is out of memory, or it is of another version.
"""

from __future__ import annotations

import mmap
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from meshwright.cost_models.memory_cost import WEIGHT_BUCKET_BYTES
from meshwright.profiles.errors import RunFailed
from meshwright.profiles.frameworks import NOT_RUN
from meshwright.runtime.device.used_memory import resident_bytes
from meshwright.runtime.inference import engine_server
from meshwright.runtime.inference.engine_server import Message, MessageError, read_message, write_message

VLLM_SERVER = Path(engine_server.__file__)
"""The program that serves vLLM."""
SGLANG_SERVER = Path(engine_server.__file__).with_name("sglang_server.py")
"""The program that serves SGLang."""

BUCKET_BYTES = WEIGHT_BUCKET_BYTES
"""Bytes of weights that are in the shared memory at a time, unless a single tensor is larger."""

START_SECONDS = 600.0
"""Time limit of a start, which takes about 20 s on a free machine (vLLM 0.32 on 2 cores, AMD EPYC, 2026-11-27)."""
MIN_ANSWER_SECONDS = 45.0
"""Time limit of a bucket of weights, and of a round unless the plan predicts long ones; below the minute after which
the run's watchdog ends a rank without knowing why."""
_END_SECONDS = 5.0
"""Time in which a process that nobody talks to any more has to end."""

_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "TORCHDYNAMO_DISABLE": "1",  # compiling its one compiled function takes half a minute at the first round
}
"""What vLLM reads from the environment when it runs as one process with its weights in the ordinary layout."""
_RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_RANK_PREFIXES = ("TORCHELASTIC_", "GROUP_", "ROLE_", "PYTHON")
"""Variables of the rank that would make its engine one of the rank's processes, or change its interpreter."""


@dataclass(frozen=True, kw_only=True)
class EngineShard:
    """The shard of a model that one process has; every rank of a replica has a process beside it."""

    tp: int = 1
    """The number of processes that share the model."""
    rank: int = 0
    """The number of this process among them."""
    store: str = ""
    """A new file in which they meet, with a name that no other processes use; empty for one process."""


@dataclass(frozen=True, kw_only=True)
class EngineAdapter:
    """The adapter with which all sequences are sampled."""

    rank: int
    alpha: float
    """The low-rank product is scaled by alpha / rank."""
    modules: tuple[str, ...]
    """The linears that it adapts, by the engine's names."""


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """What an engine starts with."""

    model: str
    """The directory with the model's config.json; its weights are not read."""
    config: Mapping[str, int]
    """Values that replace those of config.json. The rows of the embedding and of the output layer (vocab_size) are
    among them where no later token may be sampled."""
    dtype: str
    max_tokens: int
    """Largest number of tokens of a sequence, its prompt included."""
    num_slots: int
    """Sequences that are decoded at a time."""
    max_round_tokens: int
    """Tokens of one round, prefilled ones included; at least `max_tokens`, because no prefill is split."""
    block_tokens: int
    """Tokens of a KV block."""
    cache_bytes: int
    """Bytes of the KV cache."""
    cache_tokens: int = 0
    """Tokens of the KV cache, by which SGLang is told its size."""
    device: int = 0
    """The number of the GPU of this rank on its node."""
    temperature: float
    """The logits are divided by it before anything else: log-probabilities are of softmax(logits / temperature)."""
    enable_chunked_prefill: bool = False
    enable_prefix_caching: bool = True
    enforce_eager: bool = True
    """The three fields above are arguments of vLLM (`planner.plan.vllm_settings`)."""
    shard: EngineShard = EngineShard()
    """The shard of the model; vLLM takes whole weights and keeps its part of them."""
    adapter: EngineAdapter | None = None
    """With an adapter, the base weights are sent once, and every version of the weights is a version of the adapter."""


@dataclass(frozen=True, kw_only=True)
class EngineFacts:
    """What runs in the process."""

    engine: str
    version: str
    kernels: str

    def __str__(self) -> str:
        what = f"{self.engine} {self.version} ({self.kernels})"
        warnings = [f"NOT RUN before: {warning}" for name, warning in NOT_RUN.items() if name == self.engine]
        return "; ".join((what, *warnings))


@dataclass(frozen=True, kw_only=True)
class RequestSampling:
    """How the response to one prompt is sampled, and what ends it."""

    is_greedy: bool
    top_k: int
    """Sample only from the k most likely tokens; 0 is all."""
    top_p: float
    """Sample only from the most likely tokens that together have this probability, after top_k and renormalised."""
    seed: int
    max_tokens: int
    end_tokens: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Request:
    """A sequence to continue: its tokens so far, and its sampling."""

    id: str
    tokens: tuple[int, ...]
    sampling: RequestSampling


class Sampled(NamedTuple):
    """The tokens that a round gave to one request, mostly one."""

    id: str
    tokens: Sequence[int]
    logprobs: Sequence[float]
    has_ended: bool


class EngineProcess:
    """One process of an engine. It starts at once; `wait_until_ready` comes before everything else."""

    def __init__(
        self,
        python: Path,
        settings: EngineSettings,
        *,
        log: Path,
        rank: int = 0,
        num_threads: int = 1,
        server: Path = VLLM_SERVER,
        answer_seconds: float = MIN_ANSWER_SECONDS,
    ) -> None:
        """`python` is the interpreter of the engine's environment, `log` the file that gets what it prints, and
        `answer_seconds` the time limit of one answer.

        Raises RunFailed if the process cannot be started.
        """
        self._name, self._log, self._answer_seconds = f"the engine of rank {rank}", log, answer_seconds
        self._version, self._store = -1, settings.shard.store
        self._bucket = mmap.mmap(-1, 1)
        ours, theirs = socket.socketpair()
        # Unlike a file of /dev/shm it is gone with its processes, however they end, and a container does not limit it.
        self._memory = os.memfd_create("meshwright-weights")
        command = [python, "-I", server, theirs.fileno(), self._memory, os.getpid()]
        try:
            with log.open("ab") as output:
                self._process = subprocess.Popen(
                    list(map(str, command)),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    pass_fds=(theirs.fileno(), self._memory),
                    env=_environment(os.environ, num_threads),
                    start_new_session=True,  # Ctrl-C ends the run, which ends its engines in order
                )
        except OSError as error:
            ours.close()
            os.close(self._memory)
            raise RunFailed(f"{self._name} cannot be started with {python}: {error.strerror}.") from None
        finally:
            theirs.close()
        self._connection = ours
        self._ready_by = time.monotonic() + START_SECONDS
        self._send("start", **asdict(settings))

    def wait_until_ready(self, supported: str | None = None) -> EngineFacts:
        """Wait until the engine has started; return what it is.

        Raises RunFailed if it does not start, or if its version does not begin with `supported`.
        """
        answer = self._answer("started", self._ready_by, START_SECONDS)
        facts = EngineFacts(engine=answer["engine"], version=answer["version"], kernels=answer["kernels"])
        if supported is not None and not facts.version.startswith(supported):
            self._fail(f"is {facts.engine} {facts.version}, and meshwright runs {supported}")
        return facts

    def take_base_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Give the engine the frozen base weights of an adapter: tensors [...] by their names in a Hugging Face
        checkpoint. Raises RunFailed if it refuses them."""
        self._send("base")
        self._send_tensors(tensors)

    def take_weights(self, version: int, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Give the engine new weights: tensors [...] by their names in a Hugging Face checkpoint, or the tensors of its
        adapter by their names in PEFT's format.

        What it has cached under the old weights is dropped. Raises RunFailed if it refuses them.
        """
        self._send("weights", version=version)
        self._version = version
        self._send_tensors(tensors)

    def _send_tensors(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Send tensors [...] in buckets, and wait until they are loaded."""
        for bucket in _buckets(tensors):
            listed, offset = [], 0
            self._reserve(sum(_num_bytes(tensor) for _, tensor in bucket))
            for name, tensor in bucket:
                view = torch.frombuffer(self._bucket, dtype=tensor.dtype, count=tensor.numel(), offset=offset)
                view.copy_(tensor.detach().reshape(-1))
                listed.append(
                    (name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), offset, tensor.numel())
                )
                offset += _num_bytes(tensor)
            self._send("bucket", tensors=listed, num_bytes=len(self._bucket))
            self._answer("taken")
        self._send("end_weights")
        self._require_version(self._answer("loaded"), self._version)

    @property
    def version(self) -> int:
        """The version of the weights that the engine has; -1 before the first."""
        return self._version

    @property
    def resident_bytes(self) -> int:
        """The resident memory of the process now, without pages of files; 0 if it has ended."""
        return resident_bytes(self._process.pid)

    def step(self, added: Sequence[Request] = (), aborted: Sequence[str] = ()) -> list[Sampled]:
        """Add and abort requests and run one round; return what it sampled, nothing if no request is left.

        Raises RunFailed if it was sampled with other weights than the last ones taken.
        """
        self._send("step", add=list(map(asdict, added)), abort=list(aborted))
        answer = self._answer("sampled")
        self._require_version(answer, self._version)
        return [Sampled(*row) for row in answer["rows"]]

    def sleep(self) -> int:
        """Make the engine free the memory of its KV cache, which no request may use; return its bytes."""
        self._send("sleep")
        return int(self._answer("asleep")["num_bytes"])

    def wake(self) -> None:
        """Make the engine take the memory of its KV cache again. Raises RunFailed if there is none."""
        self._send("wake")
        self._answer("awake")

    def close(self) -> None:
        """End the process, if it has not ended."""
        self._connection.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_SECONDS)
        self._kill()

    def _require_version(self, answer: Message, version: int) -> None:
        if answer["version"] != version:
            self._fail(f"has weights of version {answer['version']}, and version {version} was sent")

    def _send(self, kind: str, **content: Any) -> None:
        """Send a message; that the process has ended is noticed when its answer is read."""
        with suppress(OSError):
            self._connection.settimeout(self._answer_seconds)
            write_message(self._connection, kind, **content)

    def _answer(self, kind: str, deadline: float | None = None, limit: float | None = None) -> Message:
        """Return the answer to what was sent, which has this kind. Raises RunFailed if there is no such answer."""
        limit = limit or self._answer_seconds
        try:
            answer = read_message(self._connection, deadline or time.monotonic() + limit)
        except TimeoutError:
            self._fail(f"did not answer within {limit:g} s and was ended")
        except MessageError as error:
            self._fail(f"sent {error}; its server and this program are of different versions")
        except (EOFError, OSError):
            self._fail(self._end())
        if answer["kind"] == "error" and answer.get("out_of_memory"):
            self._fail(f"ran out of memory ({answer.get('error')}); plan for more memory or fewer generation_slots")
        if answer["kind"] == "error":
            self._fail(f"refused: {answer.get('error')}")
        if answer["kind"] != kind:
            self._fail(f"answered {answer['kind']} instead of {kind}")
        return answer

    def _end(self) -> str:
        """Return how the process has ended."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_SECONDS)
        code = self._process.poll()
        if code is None:
            return "closed its connection"
        if code >= 0:
            return f"ended with exit code {code}"
        hint = ", which the kernel sends when memory runs out" if code == -signal.SIGKILL else ""
        return f"was ended by {signal.Signals(-code).name}{hint}"

    def _fail(self, reason: str) -> None:
        """End the process and raise RunFailed."""
        self._connection.close()
        self._kill()
        raise RunFailed(f"{self._name} {reason}; what it printed is in {self._log}.")

    def _kill(self) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        if self._store:
            Path(self._store).unlink(missing_ok=True)
        if self._memory >= 0:
            os.close(self._memory)
            self._memory = -1

    def _reserve(self, num_bytes: int) -> None:
        """Make the shared memory at least this large."""
        if len(self._bucket) < num_bytes:
            os.ftruncate(self._memory, num_bytes)
            self._bucket = mmap.mmap(self._memory, num_bytes)


_ALIGNMENT = 16
"""Tensors begin at multiples of this many bytes."""


def _num_bytes(tensor: Tensor) -> int:
    """Return the bytes that a tensor [...] takes in a bucket, up to the next aligned one."""
    num_bytes = tensor.numel() * tensor.element_size()
    return num_bytes + -num_bytes % _ALIGNMENT


def _buckets(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[list[tuple[str, Tensor]]]:
    """Split the tensors, in order, into buckets of at most `BUCKET_BYTES`, or of one larger tensor."""
    bucket: list[tuple[str, Tensor]] = []
    num_bytes = 0
    for name, tensor in tensors:
        if bucket and num_bytes + _num_bytes(tensor) > BUCKET_BYTES:
            yield bucket
            bucket, num_bytes = [], 0
        bucket.append((name, tensor))
        num_bytes += _num_bytes(tensor)
    if bucket:
        yield bucket


def _environment(inherited: Mapping[str, str], num_threads: int) -> dict[str, str]:
    """Return the environment of the process: the rank's, without what makes it a rank."""
    kept = {
        name: value
        for name, value in inherited.items()
        if name not in _RANK_VARIABLES and not name.startswith(_RANK_PREFIXES)
    }
    return {**kept, **_ENVIRONMENT, "OMP_NUM_THREADS": str(num_threads)}
