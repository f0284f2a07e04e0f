"""The formulation problem stands for the job: ticks never exceed seconds, blocks never fall short of bytes."""

from __future__ import annotations

import math
from itertools import product

import pytest

from meshwright.cost_models.cost import Cost, Memory, Term
from meshwright.cost_models.protocol import RefitQuery, StageQuery
from meshwright.planner.plan.cost_queries import stage_transfers
from meshwright.planner.plan.pins import Ranks, parse_pins
from meshwright.planner.plan.steps_ahead import SearchCase, synchronous
from meshwright.planner.search.formulate import MIN_UNIT_BYTES, Formulation, formulate
from meshwright.planner.search.frontiers import frontiers
from meshwright.planner.solver.problem import MAX_SUM, Resource, Transfer
from meshwright.planner.solver.rank_ranges import swaps
from meshwright.profiles.algorithms import PPO_GRAPH
from meshwright.profiles.layout import Layout
from meshwright.profiles.schedule import Offload
from tests.planner.jobs import RandomModel, ToyModel, small_facts
from tests.planner.problems import everywhere

FACTS = small_facts(nodes=2, ranks_per_node=2)
MODEL = ToyModel(FACTS)


class OffloadingModel(ToyModel):
    """Weights and optimizer state that are offloaded are transient, and cost a little time."""

    def seconds(self, query: StageQuery) -> Cost:
        more = () if query.schedule.offload is Offload.NONE else (Term("host link", 1e-3),)
        return Cost((*super().seconds(query).terms, *more))

    def memory(self, query: StageQuery) -> Memory:
        memory = super().memory(query)
        moved = {Offload.NONE: (), Offload.WEIGHTS: ("weights",), Offload.OPTIMIZER: ("optimizer",)}
        gone = [term for term in memory.resident.terms if term.name in moved[query.schedule.offload]]
        kept = [term for term in memory.resident.terms if term not in gone]
        return Memory(resident=Cost(tuple(kept)), transient=Cost((*memory.transient.terms, *gone)))


class CrawlingModel(ToyModel):
    """One rank alone is ten thousand times slower."""

    def seconds(self, query: StageQuery) -> Cost:
        return super().seconds(query).scaled(10**4 if query.layout.num_ranks == 1 else 1)


def pose_pinned(*pins: str, by_pool: bool = False) -> Formulation:
    found = frontiers(FACTS, MODEL, parse_pins(pins, PPO_GRAPH), is_limited=False)
    return formulate(FACTS, MODEL, found, stage_transfers(FACTS, MODEL), by_pool=by_pool)


@pytest.fixture(scope="module")
def formulation() -> Formulation:
    return pose_pinned(by_pool=True)


@pytest.fixture(scope="module")
def posed_anywhere() -> Formulation:
    return pose_pinned()


def test_stages_that_may_be_anywhere_have_the_options_of_every_pool(
    formulation: Formulation, posed_anywhere: Formulation
) -> None:
    assert posed_anywhere.problem.anywhere
    spread = everywhere(posed_anywhere.problem)
    assert spread.activities == formulation.problem.activities
    for task, other in zip(spread.tasks, formulation.problem.tasks, strict=True):
        assert set(task.modes) == set(other.modes)


def test_a_pool_that_is_fixed_makes_ranks_matter() -> None:
    pinned = pose_pinned("actor_train.pool=2:2")
    assert not pinned.problem.anywhere
    assert {ranks for ranks, _ in pinned.option_choices["actor_train"]} == {Ranks(2, 2)}


def test_every_candidate_is_an_option_on_every_pool_of_its_size(formulation: Formulation) -> None:
    for task in formulation.problem.tasks:
        pairs = formulation.option_choices[task.name]
        for option, (ranks, candidate) in zip(task.modes, pairs, strict=True):
            assert option.resource == Resource(ranks.first_rank, ranks.num_ranks, str(candidate.layout))
        by_pool = {ranks: [c for r, c in pairs if r == ranks] for ranks, _ in pairs}
        assert len({tuple(c.amounts for c in found) for r, found in by_pool.items() if r.num_ranks == 1}) == 1


def test_ticks_round_down_and_blocks_round_up(formulation: Formulation) -> None:
    for task in formulation.problem.tasks:
        for option, (_, candidate) in zip(task.modes, formulation.option_choices[task.name], strict=True):
            seconds = candidate.seconds
            assert 0 <= seconds - option.ticks * formulation.tick_seconds < formulation.tick_seconds
            assert 0 <= option.resident_units * MIN_UNIT_BYTES - candidate.resident_bytes < 2 * MIN_UNIT_BYTES
            assert 0 <= option.transient_units * MIN_UNIT_BYTES - candidate.transient_bytes < MIN_UNIT_BYTES


def test_a_step_has_between_a_hundred_thousand_and_a_few_million_ticks(formulation: Formulation) -> None:
    fastest = sum(min(option.ticks for option in task.modes) for task in formulation.problem.tasks)
    assert 10**5 <= fastest <= 10**6


def test_choices_that_are_far_too_slow_do_not_make_the_durations_too_many_ticks() -> None:
    slow = CrawlingModel(FACTS)
    formulation = formulate(FACTS, slow, frontiers(FACTS, slow, (), is_limited=False), stage_transfers(FACTS, slow))
    assert formulation.problem.horizon <= MAX_SUM
    assert sum(min(option.ticks for option in task.modes) for task in formulation.problem.tasks) > 10**3


def test_each_stage_runs_once_and_each_untrained_copy_has_its_refit(formulation: Formulation) -> None:
    names = {task.name for task in formulation.problem.activities}
    refits = {"refit actor_generate", "refit actor_logprob", "refit critic_value"}
    assert names == {stage.name for stage in PPO_GRAPH.stages} | refits
    for task in formulation.problem.activities:
        if isinstance(task, Transfer):
            assert task.occupies == "both"
            assert task.source == ("critic_train" if "critic" in task.target else "actor_train")


def test_a_refit_lasts_as_long_as_the_cost_model_says_of_each_two_layouts() -> None:
    model = RandomModel(0, 2**27)
    found = frontiers(FACTS, model, (), is_limited=False)
    formulation = formulate(FACTS, model, found, stage_transfers(FACTS, model))
    for task in formulation.problem.activities:
        if isinstance(task, Transfer):
            spec = FACTS.models.spec(PPO_GRAPH.by_name[task.target].role)
            for one, other in product(task.ticks.sources, task.ticks.targets):
                source, target = Layout.parse(one), Layout.parse(other)
                nested, both = min(source.num_ranks, target.num_ranks), source.num_ranks + target.num_ranks
                for overlap in (0, nested) if both <= FACTS.cluster.num_ranks else (nested,):
                    move = RefitQuery(model=spec, source=source, target=target, overlap=overlap)
                    expected = math.floor(model.refit_seconds(move).total / formulation.tick_seconds)
                    assert task.ticks.between(one, other, overlap) == expected
            layouts = [
                {option.resource.layout for option in formulation.problem.modes(c)} for c in (task.source, task.target)
            ]
            assert [set(task.ticks.sources), set(task.ticks.targets)] == layouts


def test_blocks_of_ranks_of_one_size_are_interchangeable(formulation: Formulation) -> None:
    assert {(len(swap.left), swap.left.start) for swap in swaps(formulation.problem)} == {(1, 0), (1, 2), (2, 0)}


def test_weights_that_may_wait_in_the_host_are_no_copy_that_others_share() -> None:
    """They used to be, and a job in which a stage fitted with them and without was refused with a traceback."""
    scope = SearchCase(ahead=synchronous(PPO_GRAPH), offload=True)
    found = frontiers(FACTS, OffloadingModel(FACTS), (), is_limited=False, search_case=scope)
    offloaded = {c.schedule.offload for f in found for size in f.candidates.values() for c in size}
    assert offloaded == {Offload.NONE, Offload.WEIGHTS, Offload.OPTIMIZER}
    problem = formulate(FACTS, MODEL, found, stage_transfers(FACTS, MODEL)).problem
    assert {o.shared_units for name in ("ref_logprob", "reward_score") for o in problem.modes(name)} == {0}
    assert all(option.shared_units for option in problem.modes("actor_train"))
