"""A double of the package `sglang`. THIS IS NOT SGLANG: it has no model, and its tokens are sums.

It has what `sglang_server.py` calls, with the names of arguments, the chunks and the behaviour that were read in the
source of SGLang 0.5.23 (2026-11-27): srt/server_args.py, srt/entrypoints/engine.py, srt/sampling/sampling_params.py,
and `_stream_one_response` and `abort_request` in srt/managers/tokenizer_manager.py.

A token is the sum of the weights and of the tokens before it, modulo 100, with the log-probability -0.25 times the
temperature. A second token comes with the first chunk whose first token is even, as where two rounds come together.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

__version__ = "0.5.23"

SERVER_ARGUMENTS = {
    "model_path",
    "json_model_override_args",
    "load_format",
    "skip_tokenizer_init",
    "dtype",
    "context_length",
    "max_running_requests",
    "chunked_prefill_size",
    "page_size",
    "max_total_tokens",
    "mem_fraction_static",
    "base_gpu_id",
    "incremental_streaming_output",
    "enable_deterministic_inference",
    "enable_memory_saver",
    "random_seed",
}
SAMPLING_PARAMETERS = {
    "temperature",
    "top_k",
    "top_p",
    "sampling_seed",
    "max_new_tokens",
    "stop_token_ids",
    "ignore_eos",
    "no_stop_trim",
}
MODULUS = 100
REFUSED = "refused"
"""A weight that this double does not take."""


class FlushCacheReqOutput(NamedTuple):
    success: bool
    message: str = ""


class TokenizerManager:
    """The states of requests, by their names."""

    def __init__(self) -> None:
        self.running: dict[str, asyncio.Event] = {}

    def abort_request(self, rid: str = "", abort_all: bool = False) -> None:
        assert not abort_all
        if rid in self.running:
            self.running[rid].set()


class Engine:
    """The offline engine."""

    def __init__(self, **server_args: Any) -> None:
        assert server_args.keys() <= SERVER_ARGUMENTS, server_args.keys() - SERVER_ARGUMENTS
        json.loads(server_args["json_model_override_args"])
        assert server_args["skip_tokenizer_init"]
        self._is_incremental = server_args["incremental_streaming_output"]
        self.loop = asyncio.new_event_loop()
        self.tokenizer_manager = TokenizerManager()
        self._total, self._names, self._released = 0, set[str](), set[str]()

    async def async_generate(
        self,
        *,
        sampling_params: dict[str, Any],
        input_ids: list[int],
        return_logprob: bool = False,
        stream: bool = False,
        rid: str,
    ) -> AsyncIterator[dict[str, Any]]:
        assert input_ids
        assert return_logprob
        assert stream
        assert sampling_params.keys() <= SAMPLING_PARAMETERS, sampling_params.keys() - SAMPLING_PARAMETERS
        assert sampling_params["top_k"] == -1 or sampling_params["top_k"] >= 1  # SamplingParams.verify
        assert isinstance(sampling_params["sampling_seed"], int)
        assert rid not in self._names, f"{rid} was used before"
        assert not self._released, "the cache was released"
        self._names.add(rid)
        return self._chunks(list(input_ids), sampling_params, rid)

    async def _chunks(self, tokens: list[int], sampling: dict[str, Any], rid: str) -> AsyncIterator[dict[str, Any]]:
        aborted = self.tokenizer_manager.running.setdefault(rid, asyncio.Event())
        sampled: list[int] = []
        finish: dict[str, Any] | None = None
        while finish is None:
            await asyncio.sleep(0)
            chunk: list[int] = []
            if aborted.is_set():
                finish = {"type": "abort", "message": "Abort in waiting queue"}
            while finish is None and (not chunk or (len(chunk) < 2 and chunk[0] % 2 == 0)):
                token = (self._total + sum(tokens)) % MODULUS
                for known in (tokens, sampled, chunk):
                    known.append(token)
                if token in sampling["stop_token_ids"]:
                    finish = {"type": "stop", "matched": token}
                elif len(sampled) == sampling["max_new_tokens"]:
                    finish = {"type": "length", "length": len(sampled)}
            logprobs = [(-0.25 * sampling["temperature"], token, None) for token in chunk]
            yield {
                "output_ids": chunk if self._is_incremental else sampled,
                "meta_info": {"id": rid, "finish_reason": finish, "output_token_logprobs": logprobs},
            }
        del self.tokenizer_manager.running[rid]

    def update_weights_from_tensor(
        self, named_tensors: list[tuple[str, Any]], flush_cache: bool = True
    ) -> tuple[bool, str]:
        assert not flush_cache, "the adapter flushes once, after its last bucket"
        assert not self.tokenizer_manager.running, "it waits for requests that run"
        if any(name == REFUSED for name, _ in named_tensors):
            return False, "no such parameter"
        self._total = sum(int(tensor.sum()) for _, tensor in named_tensors)
        return True, "Succeeded to update parameter online from tensor."

    def flush_cache(self) -> FlushCacheReqOutput:
        return FlushCacheReqOutput(not self.tokenizer_manager.running)

    def release_memory_occupation(self, tags: list[str] | None = None) -> None:
        assert not self.tokenizer_manager.running
        self._released |= set(tags or ())

    def resume_memory_occupation(self, tags: list[str] | None = None) -> None:
        self._released -= set(tags or ())
