"""Code is right where it passes its tests, within its limits, and says nothing of them itself."""

from __future__ import annotations

import time

import pytest

from meshwright.runtime.environment import unit_tests as tested
from meshwright.runtime.environment.unit_tests import unit_tests
from tests.runtime.environment.samples import sample

RIGHT = "def twice(x):\n    return 2 * x\n"
TESTS = "assert twice(3) == 6\nassert twice(0) == 0\n"


@pytest.mark.parametrize(
    "response", [RIGHT, f"Here it is:\n```python\n{RIGHT}```\nDone.", f"```\nx = 1\n```\n```py\n{RIGHT}```"]
)
def test_code_that_passes_is_paid(response: str) -> None:
    assert unit_tests([sample(response, TESTS)]) == [1.0]


@pytest.mark.parametrize(
    "response",
    [
        "def twice(x):\n    return x\n",
        "def twice(x) return",
        "import os\nos._exit(0)",
        "import sys\nsys.exit(0)",
        "twice = bytearray(2**31)",
        "open('large', 'wb').write(bytes(2**22)); twice = lambda x: 2 * x",
    ],
)
def test_code_that_fails_leaves_or_takes_too_much_is_not(response: str) -> None:
    assert unit_tests([sample(response, TESTS)]) == [0.0]


def test_code_that_does_not_end_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tested, "SECONDS", 0.5)
    begun = time.monotonic()
    assert unit_tests([sample("while True: pass", TESTS)]) == [0.0]
    assert time.monotonic() - begun < 5.0
