"""What a PPO step has to process: how many sequences, and how long they are."""

from __future__ import annotations

from functools import cached_property

from pydantic import Field

from meshwright.profiles.documents import Document
from meshwright.profiles.lengths import Histogram, LengthSpec


class Workload(Document):
    """One PPO step: `batch_size` prompts, one response each, `num_minibatches` updates per epoch."""

    batch_size: int = Field(gt=0, description="prompts (and responses) per PPO step")
    prompt: LengthSpec = Field(description="prompt lengths in tokens")
    response: LengthSpec = Field(description="response lengths in tokens, the end token included")
    num_minibatches: int = Field(default=1, gt=0, description="optimizer updates per pass over the batch")
    num_epochs: int = Field(default=1, gt=0, description="passes over the batch per PPO step")

    @cached_property
    def prompt_lengths(self) -> Histogram:
        return self.prompt.resolve()

    @cached_property
    def response_lengths(self) -> Histogram:
        return self.response.resolve()

    @cached_property
    def sequence_lengths(self) -> Histogram:
        """Prompt and response together, drawn independently."""
        return self.prompt_lengths.plus(self.response_lengths)

    @property
    def max_tokens(self) -> int:
        """The longest sequence a step can produce."""
        return self.prompt.max + self.response.max

    @property
    def mean_tokens(self) -> float:
        """Mean length of prompt and response together."""
        return self.prompt_lengths.mean + self.response_lengths.mean
