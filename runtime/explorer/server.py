"""The server of the explorer: the standard library's, on the loopback interface, for one user.

Python's documentation recommends `http.server` for nothing public, because it has only basic checks. Here it listens on
127.0.0.1 alone, answers only addresses that begin with a secret token and name this host (so that no other page in the
browser can ask, by rebinding a name or otherwise), serves no files, and reads no bodies. A library would add
dependencies and nothing that this needs.
"""

from __future__ import annotations

import json
import secrets
import sys
import threading
import time
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit

from meshwright.planner.analysis.plan_summary import NextLayout
from meshwright.planner.analysis.sweep import sweep_json
from meshwright.planner.plan.plan import Plan
from meshwright.profiles.documents import canonical_json
from meshwright.profiles.errors import BadInput, MeshwrightError
from meshwright.runtime.api.reports import report
from meshwright.runtime.api.runs import simulate
from meshwright.runtime.explorer import views
from meshwright.runtime.explorer.estimates import Estimates
from meshwright.runtime.explorer.grids import sweep_of_grid
from meshwright.runtime.explorer.searches import Answer, Refusal, RunningSearch, Searches
from meshwright.runtime.explorer.source import Source
from meshwright.runtime.explorer.state import State, state_from_query
from meshwright.runtime.explorer.why_not import why_not

HOST = "127.0.0.1"

_POLL_SECONDS = 1.0
"""Longest time that a request waits for news of a search."""

_REQUEST_SECONDS = 30.0
"""Time limit of reading a request."""

_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'unsafe-inline'; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class ExplorerServer(ThreadingHTTPServer):
    """Serves the page of a source and the answers of its searches."""

    daemon_threads = True

    def __init__(self, source: Source, searches: Searches, *, port: int = 0) -> None:
        """Port 0 takes a free one. Raises BadInput for a port that is taken."""
        self.source, self.searches, self.estimates = source, searches, Estimates(source)
        self.token = secrets.token_urlsafe(16)
        try:
            super().__init__((HOST, port), _Handler)
        except OSError as error:
            raise BadInput(f"port {port} cannot be used: {error.strerror}; name another --port, or none.") from None

    def server_bind(self) -> None:
        """Bind the port, without asking a name server for the name of this host as the standard library does."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = HOST, int(self.server_address[1])

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Report an error of a request on standard error, unless the browser has only closed its connection."""
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            super().handle_error(request, client_address)

    def address(self, state: State) -> str:
        """The address of a state."""
        query = f"?{state.query}" if state.query else ""
        return f"http://{HOST}:{self.server_port}/{self.token}/{query}"

    @property
    def hosts(self) -> tuple[str, str]:
        """The names under which a browser may ask for this server."""
        return f"{HOST}:{self.server_port}", f"localhost:{self.server_port}"


@dataclass(frozen=True, kw_only=True)
class _Known:
    """What is known of a state at one time."""

    answer: Answer | None
    running: RunningSearch | None
    layouts: tuple[NextLayout, ...] | None
    free: Answer | None
    """The answer without the pins."""
    reference: Answer | None
    """The answer to the state beside which this one is shown."""
    points: tuple[Answer | None, ...]
    """The answers to the points of the grid."""
    grid_is_stopped: bool
    grid_running: tuple[State, RunningSearch] | None
    """The point of the grid whose search runs."""

    @property
    def version(self) -> str:
        """A text whose parts, between bars, change with what is known of the answer, of the grid and of searches."""
        answer = self.answer and (self.answer.seconds, self.layouts is None, self.free is None, self.reference is None)
        grid = [point and (point.seconds, point.is_first) for point in self.points], self.grid_is_stopped
        running = self.running or (self.grid_running and self.grid_running[1])
        return f"{answer}|{grid}|{running and running.progress}"

    def is_searching_grid(self) -> bool:
        """True if points of the grid are still to be searched, or searched to the end."""
        return not (self.grid_is_stopped or all(point and not point.is_first for point in self.points))

    def is_final(self) -> bool:
        """True if no more news will come."""
        has_layouts = self.layouts is not None or not (self.answer and _has_plan(self.answer))
        is_answered = self.answer is not None and self.free is not None and self.reference is not None
        return is_answered and has_layouts and not self.is_searching_grid()


class _Handler(BaseHTTPRequestHandler):
    server: ExplorerServer
    server_version = "meshwright"
    sys_version = ""
    timeout = _REQUEST_SECONDS

    def do_GET(self) -> None:
        pages = {
            "": self._page,
            "explore.js": self._script,
            "answer": self._answer,
            "job.yaml": self._job,
            "plan.json": self._plan,
            "report.html": self._report,
            "grid.json": self._grid,
        }
        self._serve(pages)

    def do_POST(self) -> None:
        self._serve({"stop": self._stop, "again": self._again, "resume": self._resume})

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not logged."""

    def _serve(self, pages: dict[str, Any]) -> None:
        parts = urlsplit(self.path)
        token, _, name = parts.path.removeprefix("/").partition("/")
        if self.headers.get("Host") not in self.server.hosts:
            self._send(HTTPStatus.FORBIDDEN, "text/plain", "this name is not served")
        elif not secrets.compare_digest(token.encode(), self.server.token.encode()) or name not in pages:
            self._send(HTTPStatus.NOT_FOUND, "text/plain", "there is nothing at this address")
        else:
            try:
                pages[name](parts.query)
            except MeshwrightError as error:
                self._send(HTTPStatus.CONFLICT, "text/plain", str(error))

    def _page(self, query: str) -> None:
        try:
            state = state_from_query(query)
        except BadInput:
            state = State()  # the script asks for the answer with the same query, and shows why it is refused
        self._send(HTTPStatus.OK, "text/html", views.page(self.server.source, state))

    def _script(self, _query: str) -> None:
        self._send(HTTPStatus.OK, "text/javascript", views.script())

    def _answer(self, query: str) -> None:
        pairs = parse_qsl(query)
        have = next((text for name, text in pairs if name == "have"), "")
        try:
            state = state_from_query(urlencode([pair for pair in pairs if pair[0] != "have"]))
        except BadInput as error:
            self._send_news(State(), _refused(str(error)), have=have)
            return
        searches = self.server.searches
        if not have:
            searches.focus(state)
        for needed in (state, state.without_pins, state.reference):
            searches.ask(needed)
        searches.ask_points(state)
        searches.want_layouts(state)
        deadline = time.monotonic() + _POLL_SECONDS
        while (known := self._known(state)).version == have and time.monotonic() < deadline:
            searches.wait(max(0.0, deadline - time.monotonic()))
        self._send_news(state, known, have=have)

    def _known(self, state: State) -> _Known:
        searches = self.server.searches
        running = ((point, searches.running(point)) for point in state.points)
        return _Known(
            answer=searches.find(state),
            running=searches.running(state),
            layouts=searches.layouts(state),
            free=searches.find(state.without_pins),
            reference=searches.find(state.reference),
            points=tuple(searches.find_point(point) for point in state.points),
            grid_is_stopped=searches.is_stopped_grid(state),
            grid_running=next(((point, search) for point, search in running if search), None),
        )

    def _send_news(self, state: State, known: _Known, *, have: str) -> None:
        """Send what is known of a state as JSON; the markup of the answer and of the grid only if it is new."""
        source, old_versions, versions = self.server.source, have.split("|"), known.version.split("|")
        news: dict[str, Any] = {
            "version": known.version,
            "answered": known.answer is not None,
            "searching": known.answer is None or known.is_searching_grid(),
            "final": known.is_final(),
            "html": None,
            "grid": None,
            **self._progress(state, known),
        }
        if known.answer is not None and versions[:1] != old_versions[:1]:
            news["html"] = views.answer_page(source, state, known.answer, self._beside(state, known, known.answer))
            news["numbers"] = views.numbers(state, known.answer)
        if versions[1:2] != old_versions[1:2]:
            news["grid"] = views.grid_page(source, state, known.points, is_stopped=known.grid_is_stopped)
        self._send(HTTPStatus.OK, "application/json", json.dumps(news))

    def _progress(self, state: State, known: _Known) -> dict[str, Any]:
        """The status, the title, and the done share of the searches."""
        name = self.server.source.path.name
        if known.answer is None:
            progress = known.running.progress if known.running else None
            estimate = self.server.estimates.of(state, self.server.searches.find(State()))
            return {
                "status": views.searching(progress, estimate),
                "share": views.share(progress),
                "title": f"searching · {name}",
            }
        headline = views.headline(known.answer)
        if not known.is_searching_grid():
            return {"status": headline, "share": None, "title": f"{headline} · {name}"}
        running = known.grid_running
        return {
            "status": f"{headline}. {views.searching_grid(known.points, running)}",
            "share": sum(views.share_of_point(point) for point in known.points) / len(known.points),
            "title": f"searching · {name}",
        }

    def _beside(self, state: State, known: _Known, answer: Answer) -> views.Beside:
        """Return what is shown beside the answer to a state."""
        has_reasons = state.pins and (known.free or not _has_plan(answer))
        return views.Beside(
            reference=known.reference,
            layouts=known.layouts,
            reasons=why_not(state.pins, answer, known.free) if has_reasons else (),
        )

    def _job(self, query: str) -> None:
        self._send(HTTPStatus.OK, "application/yaml", self.server.source.job_text(state_from_query(query)))

    def _plan(self, query: str) -> None:
        self._send(HTTPStatus.OK, "application/json", canonical_json(self._planned(state_from_query(query))))

    def _report(self, query: str) -> None:
        state = state_from_query(query)
        plan = self._planned(state)
        simulation = simulate(plan, self.server.source.table, steps=20, traced=True)
        table = self.server.source.table
        page = report(plan, simulation, table=table, price=state.price, num_steps=state.num_steps)
        self._send(HTTPStatus.OK, "text/html", page)

    def _grid(self, query: str) -> None:
        state = state_from_query(query)
        sweep = sweep_of_grid(state, [self.server.searches.find_point(point) for point in state.points])
        self._send(HTTPStatus.OK, "application/json", sweep_json(sweep))

    def _planned(self, state: State) -> Plan:
        """The plan of a state. Raises BadInput for a state whose plan is not known."""
        answer = self.server.searches.find(state)
        if answer is None or not isinstance(answer.outcome, Plan):
            raise BadInput("this state has no plan yet; open its address, and save it once the plan is found.")
        return answer.outcome

    def _stop(self, query: str) -> None:
        self.server.searches.stop(state_from_query(query))
        self._send(HTTPStatus.OK, "text/plain", "stopped")

    def _again(self, query: str) -> None:
        self.server.searches.forget(state_from_query(query))
        self._send(HTTPStatus.OK, "text/plain", "forgotten")

    def _resume(self, query: str) -> None:
        self.server.searches.resume(state_from_query(query))
        self._send(HTTPStatus.OK, "text/plain", "resumed")

    def _send(self, status: HTTPStatus, kind: str, text: str) -> None:
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)


def _has_plan(answer: Answer) -> bool:
    return isinstance(answer.outcome, Plan)


def _refused(sentence: str) -> _Known:
    """What is known of an address that cannot be read."""
    answer = Answer(outcome=Refusal(sentence), seconds=0.0)
    return _Known(
        answer=answer,
        running=None,
        layouts=None,
        free=answer,
        reference=answer,
        points=(),
        grid_is_stopped=False,
        grid_running=None,
    )


def serve(server: ExplorerServer) -> None:
    """Answer requests in threads, and search in this one, until the searches are closed. Call it in the main thread."""
    thread = threading.Thread(target=server.serve_forever, name="explorer", daemon=True)
    thread.start()
    try:
        server.searches.serve()
    finally:
        server.shutdown()
        server.server_close()
