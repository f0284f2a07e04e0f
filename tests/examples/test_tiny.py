"""The maker of the tiny models: files that load, the same bytes for the same seed, nothing done twice."""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from byte_tokenizer import BOS, byte_tokenizer, encode
from corpus import documents
from hypothesis import given, settings
from hypothesis import strategies as st
from lessons import QUICK
from make import make
from preferences import FLAWS, comparisons
from random_models import FAMILIES, random_model, save_random_model
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

WEIGHTS = ("actor/model.safetensors", "reward/model.safetensors")
TEXTS = ("tokenizer/tokenizer.json", "actor/config.json", "reward/config.json", "prompts.jsonl", "held_out.jsonl")


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """Two threads of a test wait for each other longer than they work when the machine is shared."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("tiny") / "build"
    assert make(out, seed=0, recipe=QUICK)
    return out


def prompts(path: Path) -> list[str]:
    return [json.loads(line)["prompt"] for line in path.read_text().splitlines()]


@pytest.mark.slow
def test_what_is_made_loads_in_transformers(build: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(build / "tokenizer")
    actor = AutoModelForCausalLM.from_pretrained(build / "actor")
    reward = AutoModelForSequenceClassification.from_pretrained(build / "reward")
    ids = tokenizer(["Return the", "Set"], padding=True, return_tensors="pt").input_ids
    assert ids[1, -1] == tokenizer.pad_token_id
    with torch.no_grad():
        assert actor(input_ids=ids).logits.shape == (2, 11, len(tokenizer))
        assert reward(input_ids=ids).logits.shape == (2, 1)


@pytest.mark.slow
def test_the_score_is_read_at_the_last_token_before_the_padding(build: Path) -> None:
    reward = AutoModelForSequenceClassification.from_pretrained(build / "reward")
    short = encode("Set the name.")
    with torch.no_grad():
        alone = reward(input_ids=torch.tensor([short])).logits
        padded = reward(input_ids=torch.tensor([[*short, *[reward.config.pad_token_id] * 5]])).logits
    torch.testing.assert_close(alone, padded)


@pytest.mark.slow
def test_the_same_seed_makes_the_same_bytes_and_another_seed_does_not(build: Path, tmp_path: Path) -> None:
    make(tmp_path / "again", seed=0, recipe=QUICK)
    make(tmp_path / "other", seed=1, recipe=QUICK)
    for name in (*WEIGHTS, *TEXTS):
        assert (tmp_path / "again" / name).read_bytes() == (build / name).read_bytes()
    for name in (*WEIGHTS, "prompts.jsonl"):
        assert (tmp_path / "other" / name).read_bytes() != (build / name).read_bytes()


@pytest.mark.slow
def test_a_second_call_does_nothing_until_a_setting_or_a_file_is_missing(build: Path) -> None:
    report = (build / "report.json").read_bytes()
    assert not make(build, seed=0, recipe=QUICK)
    assert (build / "report.json").read_bytes() == report
    (build / "prompts.jsonl").unlink()
    assert make(build, seed=0, recipe=QUICK)
    assert make(build, seed=0, recipe=replace(QUICK, language_steps=1, reward_steps=1))


@pytest.mark.slow
def test_prompts_are_distinct_and_of_eight_to_forty_eight_tokens(build: Path) -> None:
    known, held_out = prompts(build / "prompts.jsonl"), prompts(build / "held_out.jsonl")
    assert len(known) >= 512
    assert len(held_out) >= 128
    assert len({*known, *held_out}) == len(known) + len(held_out)
    assert all(8 <= len(encode(prompt)) <= 48 for prompt in known + held_out)


TOKENIZER = functools.cache(byte_tokenizer)


@given(st.text())
@settings(max_examples=200)
def test_the_tokenizer_gives_any_text_back(text: str) -> None:
    tokenizer = TOKENIZER(512)
    for spelt in (text, text + "<eos><bos>"):
        ids = tokenizer(spelt).input_ids
        assert ids == encode(spelt)
        assert ids[0] == BOS
        assert tokenizer.decode(ids, skip_special_tokens=True) == spelt


@pytest.mark.slow
def test_the_corpus_is_whole_sentences_and_enough_of_them() -> None:
    texts = documents()
    assert len(texts) == len(set(texts)) > 2000
    assert all(text[0].isupper() and text.endswith(".") and 24 <= len(text) <= 320 for text in texts)


def test_every_rejected_text_keeps_the_prompt_and_differs_from_the_chosen_one() -> None:
    texts = ("Return the name of the file that is being read.", "Remove every item from the list, from last to first.")
    for seed in range(50):
        for comparison in comparisons(texts, random.Random(seed)):
            assert set(comparison.rejected) == set(FLAWS)
            for rejected in comparison.rejected.values():
                assert rejected[:8] == comparison.chosen[:8]  # the shortest prompt
                assert rejected != comparison.chosen


@pytest.mark.parametrize("scalar_head", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_random_model_of_each_family_is_the_same_for_the_same_seed(
    family: str, scalar_head: bool, tmp_path: Path
) -> None:
    save_random_model(tmp_path, family, scalar_head=scalar_head, seed=3)
    kind = AutoModelForSequenceClassification if scalar_head else AutoModelForCausalLM
    loaded = kind.from_pretrained(tmp_path).state_dict()
    for name, tensor in random_model(family, scalar_head=scalar_head, seed=3).state_dict().items():
        assert torch.equal(tensor, loaded[name])
        assert tensor.std() > 0
