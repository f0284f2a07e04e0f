"""What was predicted beside what every clock says of it."""

from __future__ import annotations

from dataclasses import replace

from meshwright.planner.report.predicted_and_observed import predicted_and_observed
from meshwright.profiles.trace import Run, Span
from tests.planner.report.pages import Outline, contents_of, plan_of, titles


def slower(run: Run, factor: float) -> Run:
    def later(span: Span) -> Span:
        return replace(span, start_seconds=factor * span.start_seconds, end_seconds=factor * span.end_seconds)

    return replace(run, spans=tuple(map(later, run.spans)))


def test_every_stage_and_the_step_have_a_bar_for_each_clock_and_one_for_the_prediction() -> None:
    contents = contents_of(plan_of(), "measured")
    told = titles(predicted_and_observed(contents))
    for placement in contents.plan.placements:
        mine = [text for text in told if text.startswith(f"{placement.stage}, ")]
        assert [text.partition(":")[0].partition(", ")[2] for text in mine] == [
            "predicted",
            "SIMULATED",
            "MEASURED the measured one",
        ]
    assert any(text.startswith("step, predicted: ") for text in told)


def test_a_run_that_took_half_as_long_again_was_predicted_a_third_too_fast() -> None:
    """As the terminal says it, beside whose table this one may lie."""
    contents = contents_of(plan_of(), "measured")
    late = replace(contents, runs=(slower(contents.runs[0], 1.5),))
    text = Outline(predicted_and_observed(late)).text
    told = [name for name in text if name in {"refit", "step", *late.plan.ahead}]
    assert text.count("-33.3%") == text.count("+0.0%") == len(set(told))


def test_only_a_rehearsal_is_told_to_show_no_computing() -> None:
    said = "it shows scheduling and messages, not computing"
    assert said in " ".join(Outline(predicted_and_observed(contents_of(plan_of(), "rehearsed"))).text)
    assert said not in " ".join(Outline(predicted_and_observed(contents_of(plan_of(), "measured"))).text)
