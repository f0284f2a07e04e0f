"""What a run learned is drawn: a plot for each curve, the last responses as they are, whatever they hold."""

from __future__ import annotations

from meshwright.planner.report.training_curves import HELD_OUT, ShownSample, TrainingCurves, training_section
from tests.planner.report.pages import Outline, circles

SAMPLE = ShownSample(step=10, prompt="<b>1 + 1", response="2\x1b[2J" + "x" * 9000, score=0.25)


def test_each_curve_is_a_plot_and_a_single_point_is_none() -> None:
    curves = {"score": [(0, -1.0), (1, 0.5), (2, 1.0)], HELD_OUT: [(0, 0.1)], "entropy": [(0, 2.0), (1, 1.0)]}
    page = training_section([TrainingCurves(run="run", curves=curves)])
    assert circles(page) == 5
    text = Outline(page).text
    assert {"reward", "entropy, nats per token"} <= set(text)
    assert HELD_OUT not in text


def test_a_long_curve_is_thinned_and_its_mean_stays() -> None:
    points = [(step, float(step % 2)) for step in range(10_000)]
    page = training_section([TrainingCurves(run="run", curves={"score": points})])
    assert len(page) < 100_000
    assert page.count('class="series"') == 199


def test_responses_are_shown_as_text_with_their_score_and_not_for_ever() -> None:
    page = training_section([TrainingCurves(run="run", curves={"score": [(0, 0.0), (1, 1.0)]}, samples=[SAMPLE])])
    text = Outline(page).text
    assert "<b>1 + 1" in text
    assert "0.250" in text
    [response] = [one for one in text if one.startswith("2\\x1b[2J")]
    assert len(response) < 2100


def test_a_report_without_a_run_says_how_to_get_one() -> None:
    assert "name the --out of a `meshwright run`" in " ".join(Outline(training_section([])).text)
