"""Sample responses of a batch that a run keeps as text."""

from __future__ import annotations

from meshwright.runtime.generation.prompts import PromptData
from meshwright.runtime.messages.step_experience import StepExperience
from meshwright.runtime.records.kept_responses import SAMPLES_PER_STEP, KeptResponse


def sample_responses(batch: StepExperience, data: PromptData) -> tuple[KeptResponse, ...]:
    """Return the first rows of a batch that this rank holds in full; with groups they answer one prompt."""
    return tuple(_sample(batch, data, row) for row in batch.rows[:SAMPLES_PER_STEP])


def _sample(batch: StepExperience, data: PromptData, row: int) -> KeptResponse:
    tokens, first = batch.experience.get("tokens", row).tolist(), batch.prompt_length(row)
    return KeptResponse(
        step=batch.step,
        row=row,
        prompt=data.text(tokens[:first]),
        response=data.text(tokens[first:]),
        score=float(batch.score(row)),
        response_tokens=len(tokens) - first,
        truncated=bool(batch.experience.get("truncated", row)),
    )
