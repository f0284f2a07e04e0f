"""End tokens: all that both files of a model name, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models

from meshwright.profiles.errors import BadInput
from meshwright.runtime.inference.slots import Finish, LiveGroup, PartialResponse, Prompt
from meshwright.runtime.inference.stopping import Stopping
from meshwright.runtime.model.end_tokens import StopConditions, read_end_tokens

WORDS = ("<|begin_of_text|>", "<|end_of_text|>", "<|eom_id|>", "<|eot_id|>", "<|pad|>", "word")
BEGIN, END_OF_TEXT, END_OF_MESSAGE, END_OF_TURN, PAD, WORD = range(len(WORDS))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(models.WordLevel({word: token for token, word in enumerate(WORDS)}, unk_token="word"))


def write(directory: Path, config: object, generation: object = None) -> Path:
    (directory / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (directory / "generation_config.json").write_text(json.dumps(generation))
    return directory


LISTED = [END_OF_TEXT, END_OF_MESSAGE, END_OF_TURN]


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        ({"eos_token_id": LISTED}, {"eos_token_id": LISTED}, LISTED),  # Llama 3.1 Instruct
        ({"eos_token_id": END_OF_TEXT}, {"eos_token_id": [END_OF_TURN, END_OF_TEXT]}, [END_OF_TEXT, END_OF_TURN]),
        ({"eos_token_id": [END_OF_TURN]}, {"eos_token_id": END_OF_TEXT}, [END_OF_TEXT, END_OF_TURN]),
        ({"eos_token_id": END_OF_TURN}, None, [END_OF_TURN]),
        ({"eos_token_id": None}, {"eos_token_id": END_OF_TURN}, [END_OF_TURN]),
        ({}, {"eos_token_id": [END_OF_TURN]}, [END_OF_TURN]),
        ({"eos_token_id": END_OF_TURN}, {"pad_token_id": PAD}, [END_OF_TURN]),
    ],
)
def test_the_end_tokens_of_both_files_count(
    tmp_path: Path, tokenizer: Tokenizer, config: object, generation: object, expected: list[int]
) -> None:
    found = read_end_tokens(write(tmp_path, config, generation), tokenizer)
    assert found == {token: WORDS[token] for token in expected}


@pytest.mark.parametrize(("listed", "ends"), [([END_OF_TEXT, END_OF_TURN], False), ([END_OF_TURN, PAD], True)])
def test_the_padding_token_ends_a_response_only_where_it_is_listed(
    tmp_path: Path, tokenizer: Tokenizer, listed: list[int], ends: bool
) -> None:
    directory = write(tmp_path, {"eos_token_id": listed, "pad_token_id": PAD}, {"pad_token_id": PAD})
    stopping = Stopping(eos_tokens=frozenset(read_end_tokens(directory, tokenizer)), max_response=9)
    said = {}
    for token in range(len(WORDS)):
        group, prompt = LiveGroup(first_slot=0, num_slots=1), Prompt(row=0, sample_id=0, tokens=(BEGIN,))
        group.add(PartialResponse(prompt=prompt, tokens=(token,), logprobs=(0.0,), versions=(0,)))
        said[token] = stopping.finish(group).get(0)
    assert {token for token, finish in said.items() if finish is Finish.EOS} == set(listed)
    assert (said[PAD] is Finish.EOS) == ends


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({}, "neither config.json nor generation_config.json names an eos_token_id"),
        ({"eos_token_id": []}, "neither config.json nor generation_config.json names an eos_token_id"),
        ({"eos_token_id": "</s>"}, "eos_token_id is '</s>'; it must be a number or a list of numbers"),
        ({"eos_token_id": [1, True]}, "it must be a number or a list of numbers"),
        ({"eos_token_id": [1, 6]}, "names 6, which is not a token of the job's tokenizer"),
        ({"eos_token_id": 2**80}, "which is not a token of the job's tokenizer"),
        ({"eos_token_id": -1}, "names -1, which is not a token of the job's tokenizer"),
        ([], "holds list; a JSON object is needed"),
    ],
)
def test_what_is_no_end_token_gets_a_sentence(tmp_path: Path, tokenizer: Tokenizer, config: object, said: str) -> None:
    with pytest.raises(BadInput, match=said):
        read_end_tokens(write(tmp_path, config), tokenizer)


def test_a_run_says_what_ends_a_response() -> None:
    one = StopConditions(tokens={1: "<eos>"})
    assert one.sentence == "a response ends with <eos> (1), or at the length limit"
    several = StopConditions(tokens={1: "<eos>", 3: "<|eot_id|>"}, strings=("\nUser:",))
    assert several.sentence == (
        'a response ends with <eos> (1), <|eot_id|> (3) or the text "\\nUser:", or at the length limit'
    )
