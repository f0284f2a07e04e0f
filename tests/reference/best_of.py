"""Training on the best of several samples: one process, float64, one prompt after another.

Of each prompt n samples are drawn and scored, and the k with the highest scores are the batch, in the order in which
they were drawn; of equal ones those that were drawn first. What is learned of them is what an algorithm learns of a
group of k. Nothing is imported from the project.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from tests.reference.dynamic_sampling import SAME_DIGITS, Sampled, best, passes, sample
from tests.reference.ppo import Row


@dataclass(frozen=True, kw_only=True)
class Kept:
    """What a step is trained on, and what all samples of its prompts are scored."""

    rows: list[Row]
    scores: list[float]
    tied: int
    """Prompts of which a sample was dropped that is scored as one that was kept."""


class BestOf:
    """The batches of a run, the best `kept` of `drawn` samples of each of `num_prompts` prompts."""

    def __init__(
        self, prompts: Sequence[Sequence[int]], settings: Sampled, *, num_prompts: int, drawn: int, kept: int
    ) -> None:
        self._settings, self._num_prompts, self._drawn, self._kept = settings, num_prompts, drawn, kept
        self._dealt = enumerate(passes(prompts, settings.seed))

    @torch.no_grad()
    def batch(
        self, policy: nn.Module, score: Callable[[Row], float], version: int, paid: Callable[[Row, float], float]
    ) -> Kept:
        """The batch of the next step, whose policy has seen `version` updates; `paid` is what a row with a score earns.

        Samples are compared by what they are paid."""
        rows: list[Row] = []
        said: list[float] = []
        tied = 0
        for place, prompt in itertools.islice(self._dealt, self._num_prompts):
            draws = range(place * self._drawn, (place + 1) * self._drawn)
            group = [sample(policy, prompt, draw, version, self._settings) for draw in draws]
            scores = [round(score(row), SAME_DIGITS) for row in group]
            amounts = [paid(row, one) for row, one in zip(group, scores, strict=True)]
            chosen, is_tied = best(amounts, self._kept)
            rows += [group[index] for index in chosen]
            tied += is_tied
            said += scores
        return Kept(rows=rows, scores=said, tied=tied)
