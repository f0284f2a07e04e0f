"""Processor time of a training pass with compiled operators over that with plain ones, in one process and in turns.

    python -m benchmarks.costs.kernels [--hidden 64 256] [--runs 9]

Rotary embedding and SwiGLU are compiled, as a run has them on a GPU; a pass is forward and backward over four rows of
different lengths. The first passes, which compile, are not counted.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.small_worlds import join_alone
from meshwright.profiles.devices import local_cluster
from meshwright.profiles.layout import Layout
from meshwright.profiles.model_shape import ModelSpec
from meshwright.runtime.model.chosen_kernels import PLAIN, ChosenKernels
from meshwright.runtime.model.logprobs import token_logprobs
from meshwright.runtime.model.mesh import Mesh, build_mesh
from meshwright.runtime.model.model_shard import build_model
from meshwright.runtime.training.bodies import MicroBatch, Trainer
from meshwright.runtime.training.ppo import LossShare

LENGTHS = (250, 190, 120, 60)
_LAYERS, _VOCAB = 4, 512


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.costs.kernels", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--hidden", type=int, nargs="+", default=[64, 256], help="sizes of the models")
    parser.add_argument("--runs", type=int, default=9, help="passes of each, of which the median is told")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    join_alone()
    print(f"{local_cluster(1).device.name}, torch {torch.__version__}, one thread; processor time\n")
    print("| hidden size | plain ms | compiled ms | ratio |")
    print("|---|---|---|---|")
    for hidden in asked.hidden:
        plain, compiled = (training_pass(hidden, kernels) for kernels in (PLAIN, ChosenKernels(operators="compiled")))
        for warm in (compiled, plain):
            seconds(warm)
        pairs = [(seconds(plain), seconds(compiled)) for _ in range(asked.runs)]
        ratio = statistics.median(theirs / ours for ours, theirs in pairs)
        medians = (1e3 * statistics.median(side) for side in zip(*pairs, strict=True))
        print(f"| {hidden} | {' | '.join(f'{one:.1f}' for one in medians)} | {ratio:.2f} |", flush=True)


def training_pass(hidden: int, kernels: ChosenKernels) -> Callable[[], object]:
    """Forward and backward of a model of so wide a hidden state."""
    spec = ModelSpec(
        name=f"{hidden} wide",
        architecture="llama",
        max_positions=max(LENGTHS),
        tied_embeddings=False,
        activation="silu",
        norm_epsilon=1e-5,
        vocab_size=_VOCAB,
        num_layers=_LAYERS,
        hidden_size=hidden,
        ffn_size=4 * hidden,
        num_heads=4,
        num_kv_heads=2,
        head_dim=hidden // 4,
    )
    mesh = build_mesh(Layout(), 0)
    trainer = Trainer(build_model(spec, mesh, trainable=True, kernels=kernels), mesh, learning_rate=1e-3)
    draw = torch.Generator().manual_seed(0)
    rows = [torch.randint(_VOCAB, (length,), generator=draw) for length in LENGTHS]
    block = MicroBatch.of(rows, {})
    return lambda: trainer.accumulate([block], functools.partial(_loss, spec, mesh))


def _loss(spec: ModelSpec, mesh: Mesh, output: Tensor, block: MicroBatch) -> LossShare:
    logprobs, _ = token_logprobs(output, block.next_tokens.unsqueeze(0), mesh.groups.tp, vocab_size=spec.vocab_size)
    loss = -logprobs.mean()
    return LossShare(loss, {"loss": loss.detach().double()})


def seconds(call: Callable[[], object]) -> float:
    """Processor time of this process."""
    began = time.process_time()
    call()
    return time.process_time() - began


if __name__ == "__main__":
    main()
