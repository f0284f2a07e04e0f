"""A judge that generates: a language model that reads a prompt and its response and writes a verdict, whose text is
read as a score.

The judge continues the tokens of `before`, of the prompt and response as they were sampled, and of `after`. It samples
its likeliest token each time, until an end token or the largest length.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Annotated, Self

from pydantic import Field, model_validator

from meshwright.profiles.documents import Document
from meshwright.profiles.lengths import LengthSpec
from meshwright.profiles.workload import Workload

_TEMPLATE = "largest number of tokens of before and after together; run refuses texts that have more"
_VERDICT = "lengths of verdicts in tokens; longer ones are truncated"
_SCORES = "score of each text that a verdict may have, as whole words; of several, the one that ends last counts"
_OTHERWISE = "score of a verdict that has none of these texts"

VerdictText = Annotated[str, Field(min_length=1, max_length=200)]


class JudgeSpec(Document):
    """The texts that a generating judge reads, the lengths of its verdicts, and how they are read."""

    before: str = Field(default="", max_length=20_000, description="text before the prompt and its response")
    after: str = Field(min_length=1, max_length=20_000, description="text after the response, which asks for a verdict")
    template_tokens: int = Field(gt=0, le=100_000, description=_TEMPLATE)
    verdict: LengthSpec = Field(description=_VERDICT)
    scores: Mapping[VerdictText, float] = Field(min_length=1, max_length=64, description=_SCORES)
    otherwise: float = Field(default=0.0, description=_OTHERWISE)

    @model_validator(mode="after")
    def _scores_are_finite(self) -> Self:
        for text, score in (*self.scores.items(), ("otherwise", self.otherwise)):
            if not math.isfinite(score):
                raise ValueError(f"the score of {text} is {score}; give a finite number")
        return self

    def parse(self, verdict: str) -> float | None:
        """The score of a verdict; None if it has none of the texts of `scores`.

        The text that ends last counts; of several that end there, the longest. A text is found as whole words: "no"
        is not in "cannot", nor "1" in "10".
        """
        ends = {
            text: max(found) for text in self.scores if (found := [m.end() for m in _words(text).finditer(verdict)])
        }
        return self.scores[max(ends, key=lambda text: (ends[text], len(text)))] if ends else None

    @property
    def max_added_tokens(self) -> int:
        """Maximum number of tokens that a judged sequence is longer than the sequence of the actor."""
        return self.template_tokens + self.verdict.max

    def judged(self, workload: Workload) -> Workload:
        """The judge's own generation as a workload: every sequence of a batch is a prompt of the mean length."""
        longest = workload.max_tokens + self.template_tokens
        mean = min(longest, math.ceil(workload.mean_tokens) + self.template_tokens)
        return workload.model_copy(
            update={
                "prompt": LengthSpec(max=longest, fixed=mean),
                "response": self.verdict,
                "group_size": 1,
                "num_minibatches": 1,
                "num_epochs": 1,
                "best_of": None,
                "dynamic_sampling": None,
                "turns": None,
            }
        )


def _words(text: str) -> re.Pattern[str]:
    """A pattern of the text that is not inside a longer word."""
    before = r"(?<!\w)" if re.match(r"\w", text[0]) else ""
    after = r"(?!\w)" if re.match(r"\w", text[-1]) else ""
    return re.compile(f"{before}{re.escape(text)}{after}")
