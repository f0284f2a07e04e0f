"""The prompts of one step and the experience gathered from them."""

from __future__ import annotations

from dataclasses import dataclass, field

from meshwright.runtime.experience import Experience
from meshwright.runtime.slots import Prompt


@dataclass(frozen=True, kw_only=True)
class Batch:
    """`prompts` are numbered by row from 0; `experience` fills as the stages of the step write."""

    step: int
    prompts: tuple[Prompt, ...]
    experience: Experience = field(default_factory=Experience)

    @property
    def rows(self) -> tuple[int, ...]:
        return tuple(prompt.row for prompt in self.prompts)

    def prompt_length(self, row: int) -> int:
        return len(self.prompts[row].tokens)

    def length(self, row: int) -> int:
        """Tokens of prompt and response together."""
        return len(self.experience.get("tokens", row))

    def lengths(self) -> dict[int, int]:
        return {row: self.length(row) for row in self.rows}
