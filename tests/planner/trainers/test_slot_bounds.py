"""Limits of an engine are upper bounds of its slots, and its share of memory decides what fits."""

from __future__ import annotations

from meshwright.planner.trainers.importer import slot_bounds
from meshwright.planner.trainers.parsed_config import MEMORY_SHARE
from tests.planner.drawn import model_of
from tests.planner.trainers.plans import facts_of

FACTS = facts_of()
ENGINES = {"actor_generate.pool": f"0:{FACTS.cluster.num_ranks}", "actor_generate.tp": 1, "actor_generate.pp": 1}


def forbidden(**more: float) -> list[int]:
    """The numbers of slots that are ruled out, with a limit and a share."""
    words = {**ENGINES}
    if "limit" in more:
        words["actor_generate.generation_slots"] = more["limit"]
    if "share" in more:
        words[MEMORY_SHARE] = more["share"]
    pins, _ = slot_bounds(FACTS, model_of(FACTS), words)
    assert all(pin.forbids and pin.key == "generation_slots" for pin in pins)
    return [int(str(pin.value)) for pin in pins]


def test_a_limit_rules_out_what_is_above_it_and_nothing_below() -> None:
    rows = -(-FACTS.workload.batch_size // FACTS.cluster.num_ranks)
    assert forbidden() == forbidden(limit=10 * rows) == []
    assert all(count > rows // 2 for count in forbidden(limit=rows // 2))
    assert rows in forbidden(limit=rows // 2)


def test_less_memory_holds_no_more_sequences() -> None:
    shares = [0.9, 0.1, 0.01, 0.001, 0.0001]
    counts = [len(forbidden(share=share)) for share in shares]
    held = [one for one, share in zip(counts, shares, strict=True) if share >= 0.001]
    assert held[0] == 0


def test_a_share_that_holds_nothing_is_told_and_left_free() -> None:
    pins, notes = slot_bounds(FACTS, model_of(FACTS), {**ENGINES, MEMORY_SHARE: 1e-9})
    assert pins == ()
    assert "the share is left free" in notes[0]


def test_engines_that_are_not_known_have_no_bound() -> None:
    assert slot_bounds(FACTS, model_of(FACTS), {}) == ((), [])
