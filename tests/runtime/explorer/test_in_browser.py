"""The explorer in a real browser: stories typed with the keyboard, on a desk and on a telephone, without an error."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from meshwright.runtime.explorer.server import ExplorerServer
from meshwright.runtime.explorer.state import State, state_of
from tests.planner.laws.test_browser import _CHROMIUM
from tests.runtime.explorer.browser import Tab, browser

pytestmark = [
    pytest.mark.check_all,
    pytest.mark.slow,
    pytest.mark.skipif(_CHROMIUM is None, reason="no chromium here; install the Debian package chromium"),
]

ANSWERED = "document.querySelector('#answer')?.getAttribute('aria-busy') === 'false'"
PHONE = 390


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    with browser(tmp_path_factory.mktemp("profile")) as found:
        yield found


@pytest.fixture
def page(tab: Tab, server: ExplorerServer) -> Iterator[Tab]:
    """The job as given, answered."""
    tab.errors.clear()
    tab.resize(1280)
    tab.open(server.address(State()))
    tab.wait(ANSWERED)
    tab.wait("document.querySelector('[data-pin]')")
    yield tab
    assert tab.errors == []


def fill(tab: Tab, name: str, text: str) -> None:
    """Types a number into the control of this field."""
    tab.evaluate(f"document.querySelector('[name=\"{name}\"]').focus()")
    tab.type(text)


def text_of(tab: Tab, selector: str) -> str:
    return str(tab.evaluate(f"document.querySelector({json.dumps(selector)}).innerText"))


def test_a_changed_number_is_answered_and_is_in_the_address(page: Tab) -> None:
    fill(page, "workload.response.scale", "2")
    page.wait("location.search.includes('workload.response.scale=2')")
    page.wait(f"{ANSWERED} && document.querySelector('#numbers th[scope=row]')")
    assert "as given" in text_of(page, "#numbers")
    assert "--set workload.response.scale=2" in text_of(page, "#command")
    before = text_of(page, "#numbers")
    page.open(str(page.evaluate("location.href")))
    page.wait(f"{ANSWERED} && document.querySelector('#numbers th[scope=row]')")
    assert page.evaluate("document.querySelector('[name=\"workload.response.scale\"]').value") == "2"
    assert text_of(page, "#numbers") == before


def test_money_needs_no_search(page: Tab) -> None:
    fill(page, "price", "2.5")
    page.wait("document.querySelector('#numbers').innerText.includes('money of 1,000 steps')")
    fill(page, "steps", "10")
    page.wait("document.querySelector('#numbers').innerText.includes('money of 10 steps')")


def test_why_not_is_asked_with_the_keyboard_alone(page: Tab) -> None:
    page.evaluate("document.querySelector('#why [name=value]').focus()")
    page.type("tp2")
    page.press("Enter")
    page.wait("document.querySelector('#reasons')?.innerText.includes('instead of')")
    assert page.evaluate("document.activeElement.id") == "status"
    assert page.evaluate("location.search").startswith("?pin=")
    page.evaluate("document.querySelector('[data-unpin]').focus()")
    page.press("Enter")
    page.wait(f"{ANSWERED} && !document.querySelector('#reasons') && location.search === ''")


def test_a_click_on_a_next_layout_says_why_not(page: Tab) -> None:
    page.evaluate("document.querySelector('[data-pin]').click()")
    page.wait("document.querySelector('#reasons')?.innerText.includes('a step takes')")


def test_an_illegal_pin_says_which_rule_it_breaks(page: Tab) -> None:
    page.evaluate("document.querySelector('#why [name=key]').value = 'tp'")
    page.evaluate("document.querySelector('#why [name=value]').focus()")
    page.type("3")
    page.press("Enter")
    page.wait("document.querySelector('#refused')?.innerText.includes('does not divide the 4 attention heads')")
    page.evaluate("document.querySelector('#reset').click()")
    page.wait("document.querySelector('#numbers') && !document.querySelector('[data-unpin]')")


def test_a_search_can_be_stopped_and_shows_its_progress(page: Tab) -> None:
    fill(page, "workload.batch_size", "32")
    page.wait("!document.querySelector('#stop').hidden || document.querySelector('#numbers th[scope=row]')")
    page.evaluate("document.querySelector('#stop').click()")
    page.wait(ANSWERED)


def test_a_state_is_kept_and_combinations_are_planned_with_the_keyboard_alone(page: Tab) -> None:
    fill(page, "workload.batch_size", "8")
    page.wait(f"{ANSWERED} && document.querySelector('#compared li')")
    assert "Beside “as given”" in text_of(page, "#compared")
    page.evaluate("document.querySelector('#keep').focus()")
    page.press("Enter")
    page.wait("location.search.includes('kept=') && !document.querySelector('#compared')")
    fill(page, "workload.batch_size", "16")
    page.wait("document.querySelector('#compared')?.innerText.includes('Beside “workload.batch_size=8”')")
    page.wait("document.querySelector('#compared li')")
    page.evaluate("document.querySelector('#vary [name=\"cluster.nodes\"]').focus()")
    page.type("1")
    page.evaluate("document.querySelector('#vary [name=staleness]').focus()")
    page.type("0,1")
    page.press("Enter")
    page.wait("document.querySelectorAll('#grid tbody tr').length === 2 && document.querySelector('#stop')?.hidden")
    assert page.evaluate("document.activeElement.id") == "status"
    page.evaluate("document.querySelector('#grid a[href*=\"staleness=1\"]').focus()")
    page.press("Enter")
    page.wait("document.querySelector('#controls [name=staleness]')?.value === '1'")
    page.wait("document.querySelectorAll('#grid tbody tr').length === 2 && document.querySelector('#compared li')")
    assert "Beside “workload.batch_size=8”" in text_of(page, "#compared")
    page.evaluate("document.querySelector('#reset').focus()")
    page.press("Enter")
    page.wait(f"{ANSWERED} && location.search === '' && !document.querySelector('#grid')")


def test_an_address_that_is_no_state_is_refused_when_it_is_opened(page: Tab, server: ExplorerServer) -> None:
    page.open(f"{server.address(State())}?price=dear")
    page.wait("document.querySelector('#refused')?.innerText.includes('is not a number; give the price')")


def test_the_page_fits_a_telephone(page: Tab, tmp_path: Path) -> None:
    page.resize(PHONE)
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE
    shown = "[...document.querySelectorAll('button, input, select')].filter(one => one.offsetWidth)"
    assert page.evaluate(f"{shown}.every(one => one.offsetHeight >= 24)")
    page.screenshot(tmp_path / "phone.png")
    assert (tmp_path / "phone.png").stat().st_size > 20_000


@pytest.mark.skipif(find_spec("axe_core_python") is None, reason="needs axe-core-python")
def test_no_state_has_a_serious_finding_of_axe(page: Tab, server: ExplorerServer) -> None:
    import axe_core_python  # noqa: PLC0415 - the package may be missing

    script = (Path(axe_core_python.__file__).parent / "axe.min.js").read_text(encoding="utf-8")
    pinned, refused = (state_of([], (f"actor_train.{pin}",)) for pin in ("layout=tp2", "tp=3"))
    for state in (State(), pinned, refused):
        page.open(server.address(state))
        page.wait(ANSWERED)
        page.evaluate(script + "; 1")
        found: list[dict[str, Any]] = page.evaluate("axe.run().then(found => found.violations)")
        assert [(one["id"], one["nodes"][0]["html"]) for one in found if one["impact"] in ("serious", "critical")] == []
