"""Blocks that drawn sequences hold: as if each were counted in each round, and as the plan's law has them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from meshwright.planner.program.durations import HeldBlocks
from meshwright.planner.simulation.sampled_durations import Sampled
from meshwright.planner.simulation.simulate import CacheUse, simulate
from meshwright.planner.simulation.simulated_flight import combined_use, held_blocks, weighted_use
from meshwright.planner.simulation.simulated_generation import InFlightGeneration, simulate_batch
from meshwright.profiles.lengths import LengthSpec
from meshwright.profiles.packing import BLOCK_TOKENS, num_blocks_for
from meshwright.profiles.schedule import Schedule
from meshwright.profiles.stages import GENERATE
from meshwright.profiles.workload import Workload
from tests.planner.drawn import TIMES, carrying_over, model_of, plan_of
from tests.planner.jobs import small_facts
from tests.runtime.plans_by_hand import Where, plan_by_hand
from tests.seeds import cases, seeds


def counted(prompts: list[int], starts: list[int], ends: list[int], group_size: int, num_rounds: int) -> list[int]:
    """Sequence by sequence and round by round: the first live row of a prompt holds what the prompt fills."""
    found = []
    for now in range(num_rounds):
        held, seen = 0, set()
        for row, (prompt, start, end) in enumerate(zip(prompts, starts, ends, strict=True)):
            if start <= now < end:
                held += num_blocks_for(prompt + max(now - start, 1))
                held -= prompt // BLOCK_TOKENS * (row // group_size in seen)
                seen.add(row // group_size)
        found.append(held)
    return found


@seeds(4, all=30, failed=(9,))
@pytest.mark.parametrize("group_size", [1, 4])
def test_blocks_are_those_that_counting_finds(seed: int, group_size: int) -> None:
    draw = np.random.default_rng(seed)
    prompts = draw.integers(1, 100, 3).repeat(group_size)
    starts = np.sort(draw.integers(-80, 40, len(prompts)))
    ends = np.maximum(starts, 0) + draw.integers(1, 150, len(prompts))
    until = np.zeros_like(ends)
    for row in range(len(ends)):
        until[row] = ends[row // group_size * group_size : row].max(initial=0)
    found = held_blocks(prompts, starts, ends, until, 120)
    assert found.tolist() == counted(prompts.tolist(), starts.tolist(), ends.tolist(), group_size, 120)


def test_rows_of_one_length_in_one_wave_hold_most_in_their_last_round() -> None:
    # 100 tokens are drawn: before the last of them 99 lie behind the prompt of 40.
    found = simulate_batch(np.full(8, 40), np.full(8, 100), 8, 1, TIMES).held
    assert found.peak == 8 * num_blocks_for(40 + 99)
    # Every decoding round takes a second, and a prefill none.
    assert found.mean == pytest.approx(8 * np.mean([num_blocks_for(40 + drawn) for drawn in range(1, 100)]))


def test_rows_of_one_prompt_hold_its_whole_blocks_once() -> None:
    apart, shared = (simulate_batch(np.full(8, 40), np.full(8, 100), 8, 1, TIMES, same_prompt=n).held for n in (1, 4))
    assert apart.peak - shared.peak == 6 * (40 // BLOCK_TOKENS)
    assert apart.mean - shared.mean == pytest.approx(6 * (40 // BLOCK_TOKENS))


@pytest.mark.parametrize("slots", [3, 8, 16])
def test_the_average_lies_between_the_least_and_the_peak(slots: int) -> None:
    responses = np.random.default_rng(slots).integers(1, 400, 16)
    found = simulate_batch(np.full(16, 64), responses, slots, 2, TIMES).held
    assert num_blocks_for(64 + 1) <= found.mean < found.peak


def test_runs_are_weighed_by_their_seconds() -> None:
    held, first, after = np.array([2.0, 4.0, 9.0]), np.array([0, 2, 0]), np.array([2, 3, 1])
    assert weighted_use(held, first, after, np.array([4.0, 1.0, 5.0])) == HeldBlocks((4 * 3 + 9 + 5 * 2) / 10, 9)
    assert weighted_use(held, first, after, np.zeros(3)) == HeldBlocks(5, 9)
    assert combined_use((HeldBlocks(1, 2), HeldBlocks(4, 5)), (2.0, 1.0)) == HeldBlocks(2, 5)


TAIL, NARROW = LengthSpec(max=256, median=40, p99=250), LengthSpec(max=240, median=160, p99=224)


def use(schedule: Schedule, dp: int = 1, *, num_rows: int = 64, response: LengthSpec = TAIL) -> CacheUse:
    """Of 20 turns of as many replicas, each with so many rows of a batch."""
    facts = small_facts(memory_bytes=2**50).model_copy(update={"staleness": 3})
    prompt = LengthSpec(max=64, fixed=64)
    workload = Workload(batch_size=num_rows * dp, prompt=prompt, response=response, num_minibatches=2)
    facts = facts.model_copy(update={"workload": workload})
    plan = plan_by_hand(facts, {GENERATE: Where(f"0:{dp}", f"dp{dp}", schedule), "other": Where("0:4", "dp4")})
    (found,) = simulate(plan, Sampled(plan, model_of, seed=0)).caches
    assert found.blocks == workload.cache_need(schedule, dp).blocks
    return found


@cases("slots", [32, 64], few=1)
@pytest.mark.parametrize("how", [{"batches_in_flight": 3}, {"overcommit": 32}], ids=str)
def test_sequences_that_run_on_use_a_larger_share_than_a_turn_alone(slots: int, how: dict[str, int]) -> None:
    alone, running_on = (use(Schedule(generation_slots=slots, **more)) for more in ({}, how))
    assert alone.mean_share
    assert running_on.mean_share
    assert running_on.mean_share > 1.6 * alone.mean_share


@cases(
    ("slots", "batches", "dp", "response"),
    [
        (64, 2, 4, NARROW),
        (128, 2, 4, TAIL),
        (256, 2, 4, TAIL),
        (256, 2, 4, NARROW),
        (512, 4, 4, TAIL),
        (128, 2, 1, TAIL),
        (256, 2, 1, NARROW),
        (512, 4, 1, TAIL),
    ],
    few=[(64, 2, 4, NARROW), (256, 2, 4, TAIL), (512, 4, 1, TAIL)],
)
def test_the_peak_of_batches_in_flight_is_about_what_is_planned(
    slots: int, batches: int, dp: int, response: LengthSpec
) -> None:
    """One turn in ten is expected to need more than is planned; and what it needs is not cut there. Slots are fewer
    than a batch has rows, as many, or enough for all that is in flight: then replicas that wait for each other end
    equal turns, and a single one begins batches together."""
    schedule = Schedule(generation_slots=slots, batches_in_flight=batches)
    found = use(schedule, dp, num_rows=128, response=response)
    assert found.peak_share
    assert 0.8 < found.peak_share < 1.15


@cases(("slots", "extra", "dp", "response"), [(64, 64, 1, TAIL), (192, 64, 4, TAIL), (192, 64, 1, NARROW)], few=1)
def test_the_peak_of_what_is_overcommitted_is_about_what_is_planned(
    slots: int, extra: int, dp: int, response: LengthSpec
) -> None:
    schedule = Schedule(generation_slots=slots, overcommit=extra * dp)
    found = use(schedule, dp, num_rows=128, response=response)
    assert found.peak_share
    assert 0.8 < found.peak_share < 1.16


@pytest.mark.parametrize("slots", [32, 64])
def test_the_peak_of_turns_alone_is_about_what_is_planned(slots: int) -> None:
    found = use(Schedule(generation_slots=slots))
    assert found.peak_share
    assert 1 < found.peak_share < 1.15


@pytest.mark.parametrize("overcommits", [False, True])
def test_replicas_never_hold_more_than_all_slots_could(overcommits: bool) -> None:
    lengths = np.full(16, 8), np.full(16, 90)
    for plan in carrying_over(overcommits):
        schedule = plan.placement(GENERATE).schedule
        carried = InFlightGeneration(plan, lambda _: lengths, TIMES, 1.0, lambda _, extra=schedule.overcommit: extra)
        held = list(itertools.chain.from_iterable(carried.of_step(step).held for step in range(6)))
        assert all(0 <= one.mean <= one.peak <= schedule.generation_slots * num_blocks_for(8 + 89) for one in held)
        # All batches in flight may end in one period, which leaves nothing to hold in those that deliver the others.
        assert sum(one.mean > 0 for one in held) >= len(held) / schedule.batches_in_flight


def test_a_simulation_tells_the_shares_of_the_planned_blocks() -> None:
    plan = plan_of(3, LengthSpec(max=128, median=30, p99=120))
    placement = plan.placement(GENERATE)
    blocks = plan.facts.workload.cache_need(placement.schedule, placement.layout.dp).blocks
    drawn = Sampled(plan, model_of, seed=0)
    found = simulate(plan, drawn, steps=1, warm_up=0)
    held = drawn.of_step(0).held_blocks[GENERATE]
    (use,) = found.caches
    assert use.mean_share is not None
    assert use == CacheUse(
        stage=GENERATE, blocks=blocks, mean_share=use.mean_share, peak_share=max(one.peak for one in held) / blocks
    )
    assert min(one.mean for one in held) <= use.mean_share * blocks <= max(one.mean for one in held)


def test_planned_durations_leave_the_cache_out() -> None:
    assert simulate(plan_of(3, LengthSpec(max=128, fixed=128)), steps=1).caches == ()
