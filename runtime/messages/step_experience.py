"""The experience of one step, gathered from the prompts dealt for it or from those that were in flight."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from meshwright.profiles.stages import REWARDS, SCORE_SIZES, SEQUENCE_DIGESTS, TOLD, TOTAL_SCORES
from meshwright.runtime.messages.experience import Experience


@dataclass(frozen=True, kw_only=True)
class StepExperience:
    """`rows` are filled as the stages of the step write. A held-out batch is scored and never trained on; of a wave of
    dynamic sampling some groups are, as rows of another batch."""

    step: int
    rows: range
    held_out: bool = False
    is_wave: bool = False
    experience: Experience = field(default_factory=Experience)

    @property
    def key(self) -> int:
        """What tells it from other batches of a run; held-out ones follow one another, and so do waves."""
        if self.is_wave:
            return -2
        return -1 if self.held_out else self.step

    def prompt_length(self, row: int) -> int:
        """Tokens of the prompt."""
        return int(self.experience.get("prompt_lengths", row))

    def length(self, row: int) -> int:
        """Tokens of prompt and response together."""
        return len(self.experience.get("tokens", row))

    def score(self, row: int) -> Tensor:
        """What a sequence is paid [1]: the reward model's score, or what was made of all that scores it."""
        held = self.experience.fields().get(TOTAL_SCORES, {})
        return held[row] if row in held else self.experience.get("scores", row)

    def score_size(self, row: int) -> Tensor:
        """The size of the largest term of a sequence's score [1], to whose rounding the score is known."""
        held = self.experience.fields().get(SCORE_SIZES, {})
        return held[row] if row in held else self.score(row).abs()

    def drawn(self, field: str, row: int) -> Tensor:
        """Of a field of tokens, the values [N] at the predictions of those that a policy drew."""
        first = self.prompt_length(row) - 1
        values, versions = (self.experience.get(name, row)[first:-1] for name in (field, "versions"))
        return values[versions != TOLD]

    def score_alike(self) -> None:
        """Gives sequences that are the same token by token one score of the reward model, that of the first.

        What a model says of them in different micro-batches differs by the rounding of a pass, which is large where
        weights have few bits and scores are near zero; nothing is to be learned from it.
        """
        scored = self.experience.fields().get("scores", {})
        said: dict[int, Tensor] = {}
        for row in sorted(scored):
            self.experience.put("scores", row, said.setdefault(self._digest(row), scored[row]))

    def _digest(self, row: int) -> int:
        held = self.experience.fields().get(SEQUENCE_DIGESTS, {})
        return int(held[row]) if row in held else digest_of(self.experience.get("tokens", row))

    def add_up(self, weights: Sequence[float], model_weight: float) -> None:
        """Makes what every sequence is paid of its rewards on hosts, with these weights, and of the reward model's
        score where there is one."""
        scored = self.experience.fields().get("scores", {})
        for row in self.rows:
            terms = self.experience.get(REWARDS, row).double() * torch.tensor(weights, dtype=torch.float64)
            if row in scored:
                terms = torch.cat([terms, model_weight * scored[row].double()])
            self.experience.put(TOTAL_SCORES, row, terms.sum().view(1).float())
            self.experience.put(SCORE_SIZES, row, terms.abs().max().view(1).float())

    def lengths(self) -> dict[int, int]:
        """Tokens of every row, all of which must be held."""
        return {row: self.length(row) for row in self.rows}


def digest_of(tokens: Tensor) -> int:
    """A number of 63 bits that is the same for the same tokens [N], and else another."""
    return int.from_bytes(hashlib.blake2b(tokens.numpy().tobytes(), digest_size=8).digest()) >> 1
