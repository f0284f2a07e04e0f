"""The batch of one step and its experience: lengths, sampled tokens and scores of its rows."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from meshwright.profiles.stages import REWARDS, SCORE_SIZES, SEQUENCE_DIGESTS, TOOL_TOKEN_VERSION, TOTAL_SCORES
from meshwright.runtime.messages.experience import Experience


@dataclass(frozen=True, kw_only=True)
class StepExperience:
    """A batch whose experience is filled as the stages of its step write it.

    A held-out batch is scored and never trained on. Some groups of a wave of dynamic sampling are trained on, as rows
    of another batch.
    """

    step: int
    rows: range
    held_out: bool = False
    is_wave: bool = False
    experience: Experience = field(default_factory=Experience)

    @property
    def key(self) -> int:
        """The step, or a negative key for a held-out batch or a wave, of which there is one at a time."""
        if self.is_wave:
            return -2
        return -1 if self.held_out else self.step

    def prompt_length(self, row: int) -> int:
        """Number of tokens of the prompt."""
        return int(self.experience.get("prompt_lengths", row))

    def length(self, row: int) -> int:
        """Number of tokens of prompt and response together."""
        return len(self.experience.get("tokens", row))

    def score(self, row: int) -> Tensor:
        """The score of a sequence [1]: the total of all rewards if there is one, else the reward model's score."""
        totals = self.experience.fields().get(TOTAL_SCORES, {})
        return totals[row] if row in totals else self.experience.get("scores", row)

    def score_size(self, row: int) -> Tensor:
        """The size of the largest term of a sequence's score [1], whose rounding error is that of the score."""
        sizes = self.experience.fields().get(SCORE_SIZES, {})
        return sizes[row] if row in sizes else self.score(row).abs()

    def sampled_values(self, field: str, row: int) -> Tensor:
        """The values [N] of a per-token field at the predictions of sampled tokens, without tool tokens."""
        first = self.prompt_length(row) - 1
        values, versions = (self.experience.get(name, row)[first:-1] for name in (field, "versions"))
        return values[versions != TOOL_TOKEN_VERSION]

    def share_scores_of_duplicates(self) -> None:
        """Gives identical sequences the same reward model score, that of the first of them.

        Their scores from different micro-batches differ by rounding, which is large in low precision and for scores
        near zero, and must not become an advantage.
        """
        scores = self.experience.fields().get("scores", {})
        score_of_digest: dict[int, Tensor] = {}
        for row in sorted(scores):
            self.experience.put("scores", row, score_of_digest.setdefault(self._digest(row), scores[row]))

    def _digest(self, row: int) -> int:
        digests = self.experience.fields().get(SEQUENCE_DIGESTS, {})
        return int(digests[row]) if row in digests else digest_of(self.experience.get("tokens", row))

    def sum_rewards(self, weights: Sequence[float], model_weight: float) -> None:
        """Sets the total score of every sequence: the weighted sum of its host rewards and of the reward model's score,
        if it has one."""
        scores = self.experience.fields().get("scores", {})
        for row in self.rows:
            terms = self.experience.get(REWARDS, row).double() * torch.tensor(weights, dtype=torch.float64)
            if row in scores:
                terms = torch.cat([terms, model_weight * scores[row].double()])
            self.experience.put(TOTAL_SCORES, row, terms.sum().view(1).float())
            self.experience.put(SCORE_SIZES, row, terms.abs().max().view(1).float())

    def lengths(self) -> dict[int, int]:
        """Number of tokens of every row; this rank must have the tokens of all rows."""
        return {row: self.length(row) for row in self.rows}


def digest_of(tokens: Tensor) -> int:
    """A 63-bit hash of tokens [N]."""
    return int.from_bytes(hashlib.blake2b(tokens.numpy().tobytes(), digest_size=8).digest()) >> 1
