"""Prompts: every one is visited once a pass, in an order that the seed decides."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import tokenizers
from transformers import AutoTokenizer

from meshwright.planner.job.evaluation import Evaluation, EvaluationSet
from meshwright.planner.job.job import Job, read_job
from meshwright.planner.job.rewards_and_tools import Reward
from meshwright.profiles.errors import BadInput, RunFailed
from meshwright.profiles.workload import Workload
from meshwright.runtime.model.end_tokens import StopConditions
from meshwright.runtime.rollout.prompt_encoding import PromptEncoder
from meshwright.runtime.rollout.prompts import PromptData, PromptSet, read_data, read_tokenizer
from tests.runtime.small_job import EOS, VOCAB_SIZE, write_job


def data(seed: int = 0) -> PromptData:
    prompts = tuple((number,) for number in range(10))
    return PromptData(
        train=prompts,
        held_out={"held_out": PromptSet(prompts[:3]), "hard": PromptSet(prompts[3:7], max_response=5)},
        ends=StopConditions(tokens={1: "<eos>"}),
        stop=None,
        batch_size=4,
        seed=seed,
        num_tokens=10,
    )


def rows(found: PromptData, steps: range) -> list[tuple[int, ...]]:
    return [prompt.tokens for step in steps for prompt in found.batch(step)]


def test_a_pass_visits_every_prompt_once_and_the_next_in_another_order() -> None:
    visited = rows(data(), range(5))
    assert sorted(visited[:10]) == sorted(visited[10:]) == [(number,) for number in range(10)]
    assert visited[:10] != visited[10:]


def test_the_seed_decides_the_order() -> None:
    assert rows(data(1), range(5)) == rows(data(1), range(5)) != rows(data(2), range(5))


def test_no_two_prompts_of_a_run_share_their_draws() -> None:
    draws = [prompt.sample_id for step in range(5) for prompt in data().batch(step)]
    draws += [prompt.sample_id for name in data().held_out for prompt in data().held_out_batch(name)]
    assert len(set(draws)) == len(draws)


def test_waves_are_dealt_one_behind_the_other_whatever_their_size() -> None:
    found = replace(data(), group_size=2)
    one = [*found.wave(0, range(6), 0), *found.wave(0, range(6, 12), 3), *found.wave(1, range(8), 6)]
    other = found.wave(0, range(20), 0)
    assert [(prompt.sample_id, prompt.tokens) for prompt in one] == [(p.sample_id, p.tokens) for p in other]
    assert [prompt.row for prompt in one] == [*range(12), *range(8)]
    assert [prompt.sample_id // 2 for prompt in other[::2]] == list(range(10))
    assert sorted(prompt.tokens for prompt in other[::2]) == [(number,) for number in range(10)]


LONG = '{"prompt": "' + " ".join(f"w{n}" for n in range(9)) + '"}\n'


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_job(tmp_path_factory.mktemp("job"), num_ranks=1)


def changed(job: Path, **files: object) -> Job:
    document = read_job(job)
    assert document.data is not None
    return document.model_copy(update={"data": document.data.model_copy(update=files)})


def test_the_prompts_of_a_job_are_encoded_and_its_end_token_read(job: Path) -> None:
    found = read_data(read_job(job), job.parent)
    assert len(found.train) == 40
    assert all(3 <= len(tokens) <= 8 for tokens in found.train)
    assert found.ends.tokens == {EOS: "<eos>"}
    assert found.num_tokens == VOCAB_SIZE


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"prompt": "w1 w2"}\nnot json\n', "line 2 is not a JSON object"),
        ('{"text": "w1"}\n', "line 1 is not an object with a 'prompt'; it has text"),
        ('{"prompt": ""}\n', "line 1 has no tokens"),
        (LONG, "is empty but for 1 prompts of more than workload.prompt.max=8 tokens"),
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


def test_a_prompt_that_is_too_long_is_left_out_cut_or_refused_as_the_job_says(job: Path) -> None:
    (job.parent / "long.jsonl").write_text(LONG + '{"prompt": "w1 w2"}\n')
    filtered = read_data(changed(job, prompts="long.jsonl"), job.parent)
    assert [len(tokens) for tokens in filtered.train] == [2]
    [note] = filtered.notes
    assert note.endswith("long.jsonl: 1 of 2 prompts have more than 8 tokens and were left out")
    cut = read_data(changed(job, prompts="long.jsonl", long_prompts="truncate_left"), job.parent)
    whole = read_data(
        changed(job, prompts="long.jsonl", long_prompts="truncate_left").model_copy(update={"workload": longer(job)}),
        job.parent,
    )
    assert cut.train == (whole.train[0][-8:], whole.train[1])
    assert cut.notes[0].endswith("1 of 2 prompts have more than 8 tokens and were truncated to their last 8")
    assert whole.notes == ()
    with pytest.raises(
        BadInput, match=r"line 1 has 9 tokens, more than workload\.prompt\.max=8; raise that, or give data"
    ):
        read_data(changed(job, prompts="long.jsonl", long_prompts="refuse"), job.parent)


def test_columns_travel_with_their_prompts_through_filters_passes_and_groups(job: Path) -> None:
    lines = [
        LONG.replace('"}', '", "solution": {"value": -1}}'),
        *(f'{{"prompt": "w{n}", "solution": {{"value": {n}}}}}\n' for n in range(10)),
    ]
    (job.parent / "answers.jsonl").write_text("".join(lines))
    document = changed(job, prompts="answers.jsonl", held_out="answers.jsonl", columns={"answer": "solution.value"})
    found = replace(read_data(document, job.parent), batch_size=4, group_size=2)
    drawn = [prompt for step in range(12) for prompt in found.batch(step)] + list(found.held_out_batch())
    assert [found.columns_of(prompt.sample_id) for prompt in drawn] == [
        {"answer": prompt.tokens[0] - 2}
        for prompt in drawn  # the tokenizer of the job counts words from 2
    ]


def longer(job: Path) -> Workload:
    workload = read_job(job).workload
    return workload.model_copy(update={"prompt": workload.prompt.model_copy(update={"max": 9})})


def test_the_samples_of_a_group_have_one_prompt_and_draws_of_their_own() -> None:
    grouped = replace(data(), group_size=2)
    steps = [grouped.batch(step) for step in range(10)]
    tokens = [prompt.tokens for batch in steps for prompt in batch]
    assert all(one == other for one, other in zip(tokens[::2], tokens[1::2], strict=True))
    assert tokens[::2] == rows(data(), range(5))  # in the same order, in twice as many steps
    assert len({prompt.sample_id for batch in steps for prompt in batch}) == len(tokens)


def test_a_prompt_has_the_answer_of_its_line_in_every_pass_and_group() -> None:
    train = tuple({"answer": letter} for letter in "abcdefghij")
    held_out = PromptSet(data().train[:3], ({"answer": "x"}, {}, {"answer": 7}))
    hard = PromptSet(data().train[:2], ({"answer": "y"}, {"answer": "z"}))
    answered = replace(data(), group_size=2, train_columns=train, held_out={"held_out": held_out, "hard": hard})
    for step in range(8):
        for prompt in answered.batch(step):
            assert answered.answer(prompt) == "abcdefghij"[prompt.tokens[0]]
    assert [answered.answer(prompt) for prompt in answered.held_out_batch()] == ["x", None, "7"]
    assert [answered.answer(prompt) for prompt in answered.held_out_batch("hard")] == ["y", "z"]
    assert answered.without_answers(Evaluation()) == ("data.held_out",)
    unanswered = replace(answered, train_columns=({}, *train[1:]), held_out={"hard": hard, "other": held_out})
    assert unanswered.without_answers(Evaluation()) == ("data.prompts", "evaluation.sets.other.prompts")
    assert replace(answered, held_out={"hard": hard}).without_answers(Evaluation()) == ()
    scored_otherwise = EvaluationSet(prompts="none", rewards=(Reward(name="own", function="exact_match"),))
    assert not replace(answered, held_out={"other": held_out}).without_answers(
        Evaluation(sets={"other": scored_otherwise})
    )


def test_a_held_out_set_keeps_its_numbers_when_another_grows() -> None:
    one, grown = data(), replace(data(), held_out=data().held_out | {"held_out": PromptSet(data().train)})
    assert one.held_out_batch("hard") == grown.held_out_batch("hard")
    assert [one.held_out_name(p.sample_id) for p in one.held_out_batch("hard")] == ["hard"] * 4
    assert {prompt.max_response for prompt in one.held_out_batch("hard")} == {5}
    assert {prompt.max_response for prompt in one.held_out_batch()} == {None}


def test_answers_stay_with_their_prompts_where_long_ones_are_left_out(tmp_path: Path) -> None:
    path = write_job(tmp_path, num_ranks=1)
    lines = (json.dumps({"prompt": " ".join(["w3"] * count), "answer": str(count)}) for count in (3, 99, 5))
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines))
    found = read_data(read_job(path), tmp_path)
    answers = [columns["answer"] for columns in found.train_columns]
    assert [*zip(map(len, found.train), answers, strict=True)] == [(3, "3"), (5, "5")]
    assert found.text(found.train[0]) == "w3 w3 w3"


def test_an_answer_that_is_neither_a_text_nor_a_number_is_refused(tmp_path: Path) -> None:
    path = write_job(tmp_path, num_ranks=1)
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": "w3", "answer": [3]}))
    with pytest.raises(BadInput, match=r"line 1 has an answer that is neither a text nor a number; write one"):
        read_data(read_job(path), tmp_path)


def write_words(directory: Path, **settings: object) -> Path:
    """A tokenizer as `save_pretrained` leaves it, which begins texts with <s>; `settings` go beside it."""
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({"<unk>": 0, "<s>": 1, "</s>": 2, "a": 3, "b": 4}, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=8, pad_id=0, pad_token="<unk>")
    directory.mkdir()
    tokenizer.save(str(directory / "tokenizer.json"))
    known = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>", **settings}
    (directory / "tokenizer_config.json").write_text(json.dumps(known))
    return directory


@pytest.mark.parametrize(
    "settings", [{}, {"add_bos_token": False}, {"add_eos_token": True}, {"split_special_tokens": True}], ids=str
)
@pytest.mark.parametrize("text", ["a b a b a b", "a", "a </s> b"])
def test_texts_and_answers_of_tools_have_the_tokens_that_transformers_gives_them(
    tmp_path: Path, settings: dict[str, object], text: str
) -> None:
    directory = write_words(tmp_path / "words", **settings)
    known = AutoTokenizer.from_pretrained(directory)
    found = read_tokenizer(directory)
    assert PromptEncoder(found, directory, chat=False).encode(text, "here") == tuple(known(text)["input_ids"])
    tool = replace(data(), tokenizer=found).encode(text)
    assert tool == tuple(known(text, add_special_tokens=False)["input_ids"])


def test_a_tokenizer_that_is_one_file_neither_cuts_nor_pads(tmp_path: Path) -> None:
    file = write_words(tmp_path / "words") / "tokenizer.json"
    assert read_tokenizer(file).encode("a b a b a b").ids == [1, 3, 4, 3, 4, 3, 4]
    assert read_tokenizer(file).encode("a").ids == [1, 3]


def test_settings_that_add_tokens_which_no_model_has_are_refused(tmp_path: Path) -> None:
    directory = write_words(tmp_path / "words", pad_token="[PAD]")
    with pytest.raises(BadInput, match=r"tokenizer_config.json adds '\[PAD\]', which tokenizer.json lacks"):
        read_tokenizer(directory)


def test_an_answer_of_a_tool_that_the_tokenizer_gives_up_on_ends_the_run_in_a_sentence(tmp_path: Path) -> None:
    tokenizer = read_tokenizer(write_words(tmp_path / "words"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex("(a+)+$"), "isolated")
    found = replace(data(), tokenizer=tokenizer)
    with pytest.raises(RunFailed, match=r"the answer of a tool cannot be encoded: the tokenizer says .*retry-limit"):
        found.encode("a" * 3000 + "b")


def test_messages_are_kept_beside_their_prompts_for_a_job_with_rewards(tmp_path: Path) -> None:
    job = read_job(write_job(tmp_path, num_ranks=1))
    (tmp_path / "tokenizer" / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }} {% endfor %}")
    (tmp_path / "tokenizer" / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    chats = [[{"role": "user", "content": f"w{number}"}] for number in range(3)]
    for name in ("prompts.jsonl", "held_out.jsonl"):
        (tmp_path / name).write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in [*chats, "w9"]))
    rewards = (Reward(name="words", function="exact_match"),)
    found = read_data(job.model_copy(update={"rewards": rewards}), tmp_path)
    messages = {found.text(prompt.tokens): found.messages(prompt) for prompt in found.batch(0)}
    assert messages == {"w0": tuple(chats[0]), "w1": tuple(chats[1]), "w2": tuple(chats[2]), "w9": ()}
    assert [found.messages(prompt) for prompt in found.held_out_batch()] == [*map(tuple, chats), ()]
    assert not any(map(read_data(job, tmp_path).messages, found.batch(0)))
