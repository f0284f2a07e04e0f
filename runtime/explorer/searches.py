"""The searches behind the explorer: one at a time, in the main thread, for the state that was asked for last, and then
for those beside which it is shown and those of its grid. Every point of a grid has a quick first answer, whose plan may
be slower than the best by a stated share, before any of them is searched to the end.

The threads that answer requests ask for states and wait for news; the main thread searches. A request for another state
ends the search of the state before, whose answer is then dropped. Answers to ended searches are kept.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, TypeAlias

from meshwright.planner.analysis.plan_summary import NextLayout, next_layouts
from meshwright.planner.plan.plan import Plan
from meshwright.planner.search.no_plan import NoPlan
from meshwright.planner.search.search_control import SearchProgress
from meshwright.planner.solver.result import Limits
from meshwright.profiles.errors import MeshwrightError
from meshwright.profiles.uncertainty import Interval
from meshwright.runtime.api.analyses import step_interval
from meshwright.runtime.api.arguments import cost_model_builder
from meshwright.runtime.api.planning import plan as search_plan
from meshwright.runtime.explorer.source import Source
from meshwright.runtime.explorer.state import State

_FIRST_GAP = 0.3
"""Gap of the first answers to the points of a grid. Their plans are at most this much slower than the best, and take a
tenth of the time of the last percents."""

_MAX_ANSWERS = 256
"""Largest number of answers that are kept; the oldest goes first."""


@dataclass(frozen=True)
class Refusal:
    """The sentence that says why a state has no answer."""

    sentence: str


Outcome: TypeAlias = Plan | NoPlan | Refusal


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The outcome of a search; `stopped` if the user stopped it, so that a better plan may exist. A plan has the
    interval of its step. `is_first` if its plan is to be replaced by that of a search to the end."""

    outcome: Outcome
    seconds: float
    stopped: bool = False
    is_first: bool = False
    step_interval: Interval | None = None


class _Wanted(NamedTuple):
    """A search that waits: of a state to the end, or for its first answer."""

    state: State
    is_first: bool = False


@dataclass
class RunningSearch:
    """A search in the main thread, and the last news of it; `is_first` as in its answer."""

    state: State
    is_first: bool = False
    began: float = field(default_factory=time.monotonic)
    stop: threading.Event = field(default_factory=threading.Event)
    is_dropped: bool = False
    progress: SearchProgress | None = None


class MemoryLimit(Protocol):
    """Ends a search that takes more memory than there is; see `runtime.cli.call.limit_memory`."""

    def __call__(self) -> AbstractContextManager[None]: ...


class Searches:
    """The answers to states, and the search in progress."""

    def __init__(self, source: Source, *, limit_memory: MemoryLimit) -> None:
        self._source, self._limit_memory = source, limit_memory
        self._answers: dict[State, Answer] = {}
        if source.plan:
            of_step = step_interval(source.plan, source.table)
            self._answers[State()] = Answer(outcome=source.plan, seconds=0.0, step_interval=of_step)
        self._first_answers: dict[State, Answer] = {}
        self._layouts: dict[State, tuple[NextLayout, ...]] = {}
        self._wants_layouts: State | None = None
        self._waiting: deque[_Wanted] = deque()
        self._stopped_grids: set[State] = set()
        self._running: RunningSearch | None = None
        self._news = threading.Condition()
        self._is_closed = False

    def focus(self, state: State) -> None:
        """End the searches that this state does not need, and the one that its own search would have to wait for."""
        needed = {one.searched for one in state.needed}
        with self._news:
            self._waiting.clear()
            if (running := self._running) is None:
                return
            is_in_the_way = state.searched not in self._answers and running.state != state.searched
            if is_in_the_way or running.state not in needed:
                self._drop_running()

    def ask(self, state: State) -> Answer | None:
        """Return the answer to a state, or None and have it searched after the others."""
        state = state.searched
        with self._news:
            if state in self._answers:
                return self._answers[state]
            self._want(_Wanted(state))
            return None

    def ask_points(self, state: State) -> None:
        """Have the points of a state's grid searched after everything else, unless their search was stopped: first
        for a first answer to each, and then to the end."""
        if self.is_stopped_grid(state):
            return
        with self._news:
            points = [point.searched for point in state.points if point.searched not in self._answers]
            if self._source.gap is None or self._source.gap < _FIRST_GAP:
                for point in points:
                    if point not in self._first_answers:
                        self._want(_Wanted(point, is_first=True))
            for point in points:
                self._want(_Wanted(point))

    def _want(self, wanted: _Wanted) -> None:
        """Add a search to those that wait, unless it waits or runs already."""
        running = self._running
        runs = running and not running.is_dropped and (running.state, running.is_first) == wanted
        if not runs and wanted not in self._waiting:
            self._waiting.append(wanted)
            self._news.notify_all()

    def is_stopped_grid(self, state: State) -> bool:
        """Return True if the search of the grid of a state was stopped."""
        with self._news:
            return state.grid_search in self._stopped_grids

    def find(self, state: State) -> Answer | None:
        """Return the answer to a state if it is known."""
        with self._news:
            return self._answers.get(state.searched)

    def find_point(self, point: State) -> Answer | None:
        """Return the answer to a point of a grid, or its first answer until that is known."""
        with self._news:
            return self._answers.get(point.searched) or self._first_answers.get(point.searched)

    def layouts(self, state: State) -> tuple[NextLayout, ...] | None:
        """Return the next best layouts of the plan of a state, once they are known."""
        with self._news:
            return self._layouts.get(state.searched)

    def running(self, state: State) -> RunningSearch | None:
        """Return the search of a state if it runs."""
        with self._news:
            return self._running if self._running and self._running.state == state.searched else None

    def wait(self, seconds: float) -> None:
        """Wait for news, at most this long."""
        with self._news:
            self._news.wait(seconds)

    def stop(self, state: State) -> None:
        """Stop the search of a state and of its grid; the best plan so far becomes the answer of the running one, and
        the points of the grid that wait are not searched."""
        with self._news:
            points = {point.searched for point in state.points}
            if self._running and self._running.state in {state.searched, *points}:
                self._running.stop.set()
            if points - self._answers.keys():
                self._stopped_grids.add(state.grid_search)
                self._waiting = deque(wanted for wanted in self._waiting if wanted.state not in points)
            self._news.notify_all()

    def forget(self, state: State) -> None:
        """Forget the answer to a state, so that it is searched again."""
        with self._news:
            self._forget(state.searched)

    def resume(self, state: State) -> None:
        """Forget that the grid of a state was stopped, and the answers that were then cut short."""
        with self._news:
            self._stopped_grids.discard(state.grid_search)
            for point in state.points:
                if any(
                    known[point.searched].stopped
                    for known in (self._answers, self._first_answers)
                    if point.searched in known
                ):
                    self._forget(point.searched)

    def _forget(self, searched: State) -> None:
        self._answers.pop(searched, None)
        self._first_answers.pop(searched, None)
        self._layouts.pop(searched, None)

    def close(self) -> None:
        """End `serve`, and the search in progress."""
        with self._news:
            self._is_closed = True
            self._drop_running()
            self._news.notify_all()

    def serve(self) -> None:
        """Search for the states that are asked for, until `close`. Call it in the main thread."""
        while running := self._next():
            answer = self._search(running)
            with self._news:
                if not running.is_dropped:
                    (self._first_answers if answer.is_first else self._answers)[running.state] = answer
                    for known in (self._answers, self._first_answers):
                        while len(known) > _MAX_ANSWERS:
                            self._forget(next(iter(known)))
                self._running = None
                self._news.notify_all()

    def answer_now(self, state: State) -> Answer:
        """Return the answer to a state, searched in this thread unless it is known."""
        return self.find(state) or self._search(RunningSearch(state.searched))

    def want_layouts(self, state: State) -> None:
        """Have the next best layouts of a plan found when no search waits."""
        state = state.searched
        with self._news:
            answer = self._answers.get(state)
            if answer and isinstance(answer.outcome, Plan) and state not in self._layouts:
                self._wants_layouts = state
                self._news.notify_all()

    def _find_layouts(self) -> None:
        """Find the wanted layouts, stage by stage, until a search is asked for."""
        with self._news:
            state = self._wants_layouts
            answer = self._answers.get(state) if state else None
            if state is None or answer is None or not isinstance(answer.outcome, Plan):
                self._wants_layouts = None
                return
        plan, found = answer.outcome, list[NextLayout]()
        for layout in next_layouts(plan, cost_model_builder(self._source.table)(plan.facts)):
            found.append(layout)
            if self._is_closed or self._waiting:
                return
        with self._news:
            self._layouts[state] = tuple(found)
            if self._wants_layouts == state:
                self._wants_layouts = None
            self._news.notify_all()

    def _drop_running(self) -> None:
        if self._running:
            self._running.is_dropped = True
            self._running.stop.set()

    def _next(self) -> RunningSearch | None:
        """Wait for a search that is still needed; None after `close`."""
        while True:
            with self._news:
                self._news.wait_for(lambda: self._is_closed or self._waiting or self._wants_layouts)
                if self._is_closed:
                    return None
                while self._waiting:
                    wanted = self._waiting.popleft()
                    if wanted.state not in self._answers:
                        self._running = RunningSearch(*wanted)
                        self._news.notify_all()
                        return self._running
            self._find_layouts()

    def _search(self, running: RunningSearch) -> Answer:
        source, state = self._source, running.state

        def report(progress: SearchProgress) -> None:
            with self._news:
                running.progress = progress
                self._news.notify_all()

        outcome: Outcome
        of_step: Interval | None = None
        try:
            with self._limit_memory():
                outcome = search_plan(
                    source.facts_of(state),
                    source.table,
                    pins=(*source.pins, *state.pins),
                    job=None if state.settings else source.job,
                    engines=source.engines_for(state),
                    limits=Limits(gap=_FIRST_GAP if running.is_first else source.gap, stop=running.stop),
                    progress=report,
                )
                if isinstance(outcome, Plan):
                    of_step = step_interval(outcome, source.table)
        except MeshwrightError as error:
            outcome = Refusal(str(error))
        return Answer(
            outcome=outcome,
            seconds=time.monotonic() - running.began,
            stopped=running.stop.is_set(),
            step_interval=of_step,
            is_first=running.is_first and isinstance(outcome, Plan),  # a rule or a limit forbids plans of any gap
        )
