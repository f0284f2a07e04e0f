from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import pairwise

import pytest

from meshwright.profiles.algorithms import PPO_GRAPH
from meshwright.profiles.hardware import Cluster
from meshwright.profiles.harness import (
    TimingResult,
    clock_timer,
    event_timer,
    exchanges,
    failed_measurement,
    measure,
    merge_measurements,
    points,
    record,
)
from meshwright.profiles.lengths import LengthSpec
from meshwright.profiles.model_shape import ModelSpec
from meshwright.profiles.stages import Role
from meshwright.profiles.table import Shape, TimedPass, shape_of
from meshwright.profiles.workload import Workload


class Clock:
    """Virtual time that a timed pass advances."""

    def __init__(self, durations: Iterator[float]) -> None:
        self.now = 0.0
        self.durations = durations
        self.waits = 0

    def read(self) -> float:
        return self.now

    def timed_pass(self) -> None:
        self.now += next(self.durations)

    def wait(self) -> None:
        self.waits += 1


def timed(
    durations: list[float],
    *,
    warmup: int = 0,
    repeats: int = 5,
    budget_seconds: float = 100.0,
    least_seconds: float = 0.0,
) -> TimingResult:
    clock = Clock(iter(durations))
    return measure(
        clock.timed_pass,
        timer=clock_timer(clock.read, clock.wait),
        clock=clock.read,
        warmup=warmup,
        repeats=repeats,
        budget_seconds=budget_seconds,
        min_seconds=least_seconds,
    )


def test_the_median_is_of_the_repeats_and_not_of_the_warm_up() -> None:
    sample = timed([90.0, 1.0, 2.0, 3.0, 4.0, 5.0], warmup=1, budget_seconds=1000.0)
    assert sample == TimingResult(median_seconds=3.0, spread_seconds=2.0, repeats=5)


def test_a_spent_budget_stops_the_repeats_but_never_the_first() -> None:
    assert timed([3.0] * 9, budget_seconds=5.0).repeats == 2
    assert timed([3.0] * 9, budget_seconds=0.0).repeats == 1
    assert timed([3.0], budget_seconds=0.0).spread_seconds == 0.0


def test_a_short_body_is_timed_more_often_so_that_its_first_calls_do_not_decide() -> None:
    sample = timed([9.0, 5.0, 4.0, *[1.0] * 30], warmup=0, budget_seconds=1000.0, repeats=3, least_seconds=28.0)
    assert (sample.median_seconds, sample.repeats) == (1.0, 13)
    assert timed([9.0] * 9, warmup=0, budget_seconds=20.0, repeats=3, least_seconds=100.0).repeats == 3


def test_calls_that_are_timed_together_count_by_their_mean() -> None:
    clock = Clock(iter([1.0, 5.0, 2.0, 2.0, 1.0, 3.0]))
    timer = clock_timer(clock.read, clock.wait)
    found = measure(
        clock.timed_pass, timer=timer, clock=clock.read, warmup=0, repeats=3, budget_seconds=99.0, calls_per_sample=2
    )
    assert (found.median_seconds, found.repeats) == (2.0, 3)


def test_a_turn_in_which_the_machine_was_disturbed_is_left_out(
    specs: dict[Role, ModelSpec], workload: Workload, cluster: Cluster
) -> None:
    point = points(PPO_GRAPH, specs, workload, cluster)[0]
    turns = [
        record(point, TimingResult(median_seconds=seconds, spread_seconds=0.1, repeats=3), peak_bytes)
        for seconds, peak_bytes in ((1.0, 10), (9.0, 30), (1.2, 20))
    ]
    found = merge_measurements(turns)
    assert (found.point, found.seconds, found.repeats, found.peak_bytes) == (point, 1.2, 9, 20)
    assert found.spread_seconds == pytest.approx(4.0)
    assert merge_measurements(turns[:1]) == turns[0]
    assert (
        merge_measurements([turns[0], failed_measurement(point, "out of memory"), turns[2]]).reason == "out of memory"
    )


def test_each_repeat_waits_for_the_device() -> None:
    clock = Clock(iter([1.0] * 4))
    timer = clock_timer(clock.read, clock.wait)
    measure(clock.timed_pass, timer=timer, clock=clock.read, warmup=1, repeats=3, budget_seconds=9.0)
    assert clock.waits == 1 + 3


class Mark:
    """An event of a device that works in order and lags behind its host, in milliseconds."""

    queued = 0.0

    def __init__(self) -> None:
        self.at: float | None = None
        self.passed = False

    def record(self) -> None:
        self.at = Mark.queued

    def synchronize(self) -> None:
        self.passed = True

    def elapsed_time(self, end: "Mark") -> float:
        assert end.passed, "the end has not been waited for"
        assert self.at is not None
        assert end.at is not None
        return end.at - self.at


def test_events_count_what_the_device_does_and_not_what_the_host_waits() -> None:
    def timed_pass() -> None:
        Mark.queued += 250.0

    read: Callable[[], float] = lambda: 0.0  # noqa: E731
    sample = measure(timed_pass, timer=event_timer(Mark), clock=read, warmup=1, repeats=3, budget_seconds=1.0)
    assert sample == TimingResult(median_seconds=0.25, spread_seconds=0.0, repeats=3)


def test_a_failing_body_is_the_callers_to_record() -> None:
    def broken() -> None:
        raise MemoryError

    read: Callable[[], float] = lambda: 0.0  # noqa: E731
    timer = clock_timer(read, lambda: None)
    with pytest.raises(MemoryError):
        measure(broken, timer=timer, clock=read, warmup=0, repeats=1, budget_seconds=1.0)


def test_points_cover_the_workload_at_two_depths(
    specs: dict[Role, ModelSpec], workload: Workload, cluster: Cluster
) -> None:
    found = points(PPO_GRAPH, specs, workload, cluster)
    assert len(found) == len(set(found))
    for timed_pass in TimedPass:
        shapes = defaultdict[Shape, set[int]](set)
        for point in found:
            if point.timed_pass is timed_pass:
                shapes[point.shape].add(point.num_layers)
        assert all(len(depths) == 2 for depths in shapes.values()), timed_pass
    for timed_pass in (TimedPass.FORWARD, TimedPass.TRAIN):
        lengths = {point.tokens for point in found if point.timed_pass is timed_pass}
        assert min(lengths) == workload.sequence_lengths.tokens[0]
        assert max(lengths) == workload.sequence_lengths.maximum
    contexts = {point.context for point in found if point.timed_pass is TimedPass.DECODE}
    assert min(contexts) == workload.prompt_lengths.tokens[0]
    assert max(contexts) == workload.sequence_lengths.maximum - 1
    assert max(point.rows for point in found if point.timed_pass is TimedPass.DECODE) == workload.batch_size


def test_on_a_gpu_passes_are_timed_at_the_models_own_depth_where_its_training_state_takes_half_of_the_memory(
    specs: dict[Role, ModelSpec], workload: Workload, cluster: Cluster
) -> None:
    model = specs[Role.ACTOR]
    layer, ends = 18 * model.layer_params, 18 * (model.num_params - model.num_layers * model.layer_params)
    for memory, deepest in ((1e15, model.num_layers), (2 * (ends + 3.5 * layer), 3), (2 * ends, 2)):
        device = cluster.device.model_copy(update={"memory_bytes": int(memory), "kind": "cuda"})
        found = points(PPO_GRAPH, specs, workload, cluster.model_copy(update={"device": device, "ranks_per_node": 1}))
        of_actor = [point for point in found if point.shape == shape_of(model, 1)]
        for timed_pass in (TimedPass.FORWARD, TimedPass.TRAIN, TimedPass.PREFILL):
            depths = {point.num_layers for point in of_actor if point.timed_pass is timed_pass}
            assert depths == {1, min(deepest, model.num_layers)}


def test_batches_that_may_be_in_flight_together_are_decoded_together_and_nothing_else_is(
    specs: dict[Role, ModelSpec], workload: Workload, cluster: Cluster
) -> None:
    found, fresh = (points(PPO_GRAPH, specs, workload, cluster, staleness=staleness) for staleness in (3, 0))
    assert max(point.rows for point in found if point.timed_pass is TimedPass.DECODE) == 4 * workload.batch_size
    assert {point.timed_pass for point in set(found) - set(fresh)} == {TimedPass.DECODE}


def test_all_samples_that_are_drawn_are_decoded_together_and_those_that_are_kept_are_trained_on(
    specs: dict[Role, ModelSpec], workload: Workload, cluster: Cluster
) -> None:
    few = workload.model_copy(update={"batch_size": 4})
    found = points(PPO_GRAPH, specs, few.model_copy(update={"best_of": 3}), cluster)
    most = {
        timed_pass: max(point.rows for point in found if point.timed_pass is timed_pass)
        for timed_pass in (TimedPass.DECODE, TimedPass.TRAIN)
    }
    assert most == {TimedPass.DECODE: 12, TimedPass.TRAIN: 4}


def test_points_of_one_shape_and_depth_are_neighbours(
    specs: dict[Role, ModelSpec], workload: Workload, cluster: Cluster
) -> None:
    keys = [(point.shape, point.num_layers) for point in points(PPO_GRAPH, specs, workload, cluster)]
    assert sum(a != b for a, b in pairwise(keys)) == len(set(keys)) - 1


def test_each_shape_is_timed_in_the_bodies_that_some_role_runs(
    specs: dict[Role, ModelSpec], workload: Workload, cluster: Cluster
) -> None:
    found = points(PPO_GRAPH, specs, workload, cluster)
    for tp in (1, 2):
        actor = {point.timed_pass for point in found if point.shape == shape_of(specs[Role.ACTOR], tp)}
        critic = {point.timed_pass for point in found if point.shape == shape_of(specs[Role.CRITIC], tp)}
        assert actor == set(TimedPass)
        assert critic == {TimedPass.FORWARD, TimedPass.TRAIN, TimedPass.OPTIMIZER}
    assert len({point.shape for point in found}) == 4


def test_a_tiny_job_has_few_points_and_fixed_lengths_have_fewer(
    specs: dict[Role, ModelSpec], workload: Workload, cluster: Cluster
) -> None:
    fixed = Workload(batch_size=32, prompt=LengthSpec(max=16, fixed=16), response=LengthSpec(max=96, fixed=96))
    assert len(points(PPO_GRAPH, specs, fixed, cluster)) < len(points(PPO_GRAPH, specs, workload, cluster)) <= 300


def test_a_gpu_is_timed_at_what_fills_it_and_its_decode_steps_at_depths_far_apart(
    specs: dict[Role, ModelSpec], cluster: Cluster
) -> None:
    many = Workload(batch_size=256, prompt=LengthSpec(max=48, fixed=48), response=LengthSpec(max=464, fixed=464))
    gpu = cluster.model_copy(update={"device": cluster.device.model_copy(update={"kind": "cuda"})})
    of_gpu, of_cpu = (
        [
            point
            for point in points(PPO_GRAPH, specs, many, on)
            if point.timed_pass in (TimedPass.TRAIN, TimedPass.DECODE)
        ]
        for on in (gpu, cluster)
    )
    tokens = [max(p.rows * p.tokens for p in found if p.timed_pass is TimedPass.TRAIN) for found in (of_gpu, of_cpu)]
    assert tokens == [256 * 512, 16 * 512]
    assert {point.num_layers for point in of_gpu if point.timed_pass is TimedPass.DECODE} == {1, 8}
    assert {point.num_layers for point in of_gpu if point.timed_pass is TimedPass.TRAIN} == {
        1,
        specs[Role.ACTOR].num_layers,
    }


def test_no_measured_micro_batch_is_huge(specs: dict[Role, ModelSpec], cluster: Cluster) -> None:
    long = Workload(batch_size=64, prompt=LengthSpec(max=512, fixed=512), response=LengthSpec(max=8192, fixed=8192))
    trained = [point for point in points(PPO_GRAPH, specs, long, cluster) if point.timed_pass is TimedPass.TRAIN]
    assert max(point.rows * point.tokens for point in trained) <= 32768
    assert min(point.rows for point in trained) == 1


def test_collectives_are_measured_for_every_group_that_divides_a_node(cluster: Cluster) -> None:
    eight = cluster.model_copy(update={"ranks_per_node": 8})
    assert {exchange.num_ranks for exchange in exchanges(eight)} == {2, 4, 8}
    assert {e.num_ranks for e in exchanges(eight) if e.operation == "send_receive"} == {2}
    assert exchanges(cluster.model_copy(update={"ranks_per_node": 1})) == ()
    assert {exchange.num_ranks for exchange in exchanges(eight, 4)} == {2, 4}
    assert exchanges(eight, 1) == ()
