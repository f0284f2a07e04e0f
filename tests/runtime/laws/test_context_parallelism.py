"""Sequences cut over ranks are scored, learned from, moved and saved as whole ones are."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch
from torch import Tensor

from meshwright.planner.plan.layout_and_schedule_rules import MIN_CONTEXT_TOKENS
from meshwright.planner.program.durations import Planned
from meshwright.planner.program.program import lower
from meshwright.profiles.layout import Layout
from meshwright.profiles.model_shape import read_model
from meshwright.runtime.execution.rehearse import rehearse
from meshwright.runtime.model.context_parallel import SequenceShard
from meshwright.runtime.model.mesh import build_mesh
from meshwright.runtime.model.model_shard import Recompute, build_model
from meshwright.runtime.training.trainer import Trainer
from tests.planner.jobs import small_facts
from tests.planner.plans import random_plan
from tests.runtime.checkpoints import expected_logprobs, expected_scores, tokens, write_checkpoint
from tests.runtime.model.test_weights import _answers
from tests.runtime.ranks import run_on_ranks
from tests.runtime.training.test_checkpoint import Run, _merge
from tests.runtime.training.test_refit import _check as check_refit
from tests.runtime.updates import HEADS, How, assert_updates_are_those_of_one_rank, blocks, language_loss
from tests.seeds import cases


def _gathers_of_an_update(directory: Path, recompute: Recompute) -> int:
    """Of keys and values, in two micro-batches of four layers."""
    mesh, spec = build_mesh(Layout(dp=2, cp=2), 0), read_model(directory)
    trainer = Trainer(build_model(spec, mesh, trainable=True, recompute=recompute), mesh, learning_rate=1e-3)
    num_gathers, gathered = 0, SequenceShard.gather

    def counted(parts: SequenceShard, own: Tensor) -> Tensor:
        nonlocal num_gathers
        num_gathers += 1
        return gathered(parts, own)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SequenceShard, "gather", counted)
        trainer.train_step(blocks(1, mesh), functools.partial(language_loss, spec, mesh))
    return num_gathers


@pytest.mark.slow
@cases(("recompute", "times"), [("none", 2), ("selective", 3), ("full", 3)], few=1)
def test_every_layer_gathers_keys_and_values_as_often_as_it_is_costed(
    tmp_path: Path, recompute: Recompute, times: int
) -> None:
    directory = write_checkpoint(tmp_path / "model")
    assert run_on_ranks(4, _gathers_of_an_update, directory, recompute) == [2 * 4 * times] * 4


@pytest.mark.slow
@cases("layout", ["cp2", "cp4", "tp2,cp2", "tp2,cp2,sp", "pp2,cp2"], few=1)
def test_log_probabilities_of_cut_sequences_are_those_of_whole_ones(tmp_path: Path, layout: str) -> None:
    directory = write_checkpoint(tmp_path / "model")
    _check_answers(directory, layout, expected_logprobs(directory, tokens()))


@pytest.mark.slow
def test_scores_of_cut_sequences_are_those_of_whole_ones(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "model", head="ForSequenceClassification")
    _check_answers(directory, "tp2,cp2,sp", expected_scores(directory, tokens()))


def _check_answers(directory: Path, layout: str, expected: Tensor) -> None:
    """Every rank of the last stage has the answers for all tokens."""
    answers = [answer for answer in run_on_ranks(4, _answers, directory, layout, tokens(), None) if answer]
    assert len(answers) == Layout.parse(layout).tp * Layout.parse(layout).cp
    for long, short in answers:
        torch.testing.assert_close(long, expected, atol=1e-4, rtol=0)
        torch.testing.assert_close(short[:, :8], expected[:2, :8], atol=1e-4, rtol=0)


HOWS = [
    How("cp2", 1),
    How("cp2", 2),
    How("cp4", 1, "selective"),
    How("dp2,cp2", 1, "full"),
    How("tp2,cp2,sp", 1),
]


@pytest.mark.slow
@cases("scalar", [False, True], few=1)
def test_an_update_from_cut_sequences_is_that_from_whole_ones(tmp_path: Path, scalar: bool) -> None:
    """As `test_bodies` has it for other ways to compute an update. Tied embeddings, of an actor and of a critic."""
    directory = write_checkpoint(tmp_path / "model", "Qwen2", head=HEADS[scalar])
    assert_updates_are_those_of_one_rank(directory, HOWS, tmp_path, scalar=scalar)


@pytest.mark.slow
@cases(
    ("source", "target"),
    [(("tp2,cp2,sp", 0), ("pp2,dp2", 0)), (("cp2", 0), ("tp2", 1)), (("dp2", 0), ("pp2,cp2", 0))],
    few=1,
)
def test_weights_are_moved_from_and_to_ranks_that_cut_sequences(
    tmp_path: Path, source: tuple[str, int], target: tuple[str, int]
) -> None:
    check_refit(write_checkpoint(tmp_path / "model"), source, target)


@pytest.mark.check_all
def test_a_saved_trainer_that_cuts_sequences_goes_on_in_another_layout_that_does(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "actor")
    first, then, whole = ({"actor": (layout, 0)} for layout in ("tp2,cp2", "dp2,cp2", "dp2"))
    known = _merge(tmp_path, Run(places=whole, num_updates=2))
    start = _merge(tmp_path, Run(places=first, num_updates=1, written=tmp_path / "saved"))
    rest = _merge(tmp_path, Run(places=then, num_updates=1, read=tmp_path / "saved"))
    assert start["actor"] + rest["actor"] == pytest.approx(known["actor"], rel=1e-4)


@pytest.mark.check_all
def test_a_plan_with_cut_sequences_is_rehearsed_to_its_end() -> None:
    facts = small_facts(ranks_per_node=2, memory_bytes=2**50, batch_size=2, response=2 * MIN_CONTEXT_TOKENS - 64)
    plans = (random_plan(seed, facts) for seed in range(100))
    plan = next(plan for plan in plans if sum(p.layout.cp > 1 for p in plan.placements) > 1 and plan.refits)
    rehearsed = rehearse(plan, Planned(plan), steps=1, speed=0.2 / plan.period_seconds)
    assert rehearsed.simulated.mean == pytest.approx(plan.period_seconds)
    assert {span.instruction for span in rehearsed.spans} == {i.name for i in lower(plan).instructions}
