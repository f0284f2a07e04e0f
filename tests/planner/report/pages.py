"""Contents of reports for the tests: a random plan, its simulation, and runs that went as simulated."""

from __future__ import annotations

from dataclasses import replace
from html.parser import HTMLParser

from meshwright.planner.plan.plan import Plan
from meshwright.planner.plan.steps_ahead import StepsAhead
from meshwright.planner.report.contents import Contents
from meshwright.planner.simulation.simulate import simulate
from meshwright.profiles.trace import Run
from tests.planner.jobs import small_facts
from tests.planner.plans import random_plan


def plan_of(seed: int = 1, ahead: StepsAhead | None = None) -> Plan:
    return random_plan(seed, small_facts(nodes=2, ranks_per_node=2, memory_bytes=2**50), ahead=ahead)


def contents_of(plan: Plan, *clocks: str) -> Contents:
    """The plan, its simulation, and for each clock a run of it."""
    simulation = simulate(plan, steps=4, traced=True)
    runs = [
        Run(spans=tuple(replace(span, clock=clock) for span in simulation.spans), name=f"the {clock} one")
        for clock in clocks
    ]
    return Contents(plan=plan, simulation=simulation, runs=tuple(runs))


class Outline(HTMLParser):
    """The elements of a page, and its text between them; raises when one is not closed where it should be."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.names: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.text: list[str] = []
        self.feed(str(text))
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag != "meta" and not (self.get_starttag_text() or "").endswith("/>"):
            self.open.append(tag)
        self.names.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        self.ids += [value or "" for name, value in attrs if name == "id"]

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if data.strip():
            self.text.append(data)


def titles(markup: str) -> list[str]:
    """What the boxes of a picture say when the pointer rests on them."""
    return [line.partition("</title>")[0] for line in markup.split("<title>")[1:]]


def circles(page: str) -> int:
    """Points of a plot."""
    return Outline(page).names.count("circle")
