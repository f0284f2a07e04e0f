"""The option --sizes: further numbers of ranks to plan a job on."""

from __future__ import annotations

from meshwright.profiles.errors import BadInput

_MOST_SIZES = 64
"""Largest number of sizes, since each takes a search."""


def parse_sizes(text: str | None) -> tuple[int, ...]:
    """Return the numbers in `8,16,32`, each once; none without a text. Raises BadInput for any other text."""
    if text is None:
        return ()
    try:
        sizes = tuple(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        raise BadInput(f"--sizes {text!r} is not a list of whole numbers; write it like 8,16,32.") from None
    if len(sizes) > _MOST_SIZES:
        raise BadInput(f"--sizes has {len(sizes)} numbers, and each takes a search; give {_MOST_SIZES} at most.")
    return sizes
