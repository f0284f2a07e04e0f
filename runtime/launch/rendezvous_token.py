"""The token of a run, by which its nodes know each other: what one says is sealed with it, and looked at only then.

A seal is the HMAC-SHA256 (RFC 2104) of the text under the token. The token itself is never sent.
"""

from __future__ import annotations

import hmac
import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path

from meshwright.profiles.errors import BadInput
from meshwright.profiles.values import read_text

VARIABLE = "MESHWRIGHT_TOKEN"
"""Of the environment, where no file is named."""
_LEAST_CHARACTERS, _MOST_BYTES = 16, 4096
_WAY_OUT = "`openssl rand -hex 16` makes one"


def read_token(path: Path | None, environment: Mapping[str, str] = os.environ) -> str:
    """The token in a file, else that of the environment; empty where neither gives one.

    Raises BadInput for a file that others may read, and for a token that could be guessed.
    """
    if path is None:
        told, token = VARIABLE, environment.get(VARIABLE, "")
        if not token:
            return ""
    else:
        told, token = f"--token-file {path}", read_text(path, "token", _MOST_BYTES).strip()
        if path.stat().st_mode & (stat.S_IRGRP | stat.S_IROTH):
            raise BadInput(f"{told} can be read by others; make it yours alone: chmod 600 {path}.")
    if len(token) < _LEAST_CHARACTERS:
        raise BadInput(f"{told} has {len(token)} characters, fewer than {_LEAST_CHARACTERS}; {_WAY_OUT}.")
    return token


def sealed(text: str, token: str) -> str:
    """The text with its seal."""
    return json.dumps({"text": text, "seal": _seal(text, token)})


def opened(message: str | bytes, token: str) -> str | None:
    """The text of a message that was sealed with the same token; None for any other. Compared in constant time."""
    try:
        found = json.loads(message)
        text, seal = str(found["text"]), str(found["seal"])
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    return text if hmac.compare_digest(seal.encode(), _seal(text, token).encode()) else None


def _seal(text: str, token: str) -> str:
    return hmac.new(token.encode(), text.encode(), "sha256").hexdigest()
