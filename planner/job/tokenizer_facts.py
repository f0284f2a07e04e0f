"""Digests of a job's tokenizer and chat template, and the end tokens of its actor: they decide how texts become tokens
and where responses end.

A plan records them and is compared with the files of another machine by them. Where a directory is, and what it is
called, is no part of them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import Field

from meshwright.profiles.documents import Document
from meshwright.profiles.errors import BadInput
from meshwright.profiles.model_shape import MAX_CONFIG_BYTES
from meshwright.profiles.untrusted_text import json_value, read_text

TOKENIZER = "tokenizer.json"
MAX_TOKENIZER_BYTES = 2**28
"""The largest tokenizer.json that is read; those of large vocabularies have some tens of megabytes."""
_TEMPLATE, _SETTINGS = "chat_template.jinja", "tokenizer_config.json"
_MAX_SETTINGS_BYTES = 2**24
_IGNORED = ("padding", "truncation")
"""Parts of a tokenizer.json that are set anew for every call."""


class TokenizerFacts(Document):
    """The tokenizer and the chat template of a job by their digests, and the actor's end tokens; None if absent."""

    digest: str | None = Field(default=None, description="SHA-256 of tokenizer.json, without padding and truncation")
    chat_template: str | None = Field(default=None, description="SHA-256 of the chat template")
    end_tokens: tuple[int, ...] | None = Field(default=None, description="eos_token_id of the actor's config.json")


def read_tokenizer_facts(actor: Path, tokenizer: Path | None) -> TokenizerFacts | None:
    """Return the facts of a job's tokenizer (a tokenizer.json or its directory) and of its actor (a directory or a
    config.json); None if there are none. Raises BadInput for a file that cannot be read."""
    facts = TokenizerFacts(
        digest=_tokenizer_digest(tokenizer) if tokenizer else None,
        chat_template=_template_digest(tokenizer) if tokenizer else None,
        end_tokens=_end_tokens(actor / "config.json" if actor.is_dir() else actor),
    )
    return None if facts == TokenizerFacts() else facts


def tokenizer_violations(
    planned: TokenizerFacts | None, found: TokenizerFacts | None, actor: Path, tokenizer: Path | None
) -> Iterator[str]:
    """Yield a sentence for each fact of a plan that the files of a job do not have.

    What was absent when the job was planned is not compared.
    """
    planned, found = planned or TokenizerFacts(), found or TokenizerFacts()
    if planned.end_tokens is not None and found.end_tokens != planned.end_tokens:
        yield (
            f"eos_token_id is {_listed(planned.end_tokens)} in the plan and {_listed(found.end_tokens)} in the actor's "
            f"{actor}; give the directory of the planned model, as --model actor=DIR, or plan this job again."
        )
    if planned.digest is not None and found.digest != planned.digest:
        problem = "is not the plan's" if found.digest else f"has no {TOKENIZER}, and the plan's has"
        yield (
            f"the tokenizer {tokenizer} {problem}; give the one that the job was planned with, or plan this job again."
        )
    if planned.chat_template is not None and found.chat_template != planned.chat_template:
        problem = "has another chat template than" if found.chat_template else "has no chat template, unlike"
        yield (
            f"the tokenizer {tokenizer} {problem} the plan's; give the {_TEMPLATE} that the job was planned with, or "
            "plan this job again."
        )


def _listed(tokens: tuple[int, ...] | None) -> str:
    return "not given" if tokens is None else " and ".join(map(str, tokens))


def _tokenizer_digest(tokenizer: Path) -> str | None:
    path = tokenizer / TOKENIZER if tokenizer.is_dir() else tokenizer
    if not path.is_file():
        return None
    content = _json_object(path, "tokenizer", MAX_TOKENIZER_BYTES)
    return _sha256(json.dumps({key: content[key] for key in content if key not in _IGNORED}, sort_keys=True))


def _template_digest(tokenizer: Path) -> str | None:
    """Digest of the chat template where transformers finds it: in a file of its own, else in the settings."""
    directory = tokenizer if tokenizer.is_dir() else tokenizer.parent
    if (path := directory / _TEMPLATE).is_file():
        return _sha256(read_text(path, "chat template", _MAX_SETTINGS_BYTES))
    if not (path := directory / _SETTINGS).is_file():
        return None
    template = _json_object(path, "tokenizer settings", _MAX_SETTINGS_BYTES).get("chat_template")
    return _sha256(template if isinstance(template, str) else json.dumps(template)) if template else None


def _end_tokens(config_path: Path) -> tuple[int, ...] | None:
    """The numbers under `eos_token_id`; None for anything else, which `run` refuses."""
    value = _json_object(config_path, "model config", MAX_CONFIG_BYTES).get("eos_token_id")
    tokens: list[Any] = value if isinstance(value, list) else [value]
    return tuple(tokens) if all(type(token) is int for token in tokens) else None


def _json_object(path: Path, what: str, max_bytes: int) -> Mapping[str, Any]:
    content = json_value(read_text(path, what, max_bytes), f"{what} {path}")
    if not isinstance(content, dict):
        raise BadInput(f"{what} {path} holds {type(content).__name__}; a JSON object is needed.")
    return content


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
