"""Blocks of cache that are planned for ten workloads, against the most that the generator holds with blocks for all.

python -m benchmarks.generation.cache_peak [--runs 3]

The generator seats, grows and frees as ever, on a model of one narrow layer; lengths of responses are drawn from the
workload. What is proven is that rows of the longest sequence hold no more than all slots could.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
from pathlib import Path

import torch

from benchmarks.generation.host_work import SHAPE
from benchmarks.generation.work import write_checkpoint
from benchmarks.small_worlds import join_alone
from meshwright.profiles.hardware import local_cluster
from meshwright.profiles.layout import Layout
from meshwright.profiles.lengths import LengthSpec
from meshwright.profiles.model_shape import ModelSpec, read_model
from meshwright.profiles.packing import num_blocks_for
from meshwright.profiles.schedule import Schedule
from meshwright.profiles.workload import Workload
from meshwright.runtime.inference.engine import Generator
from meshwright.runtime.inference.slots import Prompt
from meshwright.runtime.model.mesh import build_mesh
from meshwright.runtime.model.model_shard import build_model

PROMPT = 48
RESPONSES = {
    "fixed": LengthSpec(max=200, fixed=200),
    "narrow": LengthSpec(max=240, median=160, p99=224),
    "wide": LengthSpec(max=512, median=96, p99=480),
    "long tail": LengthSpec(max=512, median=24, p99=320),
    "two kinds": LengthSpec(max=400, histogram=((20, 0.9), (400, 0.1))),
}
SLOTS = (64, 192)
SEQUENCES = 384


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.generation.cache_peak", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--runs", type=int, default=3, help="of each workload, with other lengths and prompts")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    join_alone()
    print(
        f"{local_cluster(1).device.name}, torch {torch.__version__}; {SEQUENCES} sequences, {PROMPT} tokens a prompt\n"
    )
    print("| responses | slots | planned | measured peaks, least to most | planned over the mean peak | proven bound |")
    print("|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as directory:
        spec = read_model(write_checkpoint(Path(directory), SHAPE, 0, positions=PROMPT + 512))
    for name, response in RESPONSES.items():
        workload = Workload(batch_size=SEQUENCES, prompt=LengthSpec(max=PROMPT, fixed=PROMPT), response=response)
        for slots in SLOTS:
            planned = workload.cache_need(Schedule(generation_slots=slots), 1).blocks
            bound = slots * num_blocks_for(PROMPT + response.max)
            peaks = sorted(peak(spec, workload, slots, seed) for seed in range(arguments.runs))
            assert peaks[-1] <= bound
            ratio = planned / statistics.fmean(peaks)
            print(f"| {name} | {slots} | {planned} | {peaks[0]} to {peaks[-1]} | {ratio:.3f} | {bound} |", flush=True)


def peak(spec: ModelSpec, workload: Workload, num_slots: int, seed: int) -> int:
    """The most blocks that are held at a time in one generation of the workload."""
    mesh, longest = build_mesh(Layout(), 0), workload.max_response
    generator = Generator(
        build_model(spec, mesh),
        spec,
        mesh,
        num_slots=num_slots,
        max_tokens=PROMPT + longest,
        max_response=longest,
        eos_tokens=frozenset(),
        temperature=1.0,
        seed=seed,
    )
    draw, lengths = random.Random(seed), workload.response_lengths
    responses = draw.choices(lengths.tokens, lengths.probabilities, k=workload.batch_size)
    generator.generate(
        [
            Prompt(
                row=row,
                sample_id=row,
                tokens=tuple(draw.choices(range(spec.vocab_size), k=PROMPT)),
                max_response=length,
            )
            for row, length in enumerate(responses)
        ]
    )
    return generator.scheduler.peak_blocks


if __name__ == "__main__":
    main()
