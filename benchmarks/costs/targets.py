"""Host microseconds for each response token of what every training rank computes of a whole batch before its updates.

    python -m benchmarks.costs.targets [--rows 1024] [--runs 3]

Targets of PPO, what is reported of the batch, and its micro-batches; in processor time of one thread. A long tail is
padded to its longest row.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping

import numpy as np
import torch

from meshwright.planner.job.algorithm_settings import PPO
from meshwright.profiles.hardware import local_cluster
from meshwright.profiles.lengths import LengthSpec
from meshwright.profiles.workload import Workload
from meshwright.runtime.messages.experience import StepExperience
from meshwright.runtime.training.training_batch import TrainingBatch, minibatches

_PROMPT, _UPDATES, _MICRO_BATCH = 16, 4, 16
RESPONSES: Mapping[str, LengthSpec] = {
    "median 64": LengthSpec(max=256, median=64, p99=200),
    "median 512": LengthSpec(max=2048, median=512, p99=1500),
    "median 512, of long-tail-64": LengthSpec(max=12288, median=512, p99=8192),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.costs.targets", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--rows", type=int, default=1024, help="of a batch")
    parser.add_argument("--runs", type=int, default=3, help="of which the fastest is told")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    print(
        f"{local_cluster(1).device.name}, torch {torch.__version__}, one thread; processor time of {asked.rows} rows\n"
    )
    print("| response tokens | drawn | longest | seconds | us a token |")
    print("|---|---|---|---|---|")
    for name, response in RESPONSES.items():
        batch, workload = batch_of(asked.rows, response)
        lengths = [length - _PROMPT for length in batch.lengths().values()]
        seconds = min(target_seconds(batch, workload) for _ in range(asked.runs))
        figures = f"{sum(lengths)} | {max(lengths)} | {seconds:.2f} | {1e6 * seconds / sum(lengths):.2f}"
        print(f"| {name} | {figures} |", flush=True)


def batch_of(num_rows: int, response: LengthSpec) -> tuple[StepExperience, Workload]:
    """Experience of drawn lengths with random numbers in it."""
    workload = Workload(
        batch_size=num_rows,
        prompt=LengthSpec(max=_PROMPT, fixed=_PROMPT),
        response=response,
        num_minibatches=_UPDATES,
    )
    lengths, batch = workload.response_lengths, StepExperience(step=0, rows=range(num_rows))
    drawn = np.random.default_rng(0).choice(lengths.tokens, num_rows, p=lengths.probabilities).tolist()
    torch.manual_seed(0)
    for row, length in enumerate(drawn):
        put, total = batch.experience.put, _PROMPT + length
        put("tokens", row, torch.randint(1000, (total,)))
        put("prompt_lengths", row, torch.tensor([_PROMPT]))
        put("truncated", row, torch.zeros(1, dtype=torch.uint8))
        put("scores", row, torch.randn(1))
        for field in ("proximal_logprobs", "ref_logprobs", "values"):
            put(field, row, torch.randn(total))
    return batch, workload


def target_seconds(batch: StepExperience, workload: Workload) -> float:
    """Processor seconds of one stage, on a rank that has all rows."""
    began = time.process_time()
    learning = TrainingBatch(PPO(), batch, reads=("ref_logprobs", "values"), workload=workload)
    learning.metrics()
    for rows in minibatches(batch.rows, step=0, num_epochs=1, num_minibatches=workload.num_minibatches, seed=0):
        learning.num_tokens(rows)
        for first in range(0, len(rows), _MICRO_BATCH):
            learning.micro_batch(rows[first : first + _MICRO_BATCH])
    return time.process_time() - began


if __name__ == "__main__":
    main()
