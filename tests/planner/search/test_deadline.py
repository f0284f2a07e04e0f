"""A cost model in a hurry answers as it would, and after the deadline not at all."""

from __future__ import annotations

import threading
import time

import pytest

from meshwright.cost_models.protocol import RefitQuery, StageQuery
from meshwright.planner.search.search_control import TimeLimitedCostModel
from meshwright.planner.solver.result import Limits, OutOfTimeError
from meshwright.profiles.algorithms import PPO_GRAPH
from meshwright.profiles.layout import Layout
from meshwright.profiles.schedule import Schedule
from tests.planner.jobs import ToyModel, small_facts

FACTS = small_facts()
MODEL = ToyModel(FACTS)
CALL = StageQuery(
    stage=PPO_GRAPH.by_name["actor_train"], model=FACTS.models.actor, layout=Layout(dp=2), schedule=Schedule()
)
MOVE = RefitQuery(model=FACTS.models.actor, source=Layout(), target=Layout(dp=2), overlap=1)
QUESTIONS = {
    "seconds": CALL,
    "tail_seconds": CALL,
    "memory": CALL,
    "refit_seconds": MOVE,
    "transfer_seconds": 1e6,
}


@pytest.mark.parametrize("name", QUESTIONS)
def test_in_time_the_model_itself_answers_and_later_nobody_does(name: str) -> None:
    asked = QUESTIONS[name]
    in_time, late = (TimeLimitedCostModel(MODEL, Limits(deadline=time.monotonic() + seconds)) for seconds in (60, -1))
    assert getattr(in_time, name)(asked) == getattr(MODEL, name)(asked)
    with pytest.raises(OutOfTimeError):
        getattr(late, name)(asked)


def test_a_model_that_is_asked_to_stop_answers_no_more() -> None:
    stop = threading.Event()
    model = TimeLimitedCostModel(MODEL, Limits(stop=stop))
    assert model.seconds(CALL) == MODEL.seconds(CALL)
    stop.set()
    with pytest.raises(OutOfTimeError):
        model.seconds(CALL)


def test_what_is_known_without_asking_is_told_at_any_time() -> None:
    assert (
        TimeLimitedCostModel(MODEL, Limits(deadline=time.monotonic() - 1)).seconds_are_monotone
        is MODEL.seconds_are_monotone
    )
