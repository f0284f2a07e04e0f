"""Tokens per second of the generation engine against transformers' `generate`: same checkpoint, prompts and lengths.

python -m benchmarks.generation [--threads 1] [--runs 5] [--seed 0]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

import torch
import transformers

from benchmarks.generation.rivals import DEVICE, DTYPE, Engine, Transformers, seconds
from benchmarks.generation.work import BATCH, SHAPES, Work, draw_work, write_checkpoint
from meshwright.profiles.hardware import local_cluster


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.generation", description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1, help="threads of torch, for both sides")
    parser.add_argument("--runs", type=int, default=5, help="paired runs, of which the median ratio is taken")
    parser.add_argument("--seed", type=int, default=0, help="of weights, prompts, lengths and draws")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    print(
        f"{_device()}, torch {torch.__version__} with {arguments.threads} threads, {DTYPE}, "
        f"transformers {transformers.__version__}; {BATCH} sequences at a time, medians of {arguments.runs} runs\n"
    )
    print("| model | prompts | tokens | mean, longest | transformers | engine, by batches | engine, refilled |")
    print("|---|---|---|---|---|---|---|")
    for name, (shape, counts) in SHAPES[DEVICE.type].items():
        with tempfile.TemporaryDirectory() as directory:
            checkpoint = write_checkpoint(Path(directory), shape, arguments.seed)
            for num_prompts in counts:
                work = draw_work(num_prompts, shape["vocab_size"], arguments.seed)
                print(f"| {name} | {_compare(work, checkpoint, arguments)} |", flush=True)
            agreeing = _num_agreeing(draw_work(BATCH, shape["vocab_size"], arguments.seed), checkpoint)
            print(f"{name}: greedy, {agreeing} of {BATCH} responses are the same token by token", file=sys.stderr)
    return 0


def _device() -> str:
    return torch.cuda.get_device_name() if DEVICE.type == "cuda" else local_cluster(1).device.name


def _compare(work: Work, checkpoint: Path, arguments: argparse.Namespace) -> str:
    """Tokens per second of each side, and the median and range over runs of the ratio to transformers."""
    engine = Engine(checkpoint, temperature=1.0, seed=arguments.seed)
    sides = (Transformers(checkpoint).generate, engine.by_batches, engine.refilled)
    for side in sides:
        side(Work(prompts=work.prompts[:BATCH], lengths=(4,) * BATCH))  # to warm up
    runs = [[seconds(side, work) for side in sides] for _ in range(arguments.runs)]
    rates = [statistics.median(work.num_tokens / run[side][0] for run in runs) for side in range(3)]
    cells = [f"{rates[0]:.0f}"]
    for side in (1, 2):
        wall, processor = ([run[0][clock] / run[side][clock] for run in runs] for clock in (0, 1))
        cells.append(
            f"{rates[side]:.0f}: {statistics.median(wall):.2f}x ({min(wall):.2f}-{max(wall):.2f}), "
            f"processor {statistics.median(processor):.2f}x ({min(processor):.2f}-{max(processor):.2f})"
        )
    mean = work.num_tokens / len(work.lengths)
    return " | ".join([str(len(work.prompts)), str(work.num_tokens), f"{mean:.0f}, {max(work.lengths)}", *cells])


def _num_agreeing(work: Work, checkpoint: Path) -> int:
    """Responses in which both sides draw the same tokens when nothing is left to chance."""
    ours = Engine(checkpoint, temperature=0.0, seed=0).refilled(work)
    theirs = Transformers(checkpoint, greedy=True).generate(work)
    return sum(a == b for a, b in zip(ours, theirs, strict=True))


sys.exit(main())
