import json
from pathlib import Path
from typing import Any

import pytest

from meshwright.profiles.errors import BadInput
from meshwright.profiles.trace import Span, chrome_trace, read_spans, write_spans


def span(rank: int, clock: str = "measured") -> Span:
    return Span(
        step=1,
        instruction="actor_train",
        kind="stage",
        rank=rank,
        start_seconds=1.0,
        end_seconds=3.5,
        clock=clock,
        facts={"num_tokens": 7.0},
    )


def test_spans_are_read_back_equal_and_files_are_appended_to(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    write_spans(path, [span(0)])
    write_spans(path, [span(1)])
    assert read_spans(path) == (span(0), span(1))


def events_of(*spans: Span, **pools: tuple[int, ...]) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = json.loads(chrome_trace(spans, pools))["traceEvents"]
    return events


def test_a_chrome_trace_has_a_process_per_clock_and_a_lane_per_rank() -> None:
    events = events_of(span(0), span(1), span(0, "simulated"))
    names = [event["args"]["name"] for event in events if event["ph"] == "M" and event["name"].endswith("_name")]
    assert sorted(names) == ["SIMULATED", "measured", "rank 0", "rank 0", "rank 1"]
    complete = [event for event in events if event["ph"] == "X"]
    assert {event["dur"] for event in complete} == {2.5e6}
    assert complete[0]["args"] == {"step": 1, "num_tokens": 7.0}


def test_a_lane_names_the_pools_of_its_rank() -> None:
    names = [e["args"]["name"] for e in events_of(span(0), span(1), all=(0, 1), one=(1,)) if e["name"] == "thread_name"]
    assert names == ["rank 0 in all", "rank 1 in all, one"]


def at(kind: str, instruction: str, rank: int, start: float, end: float, **facts: float) -> Span:
    return Span(
        step=0,
        instruction=instruction,
        kind=kind,
        rank=rank,
        start_seconds=start,
        end_seconds=end,
        clock="simulated",
        facts=facts,
    )


def arrows(*spans: Span) -> list[tuple[int, float, int, float]]:
    """Rank and microsecond of both ends of each arrow."""
    events = events_of(*spans)
    begins = {event["id"]: event for event in events if event["ph"] == "s"}
    ends = {event["id"]: event for event in events if event["ph"] == "f"}
    assert begins.keys() == ends.keys()
    return [(begins[i]["tid"], begins[i]["ts"], ends[i]["tid"], ends[i]["ts"]) for i in begins]


def test_an_arrow_leads_from_the_last_send_to_each_receive() -> None:
    found = arrows(
        at("send", "send a -> b", 0, 1.0, 1.0),
        at("send", "send a -> b", 1, 2.0, 2.0),
        at("receive", "receive a -> b", 2, 0.0, 3.0),
        at("receive", "receive a -> b", 3, 0.0, 3.0),
        at("receive", "receive a -> c", 3, 0.0, 3.0),
    )
    assert found == [(1, 2e6, 2, 3e6), (1, 2e6, 3, 3e6)]


def test_an_arrow_leads_along_a_refit_to_each_rank_that_had_no_weights() -> None:
    refits = [at("refit", "refit train -> generate", rank, 1.0, 2.0) for rank in range(3)]
    stages = [at("stage", "train", 0, 5.0, 6.0), *(at("stage", "generate", rank, 2.0, 5.0) for rank in (0, 1, 2))]
    assert arrows(*refits, *stages) == [(0, 1e6, 1, 2e6), (0, 1e6, 2, 2e6)]


def test_memory_rises_to_what_a_stage_needs_and_falls_to_what_stays() -> None:
    events = events_of(at("stage", "train", 0, 1.0, 2.0, memory_bytes=7.0, resident_bytes=4.0))
    points = [(event["ts"], event["args"]["bytes"]) for event in events if event["ph"] == "C"]
    assert points == [(1e6, 7.0), (2e6, 4.0)]


@pytest.mark.parametrize("text", ['{"step": 1, "instr', '{"step": 1}', "7"])
def test_a_trace_that_was_cut_short_is_told_the_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "trace.jsonl"
    write_spans(path, [span(0)])
    path.write_text(path.read_text() + text)
    with pytest.raises(BadInput, match="line 2 is not a span"):
        read_spans(path)
