"""Tokens per second of groups of samples with their prompt prefilled once, against a prefill for each sample.

python -m benchmarks.generation.groups [--group-size 8] [--sequences 64] [--tokens 128] [--runs 5] [--threads 1]
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
from pathlib import Path

import torch

from benchmarks.generation.rivals import DEVICE, Engine, seconds
from benchmarks.generation.work import SHAPES, Work, write_checkpoint
from meshwright.profiles.devices import local_cluster

_WIDE = {
    "vocab_size": 4096,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
"""Where products of matrices take most of the time, as on a device."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.generation.groups", description=__doc__.splitlines()[0])
    parser.add_argument("--group-size", type=int, default=8, help="samples of a prompt")
    parser.add_argument("--sequences", type=int, default=64, help="in all")
    parser.add_argument("--tokens", type=int, default=128, help="of each prompt and of each response")
    parser.add_argument("--runs", type=int, default=5, help="paired runs, of which the median ratio is taken")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    device = local_cluster(1).device.name if DEVICE.type == "cpu" else torch.cuda.get_device_name()
    print(f"{device}; {arguments.sequences} sequences in groups of {arguments.group_size}")
    print(f"prompts and responses of {arguments.tokens} tokens\n")
    print("| model | alone, tokens/s | shared, tokens/s | ratio, least to most |\n|---|---|---|---|")
    shapes = {name: shape for name, (shape, _) in SHAPES[DEVICE.type].items()}
    for name, shape in {**shapes, "wide: 8 layers of 512": _WIDE}.items():
        with tempfile.TemporaryDirectory() as directory:
            checkpoint = write_checkpoint(Path(directory), shape, 0)
            work = in_groups(arguments.sequences, arguments.group_size, arguments.tokens, shape["vocab_size"])
            sizes = (1, arguments.group_size)
            alone, shared = (Engine(checkpoint, temperature=1.0, seed=0, group_size=size).refilled for size in sizes)
            assert alone(work) == shared(work)
            runs = [(seconds(alone, work)[0], seconds(shared, work)[0]) for _ in range(arguments.runs)]
        rates = [work.num_tokens / statistics.median(side) for side in zip(*runs, strict=True)]
        ratios = sorted(one / other for one, other in runs)
        told = f"{statistics.median(ratios):.2f}, {ratios[0]:.2f} to {ratios[-1]:.2f}"
        print(f"| {name} | {rates[0]:.0f} | {rates[1]:.0f} | {told} |", flush=True)


def in_groups(num_sequences: int, group_size: int, num_tokens: int, vocab_size: int) -> Work:
    """So many samples, all of one length, the samples of a prompt one behind the other."""
    draw = random.Random(0)
    prompts = [tuple(draw.choices(range(vocab_size), k=num_tokens)) for _ in range(num_sequences // group_size)]
    return Work(tuple(prompt for prompt in prompts for _ in range(group_size)), (num_tokens,) * num_sequences)


if __name__ == "__main__":
    main()
