"""Pins of a whole job: lines as on the command line, or a plan, whose choices they are."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.planner.compile import compile_plan
from meshwright.planner.plan.pin_files import pins_of, read_pins
from meshwright.planner.plan.pins import parse_pins
from meshwright.planner.plan.plan import Plan, write_plan
from meshwright.profiles.algorithms import PPO_GRAPH
from meshwright.profiles.errors import BadInput
from tests.planner.drawn import model_of
from tests.planner.jobs import small_facts
from tests.planner.plans import random_plan


def test_lines_are_pins_and_comments_are_none(tmp_path: Path) -> None:
    path = tmp_path / "pins.txt"
    path.write_text("# the actor\nactor_train.layout=tp2,dp2  # as measured\n\nref_logprob.pool != 0:2\n")
    assert read_pins(path, PPO_GRAPH) == ("actor_train.layout=tp2,pp1,dp2", "ref_logprob.pool!=0:2")


def test_a_line_that_is_no_pin_is_named(tmp_path: Path) -> None:
    path = tmp_path / "pins.txt"
    path.write_text("actor_train.layout=tp2\nactor_train.colour=red\n")
    with pytest.raises(BadInput, match=r"pins.txt, line 2: .* there is no key 'colour'"):
        read_pins(path, PPO_GRAPH)


def test_a_file_without_pins_is_no_file_of_pins(tmp_path: Path) -> None:
    path = tmp_path / "pins.txt"
    path.write_text("# none yet\n")
    with pytest.raises(BadInput, match=r"pins.txt has none; write one to a line"):
        read_pins(path, PPO_GRAPH)


def test_the_pins_of_a_plan_leave_its_choices_and_no_others(tmp_path: Path) -> None:
    facts = small_facts(ranks_per_node=2, batch_size=4, memory_bytes=2**34)
    for seed in range(3):
        plan = random_plan(seed, facts, model_of(facts))
        write_plan(tmp_path / "plan.json", plan)
        pins = read_pins(tmp_path / "plan.json", PPO_GRAPH)
        assert pins == pins_of(plan)
        found = compile_plan(facts, model_of(facts), pins=pins)
        assert isinstance(found, Plan)
        for pin in parse_pins(pins, PPO_GRAPH):
            assert found.choice(pin.stage, pin.key) == plan.choice(pin.stage, pin.key)
        assert found.period_seconds <= plan.period_seconds * (1 + 1e-9)
