"""What a run that is watched looks like."""

from __future__ import annotations

from dataclasses import replace

import pytest
from rich.console import Console

from meshwright.planner.analysis.trace_analysis import Comparison
from meshwright.planner.simulation.simulate import TimeShare, TimeUse
from meshwright.runtime.cli.watch import run_view
from meshwright.runtime.records.run_status import RunStatus

FOUND = RunStatus(
    directory="run",
    is_running=True,
    updates=40,
    num_recent=20,
    quiet_seconds=3.0,
    plan_seconds=1.5,
    step_seconds=2.0,
    tokens_per_second=1234.0,
    staleness_bound=2,
    training_metrics={
        "score": 0.75,
        "staleness": 0.5,
        "max_staleness": 1.0,
        "token_mult_prob_error": 1.01,
        "gen_kl_error": 0.5,
    },
    held_out={
        "held_out": (
            {"step": 0, "mean_score": 0.1, "standard_error": 0.2},
            {"step": 20, "mean_score": 0.9, "standard_error": 0.2},
        ),
        "gsm8k": ({"step": 10, "mean_score": 0.25, "standard_error": 0.1},),
    },
    comparisons=(
        Comparison(name="actor_train", predicted_seconds=0.5, measured_seconds=1.0),
        Comparison(name="refit", predicted_seconds=0.5, measured_seconds=0.001),
    ),
    uses=(
        TimeUse(name="all ranks", ranks=(0, 1), idle_share=0.4, busy=(), waits=(TimeShare("actor_generate", 0.4),)),
        TimeUse(name="ranks 0-1", ranks=(0, 1), idle_share=0.4, busy=(), waits=()),
        TimeUse(name="ranks 1-1", ranks=(1,), idle_share=0.6, busy=(), waits=(TimeShare("reward_score", 0.0001),)),
    ),
)


@pytest.fixture
def shown() -> str:
    return _text(FOUND)


def _text(found: RunStatus) -> str:
    console = Console(width=120, force_terminal=False)
    with console.capture() as captured:
        console.print(run_view(found))
    return captured.get()


def _lines(text: str, beginning: str) -> list[str]:
    return [" ".join(line.split()) for line in text.splitlines() if line.strip().startswith(beginning)]


def test_the_head_says_how_fast_and_how_stale(shown: str) -> None:
    assert "run: running, 40 steps, the last 3 s ago" in shown
    assert "1,234 response tokens/s, step 2.00 s, planned 1.50 s" in shown
    assert "staleness 0.50 on average, 1 at most, 2 allowed" in " ".join(shown.split())


def test_an_error_stands_beside_what_takes_a_part_of_the_step(shown: str) -> None:
    assert _lines(shown, "actor_train") == ["actor_train 0.500 1.000 -50.0%"]
    assert _lines(shown, "refit") == ["refit 0.500 0.001"]


def test_idle_time_has_its_causes_and_no_pool_that_is_all_ranks(shown: str) -> None:
    assert _lines(shown, "all ranks") == ["all ranks 40.0% actor_generate 40.0%"]
    assert _lines(shown, "ranks") == ["ranks 1-1 60.0% -"]


def test_a_mismatch_that_the_field_takes_for_a_fault_is_marked(shown: str) -> None:
    assert _lines(shown, "generator against trainer, token") == [
        "generator against trainer, token_mult_prob_error 1.01"
    ]
    assert _lines(shown, "generator against trainer, gen") == [
        "generator against trainer, gen_kl_error 0.5 above 0.02: they disagree"
    ]


def test_held_out_reward_is_told_against_the_first(shown: str) -> None:
    assert "held-out reward after 20 updates: 0.900 ± 0.200, 0.100 at the first evaluation" in shown
    assert "gsm8k reward after 10 updates: 0.250 ± 0.100, 0.250 at the first evaluation" in shown


def test_what_teachers_say_of_held_out_prompts_is_told_as_a_divergence(shown: str) -> None:
    """Their mean score is the negative of it."""
    of_set = FOUND.held_out["held_out"]
    held_out = {"held_out": tuple({**one, "mean_score": -one["mean_score"], "by_teachers": True} for one in of_set)}
    told = "held-out KL to the teachers per token after 20 updates: 0.900 ± 0.200, 0.100 at the first evaluation"
    assert told in _text(replace(FOUND, held_out=held_out))


def test_a_run_without_a_step_says_so() -> None:
    assert "no step has been finished yet" in _text(replace(FOUND, num_recent=0))
