"""What is kept of a batch are its texts and what they are paid."""

from __future__ import annotations

import torch
from tokenizers import Tokenizer, models, pre_tokenizers

from meshwright.runtime.execution.run import sample_responses
from meshwright.runtime.messages.experience import StepExperience
from meshwright.runtime.model.end_tokens import StopConditions
from meshwright.runtime.records.kept_responses import SAMPLES_PER_STEP, KeptResponse
from meshwright.runtime.rollout.prompts import PromptData


def test_a_sample_is_the_prompt_the_response_and_the_score_of_a_row() -> None:
    words = Tokenizer(models.WordLevel({"<unk>": 0, "one": 1, "two": 2, "three": 3}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    data = PromptData(
        train=((1,),),
        ends=StopConditions(tokens={}),
        stop=None,
        batch_size=6,
        seed=0,
        num_tokens=4,
        tokenizer=words,
    )
    batch = StepExperience(step=10, rows=range(6))
    for row in batch.rows:
        batch.experience.put("tokens", row, torch.tensor([1, 2, 3, 1][: 3 + row % 2]))
        batch.experience.put("prompt_lengths", row, torch.tensor([2]))
        batch.experience.put("scores", row, torch.tensor([0.5 * row]))
        batch.experience.put("truncated", row, torch.tensor([row == 1]))
    kept = sample_responses(batch, data)
    assert len(kept) == SAMPLES_PER_STEP
    assert kept[1] == KeptResponse(
        step=10, row=1, prompt="one two", response="three one", score=0.5, response_tokens=2, truncated=True
    )
