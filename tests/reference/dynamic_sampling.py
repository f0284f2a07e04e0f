"""Dynamic sampling as DAPO says it (arXiv:2503.14476, section 3.2): one process, float64, one group after another.

Prompts come in shuffled passes. The groups of a step are drawn and scored in that order, a wave at a time; the first
ones whose samples are not all paid alike are the batch. Where more samples of a prompt are drawn than a group has, its
best samples are the group. Nothing is imported from the project.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from tests.reference.critic_free import CriticFreeSettings, are_alike, paid_for
from tests.reference.ppo import Row, uniform

SAME_DIGITS = 6
"""Decimal places in which amounts are compared; those that agree in them are equal."""


class Sampled(Protocol):
    """What a sample is drawn by."""

    @property
    def max_response(self) -> int: ...
    @property
    def end_tokens(self) -> frozenset[int]: ...
    @property
    def temperature(self) -> float: ...
    @property
    def top_k(self) -> int: ...
    @property
    def top_p(self) -> float: ...
    @property
    def seed(self) -> int: ...


@dataclass(frozen=True, kw_only=True)
class Batch:
    """What a step is trained on, and of how many groups it was chosen."""

    rows: list[Row]
    num_waves: int
    num_drawn: int
    num_with_signal: int
    tied: int
    """Prompts with a sample outside the group that is paid the same as one in it."""


class DynamicSampling:
    """The batches of a run, `num_groups` groups each, from waves of `num_prompts` prompts."""

    def __init__(
        self,
        prompts: Sequence[Sequence[int]],
        settings: CriticFreeSettings,
        *,
        num_groups: int,
        num_prompts: int,
        drawn: int | None = None,
    ) -> None:
        """`drawn` is the number of samples of each prompt, by default that of a group."""
        self._settings, self._num_groups, self._num_prompts = settings, num_groups, num_prompts
        self._drawn = drawn or settings.group_size
        self._dealt = enumerate(passes(prompts, settings.seed))

    def batch(self, policy: nn.Module, score: Callable[[Row], float], version: int) -> Batch:
        """That of the next step, whose policy has seen `version` updates."""
        kept: list[list[Row]] = []
        num_waves = tied = 0
        while len(kept) < self._num_groups:
            num_waves += 1
            for place, prompt in itertools.islice(self._dealt, self._num_prompts):
                draws = range(place * self._drawn, (place + 1) * self._drawn)
                rows = [sample(policy, prompt, draw, version, self._settings) for draw in draws]
                paid = [paid_for(torch.tensor(score(row), dtype=torch.float64), row, self._settings) for row in rows]
                chosen, is_tied = best([float(one) for one in paid], self._settings.group_size)
                tied += is_tied
                if not are_alike(torch.stack([paid[index] for index in chosen])):
                    kept.append([rows[index] for index in chosen])
        return Batch(
            rows=[row for group in kept[: self._num_groups] for row in group],
            num_waves=num_waves,
            num_drawn=num_waves * self._num_prompts,
            num_with_signal=len(kept),
            tied=tied,
        )


def best(amounts: Sequence[float], number: int) -> tuple[list[int], bool]:
    """The ascending indices of the `number` highest amounts, of equal ones the first, and whether one that is left out
    equals one of them."""
    rounded = [round(amount, SAME_DIGITS) for amount in amounts]
    left, chosen = list(range(len(rounded))), list[int]()
    while len(chosen) < number:
        first = next(index for index in left if rounded[index] == max(rounded[other] for other in left))
        chosen.append(first)
        left.remove(first)
    return sorted(chosen), any(rounded[index] == rounded[chosen[-1]] for index in left)


def passes(prompts: Sequence[Sequence[int]], seed: int) -> itertools.chain[Sequence[int]]:
    """The prompts in the order in which they are dealt, shuffled anew in every pass."""
    return itertools.chain.from_iterable(_shuffled(prompts, f"{seed}/{number}") for number in itertools.count())


def _shuffled(prompts: Sequence[Sequence[int]], seed: str) -> list[Sequence[int]]:
    found = list(prompts)
    random.Random(seed).shuffle(found)
    return found


@torch.no_grad()
def sample(policy: nn.Module, prompt: Sequence[int], draw: int, version: int, s: Sampled) -> Row:
    """Token by token, each the inverse of the cumulative filtered distribution at its number."""
    ids = list(prompt)
    for place in range(s.max_response):
        logits = policy(torch.tensor([ids])).logits[0, -1] / s.temperature
        if s.top_k:
            logits = logits.masked_fill(logits < logits.topk(s.top_k).values[-1], -torch.inf)
        likeliest = logits.softmax(-1).sort(descending=True)
        before = likeliest.values.cumsum(-1) - likeliest.values
        nucleus = likeliest.indices[before < s.top_p]
        probabilities = torch.zeros_like(logits)
        probabilities[nucleus] = logits[nucleus].softmax(-1)
        number = uniform(s.seed, draw, place)
        ids.append(int((probabilities.cumsum(-1) > number).nonzero()[0]))
        if ids[-1] in s.end_tokens:
            break
    return Row(torch.tensor(ids), len(prompt), (version,) * (len(ids) - len(prompt)), draw)
