"""The experience of one step, gathered from the prompts dealt for it or from those that were in flight."""

from __future__ import annotations

from dataclasses import dataclass, field

from meshwright.runtime.messages.experience import Experience


@dataclass(frozen=True, kw_only=True)
class StepExperience:
    """`rows` are filled as the stages of the step write. A held-out batch is scored and never trained on."""

    step: int
    rows: range
    held_out: bool = False
    experience: Experience = field(default_factory=Experience)

    def prompt_length(self, row: int) -> int:
        """Tokens of the prompt."""
        return int(self.experience.get("prompt_lengths", row))

    def length(self, row: int) -> int:
        """Tokens of prompt and response together."""
        return len(self.experience.get("tokens", row))

    def lengths(self) -> dict[int, int]:
        """Tokens of every row, all of which must be held."""
        return {row: self.length(row) for row in self.rows}
