"""Host microseconds for each decoded token: what generation does between the model's steps.

python -m benchmarks.generation.host_work [--rows 1024] [--tokens 64] [--runs 3]

Everything that a turn does on the host is counted but the model's own steps and the choice of tokens from logits:
admission, blocks, records, uniform numbers, stop checks, and what of the cache is read. Beside it, the prompts of a
step from the data to the generator.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.generation.work import write_checkpoint
from benchmarks.small_worlds import join_alone
from meshwright.profiles.hardware import local_cluster
from meshwright.profiles.layout import Layout
from meshwright.profiles.model_shape import read_model
from meshwright.runtime.inference.engine import Generator
from meshwright.runtime.inference.slots import Prompt
from meshwright.runtime.model.mesh import build_mesh
from meshwright.runtime.model.model_shard import build_model

SHAPE = {
    "vocab_size": 259,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
PROMPT_TOKENS = 16


class Watch:
    """Processor seconds spent in what it wraps; what is called within one of them counts once."""

    def __init__(self) -> None:
        self.seconds, self._is_running = 0.0, False

    def timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            if self._is_running:
                return call(*args, **kwargs)
            began, self._is_running = time.process_time(), True
            try:
                return call(*args, **kwargs)
            finally:
                self.seconds, self._is_running = self.seconds + time.process_time() - began, False

        return run


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.generation.host_work", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--rows", type=int, default=1024, help="sequences that are decoded at a time")
    parser.add_argument("--tokens", type=int, default=64, help="of each response on average")
    parser.add_argument("--runs", type=int, default=3, help="of which the fastest is told")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    join_alone()
    measured = [host_seconds(arguments.rows, arguments.tokens) for _ in range(arguments.runs)]
    seconds, num_tokens = min(measured)
    print(f"{local_cluster(1).device.name}, torch {torch.__version__}, one thread; processor time")
    print(f"{arguments.rows} rows, {num_tokens} tokens: {1e6 * seconds / num_tokens:.2f} us of host work a token")


def host_seconds(num_rows: int, mean_tokens: int) -> tuple[float, int]:
    """Seconds of one generation without the model's steps and the draws, and the tokens of it."""
    watch = Watch()
    generator = watched(open_generator(num_rows, 3 * mean_tokens), watch)
    draw = random.Random(0)
    prompts = [
        Prompt(
            row=row,
            sample_id=row,
            tokens=tuple(draw.choices(range(259), k=PROMPT_TOKENS)),
            max_response=draw.randint(1, 2 * mean_tokens),
        )
        for row in range(2 * num_rows)
    ]
    began = time.process_time()
    responses = generator.generate(prompts)
    elapsed = time.process_time() - began
    return elapsed - watch.seconds, sum(len(response.tokens) for response in responses)


def open_generator(num_rows: int, max_response: int) -> Generator:
    with tempfile.TemporaryDirectory() as directory:
        spec = read_model(write_checkpoint(Path(directory), SHAPE, 0))
    mesh = build_mesh(Layout(), 0)
    return Generator(
        build_model(spec, mesh),
        spec,
        mesh,
        num_slots=num_rows,
        max_tokens=PROMPT_TOKENS + max_response,
        max_response=max_response,
        eos_tokens=frozenset({258}),
        temperature=1.0,
        seed=0,
    )


def watched(generator: Any, watch: Watch) -> Generator:
    """The generator with its steps, prefills and draws timed."""
    generator._step._layers = [Timed(layer, watch) for layer in generator._step._layers]
    generator._step._embed = watch.timed(generator._step._embed)
    generator._step._head = watch.timed(generator._step._head)
    generator._step.packed = watch.timed(generator._step.packed)
    object.__setattr__(generator._sampling, "draw", watch.timed(generator._sampling.draw))
    return generator  # type: ignore[no-any-return]


class Timed:
    """A layer of decode steps and prefills."""

    def __init__(self, layer: Any, watch: Watch) -> None:
        self.attend, self.feed_forward = watch.timed(layer.attend), watch.timed(layer.feed_forward)
        self.attended, self.project = layer.attended, layer.project
        self.begin_turn = layer.begin_turn


if __name__ == "__main__":
    main()
