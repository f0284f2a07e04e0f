"""Tokens per second of our engine and of vLLM in its process on a CPU, for responses whose lengths have a long tail.

python -m benchmarks.generation.engines --python build/engines/vllm/bin/python [--prompts 128] [--runs 5]

Both engines sit behind the interface of a run, have the same weights, slots and one thread, and sample with
log-probabilities. Their runs alternate. The processor time of vLLM is that of both processes.
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import psutil
import torch

from benchmarks.generation.work import (
    BATCH,
    LONGEST_PROMPT,
    LONGEST_RESPONSE,
    SHAPES,
    Work,
    draw_work,
    write_checkpoint,
)
from benchmarks.small_worlds import join_alone
from meshwright.profiles.hardware import local_cluster
from meshwright.profiles.layout import Layout
from meshwright.profiles.model_shape import read_model
from meshwright.profiles.packing import BLOCK_TOKENS, max_prefill_tokens, num_blocks_for
from meshwright.runtime.inference.engine import Generator
from meshwright.runtime.inference.engine_process import EngineProcess, EngineSettings
from meshwright.runtime.inference.external_replica import ExternalReplica, stored_tensors
from meshwright.runtime.inference.replica_engine import ReplicaEngine
from meshwright.runtime.inference.sampling import Sampling
from meshwright.runtime.inference.slots import Prompt
from meshwright.runtime.model.mesh import build_mesh
from meshwright.runtime.model.model_shard import Decoder, build_model
from meshwright.runtime.model.weights import load_weights

MAX_TOKENS = LONGEST_PROMPT + LONGEST_RESPONSE
WIDE = {
    "vocab_size": 8192,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}


class Took(NamedTuple):
    """Seconds of one generation by the clock, and of the processor."""

    wall: float
    processor: float


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.generation.engines", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--python", type=Path, required=True, help="the interpreter of the environment with vLLM")
    parser.add_argument("--prompts", type=int, default=128, help="of one generation")
    parser.add_argument("--runs", type=int, default=5, help="of each engine, in turn")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    join_alone()
    print(f"{local_cluster(1).device.name}, torch {torch.__version__}, one thread, load {os.getloadavg()[0]:.1f}")
    shapes = {**{name: shape for name, (shape, _) in SHAPES["cpu"].items()}, "larger: 8 layers of 512": WIDE}
    for name, shape in shapes.items():
        with tempfile.TemporaryDirectory() as directory:
            compare(name, shape, Path(directory), arguments)


def compare(name: str, shape: dict[str, int], directory: Path, arguments: argparse.Namespace) -> None:
    """Print the medians of both engines with a model of this shape, and of their ratios."""
    checkpoint, work = write_checkpoint(directory, shape, 0), draw_work(arguments.prompts, shape["vocab_size"], 0)
    spec, mesh = read_model(checkpoint), build_mesh(Layout(), 0)
    model = build_model(spec, mesh)
    assert isinstance(model, Decoder)
    load_weights(model, spec, mesh, checkpoint)
    process = start_vllm(arguments.python, checkpoint, directory)
    kinds: dict[str, ReplicaEngine] = {
        "ours": Generator(
            model,
            spec,
            mesh,
            num_slots=BATCH,
            max_tokens=MAX_TOKENS,
            max_response=LONGEST_RESPONSE,
            eos_tokens=frozenset(),
            temperature=1.0,
            seed=0,
        ),
        "vLLM": ExternalReplica(
            process,
            functools.partial(stored_tensors, model),
            num_slots=BATCH,
            max_response=LONGEST_RESPONSE,
            eos_tokens=frozenset(),
            sampling=Sampling(temperature=1.0),
            seed=0,
        ),
    }
    runs: dict[str, list[Took]] = {kind: [] for kind in kinds}
    for run in range(arguments.runs + 1):
        for kind, engine in kinds.items():
            took = seconds(engine, work)
            if run:  # the first one warms up
                runs[kind].append(took)
    process.close()
    print(f"\n{name}: {len(work.lengths)} prompts, {work.num_tokens} tokens, {BATCH} slots")
    for kind, taken in runs.items():
        wall, processor = (work.num_tokens / statistics.median(column) for column in zip(*taken, strict=True))
        print(f"{kind}: {wall:.0f} tokens/s, {processor:.0f} a second of processor time")
    pairs = list(zip(runs["ours"], runs["vLLM"], strict=True))
    for what in Took._fields:
        ratios = sorted(getattr(theirs, what) / getattr(ours, what) for ours, theirs in pairs)
        print(f"ours in {what} time: {statistics.median(ratios):.2f}x ({ratios[0]:.2f} to {ratios[-1]:.2f})")


def start_vllm(python: Path, checkpoint: Path, directory: Path) -> EngineProcess:
    """Start vLLM as a run does."""
    spec = read_model(checkpoint)
    num_blocks = BATCH * num_blocks_for(MAX_TOKENS) + 1  # one is vLLM's own
    settings = EngineSettings(
        model=str(checkpoint),
        config={},
        dtype="float32",
        max_tokens=MAX_TOKENS,
        num_slots=BATCH,
        max_round_tokens=max_prefill_tokens(BATCH, MAX_TOKENS),
        block_tokens=BLOCK_TOKENS,
        cache_bytes=num_blocks * BLOCK_TOKENS * 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * 4,
        temperature=1.0,
    )
    process = EngineProcess(python, settings, log=directory / "engine.log")
    process.wait_until_ready()
    return process


def seconds(engine: ReplicaEngine, work: Work) -> Took:
    """Generate all prompts at once; the responses must have the lengths asked for."""
    prompts = [
        Prompt(row=row, sample_id=row, tokens=tokens, max_response=length)
        for row, (tokens, length) in enumerate(zip(work.prompts, work.lengths, strict=True))
    ]
    wall, processor = time.perf_counter(), processor_seconds()
    sampled = engine.generate(prompts)
    took = Took(time.perf_counter() - wall, processor_seconds() - processor)
    assert tuple(len(response.tokens) for response in sampled) == work.lengths
    return took


def processor_seconds() -> float:
    """The processor time of this process and of those that it has started."""
    me = psutil.Process()
    times = [process.cpu_times() for process in (me, *me.children(recursive=True))]
    return sum(one.user + one.system for one in times)


if __name__ == "__main__":
    main()
