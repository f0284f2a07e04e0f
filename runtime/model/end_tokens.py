"""What ends a response besides its length: the tokens that a Hugging Face directory names, and the job's strings."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.profiles.errors import BadInput
from meshwright.profiles.model_shape import MOST_CONFIG_BYTES
from meshwright.profiles.values import json_value, read_text

if TYPE_CHECKING:  # a record names what ends a response, and is shown without any model
    from tokenizers import Tokenizer

FILES = ("config.json", "generation_config.json")
_KEY = "eos_token_id"
_LARGEST_ID = 2**32 - 1  # that a tokenizer numbers


@dataclass(frozen=True, kw_only=True)
class ResponseEnds:
    """End tokens by id, each with the text that spells it, and strings that end a response too."""

    tokens: Mapping[int, str]
    strings: tuple[str, ...] = ()

    @property
    def sentence(self) -> str:
        """What a run says of it at its start."""
        tokens = [f"{text} ({token})" for token, text in self.tokens.items()]
        strings = [f"the text {json.dumps(string)}" for string in self.strings]
        return f"a response ends with {_or([*tokens, *strings])}, or at its greatest length"


def read_end_tokens(directory: Path, tokenizer: Tokenizer) -> dict[int, str]:
    """The tokens that end a response of the model in `directory`, by id, each with the text that spells it.

    They are all that `eos_token_id` names in config.json and in generation_config.json, in either a number or a list.
    Nothing else ends a response: a padding token does so only where it is listed there too. Raises BadInput for a
    file that cannot be read, for a value that is no token of `tokenizer`, and where no token is named at all.
    """
    found: dict[int, str] = {}
    for name in FILES:
        path = directory / name
        if name == "config.json" or path.exists():
            found |= {token: _text(token, path, tokenizer) for token in _named(_read(path), path)}
    if not found:
        raise BadInput(
            f"model {directory}: neither {' nor '.join(FILES)} names an {_KEY}, so that no token ends a response; "
            "add it to generation_config.json."
        )
    return dict(sorted(found.items()))


def _read(path: Path) -> Mapping[str, Any]:
    config = json_value(read_text(path, "model config", MOST_CONFIG_BYTES), f"model config {path}")
    if not isinstance(config, dict):
        raise BadInput(f"model config {path} holds {type(config).__name__}; a JSON object is needed.")
    return config


def _named(config: Mapping[str, Any], path: Path) -> Iterator[int]:
    """The end tokens that one file names, none if it leaves them out."""
    value = config.get(_KEY)
    for token in value if isinstance(value, list) else [] if value is None else [value]:
        if not isinstance(token, int) or isinstance(token, bool):
            raise BadInput(f"model config {path}: {_KEY} is {value!r}; it must be a number or a list of numbers.")
        yield token


def _text(token: int, path: Path, tokenizer: Tokenizer) -> str:
    text: str | None = tokenizer.id_to_token(token) if 0 <= token <= _LARGEST_ID else None
    if text is None:
        raise BadInput(
            f"model config {path}: {_KEY} names {token}, which is no token of the job's tokenizer and would never end "
            "a response; correct it, or data.tokenizer."
        )
    return text


def _or(words: list[str]) -> str:
    return " or ".join(filter(None, (", ".join(words[:-1]), words[-1])))
