"""Pipelines whose stages hold different numbers of layers compute, generate, move and keep what one rank does."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.profiles.layout import layers_per_stage
from meshwright.profiles.model_shape import read_model
from tests.runtime.checkpoints import FAMILIES, write_checkpoint
from tests.runtime.inference.test_engine import VOCAB_SIZE, generate
from tests.runtime.ranks import run_on_ranks
from tests.runtime.training.test_checkpoint import Run, _merge
from tests.runtime.training.test_refit import _check
from tests.runtime.updates import How, assert_updates_are_those_of_one_rank
from tests.seeds import cases

pytestmark = pytest.mark.slow


def language_model(directory: Path, **changes: int) -> Path:
    """Six layers with tied embeddings: four stages hold 1, 2, 2 and 1 of them."""
    return write_checkpoint(directory, "Qwen2", **FAMILIES["Qwen2"], num_hidden_layers=6, **changes)


def scorer(directory: Path, num_layers: int = 3) -> Path:
    """Three layers and a scalar head: two stages hold 1 and 2 of them."""
    return write_checkpoint(directory, "Qwen2", head="ForSequenceClassification", num_hidden_layers=num_layers)


def dealt(directory: Path, num_layers: int, **changes: int) -> Path:
    """Seven layers or five: stages of 2, 2, 2 and 1 of them, or of 3 and 2, by their costs."""
    return write_checkpoint(directory, "Qwen2", **FAMILIES["Qwen2"], num_hidden_layers=num_layers, **changes)


def test_the_models_of_this_file_are_cut_unevenly(tmp_path: Path) -> None:
    assert layers_per_stage(read_model(language_model(tmp_path / "actor")), 4) == (1, 2, 2, 1)
    assert layers_per_stage(read_model(scorer(tmp_path / "critic")), 2) == (1, 2)
    assert layers_per_stage(read_model(dealt(tmp_path / "seven", 7)), 4) == (2, 2, 2, 1)
    assert layers_per_stage(read_model(dealt(tmp_path / "five", 5)), 4) == (2, 1, 1, 1)
    assert layers_per_stage(read_model(dealt(tmp_path / "five", 5)), 2) == (3, 2)


@cases("scalar", [False, True], few=1)
def test_an_uneven_pipeline_has_the_losses_and_the_weights_of_one_rank(tmp_path: Path, scalar: bool) -> None:
    directory = (scorer if scalar else language_model)(tmp_path / "model")
    how = How("pp2,dp2" if scalar else "pp4", 1)
    assert_updates_are_those_of_one_rank(directory, [how], tmp_path, scalar=scalar)


@cases(("num_layers", "layout"), [(7, "pp4"), (5, "pp2,dp2"), (5, "tp2,pp2,sp")], few=1)
def test_a_pipeline_dealt_by_cost_has_the_losses_and_the_weights_of_one_rank(
    tmp_path: Path, num_layers: int, layout: str
) -> None:
    directory = dealt(tmp_path / "model", num_layers)
    assert_updates_are_those_of_one_rank(directory, [How(layout, 1)], tmp_path, scalar=False)


@cases(
    ("num_layers", "source", "target"),
    [
        (6, ("pp4", 0), ("tp2,pp2", 0)),
        (6, ("dp2", 0), ("pp4", 0)),
        (7, ("pp4", 0), ("tp2,pp2", 0)),
        (5, ("pp2", 2), ("pp4", 0)),
    ],
    few=1,
)
def test_weights_move_between_uneven_and_other_pipelines(
    tmp_path: Path, num_layers: int, source: tuple[str, int], target: tuple[str, int]
) -> None:
    _check(write_checkpoint(tmp_path / "model", num_hidden_layers=num_layers), source, target)


@cases("num_layers", [6, 7], few=1)
def test_an_uneven_pipeline_draws_what_one_rank_draws(tmp_path: Path, num_layers: int) -> None:
    directory = dealt(tmp_path / "actor", num_layers, vocab_size=VOCAB_SIZE)
    alone, *cut = (run_on_ranks(4, generate, directory, layout, 3) for layout in ("tp1", "pp4"))
    assert alone[0] is not None
    for answer in cut[0]:
        assert answer is not None
        assert [response.tokens for response in answer[0]] == [response.tokens for response in alone[0][0]]


@cases(("num_layers", "before", "after"), [(3, "pp2", "pp3"), (5, "pp4", "pp2,dp2")], few=1)
def test_a_trainer_saved_on_an_uneven_pipeline_goes_on_on_another_one(
    tmp_path: Path, num_layers: int, before: str, after: str
) -> None:
    scorer(tmp_path / "critic", num_layers)
    first, then = ({"critic": (layout, 0)} for layout in (before, after))
    whole = _merge(tmp_path, Run(places=first, num_updates=3))
    start = _merge(tmp_path, Run(places=first, num_updates=1, written=tmp_path / "saved"))
    rest = _merge(tmp_path, Run(places=then, num_updates=2, read=tmp_path / "saved"))
    assert start["critic"] + rest["critic"] == pytest.approx(whole["critic"], rel=1e-4)
