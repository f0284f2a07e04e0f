"""Two tiers of tests, and which file starts first.

`pytest` runs the first tier: every law, on few seeds. `pytest --all` runs what is marked `check_all` too. Files are
started in the order of the seconds that they took when that was last recorded (`--record-seconds`), new ones and the
longest first, so that several processes end at about the same time. Every run leaves its two hundred slowest tests in
`build/slowest_tests.txt`.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RECORDED = Path(__file__).with_name("seconds.json")
SLOWEST = ROOT / "build" / "slowest_tests.txt"
NUM_SLOWEST = 200


def pytest_addoption(parser: pytest.Parser) -> None:
    tiers = parser.getgroup("tiers")
    tiers.addoption("--all", action="store_true", help="run the second tier too: all seeds, and what takes minutes")
    tiers.addoption("--record-seconds", action="store_true", help=f"write what each file took to {RECORDED.name}")


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # the process that the user started, not one that it has started
        config.pluginmanager.register(Durations(config), "durations")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves the second tier out unless it is asked for, or a test is named, and puts the longest files first."""
    if not (config.getoption("--all") or any("::" in argument for argument in config.args)):
        left_out = [item for item in items if item.get_closest_marker("check_all")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("check_all")]
    seconds = recorded_seconds(is_all=config.getoption("--all"))
    items.sort(key=lambda item: -seconds.get(file_of(item.nodeid), math.inf))  # stable: within a file as it is written


def file_of(nodeid: str) -> str:
    return nodeid.split("::", maxsplit=1)[0]


def recorded() -> dict[str, dict[str, float]]:
    """Seconds by tier and test file."""
    return json.loads(RECORDED.read_text()) if RECORDED.exists() else {}


def recorded_seconds(*, is_all: bool) -> dict[str, float]:
    """Seconds by test file, as last recorded for this tier, or for the other where it has none."""
    known = recorded()
    return {**known.get(tier(not is_all), {}), **known.get(tier(is_all), {})}


def tier(is_all: bool) -> str:
    return "check-all" if is_all else "check"


class Durations:
    """Seconds of each test, with its fixtures, over all processes of a session."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._seconds: dict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.nodeid] += report.duration

    def pytest_sessionfinish(self) -> None:
        if not self._seconds:
            return
        slowest = sorted(self._seconds, key=self._seconds.__getitem__, reverse=True)[:NUM_SLOWEST]
        SLOWEST.parent.mkdir(exist_ok=True)
        SLOWEST.write_text("".join(f"{self._seconds[test]:8.2f} s  {test}\n" for test in slowest))
        if self._config.getoption("--record-seconds"):
            self._record()

    def _record(self) -> None:
        by_file: dict[str, float] = defaultdict(float)
        for test, seconds in self._seconds.items():
            by_file[file_of(test)] += seconds
        known = recorded()
        of_tier = known.setdefault(tier(self._config.getoption("--all")), {})
        of_tier |= {name: round(seconds, 1) for name, seconds in by_file.items()}
        RECORDED.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")
