"""What a job says of its prompts is written as short as it was before there was more to say."""

from __future__ import annotations

from meshwright.planner.job.sections import Data


def test_a_prompt_is_in_the_column_of_that_name() -> None:
    data = Data(prompts="p.jsonl", tokenizer="t")
    assert data.named_columns == {"prompt": "prompt"}


def test_what_is_said_is_read_again() -> None:
    data = Data(prompts="d", tokenizer="t", columns={"prompt": "question", "answer": "a.b"}, split="all", chat=True)
    assert Data.model_validate_json(data.model_dump_json()) == data
    assert data.named_columns == {"prompt": "question", "answer": "a.b"}
