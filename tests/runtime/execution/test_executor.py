"""The executor: a rank makes room for what a turn will receive before it begins to compute."""

from __future__ import annotations

from typing import Any

from meshwright.planner.program.program import Program, Receive, RunStage, Send, Waves
from meshwright.runtime.execution.executor import Executor
from meshwright.runtime.messages.experience import StepExperience
from meshwright.runtime.records.results import InstructionResult, PeriodResult


class Heard:
    """A device and an exchange that write down what is asked of them."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def begin(self, _turn: int) -> None:
        self.asked.append("begin")

    def run_stage(self, stage: str, _batch: StepExperience) -> InstructionResult:
        self.asked.append(stage)
        return InstructionResult(facts={"tokens": 7.0}, metrics={"num_wonders": 1.0})

    def synchronise(self) -> None:
        return None

    def post_receive(self, instruction: Receive, channel: int) -> None:
        self.asked.append(f"expect {instruction.consumer} on {channel}")

    def receive(self, instruction: Receive, _experience: object, channel: int, _step: int) -> int:
        self.asked.append(f"receive {instruction.consumer} on {channel}")
        return 40


def executed() -> tuple[list[str], PeriodResult]:
    """What rank 1 was asked in a turn of a program, and what is left of it."""
    names = {"producer": "reward_score", "fields": ("scores",)}
    sends = [Send(**names, consumer=name, ranks=(0,), targets=(1,)) for name in ("critic_train", "actor_train")]
    receives = [
        Receive(**names, consumer="critic_train", ranks=(1,), owners=(0,)),
        Receive(
            **names, consumer="actor_train", ranks=(1,), owners=(0,), steps_ahead=-1
        ),  # of the step before: none here
    ]
    stages = [RunStage(stage="critic_value", ranks=(1,)), RunStage(stage="critic_train", ranks=(1,))]
    program = Program((stages[0], *sends, *receives, stages[1]))
    heard: Any = Heard()
    executor = Executor(
        heard, heard, lambda step: StepExperience(step=step, rows=range(1)), rank=1, start_seconds=0.0, clock="measured"
    )
    return heard.asked, executor.execute(program, 0, range(1))


def test_room_is_made_for_what_a_turn_receives_and_for_nothing_else_before_a_stage_runs() -> None:
    asked, _ = executed()
    assert asked == [
        "begin",
        "expect critic_train on 0",
        "critic_value",
        "receive critic_train on 0",
        "critic_train",
    ]


def test_what_was_done_goes_to_the_spans_and_what_was_learned_to_the_metrics_whatever_it_is_called() -> None:
    _, outcome = executed()
    assert outcome.metrics == {stage: {"num_wonders": 1.0} for stage in ("critic_value", "critic_train")}
    assert [dict(span.facts) for span in outcome.spans] == [{"tokens": 7.0}, {"num_bytes": 40.0}, {"tokens": 7.0}]


class TwoWaves:
    """What is full behind its second wave."""

    def __init__(self, heard: Heard) -> None:
        self._heard, self._num_taken = heard, 0

    @property
    def is_full(self) -> bool:
        return self._num_taken == 2

    @property
    def metrics(self) -> dict[str, float]:
        return {"waves": float(self._num_taken)}

    def next_wave(self) -> StepExperience:
        return StepExperience(step=0, rows=range(1), is_wave=True)

    def take(self, wave: StepExperience) -> None:
        assert wave.is_wave
        self._num_taken += 1
        self._heard.asked.append("take")

    def fill(self, batch: StepExperience) -> None:
        assert not batch.is_wave
        self._heard.asked.append("fill")


def drawn_in_waves(rank: int, *, is_restored: bool = False) -> tuple[list[str], PeriodResult]:
    """What a rank was asked in a turn of three ranks, of which 0 draws and 1 scores, between two stages of all.

    A restored batch was selected before the run was interrupted."""
    told = {"producer": "reward_score", "consumer": "actor_generate", "fields": ("scores",)}
    wave = (RunStage(stage="actor_generate", ranks=(0,)), RunStage(stage="reward_score", ranks=(1,)))
    exchange = (Send(**told, ranks=(1,), targets=(0, 1)), Receive(**told, ranks=(0, 1), owners=(1,)))
    before, behind = (RunStage(stage=name, ranks=(0, 1, 2)) for name in ("before", "behind"))
    heard: Any = Heard()
    selection = {"waves": 5.0} if is_restored else {}
    batches = {0: StepExperience(step=0, rows=range(1), selection=selection)}
    executor = Executor(
        heard,
        heard,
        batches.__getitem__,
        rank=rank,
        start_seconds=0.0,
        clock="measured",
        filling=lambda _step: TwoWaves(heard),
    )
    program = Program((wave[0], before, wave[1], behind), waves=Waves(wave, exchange, 3))
    return heard.asked, executor.execute(program, 0, range(1))


def test_the_first_wave_is_drawn_in_its_place_and_others_where_groups_are_selected_until_the_batch_is_full() -> None:
    asked, outcome = drawn_in_waves(0)
    room, exchanged = "expect actor_generate on 0", ["receive actor_generate on 0", "take"]
    first, second = ([room, "actor_generate", *others, *exchanged] for others in (["before"], []))
    assert asked == ["begin", *first, *second, "fill", "behind"]
    assert outcome.metrics["actor_generate"] == {"waves": 2.0}
    assert [span.instruction for span in outcome.spans].count("actor_generate") == 2


def test_a_batch_that_was_restored_is_neither_drawn_nor_selected_again() -> None:
    asked, outcome = drawn_in_waves(0, is_restored=True)
    assert asked == ["begin", "before", "behind"]
    assert outcome.metrics["actor_generate"] == {"waves": 5.0}


def test_a_rank_that_neither_draws_nor_scores_knows_of_no_waves() -> None:
    asked, _ = drawn_in_waves(2)
    assert asked == ["begin", "before", "behind"]
