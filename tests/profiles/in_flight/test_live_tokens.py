"""A paged cache is planned by what sequences in flight hold together: no more than all could, and near what they do."""

from __future__ import annotations

import heapq
import random
from statistics import fmean

import pytest

from meshwright.profiles.kv_cache_size import Arrivals, LiveTokens
from meshwright.profiles.lengths import Histogram, LengthSpec
from meshwright.profiles.packing import BLOCK_TOKENS, num_blocks_for

SPECS = {
    "long tail": LengthSpec(max=2048, median=64, p99=1024),
    "wide": LengthSpec(max=4096, median=512, p99=4000),
    "narrow": LengthSpec(max=600, median=400, p99=560),
    "two kinds": LengthSpec(max=1000, histogram=((30, 0.9), (1000, 0.1))),
    "fixed": LengthSpec(max=300, fixed=300),
}
PROMPT = 100


def of(spec: LengthSpec) -> LiveTokens:
    return LiveTokens(Histogram((PROMPT,), (1.0,)), spec.resolve(), PROMPT + spec.max)


def played(spec: LengthSpec, num_slots: int, in_flight: int, seed: int) -> int:
    """The most blocks that drawn sequences hold at a time, where none has to wait for blocks."""
    lengths, draw = spec.resolve(), random.Random(seed)
    responses = draw.choices(lengths.tokens, lengths.probabilities, k=in_flight)
    free, ends = [0] * num_slots, []
    changes: dict[int, int] = {}
    for response in responses:
        start = heapq.heappop(free)
        heapq.heappush(free, start + response)
        ends.append(start + response)
        held = 0
        for age in range(response):
            if (now := num_blocks_for(PROMPT + age + 1)) > held:
                changes[start + age] = changes.get(start + age, 0) + now - held
                held = now
        changes[start + response] = changes.get(start + response, 0) - held
    blocks = most = 0
    for time in sorted(changes):
        blocks += changes[time]
        most = max(most, blocks)
    return most


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize(("num_slots", "in_flight"), [(64, 64), (64, 256), (200, 400)])
def test_what_is_planned_is_near_the_peak_of_drawn_sequences(name: str, num_slots: int, in_flight: int) -> None:
    planned = of(SPECS[name]).need(num_slots, in_flight, num_rows=in_flight, arrivals=Arrivals.NEVER).blocks
    peaks = sorted(played(SPECS[name], num_slots, in_flight, seed) for seed in range(10))
    assert fmean(peaks) * 0.97 < planned < peaks[-1] * 1.15


@pytest.mark.parametrize("arrivals", Arrivals)
@pytest.mark.parametrize("num_rows", [64, 400])
@pytest.mark.parametrize("name", SPECS)
def test_more_slots_never_take_fewer_blocks(name: str, num_rows: int, arrivals: Arrivals) -> None:
    live = of(SPECS[name])
    slots = [*(2**k for k in range(10)), 520]
    blocks = [live.need(number, 520, num_rows=num_rows, arrivals=arrivals).blocks for number in slots]
    assert blocks == sorted(blocks)


@pytest.mark.parametrize("name", SPECS)
def test_where_nothing_waits_equal_turns_take_least_and_slots_that_are_always_taken_most(name: str) -> None:
    live = of(SPECS[name])
    evenly, in_order, alone = (
        live.need(512, 512, num_rows=128, arrivals=arrivals).blocks
        for arrivals in (Arrivals.EVENLY, Arrivals.IN_ORDER, Arrivals.NEVER)
    )
    always = live.need(512, 2**16, num_rows=2**15, arrivals=Arrivals.FIRST_ENDED).blocks
    assert evenly <= alone <= in_order <= always
    assert (evenly < 0.9 * always) == (name != "fixed")


@pytest.mark.parametrize("name", SPECS)
def test_the_cache_holds_the_longest_sequence_and_no_more_than_all_could_need(name: str) -> None:
    live, longest = of(SPECS[name]), num_blocks_for(PROMPT + SPECS[name].max)
    assert live.need(1, 512, num_rows=256, arrivals=Arrivals.EVENLY).blocks == longest
    for num_slots in (2, 16, 128):
        need = live.need(num_slots, 512, num_rows=256, arrivals=Arrivals.EVENLY)
        assert longest <= need.blocks <= num_slots * longest
        assert (need.preemptions > 0) == (need.blocks < num_slots * longest and name != "fixed")


def test_sequences_that_read_one_prompt_hold_it_once_while_they_live() -> None:
    live = LiveTokens(Histogram((1000,), (1.0,)), Histogram((10,), (1.0,)), 1010)
    alone, together = (
        live.need(64, 64, num_rows=64, arrivals=Arrivals.NEVER, rows_per_prompt=n).blocks for n in (1, 8)
    )
    assert together * BLOCK_TOKENS < alone * BLOCK_TOKENS / 4
