"""Numbers and names as a reader wants them."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.planner.report import formatting
from meshwright.profiles.algorithms import PPO_GRAPH, graph_of
from meshwright.profiles.schedule import Offload, Recompute, Schedule


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (150.24, "150.2 s"),
        (3.084, "3.08 s"),
        (0.0124, "12.4 ms"),
        (0.0, "0.00 s"),
        (-2.0, "-2.00 s"),
        (4e-5, "0.04 ms"),
    ],
)
def test_seconds_have_three_places(value: float, told: str) -> None:
    assert formatting.seconds(value) == told


@pytest.mark.parametrize(
    ("num_bytes", "told"),
    [(80 * 2**30, "80.00 GiB"), (3 * 2**20, "3.0 MiB"), (1536, "1.5 KiB"), (0, "0.0 MiB"), (-(2**31), "-2.00 GiB")],
)
def test_bytes_are_told_in_the_largest_unit_that_they_fill(num_bytes: int, told: str) -> None:
    assert formatting.size(num_bytes) == told


def test_counts_are_told_by_magnitude() -> None:
    assert [formatting.count(value) for value in (1_234_567, 1234, 312e12, 6.7e9)] == [
        "1.23 M",
        "1,234",
        "312 T",
        "6.7 G",
    ]
    assert [formatting.parameters(number) for number in (6_740_000_000, 124_000_000, 52_000)] == [
        "6.74B",
        "124M",
        "52,000",
    ]
    assert formatting.percent(0.1234) == "12.3%"


def test_a_difference_that_rounds_to_nothing_has_no_sign_of_its_own() -> None:
    assert [formatting.difference(share) for share in (0.032, -0.005, -0.0001, 0.0)] == [
        "+3.2%",
        "-0.5%",
        "+0.0%",
        "+0.0%",
    ]


@given(st.sets(st.integers(0, 40)))
def test_ranges_of_ranks_hold_each_rank_once(numbers: set[int]) -> None:
    runs = list(formatting.consecutive(numbers))
    assert [rank for first, last in runs for rank in range(first, last + 1)] == sorted(numbers)
    assert all(first > before + 1 for (_, before), (first, _) in pairwise(runs))


def test_ranks_are_told_as_ranges() -> None:
    assert formatting.ranks([12, 0, 1, 2, 3]) == "0-3, 12"
    assert formatting.ranks([]) == ""


def test_a_schedule_tells_what_concerns_its_stage() -> None:
    assert formatting.schedule(Schedule(micro_batch_size=4)) == "4 rows"
    assert formatting.schedule(Schedule(recompute=Recompute.FULL, offload=Offload.OPTIMIZER)) == (
        "1 rows, full recomputation, optimizer offloaded"
    )
    assert formatting.schedule(Schedule(generation_slots=8, overcommit=3)) == "8 slots, 3 prompts overcommitted"
    assert formatting.schedule(Schedule(generation_slots=8, batches_in_flight=2)) == "8 slots, 2 batches in flight"
    assert formatting.schedule(Schedule(chunk_tokens=64)) == "1 rows, chunks of 64 tokens"


def test_a_setting_is_told_by_the_last_name_of_its_field() -> None:
    assert formatting.setting({"workload.batch_size": 7, "cluster.nodes": 2}) == "batch_size=7, nodes=2"


def test_a_step_ahead_is_told() -> None:
    assert [formatting.step(ahead) for ahead in (0, 2)] == ["step n", "step n+2"]


def test_a_stage_its_refit_and_a_wait_for_it_have_their_colours() -> None:
    assert len({formatting.colour(stage.name, PPO_GRAPH) for stage in PPO_GRAPH.stages}) == len(PPO_GRAPH.stages)
    assert (
        formatting.colour("transfer from actor_train", PPO_GRAPH)
        == formatting.colour("actor_train", PPO_GRAPH)
        == "c-5"
    )
    assert formatting.colour("refit actor_generate", PPO_GRAPH) == "c-refit"
    assert formatting.colour("step", PPO_GRAPH) == "c-other"


GRAPHS = (
    graph_of("ppo", has_environment=True),
    graph_of("grpo"),
    graph_of("grpo", has_ref=False, has_reward=False, has_environment=True),
    graph_of("distill", num_teachers=2),
)


def test_a_stage_has_one_colour_in_every_algorithm_and_no_two_of_a_job_share_one() -> None:
    for graph in GRAPHS:
        colours = {name: formatting.colour(name, graph) for name in graph.names}
        assert len(set(colours.values())) == len(colours)
        for name in colours.keys() & set(PPO_GRAPH.names):
            assert formatting.colour(name, PPO_GRAPH) == colours[name]
