"""Tokens a second of the generation engine beside `transformers` and, where it is installed, vLLM, on long tails."""

from __future__ import annotations

import importlib
import importlib.util
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.accelerator.world import World
from benchmarks.generation.rivals import DTYPE, Engine, Transformers, seconds
from benchmarks.generation.work import BATCH, SHAPES, Work, draw_work, write_checkpoint

_RUNS, _RUNS_OF_TRANSFORMERS, _TINY_RUNS = 3, 1, 1
"""Of transformers, whose batches take a second for every forty tokens, one."""
_VLLM_MEMORY = 0.4
"""Of the device's, for its weights and cache: the other sides are on the same device."""

Side = Callable[[Work], list[list[int]]]


class Vllm:
    """Its offline engine with its defaults. Each response has the length asked for. Has not been run here."""

    def __init__(self, checkpoint: Path) -> None:
        self._vllm: Any = importlib.import_module("vllm")
        dtype = str(DTYPE).removeprefix("torch.")
        self._engine = self._vllm.LLM(
            model=str(checkpoint), dtype=dtype, skip_tokenizer_init=True, gpu_memory_utilization=_VLLM_MEMORY, seed=0
        )

    def generate(self, work: Work) -> list[list[int]]:
        prompts = [{"prompt_token_ids": list(prompt)} for prompt in work.prompts]
        sampling = [
            self._vllm.SamplingParams(max_tokens=length, ignore_eos=True, temperature=1.0, detokenize=False)
            for length in work.lengths
        ]
        found = self._engine.generate(prompts, sampling, use_tqdm=False)
        return [list(one.outputs[0].token_ids) for one in found]


def report(world: World) -> str:
    """As a table of Markdown."""
    sizes = SHAPES[world.kind]
    if world.tiny:
        sizes = dict([next(iter(SHAPES["cpu"].items()))])
    of_theirs, runs = (_TINY_RUNS, _TINY_RUNS) if world.tiny else (_RUNS_OF_TRANSFORMERS, _RUNS)
    lines = [
        f"{BATCH} sequences at a time for transformers, as many slots for the engine; "
        f"medians of {of_theirs} and {runs} runs.\n",
        "| model | prompts | tokens | transformers tokens/s | engine tokens/s | ratio | vLLM tokens/s |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, (shape, counts) in sizes.items():
        checkpoint = write_checkpoint(world.directory(f"generation/{len(lines)}"), shape, seed=0)
        for num_prompts in counts[-1:] if world.tiny else counts:
            work = draw_work(num_prompts, shape["vocab_size"], seed=0)
            if world.tiny:
                work = Work(work.prompts, tuple(1 + length // 20 for length in work.lengths))
            by_theirs, by_ours = _sides(checkpoint)
            theirs, ours = _rate(by_theirs, work, of_theirs), _rate(by_ours, work, runs)
            figures = f"{theirs:.0f} | {ours:.0f} | {ours / theirs:.2f} | {_of_vllm(checkpoint, work, runs)}"
            lines.append(f"| {name} | {num_prompts} | {work.num_tokens} | {figures} |")
            print(lines[-1], file=sys.stderr, flush=True)  # a call that is cut off has told it
    return "\n".join(lines)


def _sides(checkpoint: Path) -> tuple[Side, Side]:
    return Transformers(checkpoint).generate, Engine(checkpoint, temperature=1.0, seed=0).refilled


def _rate(side: Side, work: Work, runs: int) -> float:
    side(Work(prompts=work.prompts[:BATCH], lengths=(4,) * len(work.prompts[:BATCH])))  # to warm up
    return statistics.median(work.num_tokens / seconds(side, work)[0] for _ in range(runs))


def _of_vllm(checkpoint: Path, work: Work, runs: int) -> str:
    """Its tokens a second, or why there are none."""
    if importlib.util.find_spec("vllm") is None:
        return "not installed"
    torch.cuda.empty_cache()
    try:
        return f"{_rate(Vllm(checkpoint).generate, work, runs):.0f}"
    except (ImportError, RuntimeError, ValueError) as problem:
        return f"failed: {str(problem).splitlines()[0]}"
