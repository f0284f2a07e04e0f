"""Ten questions that people ask before they rent GPUs, typed in a browser: few interactions, no error, an answer.

The seconds from the first interaction to the whole answer are written to `build/stories.md`, by the clock and of this
process's processor time, which says what they take on a machine without other work.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from meshwright.planner.plan.pin_files import read_pins
from meshwright.runtime.explorer.source import read_source
from meshwright.runtime.explorer.state import State
from tests.planner.laws.test_browser import _CHROMIUM
from tests.runtime.command import Call
from tests.runtime.explorer.browser import Tab, browser
from tests.runtime.explorer.conftest import explored

pytestmark = [
    pytest.mark.check_all,
    pytest.mark.slow,
    pytest.mark.skipif(_CHROMIUM is None, reason="no chromium here; install the Debian package chromium"),
]

ROOT = Path(__file__).parents[3]
MAX_INTERACTIONS = 6
PHONE = 390

SETTLED = (
    "document.querySelector('#answer').getAttribute('aria-busy') === 'false' && document.querySelector('#stop').hidden"
    " && !document.querySelector('#compared')?.innerText.includes('is being searched')"
)
"""True once everything but the next best layouts is answered."""


class Clocks(NamedTuple):
    """Seconds by the clock, and of this process's processor time, which has the searches."""

    wall: float
    processor: float

    @classmethod
    def now(cls) -> Clocks:
        return cls(time.monotonic(), time.process_time())

    def since(self, began: Clocks) -> Clocks:
        return Clocks(self.wall - began.wall, self.processor - began.processor)


@dataclass
class Person:
    """Somebody at the page, whose interactions are counted: a field that is filled, a choice, a button, a link."""

    tab: Tab
    interactions: int = 0
    began: Clocks = field(default_factory=Clocks.now)

    def fill(self, name: str, text: str, form: str = "controls") -> None:
        self.interactions += 1
        self.tab.evaluate(f"document.querySelector('#{form} [name=\"{name}\"]').focus()")
        self.tab.type(text)

    def choose(self, name: str, option: str, form: str = "controls") -> None:
        self.interactions += 1
        field_of = f"document.querySelector('#{form} [name=\"{name}\"]')"
        self.tab.evaluate(f"{field_of}.value = {json.dumps(option)}")
        self.tab.evaluate(f"{field_of}.dispatchEvent(new Event('input', {{bubbles: true}}))")

    def enter(self) -> None:
        self.interactions += 1
        self.tab.press("Enter")

    def press(self, selector: str) -> None:
        self.interactions += 1
        self.tab.click(selector)

    def settled(self, condition: str) -> Clocks:
        """Waits until this is true and everything is answered; returns the seconds since the first interaction."""
        self.tab.wait(f"({condition}) && {SETTLED}", 600)
        return Clocks.now().since(self.began)

    def answered(self, condition: str) -> Clocks:
        """Waits until this is true; returns the seconds since the first interaction."""
        self.tab.wait(condition, 600)
        return Clocks.now().since(self.began)

    def text(self, selector: str) -> str:
        return str(self.tab.evaluate(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''"))

    def numbers(self) -> dict[str, list[str]]:
        """The rows of the table of numbers: here, the same beside it, the difference, and the range here."""
        rows = "[...document.querySelectorAll('#numbers tbody tr')].map(row => [...row.cells].map(c => c.innerText))"
        return {name: values for name, *values in self.tab.evaluate(rows)}

    def grid(self) -> list[list[str]]:
        rows = "[...document.querySelectorAll('#grid tbody tr')].map(row => [...row.cells].map(c => c.innerText))"
        found: list[list[str]] = self.tab.evaluate(rows)
        return found


_AS_GIVEN = State()


@dataclass
class Stories:
    """The explorer of the story that is told, and the rows of the table."""

    tab: Tab
    stack: ExitStack
    rows: list[tuple[str, int, Clocks, str]] = field(default_factory=list)

    def open(self, job: Path | str, state: State = _AS_GIVEN) -> Person:
        """Opens the page of a job, which has answered nothing yet, and waits for the job as given."""
        path = ROOT / "examples" / job / "job.yaml" if isinstance(job, str) else job
        server = self.stack.enter_context(explored(path, gap=None))
        self.tab.errors.clear()
        self.tab.open(server.address(state))
        self.tab.wait(f"{SETTLED} && document.querySelector('#numbers')", 600)
        return Person(self.tab)

    def tell(self, story: str, person: Person, seconds: Clocks, answer: str) -> None:
        self.rows.append((story, person.interactions, seconds, " ".join(answer.split())))
        assert person.interactions <= MAX_INTERACTIONS
        assert self.tab.errors == []
        self.tab.resize(PHONE)
        assert self.tab.evaluate("document.documentElement.scrollWidth") <= PHONE
        self.tab.resize(1280)
        assert serious_findings(self.tab) == []


def serious_findings(tab: Tab) -> list[tuple[str, str]]:
    """What axe finds on the page; nothing if the package is missing."""
    if find_spec("axe_core_python") is None:
        return []
    import axe_core_python  # noqa: PLC0415 - the package may be missing

    tab.evaluate((Path(axe_core_python.__file__).parent / "axe.min.js").read_text(encoding="utf-8") + "; 1")
    found: list[dict[str, Any]] = tab.evaluate("axe.run().then(found => found.violations)")
    return [(one["id"], one["nodes"][0]["html"]) for one in found if one["impact"] in ("serious", "critical")]


@pytest.fixture(scope="module")
def all_stories(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stories]:
    with browser(tmp_path_factory.mktemp("profile")) as tab:
        tab.resize(1280)
        found = Stories(tab, ExitStack())
        yield found
    table = ["| story | interactions | s | processor s | answer |", "|---|---|---|---|---|"]
    table += [
        f"| {story} | {count} | {seconds.wall:.1f} | {seconds.processor:.1f} | {answer} |"
        for story, count, seconds, answer in found.rows
    ]
    path = ROOT / "build" / "stories.md"
    path.parent.mkdir(exist_ok=True)
    path.write_text("\n".join(table) + "\n", encoding="utf-8")


@pytest.fixture
def stories(all_stories: Stories) -> Iterator[Stories]:
    with all_stories.stack:
        yield all_stories
        all_stories.tab.open("about:blank")  # a page that waits for news would find nobody


def test_the_cheapest_cluster_below_60_seconds_a_step(stories: Stories) -> None:
    person = stories.open("grpo-7b-8xh100")
    person.fill("workload.response.scale", "2")
    person.fill("price", "2.5")
    person.fill("cluster.nodes", "1,2,4", "vary")
    person.enter()
    every_row = "document.querySelectorAll('#grid tbody tr').length === 3"
    for when, wait in (("first answers", person.answered), ("to the end", person.settled)):
        seconds = wait(every_row)
        row = next(row for row in person.grid() if float(row[2].removesuffix(" s")) <= 60)
        assert row[0] == "nodes=2"
        answer = f"{row[0]}: {row[2]}, money {row[5]}"
        stories.tell(f"the cheapest cluster below 60 s a step, {when}", person, seconds, answer)


def test_is_staleness_2_worth_it(stories: Stories) -> None:
    person = stories.open("grpo-7b-8xh100")
    person.fill("staleness", "2")
    seconds = person.settled("document.querySelector('#compared li')")
    step = person.numbers()["step"]
    assert step[2].startswith("-")
    assert person.numbers()["staleness"][0] in ("1", "2")
    stories.tell("is staleness 2 worth it", person, seconds, person.text("#compared li"))


def test_h100_or_h200_at_their_own_prices(stories: Stories) -> None:
    person = stories.open("grpo-7b-8xh100")
    person.fill("price", "2.5")
    person.tab.wait("location.search.includes('price=2.5')")
    person.press("#keep")
    person.choose("cluster.device", "h200")
    person.fill("price", "3.5")
    seconds = person.settled(
        "document.querySelector('#numbers')?.innerText.includes('money') && location.search"
        ".includes('price=3.5') && document.querySelector('#compared li')"
    )
    here, beside, change, _ = person.numbers()["money of 1,000 steps"]
    assert here != beside
    assert change
    stories.tell("H100 at 2.5 or H200 at 3.5", person, seconds, f"money {here} for {beside} ({change})")


def test_8_or_16_gpus(stories: Stories) -> None:
    person = stories.open("grpo-7b-8xh100")
    person.fill("cluster.nodes", "2")
    seconds = person.settled("document.querySelector('#compared li')")
    assert person.numbers()["GPUs"] == ["16", "8", "+8", ""]
    stories.tell("8 or 16 GPUs", person, seconds, person.text("#compared li"))


def test_why_not_tp_8(stories: Stories) -> None:
    person = stories.open("grpo-7b-8xh100")
    person.choose("stage", "actor_train", "why")
    person.choose("key", "tp", "why")
    person.fill("value", "8", "why")
    person.enter()
    seconds = person.settled("document.querySelector('#refused')")
    assert "tp=8 does not divide the 28 attention heads" in person.text("#refused")
    stories.tell("why not tp 8", person, seconds, person.text("#refused .alarm"))


def test_responses_doubled(stories: Stories) -> None:
    person = stories.open("grpo-7b-8xh100")
    person.fill("workload.response.scale", "2")
    seconds = person.settled("document.querySelector('#compared li')")
    assert person.numbers()["step"][2].startswith("+")
    assert "decode" in person.text("#compared")
    stories.tell("responses twice as long", person, seconds, person.text("#compared li"))


def test_a_judge_of_5_seconds(stories: Stories) -> None:
    person = stories.open("grpo-judge-8xh100")
    person.fill("rewards.1.latency_seconds.scale", "2.5")
    seconds = person.settled("document.querySelector('#compared li')")
    assert person.numbers()["step"][2].startswith("+")
    stories.tell("a judge of 5 s instead of 2 s", person, seconds, person.text("#compared li"))


def test_70b_on_what(stories: Stories) -> None:
    person = stories.open("70b-64xh100")
    person.fill("cluster.nodes", "1,4", "vary")
    person.fill("cluster.device", "h100-sxm,h200", "vary")
    person.enter()
    every_row = "document.querySelectorAll('#grid tbody tr').length === 4"
    seconds = person.answered(every_row)
    rough = {row[0]: row[1:] for row in person.grid()}
    assert "no plan" in rough["device=h100-sxm, nodes=1"][0]
    assert "roughly: at most" in rough["device=h200, nodes=4"][-1]
    to_the_end = person.settled(every_row)
    rows = {row[0]: row[1:] for row in person.grid()}
    assert "roughly" not in rows["device=h200, nodes=4"][-1]
    answer = "; ".join(f"{name}: {cells[1] if len(cells) > 1 else 'no plan'}" for name, cells in rough.items())
    stories.tell("70B on what, first answers", person, seconds, answer)
    answer = "; ".join(f"{name}: {cells[1] if len(cells) > 1 else 'no plan'}" for name, cells in rows.items())
    stories.tell("70B on what, to the end", person, to_the_end, answer)


def test_my_verl_script(stories: Stories, call: Call, tmp_path: Path) -> None:
    shipped = yaml.safe_load((ROOT / "tests/planner/trainers/shipped/verl.yaml").read_text())
    script, job, plan = tmp_path / "run.sh", tmp_path / "job.yaml", tmp_path / "configured.json"
    script.write_text(shipped[0]["text"])
    model = ROOT / "examples/models/qwen2.5-7b"
    arguments = ("--from", "verl", "--device", "h100-sxm", "--model", model, "--gap", 0.1, "-o", job, "--plan", plan)
    assert call("import", script, *arguments).code == 0
    pins = read_pins(plan, read_source(job).facts.graph)
    began = Clocks.now()
    person = stories.open(job, State(compared_with=State(pins=tuple(sorted(pins)))))
    person.began = began  # the address that `explore --beside` prints asks at once
    seconds = person.settled("document.querySelector('#compared li')")
    person.press('a[href^="plan.json"]')
    assert person.numbers()["step"][2].startswith("-")
    stories.tell("my verl script: what to change, what is gained", person, seconds, person.text("#compared li"))


def test_the_link_is_shared(stories: Stories) -> None:
    person = stories.open("grpo-7b-8xh100")
    person.fill("cluster.nodes", "2")
    person.fill("price", "2.5")
    person.settled("document.querySelector('#compared li') && location.search.includes('price=2.5')")
    numbers, command = person.numbers(), person.text("#command")
    person.interactions += 1  # the address is opened by somebody else
    person.tab.open(str(person.tab.evaluate("location.href")))
    seconds = person.settled("document.querySelector('#compared li')")
    assert person.numbers() == numbers
    assert person.text("#command") == command
    stories.tell("share the link", person, seconds, f"the same numbers; {command}")
