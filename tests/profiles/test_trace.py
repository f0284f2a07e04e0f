import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from meshwright.profiles.errors import BadInput
from meshwright.profiles.run_logs import log_files
from meshwright.profiles.trace import (
    MAX_STEPS_AHEAD,
    Endpoints,
    Span,
    endpoints_of,
    group_by_step,
    instruction_name,
    read_last_spans,
    read_recent_spans,
    read_spans,
    write_spans,
)


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


def test_a_turn_before_the_first_step_that_only_works_ahead_leaves_spans(tmp_path: Path) -> None:
    before = replace(span(0), step=-1)
    write_spans(tmp_path / "trace.jsonl", [before])
    assert read_spans(tmp_path / "trace.jsonl") == (before,)


@pytest.mark.parametrize("kind", ["refit", "send", "receive"])
def test_the_name_of_what_goes_from_stage_to_stage_tells_both(kind: str) -> None:
    name = instruction_name(kind, "actor_train", "actor_generate")
    assert name == f"{kind} actor_train -> actor_generate"
    ends = endpoints_of(replace(span(0), kind=kind, instruction=name))
    assert ends == Endpoints("actor_train", "actor_generate")
    assert str(ends) == "actor_train -> actor_generate"


_WHOLE = json.dumps(asdict(span(0)))
CUT = (
    *('{"step": 1, "instr', '{"step": 1}', "7", "[" * 100_000),
    *(_WHOLE.replace('{"num_tokens": 7.0}', facts) for facts in ("[7.0]", "null", '{"num_tokens": "7"}')),
    _WHOLE.replace("3.5", "1" * 400),
)


@pytest.mark.parametrize("text", CUT)
def test_a_trace_that_was_cut_short_is_told_the_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "trace.jsonl"
    write_spans(path, [span(0)])
    path.write_text(path.read_text() + text)
    with pytest.raises(BadInput, match="line 2 is not a span"):
        read_spans(path)


def test_the_last_steps_are_read_from_the_end_of_a_trace_that_grows(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text("what no step looks at\n")
    turns = [replace(span(rank), step=step + rank) for step in range(40) for rank in range(2)]  # rank 1 works ahead
    write_spans(path, turns)
    with path.open("a") as file:
        file.write('{"step": 41, "instr')
    last = read_last_spans(path, 3)
    assert last == tuple(one for one in turns if one.step in (38, 39, 40))
    assert [one.step for one in last] == [38, 38, 39, 39, 40]


def test_fewer_steps_than_are_asked_for_are_all_read_and_none_of_an_empty_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text("")
    assert read_last_spans(path, 3) == ()
    write_spans(path, [span(0), span(1)])
    assert read_last_spans(path, 3) == (span(0), span(1))
    path.write_text("{}\n" + path.read_text())
    with pytest.raises(BadInput, match="line 3 from its end is not a span"):
        read_last_spans(path, 3)


def long_trace(path: Path, num_steps: int) -> list[Span]:
    """Of two ranks, the second of which works a step ahead, cut into small segments."""
    spans = [replace(span(rank), step=step + rank) for step in range(num_steps) for rank in range(2)]
    for one in spans:
        write_spans(path, [one], segment_bytes=1000)
    return spans


def test_a_trace_in_segments_is_read_as_one(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    spans = long_trace(path, 40)
    assert len(log_files(path)) > 5
    assert read_spans(path) == tuple(spans)
    for number in (1, 3, 30, 99):
        assert read_last_spans(path, number) == tuple(one for one in spans if one.step > 40 - number)


def test_of_a_trace_that_is_too_long_to_be_held_the_last_whole_steps_are_read(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    spans = long_trace(path, 40)
    assert read_recent_spans(path, 80) == tuple(spans)
    last = read_recent_spans(path, 10, min_steps=1)
    assert 0 < len(last) <= 10
    assert last == tuple(one for one in spans if one.step >= last[0].step)
    assert read_recent_spans(path, 10) == tuple(one for one in spans if one.step > 20)
    assert read_recent_spans(path, 0, min_steps=3) == tuple(one for one in spans if one.step > 37)


def test_the_steps_of_a_trace_come_whole_and_few_are_held(tmp_path: Path) -> None:
    spans = long_trace(tmp_path / "trace.jsonl", 40)
    given: list[Span] = []

    def noted() -> Iterator[Span]:
        for one in spans:
            given.append(one)
            yield one

    for step, of_step in group_by_step(noted()):
        assert of_step == [one for one in spans if one.step == step]
        assert given[-1].step - step <= MAX_STEPS_AHEAD
    assert len(given) == len(spans)
