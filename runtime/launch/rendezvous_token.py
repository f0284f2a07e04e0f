"""The secret token of a run, with which its nodes authenticate their messages.

The seal of a message is the HMAC-SHA256 (RFC 2104) of its text under the token. The token itself is never sent.
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

TOKEN_VARIABLE = "MESHWRIGHT_TOKEN"
"""Environment variable that holds the token if no file is named."""
_MIN_CHARACTERS, _MAX_BYTES = 16, 4096
_HINT = "`openssl rand -hex 16` makes one"


def read_token(path: Path | None, environment: Mapping[str, str] = os.environ) -> str:
    """Return the token in a file, else that of the environment; empty if there is neither.

    Raises BadInput for a file that others may read, and for a token that is too short.
    """
    if path is None:
        source, token = TOKEN_VARIABLE, environment.get(TOKEN_VARIABLE, "")
        if not token:
            return ""
    else:
        source, token = f"--token-file {path}", read_text(path, "token", _MAX_BYTES).strip()
        if path.stat().st_mode & (stat.S_IRGRP | stat.S_IROTH):
            raise BadInput(f"{source} can be read by others; make it yours alone: chmod 600 {path}.")
    if len(token) < _MIN_CHARACTERS:
        raise BadInput(f"{source} has {len(token)} characters, fewer than {_MIN_CHARACTERS}; {_HINT}.")
    return token


def seal(text: str, token: str) -> str:
    """Return the text with its seal, as JSON."""
    return json.dumps({"text": text, "seal": _seal(text, token)})


def open_sealed(message: str | bytes, token: str) -> str | None:
    """Return the text of a message that was sealed with the same token, else None; compared in constant time."""
    try:
        content = json.loads(message)
        text, seal = str(content["text"]), str(content["seal"])
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    return text if hmac.compare_digest(seal.encode(), _seal(text, token).encode()) else None


def _seal(text: str, token: str) -> str:
    return hmac.new(token.encode(), text.encode(), "sha256").hexdigest()
