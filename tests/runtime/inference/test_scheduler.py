"""Who has a slot and blocks: what is paused goes on before anything begins, and what does not fit gives way."""

from __future__ import annotations

import numpy as np

from meshwright.planner.simulation.flight import Flight
from meshwright.profiles.packing import BLOCK_TOKENS
from meshwright.runtime.inference.scheduler import Scheduler, SharedPrompts
from meshwright.runtime.inference.slots import LiveGroup, PartialResponse, Prompt, Response
from meshwright.runtime.model.block_tables import BlockTables


def prompt(row: int, num_tokens: int = 4) -> Prompt:
    return Prompt(row=row, sample_id=row, tokens=(1,) * num_tokens)


def seating(num_slots: int, num_blocks: int, *waiting: Prompt) -> tuple[Scheduler, LiveGroup]:
    flight: Flight[Prompt, LiveGroup, Response] = Flight(LiveGroup.split(num_slots, 1))
    flight.waiting.extend(waiting)
    made = Scheduler(BlockTables(num_blocks, num_slots, 4 * BLOCK_TOKENS), SharedPrompts(1), flight)
    return made, flight.groups[0]


def draw(group: LiveGroup, num_tokens: int) -> None:
    for _ in range(num_tokens):
        group.records.add(group.rows, np.ones(len(group.rows), dtype=int), np.zeros(len(group.rows)), 0)


def test_what_is_paused_goes_on_before_anything_begins() -> None:
    made, group = seating(1, 4, prompt(0))
    made.pause(PartialResponse(prompt=prompt(7), tokens=(2, 3), logprobs=(0.0, 0.0), versions=(0, 0)))
    seated = made.schedule(group)
    assert [one.prompt.row for one in seated.sequences] == [7]
    assert seated.num_new == 0
    assert seated.prefill_batches(100) == [[(0, 0, 6)]]


def test_the_youngest_gives_way_where_blocks_are_short() -> None:
    made, group = seating(2, 2, prompt(0), prompt(1))
    assert [one.prompt.row for one in made.schedule(group).sequences] == [0, 1]
    draw(group, BLOCK_TOKENS)
    made.allocate_next(group)
    assert [one.prompt.row for one in group.live] == [0]
    assert [one.row for one in made.paused] == [1]
    assert made.num_preempted == 1


def test_a_parked_sequence_is_fed_what_is_not_cached() -> None:
    made, group = seating(2, 4, prompt(0))
    (one,) = made.schedule(group).sequences
    draw(group, 3)
    cached = one.num_cached
    group.suspend(one)
    assert not group.live
    one.records.extend(one.row, (8, 9), (0.0, 0.0), (-1, -1))
    assert made.resume_suspended(group, one)
    assert group.live == [one]
    assert made.schedule(group, [(one, cached)]).prefill_batches(100) == [[(0, cached, cached + 3)]]


def test_a_parked_sequence_without_blocks_gives_way() -> None:
    made, group = seating(2, 2, prompt(0), prompt(1))
    one, other = made.schedule(group).sequences
    draw(group, 3)
    group.suspend(one)
    one.records.extend(one.row, (8,) * BLOCK_TOKENS, (0.0,) * BLOCK_TOKENS, (-1,) * BLOCK_TOKENS)
    assert not made.resume_suspended(group, one)
    assert group.live == [other]
    assert [paused.row for paused in made.paused] == [0]
    assert not group.is_full
