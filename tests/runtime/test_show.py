"""What a run prints about itself."""

from pathlib import Path

import pytest

from meshwright.planner.compare import Comparison
from meshwright.runtime.record import RunSummary
from meshwright.runtime.show import run_summary
from meshwright.runtime.use import MemoryUse


def printed(capsys: pytest.CaptureFixture[str], *comparisons: Comparison) -> str:
    step = Comparison(name="step", predicted_seconds=1.0, measured_seconds=0.8)
    summary = RunSummary(
        steps=4,
        comparisons=(*comparisons, step),
        evaluations=(),
        tokens_per_second=100.0,
        response_tokens=10.0,
        expected_response_tokens=12.0,
        memory=(MemoryUse(stage="actor_train", planned_bytes=2**30, measured_bytes=2**29),),
    )
    run_summary(summary, Path("out"))
    return capsys.readouterr().out


def line(text: str, name: str) -> list[str]:
    return next(line.split() for line in text.splitlines() if line.split()[:1] == [name])


def test_what_takes_next_to_nothing_of_a_step_has_no_error_beside_it(capsys: pytest.CaptureFixture[str]) -> None:
    train = Comparison(name="actor_train", predicted_seconds=0.5, measured_seconds=0.4)
    refit = Comparison(name="refit", predicted_seconds=0.01, measured_seconds=0.002)
    unseen = Comparison(name="reward_score", predicted_seconds=0.1, measured_seconds=0.0)
    text = printed(capsys, train, refit, unseen)
    assert line(text, "actor_train") == ["actor_train", "0.500", "0.400", "+25%"]
    assert line(text, "refit") == ["refit", "0.010", "0.002"]
    assert line(text, "reward_score") == ["reward_score", "0.100", "0.000"]
    assert line(text, "step") == ["step", "1.000", "0.800", "+25%"]


def test_planned_memory_says_that_it_is_for_the_longest_rows(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys)
    assert ["actor_train", "1.00", "GiB", "512", "MiB"] in [line.split() for line in text.splitlines()]
    assert "planned for rows of the greatest length" in " ".join(text.split())
