"""Tokens per second of groups of samples with their prompt prefilled once and its cache read together, against samples
that each have a prefill and a cache of their own.

python -m benchmarks.generation.groups [--group-size 8] [--sequences 64] [--tokens 128 512] [--runs 5] [--threads 1]
    [--widths 128 256 512] [--fill]
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
from pathlib import Path

import torch

from benchmarks.generation.rivals import DEVICE, Engine, seconds
from benchmarks.generation.work import BATCH, SHAPES, Work, write_checkpoint
from meshwright.profiles.hardware import local_cluster
from meshwright.profiles.packing import BLOCK_TOKENS, num_blocks_for

_WIDE = {
    "vocab_size": 4096,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
"""Where products of matrices take most of the time, as on a device."""
_COLUMNS = (
    "model",
    "tokens of prompts and responses",
    "slots, apart and together",
    "apart, tokens/s",
    "together, tokens/s",
    "ratio, least to most",
    "of processor time",
)


def main() -> None:
    told = __doc__.split("\n\n")[0]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.generation.groups", description=told)
    parser.add_argument("--group-size", type=int, default=8, help="samples of a prompt")
    parser.add_argument("--sequences", type=int, default=64, help="in all")
    parser.add_argument("--tokens", type=int, nargs="+", default=[128], help="of each prompt and of each response")
    parser.add_argument("--runs", type=int, default=5, help="paired runs, of which the median ratio is taken")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch")
    parser.add_argument("--widths", type=int, nargs="+", help="hidden sizes of the models, all by default")
    parser.add_argument(
        "--fill",
        action="store_true",
        help="groups get the slots that fit into the cache of the samples apart, not as many slots as those",
    )
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    device = local_cluster(1).device.name if DEVICE.type == "cpu" else torch.cuda.get_device_name()
    print(f"{device}; {arguments.sequences} sequences in groups of {arguments.group_size}\n")
    print(" | ".join(_COLUMNS).join(("| ", " |")) + "\n|" + "---|" * len(_COLUMNS))
    shapes = {name: shape for name, (shape, _) in SHAPES[DEVICE.type].items()} | {"wide: 8 layers of 512": _WIDE}
    for name, shape in shapes.items():
        if not arguments.widths or shape["hidden_size"] in arguments.widths:
            for num_tokens in arguments.tokens:
                print(f"| {name} | {num_tokens} | {_row(shape, num_tokens, arguments)} |", flush=True)


def _row(shape: dict[str, int], num_tokens: int, arguments: argparse.Namespace) -> str:
    """Slots, tokens a second and ratios of one model and one length, in cells of a table."""
    work = in_groups(arguments.sequences, arguments.group_size, num_tokens, shape["vocab_size"])
    num_blocks = BATCH * num_blocks_for(2 * num_tokens)
    slots = (BATCH, slots_in(num_blocks, arguments.group_size, num_tokens) if arguments.fill else BATCH)
    with tempfile.TemporaryDirectory() as directory:
        checkpoint = write_checkpoint(Path(directory), shape, 0, positions=2 * num_tokens)
        apart, together = (
            Engine(
                checkpoint,
                temperature=1.0,
                seed=0,
                group_size=size,
                num_slots=num_slots,
                num_blocks=num_blocks,
                longest_response=num_tokens,
            ).refilled
            for size, num_slots in zip((1, arguments.group_size), slots, strict=True)
        )
        assert apart(work) == together(work)
        runs = [(seconds(apart, work), seconds(together, work)) for _ in range(arguments.runs)]
    wall, processor = ([(one[clock], other[clock]) for one, other in runs] for clock in (0, 1))
    rates = [f"{work.num_tokens / statistics.median(side):.0f}" for side in zip(*wall, strict=True)]
    ratios, of_processor = (sorted(one / other for one, other in pairs) for pairs in (wall, processor))
    told = f"{statistics.median(ratios):.2f}, {ratios[0]:.2f} to {ratios[-1]:.2f}"
    return " | ".join([f"{slots[0]}, {slots[1]}", *rates, told, f"{statistics.median(of_processor):.2f}"])


def slots_in(num_blocks: int, group_size: int, num_tokens: int) -> int:
    """Samples of whole groups that find room in so many blocks, with prompts and responses of so many tokens each."""
    shared = num_tokens // BLOCK_TOKENS
    return num_blocks // (shared + group_size * (num_blocks_for(2 * num_tokens) - shared)) * group_size


def in_groups(num_sequences: int, group_size: int, num_tokens: int, vocab_size: int) -> Work:
    """So many samples, all of one length, the samples of a prompt one behind the other."""
    draw = random.Random(0)
    prompts = [tuple(draw.choices(range(vocab_size), k=num_tokens)) for _ in range(num_sequences // group_size)]
    return Work(tuple(prompt for prompt in prompts for _ in range(group_size)), (num_tokens,) * num_sequences)


if __name__ == "__main__":
    main()
