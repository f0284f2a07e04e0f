"""A distillation is planned, proven, played and explained like any other graph; nothing of it speaks of rewards."""

from __future__ import annotations

import json
import random
import re
from functools import cache

import pytest

from benchmarks.search.brute_force import best_makespan
from meshwright.cost_models.memory_cost import DISTRIBUTIONS
from meshwright.planner.analysis.explain import explain
from meshwright.planner.analysis.sensitivity import sensitivities
from meshwright.planner.analysis.whatif import whatif
from meshwright.planner.compile import compile_plan
from meshwright.planner.job.job import Facts
from meshwright.planner.plan.cost_queries import stage_transfers
from meshwright.planner.plan.evaluate import evaluate
from meshwright.planner.plan.pins import parse_pins
from meshwright.planner.plan.plan import Plan
from meshwright.planner.plan.steps_ahead import search_cases, steps_ahead_patterns
from meshwright.planner.plan.verify import verify
from meshwright.planner.program.check_program import check_program
from meshwright.planner.program.program import lower
from meshwright.planner.report.contents import Contents
from meshwright.planner.report.report import report
from meshwright.planner.search.formulate import formulate
from meshwright.planner.search.frontiers import frontiers
from meshwright.planner.simulation.sampled_durations import Sampled
from meshwright.planner.simulation.simulate import simulate
from meshwright.planner.solver.result import Limits
from meshwright.planner.solver.solve import solve
from meshwright.profiles.documents import canonical_json, parse
from meshwright.profiles.errors import BadInput
from tests.planner.drawn import model_of
from tests.planner.jobs import RandomModel, distill_facts, small_facts
from tests.planner.plans import random_plan
from tests.planner.problems import everywhere
from tests.planner.proofs import require_proof
from tests.seeds import seeds

OF_REWARDS = re.compile(r"critic(?!al)|values?\b|ppo|reward|\bref(erence)?\b|ref_", re.IGNORECASE)


@cache
def planned(num_teachers: int = 1, teacher_top_k: int | None = None) -> Plan:
    facts = distill_facts(num_teachers, small_facts(memory_bytes=2**40), teacher_top_k)
    plan = compile_plan(facts, model_of(facts), limits=Limits(max_deterministic_time=20.0))
    assert isinstance(plan, Plan), plan
    return plan


@pytest.mark.parametrize(("num_teachers", "teacher_top_k"), [(1, None), (2, None), (2, 8)])
def test_a_plan_verifies_is_read_back_and_takes_its_time(num_teachers: int, teacher_top_k: int | None) -> None:
    plan = planned(num_teachers, teacher_top_k)
    assert verify(plan) == ()
    assert evaluate(plan) == plan
    assert parse(Plan, canonical_json(plan), "plan") == plan
    assert check_program(lower(plan), plan.graph) == ()
    assert simulate(plan, steps=4).steps.mean == pytest.approx(plan.period_seconds)


@pytest.mark.parametrize("num_teachers", [1, 2])
def test_what_is_said_of_a_plan_has_no_word_of_rewards(num_teachers: int) -> None:
    plan = planned(num_teachers)
    simulation = simulate(plan, Sampled(plan, model_of, seed=0), steps=3, traced=True)
    page = report(Contents(plan=plan, simulation=simulation))
    explanation = str(explain(plan)).replace("rewards=None", "").replace("critic_adapter=None", "")
    for said in (explanation, re.sub(r"<style>.*?</style>", "", page, flags=re.DOTALL)):
        assert not OF_REWARDS.search(said), OF_REWARDS.search(said)
        assert "teacher" in said


def test_what_if_and_sensitivities_are_asked_of_the_teachers_too() -> None:
    plan = planned()
    answers = whatif(plan, [{"models.teacher.num_layers": 12}], model_of).answers
    assert answers[0].metrics is not None
    assert answers[0].metrics.step_seconds > plan.period_seconds
    assert {one.name for one in sensitivities(plan, model_of)} >= {"batch size", "response length"}


def test_distributions_cost_their_bytes_between_stages_and_in_memory() -> None:
    """A student reads 8 bytes for each of the k tokens and 4 for the rest, at each token of a response."""
    sampled, cut = planned(2), planned(2, 8)
    workload = cut.facts.workload
    tokens = workload.batch_size * workload.response_lengths.mean

    def bytes_between(plan: Plan) -> float:
        transfers = stage_transfers(plan.facts, model_of(plan.facts))
        [found] = [x for x in transfers if (x.producer, x.consumer) == ("teacher_2_logprob", "actor_train")]
        return found.num_bytes

    assert bytes_between(cut) - bytes_between(sampled) == tokens * (8 * 8 + 4)
    assert cut.placement("actor_train").host.amount(DISTRIBUTIONS) == 2 * tokens * (8 * 8 + 4)
    for plan, is_cut in ((sampled, False), (cut, True)):
        for name in ("teacher_logprob", "teacher_2_logprob", "actor_train"):
            placement = plan.placement(name)
            assert (placement.cost.amount(DISTRIBUTIONS) > 0) == is_cut
            assert (placement.transient.amount(DISTRIBUTIONS) > 0) == is_cut
            assert not placement.host.amount(DISTRIBUTIONS) or is_cut
    assert cut.graph.streaming == ()


def test_distributions_that_fill_the_hosts_are_refused_with_a_way_out() -> None:
    plan = planned(2, 8)
    small = plan.facts.cluster.model_copy(update={"host_memory_bytes": 2**20})
    facts = parse(Facts, canonical_json(plan.facts.model_copy(update={"cluster": small})), "facts")
    sentences = verify(plan.model_copy(update={"facts": facts, "digests": {**plan.digests, **facts.digests()}}))
    assert any("lower distill.teacher_top_k" in sentence for sentence in sentences)


@seeds(3, all=12)
def test_every_drawn_plan_verifies_clean_however_far_stages_work_ahead(seed: int) -> None:
    facts = distill_facts(1 + seed % 2, small_facts(memory_bytes=2**40), 4 if seed % 3 == 1 else None)
    drawn = random_plan(
        seed, facts, RandomModel(seed, memory_scale=1.0), steps_ahead_patterns(facts.graph, 2)[seed % 3]
    )
    assert verify(drawn) == ()
    assert check_program(lower(drawn), drawn.graph) == ()


@seeds(3, all=12)
def test_the_search_equals_trying_everything(seed: int) -> None:
    facts, model = distill_facts(1, small_facts(ranks_per_node=2, batch_size=4)), RandomModel(seed, 2**28.4)
    draw = random.Random(seed)
    pinned = (
        "teacher_logprob.micro_batch_size=1",
        "actor_logprob.micro_batch_size=1",
        f"actor_train.layout={draw.choice(('tp2', 'dp2', 'pp2'))}",
        *(f"actor_train.{key}" for key in ("micro_batch_size=1", "recompute=none")),
    )
    scope = next(scope for ahead in steps_ahead_patterns(facts.graph, 0) for scope in search_cases(ahead, 0))
    found = frontiers(facts, model, parse_pins(pinned, facts.graph), search_case=scope)
    problem = everywhere(formulate(facts, model, found, stage_transfers(facts, model)).problem)
    best = best_makespan(problem)
    assert best is not None
    assert solve(problem, Limits()).objective == best


@pytest.mark.parametrize("num_teachers", [1, 2])
def test_a_proof_holds(num_teachers: int) -> None:
    facts = distill_facts(num_teachers, small_facts(ranks_per_node=2, batch_size=4))
    require_proof(facts)


def test_teachers_have_their_own_shapes_and_run_where_they_are_fastest() -> None:
    plan = planned(2)
    sizes = [plan.facts.models.by_name[role].num_params for role in ("actor", "teacher", "teacher_2")]
    assert sizes == sorted(set(sizes))
    assert set(plan.graph.streaming) == {"teacher_logprob", "teacher_2_logprob"}


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"teacher": None}, "missing key 'models.teacher': algorithm=distill has a stage of that role; add it"),
        ({"ref": "actor"}, "models.ref: algorithm=distill has no stage of that role; remove it"),
    ],
)
def test_facts_without_a_teacher_or_with_others_are_refused(change: dict[str, str | None], sentence: str) -> None:
    written = json.loads(canonical_json(distill_facts()))
    for role, model in change.items():
        written["models"][role] = None if model is None else written["models"][model]
    with pytest.raises(BadInput, match=sentence):
        parse(Facts, json.dumps(written), "facts")
