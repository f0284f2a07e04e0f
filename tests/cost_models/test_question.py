"""Questions that are equal are found again, whatever made them, and others are told apart."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace

import pytest

from meshwright.cost_models.protocol import DelegatingCostModel, Memo, RefitQuery, StageQuery
from meshwright.profiles.algorithms import PPO_GRAPH
from meshwright.profiles.layout import Layout
from meshwright.profiles.model_shape import ModelSpec
from meshwright.profiles.schedule import Offload, Recompute, Schedule, WhileWaiting
from tests.planner.jobs import ToyModel, small_facts

SCHEDULES = {
    "micro_batch_size": 2,
    "recompute": Recompute.FULL,
    "generation_slots": 3,
    "batches_in_flight": 2,
    "overcommit": 8,
    "chunk_tokens": 64,
    "offload": Offload.OPTIMIZER,
    "while_waiting": WhileWaiting.LEAVE,
    "micro_batch_tokens": 4096,
    "draft_tokens": 4,
}
"""But how rows are dealt by speed, which is asked of one layout after the other and kept nowhere."""


def test_equal_questions_are_one_key(query: Callable[..., StageQuery]) -> None:
    one, other = (query("actor_train", "tp2,dp2", 4, "full") for _ in range(2))
    assert one == other
    assert one is not other
    assert hash(one) == hash(other)


def test_every_field_of_a_schedule_is_one_of_these() -> None:
    assert SCHEDULES.keys() | {"rows"} == {field.name for field in fields(Schedule)}


@pytest.mark.parametrize("setting", SCHEDULES)
def test_questions_that_differ_in_the_schedule_seldom_share_a_hash(
    query: Callable[..., StageQuery], setting: str
) -> None:
    """A search keeps millions of them side by side."""
    plain = query("actor_train")
    by_tokens = {"micro_batch_size": 0} if setting == "micro_batch_tokens" else {}
    changed = replace(plain, schedule=replace(plain.schedule, **{setting: SCHEDULES[setting], **by_tokens}))
    assert changed != plain
    assert hash(changed) != hash(plain)


def test_what_the_hash_leaves_out_still_tells_questions_apart(
    query: Callable[..., StageQuery], llama: ModelSpec
) -> None:
    plain = query("actor_generate", slots=8)
    others = (
        replace(plain, model=replace(llama, num_layers=2)),
        replace(plain, part=1),
        replace(plain, recomputes_cache=True),
    )
    assert len({plain, *others}) == 4
    assert replace(plain, stage=PPO_GRAPH.by_name["actor_train"]) != plain
    assert replace(plain, layout=Layout(dp=2)) != plain


def test_an_answer_is_computed_once_for_each_key() -> None:
    squares: Memo[int, int] = Memo()
    computed: list[int] = []

    def square(number: int) -> int:
        def make() -> int:
            computed.append(number)
            return number * number

        return squares.memoize(number, make)

    assert [square(number) for number in (3, 0, 3, 0)] == [9, 0, 9, 0]
    assert computed == [3, 0]


def test_a_model_that_passes_questions_on_answers_as_the_other_does() -> None:
    facts = small_facts()
    other = ToyModel(facts)
    model = DelegatingCostModel(other)
    query = StageQuery(
        stage=PPO_GRAPH.by_name["actor_train"], model=facts.models.actor, layout=Layout(dp=2), schedule=Schedule()
    )
    move = RefitQuery(model=facts.models.actor, source=Layout(), target=Layout(dp=2), overlap=1)
    assert model.seconds_are_monotone == other.seconds_are_monotone
    assert model.lower_bound_seconds(query.stage, query.model, 2, 0) == other.lower_bound_seconds(
        query.stage, query.model, 2, 0
    )
    assert (model.seconds(query), model.tail_seconds(query)) == (other.seconds(query), other.tail_seconds(query))
    assert (model.memory(query), model.refit_seconds(move)) == (other.memory(query), other.refit_seconds(move))
    assert model.transfer_seconds(1e6) == other.transfer_seconds(1e6)
