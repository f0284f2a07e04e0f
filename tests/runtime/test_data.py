"""Prompts: every one is visited once a pass, in an order that the seed decides."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.planner.job import Job, read_job
from meshwright.profiles.errors import BadInput
from meshwright.runtime.data import PromptData, read_data
from tests.runtime.small_job import EOS, write_job


def data(seed: int = 0) -> PromptData:
    prompts = tuple((number,) for number in range(10))
    return PromptData(train=prompts, held_out=prompts[:3], eos_token=1, stop=None, batch_size=4, seed=seed)


def rows(found: PromptData, steps: range) -> list[tuple[int, ...]]:
    return [prompt.tokens for step in steps for prompt in found.batch(step)]


def test_a_pass_visits_every_prompt_once_and_the_next_in_another_order() -> None:
    visited = rows(data(), range(5))
    assert sorted(visited[:10]) == sorted(visited[10:]) == [(number,) for number in range(10)]
    assert visited[:10] != visited[10:]


def test_the_seed_decides_the_order() -> None:
    assert rows(data(1), range(5)) == rows(data(1), range(5)) != rows(data(2), range(5))


def test_no_two_prompts_of_a_run_share_their_draws() -> None:
    draws = [prompt.draw for step in range(5) for prompt in data().batch(step)]
    draws += [prompt.draw for prompt in data().held_out_batch()]
    assert len(set(draws)) == len(draws)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_job(tmp_path_factory.mktemp("job"), num_ranks=1)


def changed(job: Path, **files: str) -> Job:
    document = read_job(job)
    assert document.data is not None
    return document.model_copy(update={"data": document.data.model_copy(update=files)})


def test_the_prompts_of_a_job_are_encoded_and_its_end_token_read(job: Path) -> None:
    found = read_data(read_job(job), job.parent)
    assert len(found.train) == 40
    assert all(3 <= len(tokens) <= 8 for tokens in found.train)
    assert found.eos_token == EOS


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"prompt": "w1 w2"}\nnot json\n', "line 2 is not a JSON object"),
        ('{"text": "w1"}\n', "line 1 is not a JSON object"),
        ('{"prompt": "' + "w1 " * 9 + '"}\n', "line 1 has 9 tokens, not 1 to 8; raise workload.prompt.max"),
        ("", "is empty"),
    ],
)
def test_malformed_prompts_get_a_sentence(job: Path, text: str, said: str) -> None:
    (job.parent / "bad.jsonl").write_text(text)
    with pytest.raises(BadInput, match=said):
        read_data(changed(job, prompts="bad.jsonl"), job.parent)


def test_a_missing_or_broken_tokenizer_gets_a_sentence(job: Path) -> None:
    with pytest.raises(BadInput, match="does not exist"):
        read_data(changed(job, tokenizer="nowhere"), job.parent)
    (job.parent / "broken.json").write_text("{}")
    with pytest.raises(BadInput, match="cannot be read"):
        read_data(changed(job, tokenizer="broken.json"), job.parent)


def test_a_job_without_data_cannot_run(job: Path) -> None:
    document = read_job(job).model_copy(update={"data": None})
    with pytest.raises(BadInput, match="no data section"):
        read_data(document, job.parent)
