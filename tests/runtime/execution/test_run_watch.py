"""A run's watchdog allows what its plan says, more for an evaluation of more prompts, and half an hour to a meeting."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

from meshwright.planner.analysis.wave_size import with_wave
from meshwright.planner.program.durations import max_waves_ratio
from meshwright.planner.program.program import RunStage
from meshwright.runtime.execution.watchdog import RunWatch, Watchdog
from tests.planner.analysis.test_oversampling import planned, sampled_facts
from tests.runtime.cli.test_report_command import small_plan
from tests.runtime.plans_by_hand import Where, plan_by_hand
from tests.runtime.ranks import run_on_ranks


def _allowed(out: Path) -> list[tuple[Any, ...]]:
    plan = small_plan(1)
    with mock.patch.object(Watchdog, "doing", autospec=True) as doing:
        watch = RunWatch(plan, out, 0.0)
        stage = RunStage(stage="actor_train", ranks=(0,))
        watch.record_period(100.0)
        watch.instruction(stage, 4, 2, 3)
        with watch.evaluation(3 * plan.facts.workload.batch_size):
            watch.instruction(stage, 4, 2, 3)
        with watch.evaluation(1):
            watch.instruction(stage, 4, 2, 3)
        watch.waiting("the reports", 2)
        watch.collective("the checkpoint", 2)
        watch.close()
    return [call.args[1:] for call in doing.call_args_list]


def test_what_is_allowed_follows_from_turns_that_were_measured(tmp_path: Path) -> None:
    stage = "actor_train of step 3"
    assert run_on_ranks(1, _allowed, tmp_path) == [
        [
            (stage, 2, 500.0, 4),
            (stage, 2, 1500.0, 4),
            (stage, 2, 500.0, 4),
            ("the reports", 2, 500.0),
            ("the checkpoint", 2, 1800.0),
        ]
    ]


def _allowed_beside_waves(out: Path) -> float:
    """Of a training, on a rank that draws or on one that waits until all is drawn."""
    apart = {"actor_generate": Where("0:1"), "reward_score": Where("0:1"), "other": Where("1:1")}
    plan = plan_by_hand(with_wave(sampled_facts(1.0), 64), apart)
    with mock.patch.object(Watchdog, "doing", autospec=True) as doing:
        watch = RunWatch(plan, out, 1.0)
        watch.record_period(100.0)
        watch.instruction(RunStage(stage="actor_train", ranks=(1,)), 4, 2, 3)
        watch.close()
    return float(doing.call_args.args[3])


def test_a_rank_that_sees_no_waves_may_wait_for_as_many_as_a_step_may_take(tmp_path: Path) -> None:
    drawing, waiting = run_on_ranks(2, _allowed_beside_waves, tmp_path)
    assert (drawing, waiting / drawing) == (500.0, max_waves_ratio(planned(with_wave(sampled_facts(1.0), 64))))
    assert waiting > drawing
