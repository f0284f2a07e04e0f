"""Sequences in flight and tokens per second where a few responses are long: a paged cache against slots of the longest.

python -m benchmarks.generation.long_tail [--slots 8] [--prompts 256] [--runs 3]

Both sides have the same bytes: the blocks that so many slots of the longest sequence would take. One side decodes no
more sequences than that, as a cache of slots must; the other as many as the plan's quantile allows in those bytes.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.generation.work import SHAPES, write_checkpoint
from benchmarks.small_worlds import join_alone
from meshwright.profiles.hardware import local_cluster
from meshwright.profiles.layout import Layout
from meshwright.profiles.lengths import LengthSpec
from meshwright.profiles.model_shape import read_model
from meshwright.profiles.packing import num_blocks_for
from meshwright.profiles.schedule import Schedule
from meshwright.profiles.workload import Workload
from meshwright.runtime.inference.engine import Generator
from meshwright.runtime.inference.slots import Prompt
from meshwright.runtime.model.mesh import build_mesh
from meshwright.runtime.model.model_shard import build_model

PROMPT, MEDIAN, P99, LONGEST = 32, 64, 1024, 2048


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.generation.long_tail", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--slots", type=int, default=8, help="of the longest sequence, whose bytes both sides have")
    parser.add_argument("--prompts", type=int, default=256, help="of one generation")
    parser.add_argument("--runs", type=int, default=3, help="paired runs, of which the median ratio is taken")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    join_alone()
    workload = Workload(
        batch_size=arguments.prompts,
        prompt=LengthSpec(max=PROMPT, fixed=PROMPT),
        response=LengthSpec(max=LONGEST, median=MEDIAN, p99=P99),
    )
    num_blocks = arguments.slots * num_blocks_for(PROMPT + LONGEST)
    fitting = [
        n
        for n in counts(arguments.prompts)
        if workload.cache_need(Schedule(generation_slots=n), 1).blocks <= num_blocks
    ]
    num_rows = max(fitting)
    print(f"{local_cluster(1).device.name}, torch {torch.__version__}, one thread; {num_blocks} blocks of cache")
    shape = SHAPES["cpu"]["demo's actor: 4 layers of 128"][0]
    with tempfile.TemporaryDirectory() as directory:
        sides = [
            open_generator(write_checkpoint(Path(directory), shape, 0), n, num_blocks)
            for n in (arguments.slots, num_rows)
        ]
    prompts = draw_prompts(arguments.prompts, shape["vocab_size"])
    runs = [[seconds(side, prompts) for side in sides] for _ in range(arguments.runs)]
    num_tokens = sum(prompt.max_response or 0 for prompt in prompts)
    for side, slots, took in zip(sides, (arguments.slots, num_rows), zip(*runs, strict=True), strict=True):
        rate = num_tokens / statistics.median(took)
        blocks, preempted = side.scheduler.peak_blocks, side.scheduler.num_preempted
        print(f"{slots} slots: {rate:.0f} tokens/s, at most {blocks} blocks, {preempted} pre-empted")
    ratios = sorted(one / other for one, other in runs)
    told = f"{statistics.median(ratios):.2f}x the tokens/s ({ratios[0]:.2f} to {ratios[-1]:.2f})"
    print(f"{num_rows / arguments.slots:.1f}x the sequences, {told}")


def counts(num_prompts: int) -> Sequence[int]:
    return [*(2**k for k in range(num_prompts.bit_length())), num_prompts]


def open_generator(checkpoint: Path, num_slots: int, num_blocks: int) -> Generator:
    spec, mesh = read_model(checkpoint), build_mesh(Layout(), 0)
    return Generator(
        build_model(spec, mesh),
        spec,
        mesh,
        num_slots=num_slots,
        num_blocks=num_blocks,
        max_tokens=PROMPT + LONGEST,
        max_response=LONGEST,
        eos_tokens=frozenset(),
        temperature=1.0,
        seed=0,
    )


def draw_prompts(count: int, vocab_size: int) -> list[Prompt]:
    """With the lengths of their responses, log-normal."""
    draw, sigma = random.Random(0), math.log(P99 / MEDIAN) / 2.326
    lengths = [min(LONGEST, max(1, round(draw.lognormvariate(math.log(MEDIAN), sigma)))) for _ in range(count)]
    return [
        Prompt(row=row, sample_id=row, tokens=tuple(draw.choices(range(vocab_size), k=PROMPT)), max_response=length)
        for row, length in enumerate(lengths)
    ]


def seconds(generator: Generator, prompts: Sequence[Prompt]) -> float:
    began = time.process_time()
    drawn = generator.generate(prompts)
    elapsed = time.process_time() - began
    assert [len(response.tokens) for response in drawn] == [prompt.max_response for prompt in prompts]
    return elapsed


if __name__ == "__main__":
    main()
