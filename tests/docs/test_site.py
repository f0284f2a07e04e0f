"""The site of docs/ is built without a link that leads nowhere, and no page shuts anybody out."""

from __future__ import annotations

import html
import json
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from meshwright import api
from meshwright.planner.report.report import report
from tests.docs.named import ROOT
from tests.planner.laws.test_browser import _CHROMIUM, chromium
from tests.planner.plans import random_plan
from tests.planner.report.pages import contents_of, plan_of

pytestmark = pytest.mark.slow

AXE = """<pre id="axe"></pre><script>addEventListener("load", () => axe.run(document,
{runOnly: ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "best-practice"]}).then(found =>
document.getElementById("axe").textContent = JSON.stringify(found.violations.map(one =>
[one.impact, one.id, one.nodes[0].html.slice(0, 200)]))))</script>"""
"""Checks the page that it stands in, and writes what is wrong into it."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("mkdocs")
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(out)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    return out


@pytest.mark.check_all
def test_every_page_is_on_the_site(site: Path) -> None:
    pages = {path.relative_to(ROOT / "docs").with_suffix(".html") for path in (ROOT / "docs").rglob("*.md")}
    assert sorted(pages - {path.relative_to(site) for path in site.rglob("*.html")}) == []


@pytest.mark.check_all
def test_every_link_and_picture_within_the_site_is_there(site: Path) -> None:
    gone = []
    for page in site.rglob("*.html"):
        if page.name == "404.html":  # its links begin at a server's root
            continue
        for target in re.findall(r'(?:href|src)="([^"#?]+)', page.read_text()):
            if "://" not in target and not (page.parent / target).exists():
                gone.append((page.name, target))
    assert gone == []


@pytest.mark.check_all
def test_nothing_is_fetched_from_elsewhere(site: Path) -> None:
    fetched = [
        (page.name, target)
        for page in site.rglob("*.html")
        for target in re.findall(r'<(?:script|link|img)[^>]+(?:src|href)="(https?:[^"]+)', page.read_text())
    ]
    assert fetched == []


axe_is_here = pytest.mark.skipif(
    _CHROMIUM is None or find_spec("axe_core_python") is None, reason="needs chromium and axe-core-python"
)


@pytest.mark.check_all
@axe_is_here
@pytest.mark.parametrize("name", ["index", "tutorial", "plan_space", "commands", "results", "ideas/oppo"])
def test_a_page_has_no_serious_finding_of_axe(site: Path, name: str) -> None:
    assert serious(site / f"{name}.html") == []


@pytest.mark.check_all
@axe_is_here
def test_the_report_and_the_plots_have_no_serious_finding_of_axe(tmp_path: Path) -> None:
    (tmp_path / "report.html").write_text(report(contents_of(plan_of(), "rehearsed", "measured")), encoding="utf-8")
    batches = [{"workload.batch_size": size} for size in (4, 8)]
    (tmp_path / "sweep.html").write_text(api.plot(api.whatif(random_plan(2), batches)), encoding="utf-8")
    assert [(page.name, found) for page in sorted(tmp_path.glob("*.html")) if (found := serious(page))] == []


@pytest.mark.check_all
@axe_is_here
def test_what_shuts_somebody_out_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text(
        '<!doctype html><html lang="en"><title>A page</title><body><main><img src="x.png"></main></body></html>'
    )
    assert [found[1] for found in serious(page)] == ["image-alt"]


def serious(page: Path) -> list[Any]:
    """Findings of axe-core that are serious or critical: impact, rule, and the first element of each.

    The page's own policy allows no script, so a copy without it is looked at.
    """
    import axe_core_python  # noqa: PLC0415 - the package may be missing

    script = (Path(axe_core_python.__file__).parent / "axe.min.js").read_text(encoding="utf-8")
    script = script.replace("</script", "<\\/script")
    text = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", page.read_text(encoding="utf-8"))
    copy = page.with_name(f"axe-{page.stem}.htm")
    body, end, rest = text.rpartition("</body>")
    copy.write_text(f"{body}<script>{script}</script>{AXE}{end}{rest}")
    found = re.search(r'<pre id="axe">(\[.*?\])</pre>', chromium(copy, "--virtual-time-budget=30000", "--dump-dom"))
    assert found is not None, "axe has not answered"
    return [one for one in json.loads(html.unescape(found[1])) if one[0] in ("serious", "critical")]
