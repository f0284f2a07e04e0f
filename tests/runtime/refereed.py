"""What runs and an independent reference are compared in: four models that all differ, what was drawn, distances."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

from torch import Tensor

from tests.reference.ppo import Row
from tests.runtime.checkpoints import edit_config, write_checkpoint
from tests.runtime.observed import Observed
from tests.runtime.small_job import VOCAB_SIZE

END_TOKENS = (1, 7, 19)


def write_models(directory: Path) -> None:
    """A policy, a reference, and two models with scalar heads."""
    small = {"vocab_size": VOCAB_SIZE, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    for seed, name in enumerate(("policy", "ref")):
        write_checkpoint(directory / name, "Qwen2", seed=seed, tie_word_embeddings=True, **small)
        edit_config(directory / name, eos_token_id=END_TOKENS[0])
        (directory / name / "generation_config.json").write_text(f'{{"eos_token_id": {list(END_TOKENS)}}}')
    for seed, name in enumerate(("values", "scores"), start=2):
        write_checkpoint(directory / name, head="ForSequenceClassification", seed=seed, **small)


def drawn_in(run: Observed, step: int, batch_size: int) -> list[Row]:
    """What chance and the clock decided in a step."""
    held, drawn = run.steps[step], []
    for row in range(batch_size):
        num_prompt = int(held["prompt_lengths"][row])
        versions = tuple(held["versions"][row][num_prompt - 1 : -1].tolist())
        drawn.append(Row(held["tokens"][row], num_prompt, versions, draw=step * batch_size + row))
    return drawn


class Distances:
    """By name, the largest relative distance between what a run and what the reference computed."""

    def __init__(self) -> None:
        self.worst: dict[str, float] = defaultdict(float)

    def add(self, name: str, found: Tensor, expected: Tensor) -> None:
        distance = (found.double() - expected).norm() / expected.norm()
        self.worst[name] = max(self.worst[name], float(distance))

    def beyond(self, tolerance: float) -> dict[str, float]:
        return {name: distance for name, distance in self.worst.items() if not distance <= tolerance}
