"""End tokens and stop strings of responses, from a Hugging Face directory and from the job."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.profiles.errors import BadInput
from meshwright.profiles.model_shape import MAX_CONFIG_BYTES
from meshwright.profiles.untrusted_text import json_value, read_text

if TYPE_CHECKING:  # runtime/records imports this module, and must load without tokenizers installed
    from tokenizers import Tokenizer

CONFIG_FILES = ("config.json", "generation_config.json")
_KEY = "eos_token_id"
_MAX_TOKEN_ID = 2**32 - 1
"""Largest id that `Tokenizer.id_to_token` accepts."""


@dataclass(frozen=True, kw_only=True)
class StopConditions:
    """End tokens by id with their texts, and the stop strings of the job."""

    tokens: Mapping[int, str]
    strings: tuple[str, ...] = ()

    @property
    def sentence(self) -> str:
        """A sentence for the start of a run."""
        tokens = [f"{text} ({token})" for token, text in self.tokens.items()]
        strings = [f"the text {json.dumps(string)}" for string in self.strings]
        return f"a response ends with {_join_or([*tokens, *strings])}, or at the length limit"


def read_end_tokens(directory: Path, tokenizer: Tokenizer) -> dict[int, str]:
    """The end tokens of the model in `directory`, by id, with their texts.

    They are all tokens of `eos_token_id`, a number or a list, in config.json and in generation_config.json. A padding
    token ends a response only if it is listed there too. Raises BadInput for a file that cannot be read, for a value
    that is not a token of `tokenizer`, and if there is no end token.
    """
    end_tokens: dict[int, str] = {}
    for name in CONFIG_FILES:
        path = directory / name
        if name == "config.json" or path.exists():
            end_tokens |= {token: _token_text(token, path, tokenizer) for token in _token_ids(_read(path), path)}
    if not end_tokens:
        raise BadInput(
            f"model {directory}: neither {' nor '.join(CONFIG_FILES)} names an {_KEY}, so that no token ends a "
            "response; add it to generation_config.json."
        )
    return dict(sorted(end_tokens.items()))


def _read(path: Path) -> Mapping[str, Any]:
    config = json_value(read_text(path, "model config", MAX_CONFIG_BYTES), f"model config {path}")
    if not isinstance(config, dict):
        raise BadInput(f"model config {path} holds {type(config).__name__}; a JSON object is needed.")
    return config


def _token_ids(config: Mapping[str, Any], path: Path) -> Iterator[int]:
    """Yields the end tokens of one file, none if it has no `eos_token_id`."""
    value = config.get(_KEY)
    for token in value if isinstance(value, list) else [] if value is None else [value]:
        if not isinstance(token, int) or isinstance(token, bool):
            raise BadInput(f"model config {path}: {_KEY} is {value!r}; it must be a number or a list of numbers.")
        yield token


def _token_text(token: int, path: Path, tokenizer: Tokenizer) -> str:
    text: str | None = tokenizer.id_to_token(token) if 0 <= token <= _MAX_TOKEN_ID else None
    if text is None:
        raise BadInput(
            f"model config {path}: {_KEY} names {token}, which is not a token of the job's tokenizer and would never "
            "end a response; correct it, or data.tokenizer."
        )
    return text


def _join_or(words: list[str]) -> str:
    return " or ".join(filter(None, (", ".join(words[:-1]), words[-1])))
