"""The server of the explorer: it answers whoever has its token, as the command line would, and nobody else."""

from __future__ import annotations

import html
import http.client
import json
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest

from meshwright.planner.plan.plan import read_plan
from meshwright.profiles.errors import BadInput
from meshwright.runtime.explorer.server import HOST, ExplorerServer
from meshwright.runtime.explorer.state import State, state_of
from tests.runtime.command import Call


def get(
    server: ExplorerServer, name: str, *, token: str | None = None, host: str | None = None, method: str = "GET"
) -> tuple[int, str, dict[str, str]]:
    """The status, the text and the headers of an answer."""
    connection = http.client.HTTPConnection(HOST, server.server_port, timeout=120)
    connection.request(
        method, f"/{server.token if token is None else token}/{name}", headers={"Host": host or server.hosts[0]}
    )
    with connection.getresponse() as response:
        found = response.status, response.read().decode(), dict(response.getheaders())
    connection.close()
    return found


def news_until_final(server: ExplorerServer, state: State) -> list[dict[str, Any]]:
    """All that the page is told of a state."""
    told: list[dict[str, Any]] = []
    while not told or not told[-1]["final"]:
        have = urlencode({"have": told[-1]["version"] if told else ""})
        status, text, _ = get(server, f"answer?{state.query}&{have}")
        assert status == 200
        told.append(json.loads(text))
    return told


def test_the_page_is_for_this_host_and_token_alone(server: ExplorerServer) -> None:
    status, page, headers = get(server, "")
    assert status == 200
    assert 'name="cluster.nodes"' in page
    assert "script-src 'self'" in headers["Content-Security-Policy"]
    assert headers["Referrer-Policy"] == "no-referrer"
    assert get(server, "", token="guessed")[0] == 404
    assert get(server, "", token="")[0] == 404
    assert get(server, "", host="evil.example:80")[0] == 403
    assert get(server, "../job.yaml")[0] == 404
    assert get(server, "stop")[0] == 404
    assert get(server, "answer", method="POST")[0] == 404
    assert server.server_address[0] == HOST


def test_a_state_has_the_plan_of_its_command_line(
    server: ExplorerServer, call: Call, job: Path, tmp_path: Path
) -> None:
    for state in (State(), state_of(["workload.batch_size=8", "workload.response.scale=0.5"], ("actor_train.tp=1",))):
        told = news_until_final(server, state)[-1]
        status, text, _ = get(server, f"plan.json?{state.query}")
        assert status == 200
        command = re.search(r'<code id="command">(.*?)</code>', told["html"])
        assert command is not None
        program, *words, output, name = shlex.split(html.unescape(command[1]))
        assert (program, output, name) == ("meshwright", "-o", "plan.json")
        path = tmp_path / name
        assert call(*words, output, path).code == 0
        assert path.read_text() == text
        assert f"{read_plan(path).period_seconds:.3g}"[:3] in told["html"]
    planned = tmp_path / "planned.json"
    assert call("plan", job, "--gap", 0.3, "-o", planned).code == 0
    assert planned.read_text() == get(server, "plan.json?")[1]


def test_the_page_tells_what_a_pin_costs(server: ExplorerServer) -> None:
    (told, *_), last = news_until_final(server, State()), None
    state = state_of([], ("actor_train.layout=tp2",), 2.0, 10)
    last = news_until_final(server, state)[-1]
    assert "With actor_train.layout=tp2 a step takes" in last["html"]
    assert "money of 10 steps" in last["html"]
    assert "meshwright explore" in last["html"]
    assert told["version"] != last["version"]


def test_what_cannot_be_is_refused_in_a_sentence(server: ExplorerServer) -> None:
    for query, sentence in (
        ("pin=actor_train.tp=3", "tp=3 does not divide the 4 attention heads"),
        ("workload.batch_size=7", "num_minibatches=2 does not divide batch_size=7; use 1"),
        ("cluster.knots=2", "the plan&#39;s facts have no such field"),
        ("price=dear", "is not a number; give the price of a GPU-hour"),
        ("cluster.device=h101", "device &#39;h101&#39; is not known; did you mean &#39;h100-sxm&#39;?"),
    ):
        told: dict[str, Any] = {"final": False, "version": ""}
        while not told["final"]:
            told = json.loads(get(server, f"answer?{query}&{urlencode({'have': told['version']})}")[1])
        assert sentence in told["html"], query


def test_a_state_is_saved_as_a_job_a_plan_and_a_report(server: ExplorerServer) -> None:
    state = state_of(["workload.batch_size=8"], (), 3.0)
    assert get(server, f"plan.json?{state_of(['staleness=7'], ()).query}")[0] == 409
    news_until_final(server, state)
    assert "batch_size: 8" in get(server, f"job.yaml?{state.query}")[1]
    report = get(server, f"report.html?{state.query}")[1]
    assert report.startswith("<!doctype html>")
    assert "at 3 per GPU-hour" in report


def test_the_numbers_come_with_their_ranges(server: ExplorerServer) -> None:
    state = state_of([], (), 2.0, 10)
    told = next(news for news in news_until_final(server, state) if news["html"])
    numbers = told["numbers"]
    step, money = numbers["ranges"]["step_seconds"], numbers["ranges"]["money"]
    assert step["p10"] < numbers["step_seconds"] < step["p90"]
    assert money["p10"] < numbers["cost"]["money"] < money["p90"]
    assert "A range is from the 10th to the 90th percentile" in told["html"]
    report = get(server, f"report.html?{state.query}")[1]
    assert "A range is from the 10th to the 90th percentile" in report


def test_a_kept_state_is_beside_the_next_one_and_comes_back_with_the_address(server: ExplorerServer) -> None:
    kept = state_of(["workload.batch_size=8"], ())
    state = replace(state_of(["workload.batch_size=16"], ()), compared_with=kept)
    told = [news for news in news_until_final(server, state) if news["html"]][-1]
    assert "Beside “workload.batch_size=8”" in told["html"]
    assert "A step takes" in told["html"]
    assert "meshwright compare kept.json plan.json" in told["html"]


def test_a_grid_is_what_its_command_line_writes(server: ExplorerServer, call: Call, job: Path, tmp_path: Path) -> None:
    state = state_of([], (), 2.0, grid=["workload.batch_size=8,16", "staleness=0"])
    news = news_until_final(server, state)
    grid = [one["grid"] for one in news if one["grid"]][-1]
    assert news[-1]["searching"] is False
    command = re.search(r'<code id="grid-command">(.*?)</code>', grid)
    assert command is not None
    _, *words, _, _ = shlex.split(html.unescape(command[1]))
    path = tmp_path / "grid.json"
    outcome = call(*words, "-o", path)
    assert outcome.code == 0
    assert outcome.out.index("batch_size=8") < outcome.out.index("batch_size=16")
    assert path.read_text() == get(server, f"grid.json?{state.query}")[1]
    assert [point["setting"] for point in json.loads(path.read_text())["points"]] == [
        {"staleness": 0, "workload.batch_size": size} for size in (8, 16)
    ]
    assert call(*words, "-o", path).code == 0, "a grid is replaced"
    assert call(*words[:2], "-o", path).code == 2, "a plan does not replace a grid"


def test_the_search_of_a_grid_is_stopped_and_resumed(server: ExplorerServer) -> None:
    state = state_of(["staleness=0"], (), grid=["workload.batch_size=24,32,40"])
    get(server, f"answer?{state.query}&have=")
    assert get(server, f"stop?{state.query}", method="POST")[0] == 200
    stopped = news_until_final(server, state)
    assert 'id="resume"' in [one["grid"] for one in stopped if one["grid"]][-1]
    assert get(server, f"resume?{state.query}", method="POST")[0] == 200
    resumed = news_until_final(server, state)
    assert "3 of 3 combinations are planned" in [one["grid"] for one in resumed if one["grid"]][-1]


def test_a_taken_port_is_named(server: ExplorerServer) -> None:
    with pytest.raises(BadInput, match=f"port {server.server_port} cannot be used"):
        ExplorerServer(server.source, server.searches, port=server.server_port)


def test_a_page_cannot_be_made_of_an_address(server: ExplorerServer) -> None:
    """What comes in an address is text wherever it is shown."""
    bad = "</script><img src=x>"
    for query in (urlencode({"pin": bad}), urlencode({bad: "1"}), urlencode({"cluster.device": bad})):
        assert "<img" not in get(server, f"?{query}")[1]
        assert "<img" not in (json.loads(get(server, f"answer?{query}&have=")[1])["html"] or "")
