"""Acceptance of drafted tokens in speculative decoding, and the tokens that a decode round samples on average.

A round verifies k drafted tokens of a sequence in one pass (Leviathan et al., arXiv:2211.17192): it samples the tokens
up to the first draft that is rejected, and that token's replacement, or one more token if none is. Let a_i be the
probability that the i-th drafted token is accepted, given that those before it were, and d the share of rounds that
have a draft. The expected tokens of a round are 1 + d (a_1 + a_1 a_2 + ... + a_1 ... a_k) (section 3.1 there, for equal
a_i).
"""

from __future__ import annotations

from itertools import accumulate
from operator import mul
from typing import NamedTuple, Self

from pydantic import Field, model_validator

from meshwright.profiles.documents import Document

_ACCEPTANCE = (
    "for each drafted token in turn, the probability that it is accepted, given that those before it were; a draft is "
    "at most as long as this list"
)
_DRAFTED = "share of the decode rounds of a sequence that have a draft; 0 if none is found"


class DraftRound(NamedTuple):
    """The expected tokens of one sequence in a decode round; without drafts one each."""

    sampled: float = 1.0
    """Tokens by which the response grows."""
    verified: float = 1.0
    """Tokens that run through the model: the last one and the draft."""


NO_DRAFTS = DraftRound()


class Speculation(Document):
    """Acceptance of the tokens that are drafted from a prompt's earlier responses, by position in the draft."""

    acceptance: tuple[float, ...] = Field(min_length=1, max_length=64, description=_ACCEPTANCE)
    drafted: float = Field(default=1.0, ge=0, le=1, description=_DRAFTED)

    @model_validator(mode="after")
    def _are_probabilities(self) -> Self:
        for position, chance in enumerate(self.acceptance, start=1):
            if not 0 <= chance <= 1:
                raise ValueError(f"acceptance of token {position} is {chance:g}; give a probability from 0 to 1")
        return self

    def updated(self, observed: Speculation) -> Speculation:
        """Return the observed acceptance, followed by the stated one of positions that were not drafted."""
        if not observed.drafted:
            return self.model_copy(update={"drafted": observed.drafted})
        acceptance = observed.acceptance + self.acceptance[len(observed.acceptance) :]
        return Speculation(acceptance=acceptance, drafted=observed.drafted)

    @property
    def max_draft(self) -> int:
        """The most tokens of a draft whose acceptance is known."""
        return len(self.acceptance)

    def round_of(self, draft_tokens: int) -> DraftRound:
        """Return the expected tokens of a decode round with drafts of `draft_tokens` tokens."""
        accepted = sum(accumulate(self.acceptance[:draft_tokens], mul))
        return DraftRound(1 + self.drafted * accepted, 1 + self.drafted * draft_tokens)
