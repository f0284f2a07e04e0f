"""Functions that a job names as module:function."""

from __future__ import annotations

import importlib
from typing import Any

from meshwright.profiles.errors import BadInput


def load_path(path: str, name: str = "") -> Any:
    """Import and return the function of a path, module:function; `name` is what the job calls it, by default the path.

    Raises BadInput if it cannot be loaded.
    """
    module, _, function = path.partition(":")
    try:
        return getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise BadInput(
            f"function {name or path} cannot be loaded: {error}; run where its module can be imported."
        ) from None
