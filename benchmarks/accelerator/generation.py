"""Tokens a second of the generation engine beside `transformers` and, where it is installed, vLLM, on long tails."""

from __future__ import annotations

import importlib
import importlib.util
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.accelerator.jobs import MODELS, config_of, free_device_memory, write_weights
from benchmarks.accelerator.world import World, tell
from benchmarks.generation.rivals import DTYPE, Engine, Transformers, seconds
from benchmarks.generation.work import BATCH, LONGEST_PROMPT, LONGEST_RESPONSE, Work, draw_work

_RUNS, _TINY_RUNS = 2, 1
"""Of the engine and of vLLM, behind one that is not counted. Transformers, whose batch takes a second for every forty
tokens of its longest response, is timed once, behind four tokens."""
_MANY = 4 * BATCH
"""Prompts that the engine is given beside the one batch."""
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


class _Rate(NamedTuple):
    """`slots` is how many sequences are decoded at a time, None where the side decides."""

    side: str
    prompts: int
    slots: int | None
    tokens: int
    per_second: float | str


def report(world: World) -> str:
    """As a table of Markdown."""
    lines = [
        f"Long tails: responses of {LONGEST_RESPONSE} tokens at most, half of them of 32; of the engine the median "
        f"of runs: {_runs(world)}. Transformers is given one batch.\n",
        "| model | side | prompts | at a time | tokens | tokens/s | to transformers |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in list(MODELS)[:1] if world.tiny else MODELS:
        with world.room("generation") as room:
            config = config_of(world, name, max_position_embeddings=LONGEST_PROMPT + LONGEST_RESPONSE)
            checkpoint = write_weights(room, config, DTYPE, world.kind)
            tell(f"{name} is written")
            theirs = None
            for rate in _rates(checkpoint, world, config["vocab_size"]):
                theirs = theirs or rate.per_second
                lines.append(f"| {name} | {_row(rate, theirs)} |")
                tell(lines[-1])
        free_device_memory()
    return "\n".join(lines)


def _row(rate: _Rate, theirs: float | str) -> str:
    told = f"{rate.side} | {rate.prompts} | {rate.slots or 'its choice'} | {rate.tokens}"
    if isinstance(rate.per_second, str) or isinstance(theirs, str):
        return f"{told} | {rate.per_second} | "
    return f"{told} | {rate.per_second:.0f} | {rate.per_second / theirs:.2f}"


def _rates(checkpoint: Path, world: World, vocab_size: int) -> Iterator[_Rate]:
    """Of transformers, of the engine for the same batch and for more prompts, and of vLLM."""
    few, many = (_work(number, vocab_size, world) for number in (BATCH, _MANY))
    yield _Rate("transformers", BATCH, BATCH, few.num_tokens, _of_transformers(checkpoint, few))
    free_device_memory()
    engine, runs = Engine(checkpoint, temperature=1.0, seed=0), _runs(world)
    for work, slots in ((few, BATCH), (many, BATCH), (many, _MANY)):
        engine.set_slots(slots)
        yield _Rate("engine", len(work.prompts), slots, work.num_tokens, _rate(engine.refilled, work, runs))
    del engine
    yield _Rate("vLLM", len(many.prompts), None, many.num_tokens, _of_vllm(checkpoint, many, runs))


def _work(num_prompts: int, vocab_size: int, world: World) -> Work:
    work = draw_work(num_prompts, vocab_size, seed=0)
    return Work(work.prompts, tuple(1 + length // 20 for length in work.lengths)) if world.tiny else work


def _runs(world: World) -> int:
    return _TINY_RUNS if world.tiny else _RUNS


def _of_transformers(checkpoint: Path, work: Work) -> float:
    side = Transformers(checkpoint).generate
    side(Work(work.prompts, (4,) * len(work.prompts)))
    return work.num_tokens / seconds(side, work)[0]


def _rate(side: Side, work: Work, runs: int) -> float:
    seconds(side, work)  # decode steps of every shape are recorded, memory is taken
    return statistics.median(work.num_tokens / seconds(side, work)[0] for _ in range(runs))


def _of_vllm(checkpoint: Path, work: Work, runs: int) -> float | str:
    """Its tokens a second, or why there are none."""
    if importlib.util.find_spec("vllm") is None:
        return "not installed"
    free_device_memory()
    try:
        return _rate(Vllm(checkpoint).generate, work, runs)
    except (ImportError, RuntimeError, ValueError) as problem:
        return f"failed: {str(problem).splitlines()[0]}"
