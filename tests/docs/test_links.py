"""What a document names exists, and what does not is found."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.named import PAGES, ROOT, missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_all_that_a_page_names_exists(page: Path) -> None:
    assert missing(page.read_text(), page.parent) == []


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("[gone](docs/gone.md)", "docs/gone.md"),
        ("[gone](README.md#a-heading-that-is-gone)", "README.md#a-heading-that-is-gone"),
        ("in `planner/gone.py`", "planner/gone.py"),
        ("in `gone/file.py`", "gone/file.py"),
        ("in `gone.py`", "gone.py"),
        ("in `examples/gone/job.yaml`", "examples/gone/job.yaml"),
        ("```\npython -m benchmarks.gone --data DIR\n```", "benchmarks.gone"),
        ("in `meshwright.planner.gone`", "meshwright.planner.gone"),
        ("`_GONE_FOR_EVER` there", "_GONE_FOR_EVER"),
        ("`GoneForEver` there", "GoneForEver"),
        ("```\nmeshwright gone plan.json\n```", "meshwright gone"),
        ("`meshwright plan job.yaml --gone`", "meshwright plan --gone"),
        ("```\nmeshwright run plan.json\n          [--gone N]\n```", "meshwright run --gone"),
        ("```\nmake gone    # what it did\n```", "make gone"),
    ],
)
def test_what_does_not_exist_is_found(text: str, found: str) -> None:
    assert missing(text, ROOT) == [found]


@pytest.mark.parametrize(
    "text",
    [
        "[there](docs/results.md#the-demo), [elsewhere](https://example.org/gone.md)",
        "`runtime/` and `runtime/cli/main.py` and `job.py`",
        "`plan.json`, `out/plan.json`, `examples/tiny/build/plan.json`",
        "`STAGES`, `_PARSERS`, `RankRun`, `a plain word`, `layout_rules`",
        "`python -m benchmarks.host --out DIR`, `meshwright.planner.plan`, `meshwright.planner.job.job`",
        "```\nmeshwright plan job.yaml -o plan.json [--gap G]\nmake lint types    # both\n```",
    ],
)
def test_what_exists_is_not_said_to_be_missing(text: str) -> None:
    assert missing(text, ROOT) == []
