"""The parts of the accelerator benchmark, each of which is run in a process of its own.

    python -m benchmarks.accelerator.parts PART --out DIR [--device h200] [--tiny]

Prints the report of one part and keeps nothing of it; `python -m benchmarks.accelerator` does all of them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from meshwright.profiles.errors import BadInput

if TYPE_CHECKING:
    from benchmarks.accelerator.world import World


class Part(NamedTuple):
    """`minutes` are what it may take on a GPU, the start of its process included; `entry` is its module's report, with
    what else it is given."""

    about: str
    minutes: float
    entry: tuple[str, *tuple[object, ...]]

    def report(self, world: World) -> str:
        """Measures; Markdown."""
        module, *given = self.entry
        found: Callable[..., str] = import_module(f"benchmarks.accelerator.{module}").report
        return found(world, *given)


PARTS: dict[str, Part] = {
    "environment": Part("devices, versions, pins; a plan for a processor keeps off the GPU", 1.5, ("environment",)),
    "agreement": Part("log-probabilities against transformers, fp32 and bf16", 2, ("agreement",)),
    "families": Part("small models of each family: scored, trained and generated from", 2, ("families",)),
    "ranks": Part("layouts of several ranks on one GPU against one rank", 2, ("ranks",)),
    "ceilings": Part("copy, matrix product and attention at their best", 1, ("ceilings",)),
    "shares": Part("decode steps and training as shares of what the device could do", 2, ("shares",)),
    "ppo": Part("a PPO run of small models that is predicted beforehand", 4, ("predicted", "ppo")),
    "grpo": Part("a GRPO run of an 8B adapter that is predicted beforehand", 3, ("predicted", "grpo")),
    "generation": Part("tokens a second against transformers, and vLLM if installed", 2.5, ("generation",)),
    "eight-bits": Part("generation in 8 bits: agreement, and what it saves", 1.5, ("eight_bits",)),
    "checkpoints": Part("what a checkpoint takes of a step, and beside it", 1.5, ("checkpoints",)),
    "host-waits": Part("prefill, training and decode steps of small models: the device's share", 2, ("host_waits",)),
    "repeats": Part("one run three times: the same bits", 5, ("repeats",)),
    "profile-0.5b": Part("profile of Qwen2.5-0.5B, tp 1 and 2", 3.5, ("profiles", "qwen2.5-0.5b", 2.0)),
    "profile-1.5b": Part("profile of Qwen2.5-1.5B, tp 1 and 2", 4.5, ("profiles", "qwen2.5-1.5b", 3.0)),
    "profile-8b": Part("profile of Llama-3.1-8B, tp 1, 2, 4 and 8", 8, ("profiles", "llama-3.1-8b", 6.0)),
}
"""In the order in which they are run, of most worth first: the ceilings before the shares that are held to them."""


def main() -> int:
    """The exit code: 0, or 2 for what cannot be measured here."""
    from benchmarks.accelerator.world import World  # noqa: PLC0415 - it loads torch, and the list of parts does without

    parser = argparse.ArgumentParser(prog="python -m benchmarks.accelerator.parts", description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=tuple(PARTS))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="h200")
    parser.add_argument("--tiny", action="store_true")
    asked = parser.parse_args()
    world = World(out=asked.out.resolve(), device=asked.device, tiny=asked.tiny)
    world.out.mkdir(parents=True, exist_ok=True)
    try:
        print(f"{world.label}\n\n{PARTS[asked.part].report(world)}")
    except BadInput as problem:
        print(f"error: {problem}", file=sys.stderr)
        return problem.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
