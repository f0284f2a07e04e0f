"""Which models a job names, and what their directories must have in common, as far as their small files tell.

A directory may hold a config.json alone: then it gives a shape to plan with, and there is nothing to compare.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer

from meshwright.profiles.documents import Document, without
from meshwright.profiles.errors import BadInput
from meshwright.profiles.model_parts.adapter import Adapter
from meshwright.profiles.model_shape import ModelSpec
from meshwright.profiles.stages import TEACHERS, Role
from meshwright.profiles.values import load_json, read_text

_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin")
_TOKENIZER = "tokenizer.json"
_MOST_BYTES = 2**28
"""Of a tokenizer: those of large vocabularies have some tens of millions."""
_OF_WORDS = ("ForCausalLM", "a language model")
_OF_SCORES = ("ForSequenceClassification", "a model with a scalar head")
_REWARD = "a model with a scalar head; needed where rewards names none"
_TEACHER = "model whose log-probabilities distill learns; it has the actor's vocabulary"
_MORE_TEACHERS = "as the teacher before it; distill learns the weighted mean of all"
_ABSENT = "reference policy of the KL penalty; without one there is no penalty; ppo needs one"
_ADAPTER = (
    "low-rank adapter of the actor, trained beside its weights, which stay as they are (LoRA); a ref of the same path "
    "may share them"
)


class ModelSource(Document):
    """Where a model is, and what is trained in place of its weights."""

    path: str = Field(
        description="Hugging Face directory, or a config.json when only planning; relative to the job file"
    )
    adapter: Adapter | None = Field(default=None, description=_ADAPTER)

    @model_serializer(mode="wrap")
    def _without_absent(self, written: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return without(written(self), None)


class Models(Document):
    """The models, as many as the algorithm has roles. The critic may name the reward model's directory: it then starts
    from those weights."""

    actor: ModelSource = Field(description="the policy that is trained")
    critic: ModelSource | None = Field(default=None, description="trained by ppo, and by no other algorithm")
    ref: ModelSource | None = Field(default=None, description=_ABSENT)
    reward: ModelSource | None = Field(default=None, description=_REWARD)
    teacher: ModelSource | None = Field(default=None, description=_TEACHER)
    teacher_2: ModelSource | None = Field(default=None, description=_MORE_TEACHERS)
    teacher_3: ModelSource | None = Field(default=None, description=_MORE_TEACHERS)
    teacher_4: ModelSource | None = Field(default=None, description=_MORE_TEACHERS)

    @model_serializer(mode="wrap")
    def _without_absent(self, written: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return without(written(self), None)

    @property
    def roles(self) -> tuple[Role, ...]:
        """Those that have a model."""
        return tuple(role for role in Role if getattr(self, role.value) is not None)

    def source(self, role: Role) -> ModelSource:
        source: ModelSource | None = getattr(self, role.value)
        assert source is not None, role
        return source


def require_heads(specs: Mapping[Role, ModelSpec], directories: Mapping[Role, Path]) -> None:
    """Raises BadInput for weights without the head that their role needs. A critic may start from a language model,
    with a head of zeros; a reward model may not, for all its scores would be zero."""
    of_words = dict.fromkeys((Role.ACTOR, Role.REF, *TEACHERS), _OF_WORDS)
    for role, wanted in {**of_words, Role.REWARD: _OF_SCORES}.items():
        if role not in specs:
            continue
        architecture, directory = specs[role].architecture, directories[role]
        if not architecture.endswith(wanted[0]) and any(any(directory.glob(name)) for name in _WEIGHTS):
            missing = "scalar head (score.weight)" if wanted is _OF_SCORES else "vocabulary head"
            raise BadInput(
                f"models.{role.value}: {directory} holds a {architecture}, which has no {missing}; the {role.value} "
                f"must be {wanted[1]}, one of ...{wanted[0]}."
            )


def require_one_vocabulary(specs: Mapping[Role, ModelSpec], directories: Mapping[Role, Path]) -> None:
    """Raises BadInput for a teacher whose vocabulary has another size than the actor's, unless both have tokenizers,
    which say more: sizes are padded differently from model to model."""
    tells = {role: (directory / _TOKENIZER).is_file() for role, directory in directories.items()}
    size = specs[Role.ACTOR].vocab_size
    for role in (teacher for teacher in TEACHERS if teacher in specs):
        if specs[role].vocab_size != size and not (tells[role] and tells[Role.ACTOR]):
            raise BadInput(
                f"models.{role.value}: its vocabulary has {specs[role].vocab_size} tokens and the actor's {size}, and "
                f"a teacher says how likely the actor's tokens are; give a teacher of the actor's vocabulary, or a "
                f"{_TOKENIZER} beside both that says that it is."
            )


def require_one_tokenizer(
    specs: Mapping[Role, ModelSpec], directories: Mapping[Role, Path], tokenizer: Path | None
) -> None:
    """Raises BadInput unless a token means the same to all models, and each has a row for it in its vocabulary.

    Tokenizers are compared, not sizes, which are padded differently from model to model: all must have the vocabulary
    and the merges of the job's `tokenizer`, a file or a directory, and no id may stand for two added tokens. Where
    the job's is not there they are compared with the first model's that is.
    """
    files = {role: path for role, directory in directories.items() if (path := directory / _TOKENIZER).is_file()}
    if tokenizer is not None and tokenizer.is_dir():
        tokenizer /= _TOKENIZER
    known = tokenizer if tokenizer is not None and tokenizer.is_file() else next(iter(files.values()), None)
    if known is None:
        return
    text = read_text(known, "tokenizer", _MOST_BYTES)
    words = _Words.read(known, text)
    for role, spec in specs.items():
        if words.num_ids > spec.vocab_size:
            raise BadInput(
                f"tokenizer {known} has ids up to {words.num_ids - 1} and the {role.value} has a vocabulary of "
                f"{spec.vocab_size}; give the tokenizer of the models, or resize the model's embedding."
            )
    for role, path in files.items():
        other = read_text(path, "tokenizer", _MOST_BYTES)
        for sentence in () if other == text else words.differences(_Words.read(path, other)):
            raise BadInput(
                f"the models must share one tokenizer, and that of the {role.value}, {path}, {sentence} {known}; "
                "give models that were trained with one tokenizer."
            )


@dataclass(frozen=True, kw_only=True)
class _Words:
    """What a tokenizer.json says of tokens and their ids; how it pads, cuts and adds is left out."""

    ids: Mapping[str, int]
    merges: tuple[str, ...]
    added: Mapping[int, str]

    @classmethod
    def read(cls, path: Path, text: str) -> _Words:
        """Of BPE, WordPiece and WordLevel, whose vocabulary is a mapping, and of Unigram, where it is a list."""
        try:
            document = load_json(text)
            model: Mapping[str, Any] = document["model"]
            vocabulary = model["vocab"]
            if isinstance(vocabulary, list):
                vocabulary = {token: number for number, (token, _) in enumerate(vocabulary)}
            merges = (pair if isinstance(pair, str) else " ".join(pair) for pair in model.get("merges") or ())
            added = {int(token["id"]): str(token["content"]) for token in document.get("added_tokens") or ()}
            if not all(isinstance(number, int) for number in vocabulary.values()):
                raise ValueError("an id in its vocabulary is no number")
            return cls(ids=dict(vocabulary), merges=tuple(merges), added=added)
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise BadInput(
                f"tokenizer {path} cannot be read: {type(error).__name__}: {error}; give a tokenizer.json as the "
                "tokenizers library writes it."
            ) from None

    @property
    def num_ids(self) -> int:
        return max((*self.ids.values(), *self.added), default=-1) + 1

    def differences(self, other: _Words) -> Iterator[str]:
        """In which ways the tokens of another tokenizer are not these, up to the name of this one."""
        for token in sorted(other.ids.items() ^ self.ids.items(), key=lambda item: (item[1], item[0]))[:1]:
            yield f"has {other.ids.get(token[0])} for the token {token[0]!r} and not {self.ids.get(token[0])} as"
        if other.merges != self.merges:
            yield "has other merges than"
        for number in sorted(other.added.keys() & self.added.keys()):
            if other.added[number] != self.added[number]:
                yield f"has {other.added[number]!r} for id {number} and not {self.added[number]!r} as"
