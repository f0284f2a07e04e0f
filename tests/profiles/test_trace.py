import json
from pathlib import Path

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


def test_a_chrome_trace_has_a_process_per_clock_and_a_lane_per_rank() -> None:
    events = json.loads(chrome_trace([span(0), span(1), span(0, "simulated")]))["traceEvents"]
    names = [event["args"]["name"] for event in events if event["ph"] == "M"]
    assert sorted(names) == ["measured", "rank 0", "rank 0", "rank 1", "simulated"]
    complete = [event for event in events if event["ph"] == "X"]
    assert {event["dur"] for event in complete} == {2.5e6}
    assert complete[0]["args"] == {"step": 1, "num_tokens": 7.0}
