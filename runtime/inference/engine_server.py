"""The program of an engine process: it serves vLLM to the rank that started it.

    PYTHON -I engine_server.py SOCKET MEMORY PARENT

PYTHON is the interpreter of the engine's own environment, so this file imports nothing of this project, and only the
class at its end imports vLLM. SOCKET and MEMORY are numbers of inherited files: a stream socket, and the shared memory
through which weights come. PARENT is the process id of the rank; the process ends with it.

A message is a header (`_HEADER`) and a JSON object. The rank asks, and the process answers every message but `base` and
`weights`:

| message | content | answer |
|---|---|---|
| `start` | settings of the engine (`EngineSettings` in `engine_process.py`) | what runs: engine, version, kernels |
| `base` | the frozen base weights of an adapter follow | none |
| `weights` | the version of the weights that follow; with an adapter, its weights alone | none |
| `bucket` | names, types, shapes and offsets of tensors in the shared memory | `taken`: the memory is free again |
| `end_weights` | | the version, -1 after `base` |
| `sleep` | | `asleep`: the number of bytes of its KV cache that are free now |
| `wake` | | `awake`: it has them again |
| `step` | requests to add, ids of requests to abort | the tokens of one round, and the version that sampled them |

An answer with the key `error` is a refusal, in one sentence; `out_of_memory` says whether memory was the reason.
"""

from __future__ import annotations

import ctypes
import errno
import json
import logging
import mmap
import os
import signal
import socket
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol, TypeAlias

PROTOCOL_VERSION = 1
"""The version of the message format; every message carries it."""
MAX_MESSAGE_BYTES = 2**26
"""Largest JSON object of a message: a round of 4,096 rows has less than a megabyte."""

LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The ranks for which vLLM 0.32 reserves memory (config/lora.py); adapters of a smaller rank fit."""

_MAGIC = b"MWEN"
_HEADER = struct.Struct(">4sHI")
"""A mark, the version of the format, and the number of bytes that follow."""
_READ_BYTES = 2**20
_PR_SET_PDEATHSIG = 1
_MADV_POPULATE_WRITE = 23
"""The advice to take pages at once (linux/mman.h, since 5.14)."""

Message: TypeAlias = dict[str, Any]


class MessageError(Exception):
    """What arrived is no message of this version of the format."""


def write_message(connection: socket.socket, kind: str, **content: Any) -> None:
    """Write one message. Raises MessageError if it is too long, OSError if nobody reads it any more."""
    text = json.dumps({"kind": kind, **content}).encode()
    if len(text) > MAX_MESSAGE_BYTES:
        raise MessageError(f"a message of {len(text)} bytes is longer than the {MAX_MESSAGE_BYTES} that are allowed")
    connection.sendall(_HEADER.pack(_MAGIC, PROTOCOL_VERSION, len(text)) + text)


def read_message(connection: socket.socket, deadline: float | None = None) -> Message:
    """Read one message, by `deadline` of `time.monotonic` if one is given.

    Raises EOFError if the other side has closed the connection, TimeoutError after the deadline, and MessageError for
    anything that is no message of this version.
    """
    mark, version, num_bytes = _HEADER.unpack(_read(connection, _HEADER.size, deadline))
    if mark != _MAGIC:
        raise MessageError(f"{mark!r} begins no message")
    if version != PROTOCOL_VERSION:
        raise MessageError(
            f"a message of version {version} of the format, and this side has version {PROTOCOL_VERSION}"
        )
    if num_bytes > MAX_MESSAGE_BYTES:
        raise MessageError(f"a message of {num_bytes} bytes is longer than the {MAX_MESSAGE_BYTES} that are allowed")
    try:
        message = json.loads(_read(connection, num_bytes, deadline))
    except (ValueError, RecursionError):
        raise MessageError("a message that is no JSON") from None
    if not isinstance(message, dict) or not isinstance(message.get("kind"), str):
        raise MessageError("a message without a kind")
    return message


def _read(connection: socket.socket, num_bytes: int, deadline: float | None) -> bytes:
    received = bytearray()
    while len(received) < num_bytes:
        if deadline is not None:
            connection.settimeout(max(1e-3, deadline - time.monotonic()))
        part = connection.recv(min(_READ_BYTES, num_bytes - len(received)))
        if not part:
            raise EOFError
        received += part
    return bytes(received)


class ServedEngine(Protocol):
    """An engine in its own process. Tensors are those of its own torch."""

    @property
    def facts(self) -> Message:
        """The engine, its version and its kernels, as text."""
        ...

    def load(self, tensors: Iterator[tuple[str, Any]]) -> None:
        """Take new weights, tensor by tensor, under the names of a Hugging Face checkpoint; forget what was cached
        under the old ones."""
        ...

    def load_adapter(self, tensors: Iterator[tuple[str, Any]]) -> None:
        """Take a new adapter, by its names in PEFT's format; drop what was cached under the old one."""
        ...

    def step(self, added: Sequence[Message], aborted: Sequence[str]) -> list[Any]:
        """Run one round; return the id of each request that got tokens, the tokens, their log-probabilities, and
        whether it has ended."""
        ...

    def sleep(self) -> int:
        """Free the memory of the KV cache, which no request uses, and forget what was cached; return its bytes."""
        ...

    def wake(self) -> None:
        """Take the memory of the KV cache again."""
        ...


def serve(connection: socket.socket, memory: int, start: Callable[[Message], ServedEngine]) -> None:
    """Answer messages until the other side closes the connection."""
    with suppress(EOFError, OSError):
        try:
            settings = _expect(read_message(connection), "start")
            engine = start(settings)
        except (EOFError, ConnectionError):
            raise
        except Exception as error:
            _refuse(connection, error)
            return
        write_message(connection, "started", **engine.facts)
        version = -1
        while True:
            message = read_message(connection)
            try:
                if message["kind"] in ("base", "weights"):
                    is_adapter = settings["adapter"] and message["kind"] == "weights"
                    load = engine.load_adapter if is_adapter else engine.load
                    with _naming_the_weight(_received(connection, memory)) as tensors:
                        load(tensors)
                    version = message.get("version", version)
                    write_message(connection, "loaded", version=version)
                elif message["kind"] == "sleep":
                    write_message(connection, "asleep", num_bytes=engine.sleep())
                elif message["kind"] == "wake":
                    engine.wake()
                    write_message(connection, "awake")
                else:
                    asked = _expect(message, "step")
                    rows = engine.step(asked["add"], asked["abort"])
                    write_message(connection, "sampled", version=version, rows=rows)
            except (EOFError, ConnectionError):
                raise
            except Exception as error:
                _refuse(connection, error)


def _refuse(connection: socket.socket, error: Exception) -> None:
    write_message(connection, "error", error=sentence_of(error), out_of_memory=_is_out_of_memory(error))


def _is_out_of_memory(error: BaseException) -> bool:
    """True for the errors of Python, of torch on a CPU and of torch on a GPU that an allocation has failed."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    text = str(error).lower()
    reasons = (os.strerror(errno.ENOMEM).lower(), "can't allocate memory", "not enough memory", "bad_alloc")
    # oneDNN says this where it has no memory for the code of a kernel; if it has no kernel for a shape, it is the
    # "primitive descriptor" that could not be created.
    has_no_code = text.endswith("could not create a primitive")
    return isinstance(error, RuntimeError | OSError) and (has_no_code or any(reason in text for reason in reasons))


@contextmanager
def _naming_the_weight(tensors: Iterator[tuple[str, Any]]) -> Iterator[Iterator[tuple[str, Any]]]:
    """Context that yields the tensors; an error in it gets the name of the tensor that was taken last."""
    last = ""

    def taken() -> Iterator[tuple[str, Any]]:
        nonlocal last
        for tensor in tensors:
            last = tensor[0]
            yield tensor
        last = ""

    try:
        yield taken()
    except (EOFError, ConnectionError):
        raise
    except Exception as error:
        if not last or _is_out_of_memory(error):
            raise
        raise ValueError(f"the weight {last} was not taken, {sentence_of(error)}") from error


def _expect(message: Message, kind: str) -> Message:
    if message["kind"] != kind:
        raise MessageError(f"{message['kind']} is not expected here, but {kind}")
    return message


def _received(connection: socket.socket, memory: int) -> Iterator[tuple[str, Any]]:
    """Yield the tensors of all buckets as copies: an engine may use them after the memory is written again."""
    import torch  # noqa: PLC0415 - the rank, which imports this module for the format, has another torch

    while (message := read_message(connection))["kind"] != "end_weights":
        bucket = _expect(message, "bucket")
        shared, tensors = mmap.mmap(memory, bucket["num_bytes"]), []
        for name, kind, shape, offset, count in bucket["tensors"]:
            flat = torch.frombuffer(shared, dtype=getattr(torch, kind), count=count, offset=offset)
            tensors.append((name, flat.view(shape).clone()))
        write_message(connection, "taken")
        yield from tensors


def sentence_of(error: BaseException) -> str:
    """Return an exception as one line, by its name alone if it says nothing."""
    return " ".join((f"{type(error).__name__}: {error}" if str(error) else type(error).__name__).split())


def main(start: Callable[[Message], ServedEngine]) -> None:
    """Serve the engine that `start` makes, on the files that the command line names."""
    connection, memory, parent = map(int, sys.argv[1:])
    end_with_parent(parent)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # a rank blocks signals, and this process inherits that
    serve(socket.socket(fileno=connection), memory, start)
    sys.stdout.flush()
    os._exit(0)  # engines leave threads that would keep the process


def end_with_parent(parent: int) -> None:
    """Make the kernel kill this process when its parent has ended. Raises OSError if it refuses.

    `planner/search/parent_death.py` has the same for processes of this project's interpreter.
    """
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:
        os._exit(1)


class VllmEngine:
    """vLLM in this process, without its tokenizer, its own server or its own processes."""

    def __init__(self, settings: Message) -> None:
        import torch  # noqa: PLC0415 - see the module's docstring
        import vllm  # noqa: PLC0415

        self._vllm, self._torch = vllm, torch
        self._adapter: _Adapter | None = _Adapter(**settings["adapter"]) if settings["adapter"] else None
        self._missing = _NotLoaded()
        logging.getLogger("vllm.model_executor.model_loader.reload.inplace").addHandler(self._missing)
        shard = settings["shard"]
        try:
            self._engine = vllm.LLMEngine.from_engine_args(
                vllm.EngineArgs(
                    model=settings["model"],
                    hf_overrides=settings["config"],
                    load_format="dummy",  # the rank sends the weights
                    skip_tokenizer_init=True,
                    generation_config="vllm",  # not the model's: every request has its own sampling settings
                    dtype=settings["dtype"],
                    max_model_len=settings["max_tokens"],
                    max_num_seqs=settings["num_slots"],
                    max_num_batched_tokens=settings["max_round_tokens"],
                    enable_chunked_prefill=settings["enable_chunked_prefill"],
                    block_size=settings["block_tokens"],
                    kv_cache_memory_bytes=settings["cache_bytes"],
                    enable_prefix_caching=settings["enable_prefix_caching"],
                    # Before the filters top_k and top_p, and before a temperature of the request, which is therefore 1.
                    logprobs_mode="raw_logprobs",
                    enforce_eager=settings["enforce_eager"],
                    **(self._adapter.arguments if self._adapter else {}),
                    tensor_parallel_size=shard["tp"],
                    distributed_executor_backend=_shard_executor(shard) if shard["tp"] > 1 else None,
                    seed=0,
                    disable_log_stats=True,
                )
            )
        finally:
            _unlink_shared_memory()
        self._engine.collective_rpc(_divide_logits, args=(settings["temperature"],))

    @property
    def facts(self) -> Message:
        kernels = f"torch {self._torch.__version__}, {self._torch.backends.cpu.get_cpu_capability()}"
        return {"engine": "vllm", "version": self._vllm.__version__, "kernels": kernels}

    def load(self, tensors: Iterator[tuple[str, Any]]) -> None:
        """Take new weights. Raises ValueError if some of the model's are missing, or if requests use cached blocks."""
        self._missing.names = ""
        self._engine.collective_rpc(_forget_expert_kernels)
        self._engine.collective_rpc(
            "reload_weights", kwargs={"weights_iterator": tensors, "is_checkpoint_format": True}
        )
        if self._engine.model_config.hf_config.tie_word_embeddings:
            self._engine.collective_rpc(_pack_tied_output)
        if self._missing.names:
            raise ValueError(f"no values came for the weights {self._missing.names}")
        self._drop_cache()

    def load_adapter(self, tensors: Iterator[tuple[str, Any]]) -> None:
        """Take a new adapter in place of the old one. Raises ValueError if requests use cached blocks."""
        assert self._adapter is not None
        with self._adapter.stored(dict(tensors)) as request:
            self._engine.add_lora(request)
        self._drop_cache()

    def _drop_cache(self) -> None:
        if not self._engine.reset_prefix_cache():
            raise ValueError("the prefix cache of the old weights is in use and cannot be dropped")

    def sleep(self) -> int:
        """Free the memory of the KV cache. Raises ValueError if requests use it.

        vLLM's own sleep needs its allocator on a GPU; its CPU build ignores the call.
        """
        self._drop_cache()
        [num_bytes] = self._engine.collective_rpc(_free_cache)
        return int(num_bytes)

    def wake(self) -> None:
        """Take the memory of the KV cache again. Raises MemoryError if there is none."""
        self._engine.collective_rpc(_take_cache)

    def step(self, added: Sequence[Message], aborted: Sequence[str]) -> list[Any]:
        if aborted:
            self._engine.abort_request(list(aborted))
        for request in added:
            self._engine.add_request(
                request["id"],
                {"prompt_token_ids": request["tokens"]},
                self._sampling(request["sampling"]),
                lora_request=self._adapter.request() if self._adapter else None,
            )
        if not self._engine.has_unfinished_requests():
            return []
        rows = []
        for output in self._engine.step():
            [completion] = output.outputs
            tokens = list(completion.token_ids)
            logprobs = [by_token[token].logprob for token, by_token in zip(tokens, completion.logprobs, strict=True)]
            rows.append((output.request_id, tokens, logprobs, output.finished))
        return rows

    def _sampling(self, sampling: Message) -> Any:
        return self._vllm.SamplingParams(
            temperature=0.0 if sampling["is_greedy"] else 1.0,
            top_k=sampling["top_k"],
            top_p=sampling["top_p"],
            seed=sampling["seed"],
            max_tokens=sampling["max_tokens"],
            stop_token_ids=sampling["end_tokens"],
            ignore_eos=True,  # the model's own; the request names all tokens that end it
            detokenize=False,
            logprobs=0,  # that of the sampled token, and of no other
            output_kind=self._vllm.sampling_params.RequestOutputKind.DELTA,
        )


class _Adapter:
    """The adapter with which all requests run. vLLM reads adapters from directories in the format of PEFT."""

    def __init__(self, rank: int, alpha: float, modules: Sequence[str]) -> None:
        self._config = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "target_modules": modules}
        self.arguments = {
            "enable_lora": True,
            "max_loras": 1,
            "max_lora_rank": next(size for size in LORA_RANKS if size >= rank),
            # Otherwise the embedding and the output layer would have an empty adapter, which takes time.
            "lora_target_modules": modules,
        }

    def request(self, directory: str = "loaded") -> Any:
        """Return vLLM's request for the adapter. One with a directory replaces the loaded adapter by the one there."""
        from vllm.lora.request import LoRARequest  # noqa: PLC0415 - see the module's docstring

        return LoRARequest("policy", 1, directory, load_inplace=directory != "loaded")

    @contextmanager
    def stored(self, tensors: dict[str, Any]) -> Iterator[Any]:
        """Context in which the tensors are in a directory; yield the request that loads them.

        The tensors are in memory, as buckets are, and the directory has a link to it.
        """
        from safetensors.torch import save  # noqa: PLC0415

        with (
            tempfile.TemporaryDirectory(prefix="meshwright-adapter-") as directory,
            open(os.memfd_create("meshwright-adapter"), "wb") as memory,
        ):
            memory.write(save(tensors))
            memory.flush()
            Path(directory, "adapter_model.safetensors").symlink_to(f"/proc/self/fd/{memory.fileno()}")
            Path(directory, "adapter_config.json").write_text(json.dumps(self._config))
            yield self.request(directory)


def _shard_executor(shard: Message) -> type:
    """Return the executor of a process that has one shard of the model.

    As with vLLM's own external launcher, every process schedules: all of them get the same requests in the same rounds
    and sample the same tokens from the same random numbers. They meet in a file whose name is unique, because vLLM also
    names their shared memory after it.
    """
    from vllm.v1.executor.uniproc_executor import UniProcExecutor  # noqa: PLC0415 - see the module's docstring

    class ShardExecutor(UniProcExecutor):  # type: ignore[misc, unused-ignore]
        def _distributed_args(self) -> tuple[str, int, int]:
            return f"file://{shard['store']}", shard["rank"], shard["rank"]

    return ShardExecutor


def _unlink_shared_memory() -> None:
    """Remove the names of the shared memory that this process uses.

    All processes of the model have opened it when an engine has started. Without names it is gone with them, however
    they end.
    """
    mapped = {line.split(maxsplit=5)[-1].rstrip() for line in Path("/proc/self/maps").read_text().splitlines()}
    for path in mapped:
        if path.startswith("/dev/shm/"):
            Path(path).unlink(missing_ok=True)


def _free_cache(worker: Any) -> int:
    """Give the pages of the KV cache back to the kernel, and return their bytes; its addresses stay."""
    return sum(_advise(start, num_bytes, mmap.MADV_DONTNEED) for start, num_bytes in _cache_pages(worker))


def _take_cache(worker: Any) -> None:
    """Take pages for the KV cache, filled with zeros. A kernel before Linux 5.14 takes each when it is written."""
    for start, num_bytes in _cache_pages(worker):
        _advise(start, num_bytes, _MADV_POPULATE_WRITE)


def _cache_pages(worker: Any) -> list[tuple[int, int]]:
    """Return the address and the bytes of the whole pages in each storage of the KV cache."""
    storages = {cache.untyped_storage().data_ptr(): cache.untyped_storage() for cache in worker.model_runner.kv_caches}
    pages = []
    for address, storage in storages.items():
        start = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (address + storage.nbytes()) // mmap.PAGESIZE * mmap.PAGESIZE
        pages.append((start, max(0, end - start)))
    return pages


def _advise(start: int, num_bytes: int, advice: int) -> int:
    """Give the kernel an advice on whole pages; return their bytes, 0 if it does not know the advice. Raises
    MemoryError if it has no pages, OSError for any other failure."""
    if not ctypes.CDLL(None, use_errno=True).madvise(ctypes.c_void_p(start), ctypes.c_size_t(num_bytes), advice):
        return num_bytes
    number = ctypes.get_errno()
    if number == errno.EINVAL:
        return 0
    if number in (errno.ENOMEM, errno.EAGAIN):
        raise MemoryError(f"{num_bytes} bytes of the KV cache cannot be taken")
    raise OSError(number, "madvise")


def _divide_logits(worker: Any, temperature: float) -> None:
    """Divide all logits by the temperature where the model computes them.

    No `logprobs_mode` of vLLM is after the temperature and before top_k and top_p: raw_logprobs are of the model's
    logits, and processed_logprobs are renormalised over the tokens that the filters leave.
    """
    worker.get_model().logits_processor.scale /= temperature


def _pack_tied_output(worker: Any) -> None:
    """Pack the weights of an output layer that is the embedding again, for the kernel of a CPU.

    A reload packs those of the layers for which values come, and they come for the embedding alone: the output layer
    would go on with its packed copy of the old weights (model_executor/model_loader/reload/layerwise.py of vLLM 0.32).
    """
    output = worker.get_model().lm_head
    output.quant_method.process_weights_after_loading(output)


def _forget_expert_kernels(worker: Any) -> None:
    """Make the next load pack the weights of experts for the kernels of a CPU.

    vLLM packs them only in the load that creates the kernel. A reload would copy plain weights to where the kernel
    reads packed ones (fused_moe/unquantized_fused_moe_method.py of vLLM 0.32).
    """
    for module in worker.get_model().modules():
        method: Any = getattr(module, "quant_method", None)
        if hasattr(method, "moe_kernel"):
            method.moe_kernel = None


class _NotLoaded(logging.Handler):
    """Keeps the names of weights for which a reload had no values: vLLM only logs them."""

    names = ""

    def emit(self, record: logging.LogRecord) -> None:
        if "not loaded from checkpoint" in record.msg and isinstance(record.args, tuple):
            self.names = ", ".join(sorted(record.args[0]))  # type: ignore[call-overload]


if __name__ == "__main__":
    main(VllmEngine)
