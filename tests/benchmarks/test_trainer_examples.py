"""The examples that a trainer ships are found, and none is faster than the best plan within it."""

from __future__ import annotations

import pytest

from benchmarks.trainers.__main__ import EXAMPLES, beside, report, text_of


def test_every_example_is_one_that_was_retyped_with_its_changes_behind() -> None:
    for example in EXAMPLES:
        text = text_of(example)
        assert "verl.trainer.main_ppo" in text
        assert text.endswith(" ".join(example.changed) + "\n")


@pytest.mark.slow
def test_what_verl_ships_for_7b_is_not_faster_than_the_best_that_it_can_say() -> None:
    row = beside(EXAMPLES[0], gap=0.2)
    assert row.holds
    assert row.shipped.facts == row.best.facts
    assert "`actor_train` | 0:8 tp2,pp2,dp2,sp" in report([row])
