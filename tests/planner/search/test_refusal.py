"""When nothing fits, the answer says what binds, by how much, and which changes were found to help."""

from __future__ import annotations

import threading
import time

import pytest

from meshwright.cost_models.cost import Cost, Memory
from meshwright.cost_models.protocol import CostModel, RefitQuery, StageQuery
from meshwright.planner.compile import compile_plan
from meshwright.planner.job.job import Facts
from meshwright.planner.job.whatif_settings import with_setting
from meshwright.planner.plan.cost_queries import stage_transfers
from meshwright.planner.plan.plan import Plan
from meshwright.planner.plan.steps_ahead import search_cases, synchronous
from meshwright.planner.search.formulate import MIN_UNIT_BYTES, formulate
from meshwright.planner.search.frontiers import StageCosts, frontier, frontiers
from meshwright.planner.search.no_plan import Change, NoPlan, explain_no_plan
from meshwright.planner.solver import solve
from meshwright.planner.solver.problem import Problem, Resource
from meshwright.planner.solver.result import Limits
from meshwright.planner.solver.solve import least_memory
from tests.planner.jobs import RandomModel, ToyModel, small_facts

MIB = 2**20


def refused(facts: Facts, pins: tuple[str, ...] = ()) -> NoPlan:
    answer = compile_plan(facts, ToyModel(facts), pins=pins, rebuild_cost_model=ToyModel)
    assert isinstance(answer, NoPlan)
    assert answer.status == "infeasible"
    return answer


def applied(facts: Facts, change: Change) -> Facts:
    """The facts with one change, as `--set` would make it."""
    return with_setting(facts, {change.key: change.value})


@pytest.fixture(scope="module")
def facts() -> Facts:
    return small_facts(ranks_per_node=2, memory_bytes=7 * MIB)


@pytest.fixture(scope="module")
def answer(facts: Facts) -> NoPlan:
    return refused(facts)


def test_stages_that_fit_alone_and_not_together_are_told_by_how_much(answer: NoPlan, facts: Facts) -> None:
    (limit,) = answer.limits
    assert limit.stage is None
    assert limit.sentence.startswith("each stage fits alone, and all together need")
    assert limit.needed_bytes > limit.device_bytes == facts.cluster.device.usable_bytes


def test_the_reason_of_a_refusal_is_found_without_timing_a_choice_or_a_refit(answer: NoPlan, facts: Facts) -> None:
    class Untimed(ToyModel):
        def seconds(self, query: StageQuery) -> Cost:
            raise AssertionError(f"{query.stage.name} was timed")

        def refit_seconds(self, move: RefitQuery) -> Cost:
            raise AssertionError(f"a refit of {move.source} was timed")

    limits = Limits()
    told = explain_no_plan(
        facts, Untimed(facts), pins=(), status="infeasible", limits=limits, rebuild_cost_model=Untimed
    )
    assert told == answer


def test_every_change_leaves_a_job_that_has_a_plan(answer: NoPlan, facts: Facts) -> None:
    assert {change.key for change in answer.changes} >= {"cluster.device.memory_bytes", "cluster.nodes"}
    for change in answer.changes:
        changed = applied(facts, change)
        assert isinstance(compile_plan(changed, ToyModel(changed)), Plan), change


def test_a_little_less_memory_than_told_is_not_enough(answer: NoPlan, facts: Facts) -> None:
    told = next(change for change in answer.changes if change.key == "cluster.device.memory_bytes")
    less = applied(facts, Change(key=told.key, value=told.value - MIB, sentence=""))
    assert isinstance(compile_plan(less, ToyModel(less)), NoPlan)


def test_a_stage_that_does_not_fit_alone_is_named() -> None:
    answer = refused(small_facts(ranks_per_node=1, memory_bytes=4 * MIB))
    named = [limit.stage for limit in answer.limits]
    assert "actor_train" in named
    assert "reward_score" not in named
    sentence = next(limit.sentence for limit in answer.limits if limit.stage == "actor_train")
    assert "in its smallest form (tp1,pp1,dp1)" in sentence


def test_a_stage_without_a_legal_choice_is_told_the_rules() -> None:
    answer = refused(small_facts(batch_size=10, num_minibatches=3))
    assert {limit.stage for limit in answer.limits} == {"actor_train", "critic_train"}
    assert answer.limits[0].sentence == (
        "actor_train has no legal choice: num_minibatches=3 does not divide batch_size=10; use 2."
    )
    assert answer.changes == ()


def test_pins_stay_in_force_when_changes_are_looked_for() -> None:
    facts = small_facts(ranks_per_node=2, memory_bytes=9 * MIB)
    answer = refused(facts, pins=("actor_train.pool=0:1", "critic_train.pool=0:1"))
    assert "cluster.nodes" not in {change.key for change in answer.changes}


def test_without_a_model_of_other_facts_only_memory_is_proposed(facts: Facts) -> None:
    answer = compile_plan(facts, ToyModel(facts))
    assert isinstance(answer, NoPlan)
    assert {change.key for change in answer.changes} == {"cluster.device.memory_bytes"}


def test_the_answer_counts_what_was_left_out(answer: NoPlan) -> None:
    assert answer.rejected["actor_generate"]


def test_a_model_is_asked_for_the_changed_facts(facts: Facts) -> None:
    asked: list[Facts] = []

    def remodel(other: Facts) -> CostModel:
        asked.append(other)
        return ToyModel(other)

    compile_plan(facts, ToyModel(facts), rebuild_cost_model=remodel)
    assert any(other.cluster.nodes == 2 for other in asked)
    assert any(other.workload.response.max == facts.workload.response.max // 2 for other in asked)


def noted_problems(monkeypatch: pytest.MonkeyPatch) -> list[Problem]:
    """The problems of which the solver is asked how much memory they need."""
    asked: list[Problem] = []
    least = solve.least_memory

    def noting(problem: Problem, limits: Limits) -> int | None:
        asked.append(problem)
        return least(problem, limits)

    monkeypatch.setattr(solve, "least_memory", noting)
    return asked


def test_how_much_all_need_is_told_of_the_choices_that_none_beats_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """All choices of large models have more blocks than the solver adds up exactly."""
    asked = noted_problems(monkeypatch)
    facts = small_facts(ranks_per_node=2, memory_bytes=7 * MIB)
    assert isinstance(compile_plan(facts, ToyModel(facts)), NoPlan)
    (problem,) = asked
    for query in problem.tasks:
        held: dict[Resource, list[tuple[int, int]]] = {}
        for option in query.modes:
            held.setdefault(option.resource, []).append((option.resident_units, option.transient_units))
        for pairs in held.values():
            assert sorted(pairs) == sorted(set(pairs))
            assert [transient for _, transient in sorted(pairs)] == sorted((t for _, t in pairs), reverse=True)


def test_a_change_that_leaves_a_stage_too_large_alone_is_asked_about_that_stage_only() -> None:
    facts = small_facts(ranks_per_node=2, memory_bytes=MIB)
    asked: list[str] = []

    class Noting(ToyModel):
        def memory(self, query: StageQuery) -> Memory:
            asked.append(query.stage.name)
            return super().memory(query)

    answer = compile_plan(facts, ToyModel(facts), pins=("actor_train.layout=tp1,pp1,dp2",), rebuild_cost_model=Noting)
    assert isinstance(answer, NoPlan)
    assert "actor_train" in asked
    assert set(asked) <= {limit.stage for limit in answer.limits}


def test_with_an_offload_pin_the_memory_that_is_missing_is_told_and_not_the_pin() -> None:
    facts = small_facts(ranks_per_node=2, memory_bytes=MIB)
    answer = refused(facts, ("actor_train.offload=optimizer",))
    assert "actor_train needs" in " ".join(limit.sentence for limit in answer.limits)
    assert "excluded by a pin" not in " ".join(limit.sentence for limit in answer.limits)


def test_no_plan_is_found_after_the_deadline_and_nothing_more_is_asked() -> None:
    facts = small_facts(ranks_per_node=2)
    over = Limits(max_deterministic_time=0.5, deadline=time.monotonic())
    answer = compile_plan(facts, ToyModel(facts), limits=over)
    assert isinstance(answer, NoPlan)
    assert answer.status == "out_of_limit"
    assert answer.limits[0].sentence == "no plan was found in 0.5 s; give more with --time-limit."


def test_a_deadline_that_is_far_away_changes_no_choice() -> None:
    facts = small_facts(ranks_per_node=2)
    plans = [
        compile_plan(facts, ToyModel(facts), limits=Limits(deadline=deadline))
        for deadline in (None, time.monotonic() + 1000)
    ]
    assert plans[0] == plans[1]


def test_models_of_changed_jobs_heed_a_request_to_stop(facts: Facts) -> None:
    """Only the model of the job itself did: a refusal went on for minutes after it was asked to stop."""
    stop, asked = threading.Event(), []

    def remodel(changed: Facts) -> CostModel:
        asked.append(changed)
        stop.set()
        return ToyModel(changed)

    answer = compile_plan(facts, ToyModel(facts), limits=Limits(stop=stop), rebuild_cost_model=remodel)
    assert isinstance(answer, NoPlan)
    assert len(asked) == 1
    assert {change.key for change in answer.changes} == {"cluster.device.memory_bytes"}
    assert "time ran out before all shorter responses and larger clusters were tried" in answer.limits[-1].sentence


def test_how_much_all_need_is_told_of_choices_larger_than_any_device() -> None:
    """Blocks of a MiB summed past what the solver handles: a traceback told so."""
    large = small_facts(ranks_per_node=2, memory_bytes=7 * MIB)
    model = RandomModel(1, memory_scale=2.0**52)
    answer = compile_plan(large, model)
    assert isinstance(answer, NoPlan)
    needed = formulate(large, model, frontiers(large, model, (), is_limited=False), stage_transfers(large, model))
    assert needed.unit_bytes > MIN_UNIT_BYTES
    assert least_memory(needed.problem, Limits()) is not None


class Untimed(ToyModel):
    """A model whose choices may not be timed."""

    def seconds(self, query: StageQuery) -> Cost:
        raise AssertionError(f"{query.stage.name} was timed")


def test_a_job_with_a_stage_that_fits_nowhere_is_refused_before_any_choice_is_timed() -> None:
    facts = small_facts(ranks_per_node=2, memory_bytes=MIB)
    answer = compile_plan(facts, Untimed(facts), rebuild_cost_model=Untimed)
    assert isinstance(answer, NoPlan)
    assert "actor_train" in {limit.stage for limit in answer.limits}


def test_a_stage_that_only_offload_makes_fit_is_not_refused() -> None:
    facts = small_facts(ranks_per_node=2)
    spare = compile_plan(facts, ToyModel(facts))
    assert isinstance(spare, Plan)
    needed = max(spare.peak_bytes_per_rank)
    for memory_bytes in (int(needed * share) for share in (0.4, 0.6, 0.8)):
        smaller = small_facts(ranks_per_node=2, memory_bytes=memory_bytes)
        costs = StageCosts(smaller, ToyModel(smaller), ())
        for stage in smaller.graph.stages:
            (case,) = search_cases(synchronous(smaller.graph), 0)
            whole = frontier(smaller, ToyModel(smaller), stage, (), search_case=case, is_timed=False)
            assert costs.fits(stage, case) == any(whole.candidates.values())


def test_no_length_is_tried_if_the_shortest_leaves_a_stage_too_large() -> None:
    facts, lengths = small_facts(ranks_per_node=2, memory_bytes=MIB), list[int]()

    def remodel(changed: Facts) -> CostModel:
        lengths.append(changed.workload.response.max)
        return ToyModel(changed)

    answer = compile_plan(facts, ToyModel(facts), rebuild_cost_model=remodel)
    assert isinstance(answer, NoPlan)
    assert [length for length in lengths if length < facts.workload.response.max] == [2]


def test_the_solver_is_not_asked_whether_a_cluster_with_room_for_all_stages_on_all_ranks_is_enough(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Large(ToyModel):
        def memory(self, query: StageQuery) -> Memory:
            memory = super().memory(query)
            return Memory(resident=memory.resident.scaled(64), transient=memory.transient.scaled(64))

    asked, facts = noted_problems(monkeypatch), small_facts(ranks_per_node=1, memory_bytes=8 * 64 * MIB)
    answer = compile_plan(facts, Large(facts), rebuild_cost_model=Large)
    assert isinstance(answer, NoPlan)
    assert "cluster.nodes" in {change.key for change in answer.changes}
    assert {problem.num_ranks for problem in asked} == {1}
