"""The four models of a job: heads that fit their roles, and one tokenizer, however vocabularies are padded."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from meshwright.planner.job.sections import require_heads, require_one_tokenizer, require_one_vocabulary
from meshwright.profiles.errors import BadInput
from meshwright.profiles.model_shape import ModelSpec
from meshwright.profiles.stages import Role
from tests.planner.jobs import small_facts

WORDS = {"a": 0, "b": 1, "ab": 2}
ADDED = {3: "<eos>"}


@pytest.fixture
def directories(tmp_path: Path) -> dict[Role, Path]:
    found = {role: tmp_path / role.value for role in Role}
    for path in found.values():
        path.mkdir()
    return found


@pytest.fixture
def specs() -> dict[Role, ModelSpec]:
    """With vocabularies padded as little and as much as models of one family are."""
    sizes = {Role.ACTOR: 8, Role.REF: 8, Role.CRITIC: 4, Role.REWARD: 6}
    models = small_facts().models
    return {role: replace(models.spec(role), vocab_size=size) for role, size in sizes.items()}


def write(
    directory: Path,
    words: Any = WORDS,
    *,
    merges: object = ("a b",),
    added: Mapping[int, str] = ADDED,
    **beside: object,
) -> Path:
    tokens = [{"id": number, "content": content, "special": True} for number, content in added.items()]
    document = {"model": {"type": "BPE", "vocab": words, "merges": merges}, "added_tokens": tokens, **beside}
    (directory / "tokenizer.json").write_text(json.dumps(document))
    return directory


def test_models_of_differently_padded_vocabularies_share_a_tokenizer(
    specs: dict[Role, ModelSpec], directories: dict[Role, Path], tmp_path: Path
) -> None:
    require_one_tokenizer(specs, directories, None)  # nothing but shapes is known
    (tmp_path / "job").mkdir()
    require_one_tokenizer(specs, directories, tmp_path / "job")  # nor then
    job = write(tmp_path / "job")
    write(directories[Role.ACTOR], padding={"pad_id": 1}, truncation=None, post_processor={})
    write(directories[Role.CRITIC], merges=[["a", "b"]])  # as newer versions write them
    write(directories[Role.REWARD], added={**ADDED, 4: "<pad>"})  # a token that only this one has
    require_one_tokenizer(specs, directories, job)
    require_one_tokenizer(specs, directories, job / "tokenizer.json")


def test_a_vocabulary_that_is_a_list_is_compared_by_its_order(
    specs: dict[Role, ModelSpec], directories: dict[Role, Path]
) -> None:
    write(directories[Role.ACTOR], [["a", 0.0], ["b", -1.0], ["ab", -2.0]], merges=None)
    write(directories[Role.REF], [["a", 0.0], ["b", -1.5], ["ab", -2.0]], merges=None)
    require_one_tokenizer(specs, directories, None)
    write(directories[Role.REF], [["a", 0.0], ["ab", -1.5], ["b", -2.0]], merges=None)
    with pytest.raises(BadInput, match="has 1 for the token 'ab' and not 2 as"):
        require_one_tokenizer(specs, directories, None)


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"words": {"a": 0, "b": 2, "ab": 1}}, "has 1 for the token 'ab' and not 2 as"),
        ({"words": {"a": 0, "b": 1}}, "has None for the token 'ab' and not 2 as"),
        ({"merges": ["b a"]}, "has other merges than"),
        ({"added": {3: "<pad>"}}, "has '<pad>' for id 3 and not '<eos>' as"),
    ],
)
def test_another_tokenizer_is_refused(
    specs: dict[Role, ModelSpec], directories: dict[Role, Path], tmp_path: Path, other: dict[str, Any], said: str
) -> None:
    (tmp_path / "job").mkdir()
    write(directories[Role.REWARD], **other)
    with pytest.raises(BadInput, match=f"must share one tokenizer, and that of the reward, .*{said} .*job"):
        require_one_tokenizer(specs, directories, write(tmp_path / "job"))


def test_a_tokenizer_larger_than_a_vocabulary_is_refused(
    specs: dict[Role, ModelSpec], directories: dict[Role, Path], tmp_path: Path
) -> None:
    job = write(tmp_path, added={**ADDED, 4: "<pad>"})
    with pytest.raises(BadInput, match="has ids up to 4 and the critic has a vocabulary of 4; give the tokenizer"):
        require_one_tokenizer(specs, directories, job)


@pytest.mark.parametrize(
    "text", ["no json", "[]", '{"model": {}}', '{"model": {"vocab": 3}}', '{"model": {"vocab": [1]}}']
)
def test_what_is_no_tokenizer_gets_a_sentence(
    specs: dict[Role, ModelSpec], directories: dict[Role, Path], text: str
) -> None:
    (directories[Role.REF] / "tokenizer.json").write_text(text)
    with pytest.raises(BadInput, match=r"tokenizer .*tokenizer.json cannot be read"):
        require_one_tokenizer(specs, directories, None)


def test_weights_without_the_head_of_their_role_are_refused(
    specs: dict[Role, ModelSpec], directories: dict[Role, Path]
) -> None:
    require_heads(specs, directories)  # shapes alone, to plan with
    for path in directories.values():
        (path / "model.safetensors").touch()
    with pytest.raises(BadInput, match=r"models.reward: .* holds a LlamaForCausalLM, which has no scalar head"):
        require_heads(specs, directories)
    classifier = {role: replace(spec, architecture="LlamaForSequenceClassification") for role, spec in specs.items()}
    require_heads({**specs, Role.REWARD: classifier[Role.REWARD]}, directories)  # the critic may start from words
    require_heads({**specs, Role.REWARD: classifier[Role.REWARD], Role.CRITIC: classifier[Role.CRITIC]}, directories)
    with pytest.raises(BadInput, match=r"models.ref: .* which has no vocabulary head"):
        require_heads({**specs, Role.REWARD: classifier[Role.REWARD], Role.REF: classifier[Role.REF]}, directories)


def test_a_teacher_has_the_actors_vocabulary_by_its_size_or_by_its_tokenizer(
    specs: dict[Role, ModelSpec], directories: dict[Role, Path]
) -> None:
    taught = {Role.ACTOR: specs[Role.ACTOR], Role.TEACHER_2: replace(specs[Role.ACTOR], num_layers=9)}
    require_one_vocabulary(taught, directories)
    padded = {**taught, Role.TEACHER_2: replace(specs[Role.ACTOR], vocab_size=16)}
    sentence = r"^models\.teacher_2: its vocabulary has 16 tokens and the actor's 8, .*; give a teacher of the actor's"
    with pytest.raises(BadInput, match=sentence):
        require_one_vocabulary(padded, directories)
    for role in (Role.ACTOR, Role.TEACHER_2):
        write(directories[role])
    require_one_vocabulary(padded, directories)
