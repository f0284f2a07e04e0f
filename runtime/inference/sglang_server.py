"""The program of an engine process that serves SGLang: `engine_server.py` with another engine.

It was written against the public interface of SGLang 0.5.23 (`sglang.Engine`, its offline engine, and the abort of its
tokenizer manager) and has never run with SGLang, which does not install without CUDA. It is tested against a double.

SGLang schedules by itself: a round of the rank is whatever tokens have come since the last one, at least one.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

Message: TypeAlias = dict[str, Any]

_BUCKET_BYTES = 2**28
"""Weights that SGLang gets in one call."""
_CACHE = "kv_cache"
"""SGLang's name for the memory of the KV cache (srt/constants.py)."""
_MEMORY_SHARE = 0.9
"""The share of the device's memory that weights and KV cache may take; `max_total_tokens` is the tighter limit."""


@dataclass(eq=False)
class _Stream:
    """A request that runs: its name in SGLang, which is never used again, and the chunk that comes next."""

    rid: str
    chunks: AsyncIterator[Message]
    next_chunk: asyncio.Task[Message]


class SglangEngine:
    """SGLang's offline engine, without its tokenizer."""

    def __init__(self, settings: Message) -> None:
        import sglang  # noqa: PLC0415 - only the interpreter of the engine's environment has it

        if settings["adapter"]:
            raise ValueError("adapters are not sent to SGLang")
        self._sglang, self._temperature, self._cache_bytes = sglang, settings["temperature"], settings["cache_bytes"]
        self._engine = sglang.Engine(
            model_path=settings["model"],
            json_model_override_args=json.dumps(settings["config"]),
            load_format="dummy",  # the rank sends the weights
            skip_tokenizer_init=True,
            dtype=settings["dtype"],
            context_length=settings["max_tokens"],
            max_running_requests=settings["num_slots"],
            chunked_prefill_size=settings["max_round_tokens"],
            page_size=settings["block_tokens"],
            max_total_tokens=settings["cache_tokens"],
            mem_fraction_static=_MEMORY_SHARE,
            base_gpu_id=settings["device"],
            incremental_streaming_output=True,
            # Without it SGLang leaves out the seed of a request. Log-probabilities are then log softmax(logits /
            # temperature), before top_k and top_p (srt/layers/sampler.py of SGLang 0.5.23).
            enable_deterministic_inference=True,
            enable_memory_saver=True,  # for the release of the cache
            random_seed=0,
        )
        self._streams: dict[str, _Stream] = {}
        self._num_requests = 0

    @property
    def facts(self) -> Message:
        return {"engine": "sglang", "version": self._sglang.__version__, "kernels": "its default attention"}

    def load(self, tensors: Iterator[tuple[str, Any]]) -> None:
        """Take new weights in buckets, and drop the cache with the last. Raises ValueError if SGLang refuses them."""
        assert not self._streams, "weights came while requests ran"
        bucket: list[tuple[str, Any]] = []
        num_bytes = 0
        for name, tensor in tensors:
            bucket.append((name, tensor))
            num_bytes += tensor.numel() * tensor.element_size()
            if num_bytes > _BUCKET_BYTES:
                self._update(bucket)
                bucket, num_bytes = [], 0
        if bucket:
            self._update(bucket)
        if not self._engine.flush_cache().success:
            raise ValueError("the cache of the old weights is in use and cannot be dropped")

    def _update(self, bucket: list[tuple[str, Any]]) -> None:
        success, reason = self._engine.update_weights_from_tensor(bucket, flush_cache=False)
        if not success:
            raise ValueError(f"SGLang refused weights up to {bucket[-1][0]}: {reason}")

    def load_adapter(self, _tensors: Iterator[tuple[str, Any]]) -> None:
        """Raises ValueError, because SGLang gets no adapters here."""
        raise ValueError("adapters are not sent to SGLang")

    def sleep(self) -> int:
        """Free the memory of the KV cache; return its bytes."""
        self._engine.release_memory_occupation(tags=[_CACHE])
        return self._cache_bytes

    def wake(self) -> None:
        """Take the memory of the KV cache again."""
        self._engine.resume_memory_occupation(tags=[_CACHE])

    def step(self, added: Sequence[Message], aborted: Sequence[str]) -> list[Any]:
        return self._run(self._step(added, aborted))

    def _run(self, work: Any) -> Any:
        return self._engine.loop.run_until_complete(work)

    async def _step(self, added: Sequence[Message], aborted: Sequence[str]) -> list[Any]:
        for name in aborted:
            await self._abort(self._streams.pop(name))
        for request in added:
            self._streams[request["id"]] = await self._start(request)
        if not self._streams:
            return []
        await asyncio.wait([one.next_chunk for one in self._streams.values()], return_when=asyncio.FIRST_COMPLETED)
        arrived = [(name, one) for name, one in self._streams.items() if one.next_chunk.done()]
        rows = [self._row(name, stream) for name, stream in arrived]
        for name, _tokens, _logprobs, has_ended in rows:
            if has_ended:
                await _exhaust(self._streams.pop(name))
        return rows

    async def _start(self, request: Message) -> _Stream:
        rid = f"{request['id']}/{self._num_requests}"
        self._num_requests += 1
        chunks = await self._engine.async_generate(
            input_ids=list(request["tokens"]),
            sampling_params=self._sampling(request["sampling"]),
            return_logprob=True,
            stream=True,
            rid=rid,
        )
        return _Stream(rid, chunks, _next(chunks))

    async def _abort(self, stream: _Stream) -> None:
        """Abort a request, and wait for its end: until then it holds its part of the cache."""
        self._engine.tokenizer_manager.abort_request(rid=stream.rid)
        await _exhaust(stream)

    def _row(self, name: str, stream: _Stream) -> tuple[str, list[int], list[float], bool]:
        """Return the tokens of a chunk that has come, their log-probabilities, and whether the request has ended.
        Raises ValueError for a request that SGLang has aborted by itself."""
        chunk = stream.next_chunk.result()
        tokens, meta = list(chunk["output_ids"]), chunk["meta_info"]
        finish = meta["finish_reason"]
        if finish and finish["type"] == "abort":
            raise ValueError(f"SGLang aborted a request: {finish.get('message')}")
        stream.next_chunk = _next(stream.chunks)
        logprobs = [logprob for logprob, _token, _text in meta["output_token_logprobs"]]
        if len(logprobs) != len(tokens):
            raise ValueError(f"SGLang gave {len(logprobs)} log-probabilities for {len(tokens)} tokens")
        return name, tokens, logprobs, bool(finish)

    def _sampling(self, sampling: Message) -> Message:
        return {
            "temperature": 0.0 if sampling["is_greedy"] else self._temperature,
            "top_k": sampling["top_k"] or -1,
            "top_p": sampling["top_p"],
            "sampling_seed": sampling["seed"],
            "max_new_tokens": sampling["max_tokens"],
            "stop_token_ids": list(sampling["end_tokens"]),
            "ignore_eos": True,  # the model's own; the request names all tokens that end it
            "no_stop_trim": True,
        }


async def _exhaust(stream: _Stream) -> None:
    """Take what is left of a stream: SGLang releases a request with its end."""
    try:
        while True:
            await stream.next_chunk
            stream.next_chunk = _next(stream.chunks)
    except StopAsyncIteration:
        return


def _next(chunks: AsyncIterator[Message]) -> asyncio.Task[Message]:
    async def next_chunk() -> Message:
        return await anext(chunks)

    return asyncio.ensure_future(next_chunk())


if __name__ == "__main__":
    sys.path.append(str(Path(__file__).parent))  # an isolated interpreter leaves it out
    importlib.import_module("engine_server").main(SglangEngine)
