"""The glossary is true to the code at least in this: each word stands in the file where it is said to live."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ENTRIES = re.findall(r"^- (\*\*.+?)\n(?=- |\n|\Z)", (ROOT / "docs" / "glossary.md").read_text(), re.M | re.S)
WORD, FILE = re.compile(r"\*\*(.+?)\*\*"), re.compile(r"`([^`]+\.py)`$")


def plain(text: str) -> str:
    return text.lower().replace("_", " ")


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.split("**")[1])
def test_a_word_stands_in_the_file_where_it_lives(entry: str) -> None:
    file = FILE.search(entry)
    assert file
    text = plain((ROOT / file[1]).read_text())
    for word in WORD.findall(entry):
        assert plain(word) in text


def test_no_word_is_explained_twice() -> None:
    words = [word for entry in ENTRIES for word in WORD.findall(entry)]
    assert 20 < len(words) == len(set(words)) <= 30
