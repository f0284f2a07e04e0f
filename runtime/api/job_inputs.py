"""Inputs of a first plan: the known hardware, a job file, and workloads from recorded rollouts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from meshwright.planner.analysis.observed_lengths import read_agent_trace, read_lengths
from meshwright.planner.job.first_job import FirstJob
from meshwright.profiles.algorithms import Algorithm
from meshwright.profiles.hardware import (
    device_named,
    device_names,
    device_nicknames,
    network_named,
    network_names,
    network_source,
    usual_network,
)
from meshwright.profiles.workload import ObservedLengths
from meshwright.runtime.api.arguments import Pathname, require_number, require_run_packages


def known_hardware() -> dict[str, list[dict[str, object]]]:
    """The devices and networks that a job may name, with their facts, as plain data.

    A device also has its nicknames and the network that usually joins its nodes.

    >>> [network["name"] for network in api.known_hardware()["networks"]][0]
    'efa-3200-per-node'
    """
    return {"devices": [_device(name) for name in device_names()], "networks": [_network(n) for n in network_names()]}


def _device(name: str) -> dict[str, object]:
    device, intra_node, host = device_named(name)
    links = {"intra_node": intra_node.model_dump(mode="json"), "host": host.model_dump(mode="json")}
    names = {"nicknames": list(device_nicknames(name)), "usual_network": usual_network(name)}
    return {**device.model_dump(mode="json"), **links, **names}


def _network(name: str) -> dict[str, object]:
    return {"name": name, **network_named(name).model_dump(mode="json"), "source": network_source(name)}


def first_job(
    model: Pathname,
    directory: Pathname = ".",
    *,
    device: str,
    batch_size: int,
    prompt: int,
    response: int,
    num_ranks: int = 8,
    network: str | None = None,
    algorithm: Algorithm = "ppo",
) -> str:
    """The YAML of a first job with a comment on every line, for a file in `directory`.

    `model` is a Hugging Face directory or a config.json, for all roles; `batch_size` counts prompts; `prompt` and
    `response` are the maximum lengths in tokens; `network` is by default the usual one of the device. Raises BadInput
    for a model, a device or a network that is not known, and for a number of ranks that is neither a multiple of 8
    (whole nodes) nor less than 8 (part of one).

    >>> text = api.first_job("examples/models/llama-2-7b", device="h100-sxm", batch_size=8, prompt=64, response=64)
    >>> text.splitlines()[8]
    '  device: "h100-sxm"  # `meshwright devices` lists them; local is this machine'
    """
    for name, value in (("batch_size", batch_size), ("prompt", prompt), ("response", response)):
        require_number(name, value, minimum=1)
    require_number("num_ranks", num_ranks, minimum=1)
    job = FirstJob(
        algorithm=algorithm,
        model=Path(model),
        device=device,
        num_ranks=num_ranks,
        network=network,
        batch_size=batch_size,
        prompt=prompt,
        response=response,
    )
    return job.text(Path(directory))


def agent_workload(trace: Pathname, tokenizer: Pathname) -> dict[str, Any]:
    """The lengths, turns and latencies of recorded agent rollouts, as the workload of a job.

    `trace` has JSON lines of chat messages, as described in `planner/analysis/observed_lengths.py`; `tokenizer` is a
    tokenizer.json, or the directory of one. Raises BadInput for a line that is not a rollout, and for a tokenizer that
    cannot be read.

    >>> import json, pathlib, tempfile, tokenizers
    >>> place = pathlib.Path(tempfile.mkdtemp())
    >>> words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a"))
    >>> words.save(str(place / "tokenizer.json"))
    >>> messages = [{"role": role, "content": "a"} for role in ("user", "assistant", "tool", "assistant")]
    >>> _ = (place / "trace.jsonl").write_text(json.dumps({"messages": messages}))
    >>> api.agent_workload(place / "trace.jsonl", place)["turns"]["number"]
    {'max': 2, 'histogram': [(2, 1)]}
    """
    require_run_packages("rollouts")
    from meshwright.runtime.rollout.prompt_encoding import encode_text
    from meshwright.runtime.rollout.prompts import read_tokenizer

    loaded, source = read_tokenizer(Path(tokenizer)), f"a message of {trace}"
    return read_agent_trace(
        Path(trace), lambda text: len(encode_text(loaded, text, source, special=False).ids)
    ).workload()


def observed_lengths(trace: Pathname, keys: Mapping[str, str] = MappingProxyType({})) -> ObservedLengths:
    """The lengths of sequences in a run of this program or of any trainer.

    `trace` is the directory of a run, or a file of JSON lines with the token counts of one rollout each. `keys` name
    the keys of its `prompt`, `response`, `result` (tool tokens) and `latency` where they differ from those in
    `planner/analysis/observed_lengths.py`. Raises BadInput for a run without a complete step, and for a line without
    lengths.

    >>> import pathlib, tempfile
    >>> trace = pathlib.Path(tempfile.mkdtemp()) / "rollouts.jsonl"
    >>> _ = trace.write_text('{"prompt_tokens": 8, "n": 96}\\n{"prompt_tokens": 8, "n": 32}\\n')
    >>> api.observed_lengths(trace, {"response": "n"}).response.resolve().mean
    64.0
    """
    return read_lengths(Path(trace), keys)
