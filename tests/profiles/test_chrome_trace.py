"""Timelines follow the Trace Event Format: phases, times and lanes are there, and both ends of every arrow meet."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from meshwright.profiles.trace import Run, Span, chrome_trace


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


def stage(rank: int, clock: str = "measured") -> Span:
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


def events_of(*runs: Run) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = json.loads(chrome_trace(runs))["traceEvents"]
    return events


def names(events: list[dict[str, Any]], what: str) -> list[str]:
    return [event["args"]["name"] for event in events if event["name"] == what]


def test_runs_are_processes_side_by_side_and_each_rank_has_a_lane() -> None:
    simulated = Run(spans=(stage(0, "simulated"),))
    events = events_of(simulated, Run(spans=(stage(0), stage(1)), name="first"), Run(spans=(stage(0),), name="second"))
    assert names(events, "process_name") == ["SIMULATED", "measured first", "measured second"]
    assert names(events, "thread_name") == ["rank 0", "rank 0", "rank 1", "rank 0"]
    complete = [event for event in events if event["ph"] == "X"]
    assert {event["dur"] for event in complete} == {2.5e6}
    assert complete[0]["args"] == {"step": 1, "num_tokens": 7.0}


def test_a_lane_names_the_pools_of_its_rank() -> None:
    run = Run(spans=(stage(0), stage(1)), pools={"all": (0, 1), "one": (1,)})
    assert names(events_of(run), "thread_name") == ["rank 0 in all", "rank 1 in all, one"]


def test_every_run_begins_at_0() -> None:
    late = Run(spans=(at("stage", "a", 0, 150.0, 151.0), at("stage", "b", 0, 151.0, 153.0)))
    assert [event["ts"] for event in events_of(late, late) if event["ph"] == "X"] == [0, 1e6, 0, 1e6]


def arrows(*spans: Span) -> list[tuple[int, float, int, float]]:
    """Rank and microsecond of both ends of each arrow."""
    events = events_of(Run(spans=spans))
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
    refits = [at("refit", "refit train -> generate", rank, 0.0, 1.0) for rank in range(3)]
    stages = [at("stage", "train", 0, 4.0, 5.0), *(at("stage", "generate", rank, 1.0, 4.0) for rank in (0, 1, 2))]
    assert arrows(*refits, *stages) == [(0, 0, 1, 1e6), (0, 0, 2, 1e6)]


def counter(span: Span) -> list[tuple[str, float, dict[str, float]]]:
    return [(e["name"], e["ts"], e["args"]) for e in events_of(Run(spans=(span,))) if e["ph"] == "C"]


def test_memory_rises_to_what_a_stage_needs_and_falls_to_what_stays() -> None:
    assert counter(at("stage", "train", 3, 1.0, 2.0, memory_bytes=7.0, resident_bytes=4.0)) == [
        ("memory of rank 3", 0, {"bytes": 7.0}),
        ("memory of rank 3", 1e6, {"bytes": 4.0}),
    ]


def test_live_sequences_are_counted_where_the_trace_tells_them() -> None:
    assert counter(at("stage", "generate", 0, 0.0, 2.0, num_live_sequences=5.5)) == [
        ("live sequences of rank 0", 0, {"sequences": 5.5}),
        ("live sequences of rank 0", 2e6, {"sequences": 0.0}),
    ]
    assert counter(at("stage", "generate", 0, 0.0, 2.0)) == []


kinds = st.sampled_from(
    [
        ("stage", "train"),
        ("stage", "generate"),
        ("refit", "refit train -> generate"),
        ("send", "send generate -> train"),
        ("receive", "receive generate -> train"),
    ]
)
spans = st.builds(
    lambda kind, rank, start, seconds: at(*kind, rank, start, start + seconds, memory_bytes=2.0, resident_bytes=1.0),
    kinds,
    st.integers(0, 3),
    st.floats(0, 100),
    st.floats(0, 100),
)


@given(st.lists(st.lists(spans, max_size=12), max_size=3))
def test_every_event_has_a_phase_a_time_and_a_lane_and_both_ends_of_an_arrow_meet(found: list[list[Span]]) -> None:
    events = events_of(*(Run(spans=tuple(run)) for run in found))
    lanes = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    for event in events:
        assert event["ph"] in "MXCsf"
        assert event["ts"] >= 0
        assert {"pid", "tid", "name"} <= event.keys()
        if event["ph"] in "XCsf":
            assert (event["pid"], event["tid"]) in lanes
        if event["ph"] == "X":
            assert event["dur"] >= 0
    begins, ends = (Counter(e["id"] for e in events if e["ph"] == phase) for phase in "sf")
    assert begins == ends
    assert set(begins.values()) <= {1}
