"""Whatever is wrong with an invocation, it ends at once in one sentence, and everything is as it was."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from tests.runtime.wrong_inputs import prepare
from tests.runtime.wrong_invocations import Ended, call_all, is_listed


def snapshot(directory: Path) -> dict[str, str]:
    """Every path below a directory, with what is in it, or what it is."""
    found = {}
    for path in sorted(directory.rglob("*")):
        is_small = path.is_file() and path.stat().st_size < 2**30
        mode = str(os.lstat(path).st_mode)
        found[str(path)] = hashlib.sha256(path.read_bytes()).hexdigest() if is_small else mode
    return found


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("wrong")
    prepare(directory)
    return directory


@pytest.mark.check_all
def test_every_wrong_invocation_ends_at_once_in_one_sentence_and_destroys_nothing(place: Path) -> None:
    before = snapshot(place)
    found = call_all(place)
    assert snapshot(place) == before
    assert len(found) >= 300
    assert [told(one) for one in found if one.code != 2] == []
    assert [told(one) for one in found if "Traceback" in one.sentence] == []
    held = [one for one in found if "in/held" in one.arguments]  # a run that is being ended is waited for
    assert [told(one) for one in held if one.seconds > 15 or not one.sentence.endswith("name another directory.")] == []
    found = [one for one in found if one not in held]
    assert [told(one) for one in found if not is_listed(one) and "\n" in one.sentence] == []
    assert [told(one) for one in found if not one.sentence.endswith((".", "?", "`"))] == []
    assert [told(one) for one in found if one.seconds > 5] == []
    assert max(one.peak_mib for one in found) < 2048


def told(one: Ended) -> str:
    return f"{' '.join(one.arguments)[:200]}: {one.code}, {one.seconds:.1f} s, {one.sentence[:300]}"
