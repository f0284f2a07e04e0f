"""The demo's models, prompts and tokenizer, which several benchmarks use."""

from __future__ import annotations

from pathlib import Path

from meshwright.profiles.errors import BadInput

TINY = Path(__file__).parents[1] / "examples" / "tiny"
BUILD = TINY / "build"


def require_demo() -> None:
    """Raises BadInput where the demo's models have not been made."""
    if not (BUILD / "actor").is_dir():
        raise BadInput(f"{BUILD} holds no models; make them with `make demo`.")
