"""The text the tiny models learn from: prose paragraphs in the docstrings of Python's own standard library.

It is read from the running interpreter, so no text is kept here; another Python version gives another corpus.
"""

from __future__ import annotations

import ast
import re
import sysconfig
from collections.abc import Iterator
from functools import cache
from pathlib import Path

_SKIPPED_FOLDERS = {"site-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo", "encodings", "__pycache__"}
_PROSE_WORD = re.compile(r"[(']{0,2}[A-Za-z]?[a-z']*(-[a-z]+)*[').,;:]{0,3}")
_SENTENCE_BREAK = re.compile(r"(?<=[.])\s+(?=[A-Z])")


@cache
def documents(*, shortest: int = 24, longest: int = 320) -> tuple[str, ...]:
    """Distinct paragraphs of whole plain-English sentences, `shortest` to `longest` characters, always in one order.

    A paragraph that is too long gives up its last sentences; one with identifiers, acronyms or figures is left out.
    """
    kept = (_whole_sentences(paragraph, longest) for paragraph in _paragraphs())
    return tuple(dict.fromkeys(text for text in kept if len(text) >= shortest and _is_prose(text)))


def _paragraphs() -> Iterator[str]:
    """Paragraphs of every docstring, each on one line."""
    for docstring in _docstrings():
        for paragraph in re.split(r"\n\s*\n", docstring):
            yield " ".join(paragraph.split())


def _docstrings() -> Iterator[str]:
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        if _SKIPPED_FOLDERS.isdisjoint(path.relative_to(root).parts):
            for node in ast.walk(ast.parse(path.read_bytes())):
                if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                    yield ast.get_docstring(node) or ""


def _whole_sentences(paragraph: str, longest: int) -> str:
    """As many of the paragraph's first sentences as fit in `longest` characters."""
    kept = ""
    for sentence in _SENTENCE_BREAK.split(paragraph):
        longer = f"{kept} {sentence}".lstrip()
        if len(longer) > longest:
            break
        kept = longer
    return kept


def _is_prose(text: str) -> bool:
    return text[:1].isupper() and text.endswith(".") and all(_PROSE_WORD.fullmatch(word) for word in text.split())
