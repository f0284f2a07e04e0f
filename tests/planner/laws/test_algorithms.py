"""What compares the samples of a prompt is planned, proven and played like PPO; nothing of it speaks of a critic."""

from __future__ import annotations

import json
import random
import re

import pytest

from meshwright.cost_models.blended import cost_model
from meshwright.cost_models.protocol import CostModel
from meshwright.planner.analysis.explain import explain
from meshwright.planner.analysis.sensitivity import sensitivities
from meshwright.planner.analysis.whatif import whatif
from meshwright.planner.compile import best_plan
from meshwright.planner.job.job import Facts
from meshwright.planner.plan.cost_queries import Choice, query_for_choice
from meshwright.planner.plan.layout_and_schedule_rules import schedule_rules, schedules
from meshwright.planner.plan.plan import Plan, read_plan
from meshwright.planner.plan.steps_ahead import SearchCase, steps_ahead_patterns, synchronous
from meshwright.planner.plan.verify import verify
from meshwright.planner.program.check_program import check_program
from meshwright.planner.program.program import lower
from meshwright.planner.report.contents import Contents
from meshwright.planner.report.report import report
from meshwright.planner.search.re_evaluate import re_evaluated_or_violation
from meshwright.planner.simulation.sampled_durations import Sampled
from meshwright.planner.simulation.simulate import simulate
from meshwright.planner.solver.result import Limits
from meshwright.profiles.algorithms import Algorithm
from meshwright.profiles.documents import canonical_json, parse
from meshwright.profiles.errors import BadInput
from meshwright.profiles.layout import Layout
from meshwright.profiles.lengths import LengthSpec
from meshwright.profiles.schedule import Schedule
from tests.planner.jobs import RandomModel, ToyModel, critic_free_facts, small_facts
from tests.planner.plans import random_plan
from tests.seeds import seeds

CASES: list[tuple[Algorithm, bool]] = [("grpo", True), ("grpo", False), ("rloo", True), ("reinforce++", False)]
OF_A_CRITIC = re.compile(r"critic(?!al)|values?\b|ppo", re.IGNORECASE)
LIMITS = Limits(max_deterministic_time=20.0, gap=0.05)


def model_of(facts: Facts) -> CostModel:
    return cost_model(facts.cluster, facts.workload, facts.precision)


def facts_of(algorithm: Algorithm, has_ref: bool) -> Facts:
    return critic_free_facts(algorithm, has_ref=has_ref, facts=small_facts(memory_bytes=2**40))


@pytest.fixture(scope="module", params=CASES, ids=str)
def plan(request: pytest.FixtureRequest) -> Plan:
    facts = facts_of(*request.param)
    found = best_plan(facts, model_of(facts), limits=LIMITS)
    assert isinstance(found, Plan)
    return found


def test_a_plan_verifies_and_is_read_as_it_was_written(plan: Plan, tmp_path_factory: pytest.TempPathFactory) -> None:
    assert verify(plan) == ()
    assert [p.stage for p in plan.placements] == list(plan.graph.names)
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    path.write_text(canonical_json(plan))
    assert read_plan(path) == plan


def test_a_plan_has_no_word_of_a_critic(plan: Plan) -> None:
    assert not OF_A_CRITIC.search(canonical_json(plan))
    assert not OF_A_CRITIC.search(str(explain(plan)).replace("critic_adapter=None", ""))
    simulation = simulate(plan, Sampled(plan, model_of, seed=0), steps=3, traced=True)
    page = report(Contents(plan=plan, simulation=simulation))
    assert not OF_A_CRITIC.search(re.sub(r"<style>.*?</style>", "", page, flags=re.DOTALL))
    assert "critic" not in page.replace("critical", "")


def test_a_program_is_sound_and_is_simulated(plan: Plan) -> None:
    assert check_program(lower(plan), plan.graph) == ()
    assert simulate(plan, steps=4).steps.mean == pytest.approx(plan.period_seconds)


def test_what_if_and_sensitivities_are_asked_of_the_graph_at_hand(plan: Plan) -> None:
    answered = whatif(plan, [{"workload.response.fixed": 64}], model_of)
    assert answered.answers[0].metrics is not None
    assert {one.name for one in sensitivities(plan, model_of)} >= {"batch size", "response length"}


@seeds(4, all=24)
def test_every_drawn_plan_verifies_clean_however_far_stages_work_ahead(seed: int) -> None:
    algorithm, has_ref = CASES[seed % len(CASES)]
    facts = facts_of(algorithm, has_ref)
    ahead = steps_ahead_patterns(facts.graph, 2)[seed % 3]
    drawn = random_plan(seed, facts, RandomModel(seed, memory_scale=1.0), ahead)
    assert verify(drawn) == ()
    assert check_program(lower(drawn), drawn.graph) == ()


def test_a_plan_of_ppo_is_no_start_for_another_algorithm() -> None:
    facts = critic_free_facts()
    began = re_evaluated_or_violation(random_plan(1), facts, ToyModel(facts), ())
    assert began == "it is a plan for ppo, and its stages differ from those of grpo."


def test_a_plan_with_a_stage_of_another_algorithm_is_refused() -> None:
    drawn, ppo = random_plan(1, facts_of("grpo", True)), random_plan(1)
    odd = drawn.model_copy(update={"placements": (*drawn.placements, ppo.placement("critic_train"))})
    assert "critic_train is placed but is not a stage of grpo; remove it." in verify(odd)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"algorithm": "ppo"}, r"missing key 'models.critic': algorithm=ppo has a stage of that role; add it\.$"),
        ({"workload": {"group_size": 1}}, "group_size=1: algorithm=grpo compares the samples of a prompt"),
        ({"workload": {"group_size": 5}}, "batch_size=16 is not a multiple of group_size=5, .*; use 15 or 20"),
        ({"algorithm": "gspo"}, "algorithm"),
    ],
)
def test_facts_that_are_of_no_algorithm_are_refused(change: dict[str, object], sentence: str) -> None:
    written = json.loads(canonical_json(critic_free_facts()))
    for key, value in change.items():
        written[key] = written[key] | value if isinstance(value, dict) else value
    with pytest.raises(BadInput, match=sentence):
        parse(Facts, json.dumps(written), "facts")


def test_a_critic_is_refused_where_none_is_trained() -> None:
    written = json.loads(canonical_json(critic_free_facts()))
    written["models"]["critic"] = written["models"]["reward"]
    with pytest.raises(BadInput, match=r"models.critic: algorithm=grpo has no stage of that role; remove it"):
        parse(Facts, json.dumps(written), "facts")


def test_the_facts_of_ppo_say_so_and_have_no_model_of_another_algorithm() -> None:
    written = json.loads(canonical_json(small_facts()))
    assert written["algorithm"] == "ppo"
    assert written["workload"]["group_size"] == 1
    assert set(written["models"]) == {"actor", "critic", "ref", "reward"}


def test_a_group_is_delivered_whole() -> None:
    facts = critic_free_facts().model_copy(update={"staleness": 2})
    generate, scope = facts.graph.stages[0], SearchCase(ahead=synchronous(facts.graph), keeps_in_flight=True)
    assert not any(schedule.overcommit for schedule in schedules(facts, generate, Layout(dp=2), scope))
    found = schedule_rules(facts, generate, Layout(dp=2), Schedule(generation_slots=8, overcommit=2))
    assert "overcommit=2 defers single sequences, and the 4 of a prompt are compared with each other; use 0." in found


def generation_terms(facts: Facts, layout: Layout, slots: int) -> dict[str, float]:
    choice = Choice(layout, Schedule(generation_slots=slots))
    cost = model_of(facts).seconds(query_for_choice(facts, facts.graph.stages[0], choice, deferral=0))
    return {term.name: term.amount for term in cost.merged().terms}


@pytest.mark.parametrize("slots", [2, 4, 8])
def test_a_prompt_is_prefilled_once_for_its_group(slots: int) -> None:
    lengths = {"prompt": LengthSpec(max=400, fixed=400), "response": LengthSpec(max=64, histogram=((8, 1), (64, 1)))}
    base = small_facts(memory_bytes=2**40, batch_size=32)
    facts = base.model_copy(update={"workload": base.workload.model_copy(update=lengths)})
    groups = [critic_free_facts("reinforce++", group_size=size, facts=facts) for size in (1, 2, 4)]
    alone, pairs, fours = (generation_terms(one, Layout(dp=2), slots) for one in groups)
    assert alone["prefill layers"] > 1.5 * pairs["prefill layers"] > 2 * fours["prefill layers"]
    assert alone["decode layers"] == pairs["decode layers"] == fours["decode layers"]


def test_rows_that_do_not_come_out_even_in_groups_are_prefilled_one_by_one() -> None:
    facts = critic_free_facts(group_size=8)  # two prompts
    assert generation_terms(facts, Layout(dp=4), 4) == generation_terms(
        critic_free_facts(group_size=1), Layout(dp=4), 4
    )


@seeds(2, all=6)
def test_the_search_by_arithmetic_is_never_above_what_a_choice_of_groups_takes(seed: int) -> None:
    draw = random.Random(seed)
    facts = critic_free_facts(group_size=draw.choice((2, 4, 8)))
    model = model_of(facts)
    stage = facts.graph.stages[0]
    layout = draw.choice([Layout(dp=4), Layout(tp=2, dp=2), Layout(pp=2, dp=2)])
    schedule = draw.choice(schedules(facts, stage, layout))
    least = model.lower_bound_seconds(stage, facts.models.actor, 4, 0)
    assert least <= model.seconds(query_for_choice(facts, stage, Choice(layout, schedule), deferral=0)).total
