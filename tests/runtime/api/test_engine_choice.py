"""A plan of a job with engine=auto has the engine with the shortest step, and says what the others would take."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import yaml

from meshwright import api
from meshwright.cost_models.cost import Source
from meshwright.cost_models.generation_cost import ENGINE_LOAD, ENGINE_SLEEP, ENGINE_WAKE
from meshwright.planner.analysis.explain import explain
from meshwright.planner.analysis.optional_features import engine_choice
from meshwright.planner.analysis.wave_size import with_wave
from meshwright.planner.job.engine_limits import engine_violations, engines_of
from meshwright.planner.job.job import Facts
from meshwright.planner.plan.cost_queries import cost_model_of
from meshwright.planner.search.re_evaluate import re_evaluate
from meshwright.profiles.algorithms import PPO_GRAPH, graph_of
from meshwright.profiles.errors import BadInput
from meshwright.profiles.frameworks import EAGER, NOT_RUN, SGLANG, VLLM, EngineSleep
from meshwright.profiles.harness import TimingResult, generation_points, points, record
from meshwright.profiles.stages import GENERATE, Role, StageGraph
from meshwright.profiles.table import EngineTimings, Table, WeightLoad, shape_of
from tests.cost_models.tables import PROVENANCE
from tests.planner.analysis.test_oversampling import sampled_facts
from tests.planner.jobs import adapted_facts, critic_free_facts, quantised_facts, small_facts
from tests.planner.plan.test_engine_rules import TURNS
from tests.runtime.checkpoints import name_end_tokens, write_checkpoint
from tests.runtime.command import Call
from tests.runtime.small_job import VOCAB_SIZE, write_job

FACTS = small_facts(ranks_per_node=2, batch_size=8, response=32, memory_bytes=2**34, num_heads=2)
LONGER = small_facts(ranks_per_node=2, batch_size=8, response=200, memory_bytes=2**34, num_heads=2)
BOTH = (EAGER, VLLM)
LOOSE = api.Limits(gap=0.3)


def table_with(vllm_factor: float, graph: StageGraph = PPO_GRAPH, facts: Facts = FACTS) -> Table:
    """A table in which a round of vLLM takes this multiple of one of our own engine."""
    specs = {role: facts.models.spec(role) for role in graph.roles}
    measured = [record(point, timed(1e-3)) for point in points(graph, specs, facts.workload, facts.cluster)]
    shapes, depths = [shape_of(FACTS.models.spec(Role.ACTOR), tp) for tp in (1, 2)], (1, 4)
    rounds = [point for shape in shapes for point in generation_points(shape, depths, FACTS.workload, "cpu")]
    timings = EngineTimings(
        engine=VLLM,
        version="0.32.0",
        kernels="AVX512",
        date="2026-11-27",
        measurements=tuple(record(point, timed(1e-3 * vllm_factor)) for point in rounds),
        loads=tuple(
            WeightLoad(shape=shape, num_layers=depth, seconds=1e-3, spread_seconds=0.0, repeats=3)
            for shape in shapes
            for depth in depths
        ),
        sleep=EngineSleep(freed_bytes_per_second=3e9, taken_bytes_per_second=1e9),
    )
    provenance = PROVENANCE.model_copy(update={"device": "toy", "kind": "cpu", "precision": "bf16", "num_ranks": 2})
    return Table(provenance=provenance, measurements=tuple(measured), engines=(timings,))


def with_workload(facts: Facts, **changes: object) -> Facts:
    return facts.model_copy(update={"workload": facts.workload.model_copy(update=changes)})


@cache
def planned(vllm_factor: float, *pins: str) -> api.Plan:
    found = api.plan(FACTS, table_with(vllm_factor), engines=BOTH, pins=pins, limits=LOOSE)
    assert isinstance(found, api.Plan)
    return found


def timed(seconds: float) -> TimingResult:
    return TimingResult(median_seconds=seconds, spread_seconds=0.0, repeats=3)


@pytest.mark.parametrize(("factor", "engine"), [(0.2, VLLM), (5.0, EAGER)])
def test_the_engine_with_the_shortest_step_is_chosen_and_the_other_is_said(factor: float, engine: str) -> None:
    plan = planned(factor)
    assert plan.facts.engine == engine
    choice = engine_choice(plan)
    assert choice is not None
    assert choice.step_seconds[engine] == plan.period_seconds == min(choice.step_seconds.values())
    assert set(choice.step_seconds) == set(BOTH)
    [sentence] = choice.sentences
    other = next(name for name in BOTH if name != engine)
    assert sentence == (
        f"engine {engine}: a step takes {plan.period_seconds:.3f} s; "
        f"{other} would take {choice.step_seconds[other]:.3f} s"
    )
    assert not api.verify(plan)
    assert explain(plan).engine == choice


def test_a_plan_for_vllm_is_one_that_runs() -> None:
    plan = planned(0.2)
    assert plan.placement(GENERATE).layout.pp == 1
    assert plan.pins == ()


def test_the_load_of_weights_is_in_the_simulated_generation_once() -> None:
    plan = planned(0.2)
    assert plan.placement(GENERATE).cost.amount(ENGINE_LOAD) == pytest.approx(1e-3)
    steps = api.simulate(plan, table_with(0.2), steps=2).steps
    assert steps.seconds[-1] == pytest.approx(plan.period_seconds, rel=1e-3)  # all responses have the same length


def test_the_load_of_weights_is_in_a_simulated_step_of_several_waves_once() -> None:
    facts = with_wave(sampled_facts(acceptance=1.0, facts=FACTS), 1)  # two groups, each of which is a wave
    table = table_with(0.2, graph_of("grpo", has_waves=True), facts)
    plan = api.plan(facts, table, engines=BOTH, limits=LOOSE)
    assert isinstance(plan, api.Plan)
    assert plan.placement(GENERATE).cost.amount(ENGINE_LOAD) == pytest.approx(1e-3)
    steps = api.simulate(plan, table, steps=2).steps
    assert steps.seconds[-1] == pytest.approx(plan.period_seconds, rel=1e-3)  # all responses have the same length


def test_the_sleep_of_an_engine_is_costed_as_it_was_timed() -> None:
    plan = planned(0.2)
    terms = {term.name: term for term in plan.placement(GENERATE).cost.terms}
    wake, sleep = terms[ENGINE_WAKE], terms[ENGINE_SLEEP]
    assert wake.amount == pytest.approx(3 * sleep.amount)
    assert {wake.source, sleep.source} == {Source.MEASURED}


def test_engines_share_the_time_of_a_search() -> None:
    plan = api.plan(FACTS, table_with(5.0), engines=BOTH, limits=api.Limits.for_seconds(60.0, gap=0.3))
    assert isinstance(plan, api.Plan)
    choice = engine_choice(plan)
    assert choice is not None
    assert set(choice.step_seconds) == set(BOTH)


def test_equations_are_said_to_be_equations() -> None:
    plan = api.plan(FACTS, engines=BOTH, limits=LOOSE)
    assert isinstance(plan, api.Plan)
    choice = engine_choice(plan)
    assert choice is not None
    assert list(choice.sentences)[-1] == (
        "generation by meshwright-eager and vllm comes from equations; `meshwright profile` measures the engines that "
        "the job names"
    )


def test_an_engine_that_does_not_run_the_job_is_excluded_with_its_reason() -> None:
    narrow = small_facts(ranks_per_node=2, batch_size=8, response=32, memory_bytes=2**34, num_heads=4)
    plan = api.plan(narrow, engines=BOTH, limits=LOOSE)
    assert isinstance(plan, api.Plan)
    assert plan.facts.engine == EAGER
    choice = engine_choice(plan)
    assert choice is not None
    assert "elements, and the actor's have 16" in choice.excluded[VLLM]
    assert [line.split(":")[0] for line in choice.sentences] == [
        "engine meshwright-eager",
        "engine vllm is excluded",
    ]


def test_a_pin_that_excludes_an_engine_is_its_reason() -> None:
    plan = planned(0.2, f"{GENERATE}.pp=2")
    assert plan.facts.engine == EAGER
    choice = engine_choice(plan)
    assert choice is not None
    assert choice.excluded == {
        VLLM: f"pin '{GENERATE}.pp=2': pp=2 shards layers, and each process of vllm has all of them on a CPU; use pp=1."
    }


def test_other_facts_drop_what_was_known_of_the_engines() -> None:
    plan = planned(0.2)
    more = FACTS.model_copy(update={"workload": FACTS.workload.model_copy(update={"batch_size": 16}), "engine": VLLM})
    assert plan.engine_options is not None
    assert re_evaluate(plan, more, cost_model_of(more)).engine_options is None


APART = (f"{GENERATE}.pool=0:1", "actor_train.pool=1:1")
FORMS: dict[str, tuple[Facts, tuple[str, ...]]] = {
    "an adapter": (adapted_facts(FACTS), ()),
    "turns": (with_workload(FACTS, turns=TURNS), ()),
    "turns ahead": (with_workload(FACTS, turns=TURNS).model_copy(update={"staleness": 1}), ()),
    "streams": (LONGER, (*APART, "ref_logprob.pool=1:1", "ref_logprob.chunk_tokens=128")),
    "batches in flight": (
        FACTS.model_copy(update={"staleness": 2, "cache_after_refit": "recompute"}),
        (*APART, f"{GENERATE}.batches_in_flight=2"),
    ),
}
"""Jobs of GRPO on two ranks, and pins."""


@pytest.mark.parametrize("name", FORMS)
def test_a_plan_of_either_engine_is_found_and_one_of_them_chosen_for_jobs_of_every_form(name: str) -> None:
    facts, pins = FORMS[name]
    facts = critic_free_facts(facts=facts)
    plan = api.plan(facts, engines=BOTH, pins=pins, limits=LOOSE)
    assert isinstance(plan, api.Plan)
    choice = engine_choice(plan)
    assert choice is not None
    assert (set(choice.step_seconds), choice.excluded) == (set(BOTH), {})
    by_vllm = api.plan(facts.model_copy(update={"engine": VLLM}), pins=pins, limits=LOOSE)
    assert isinstance(by_vllm, api.Plan)
    assert not api.verify(by_vllm)
    assert not [*engine_violations(by_vllm.facts)]


def test_what_vllm_does_not_do_with_these_jobs_is_its_reason() -> None:
    keeping = critic_free_facts(facts=FACTS.model_copy(update={"staleness": 2}))
    plan = api.plan(keeping, engines=BOTH, pins=(*APART, f"{GENERATE}.batches_in_flight=2"), limits=LOOSE)
    assert isinstance(plan, api.Plan)
    choice = engine_choice(plan)
    assert choice is not None
    assert "give cache_after_refit: recompute, or use 1" in choice.excluded[VLLM]


def test_an_engine_that_was_never_tried_is_said_to_be_so_and_is_not_chosen_by_a_plan() -> None:
    device = FACTS.cluster.device.model_copy(update={"kind": "cuda"})
    on_gpus = FACTS.model_copy(update={"cluster": FACTS.cluster.model_copy(update={"device": device})})
    chosen = api.plan(on_gpus, engines=(EAGER, SGLANG), limits=LOOSE)
    assert isinstance(chosen, api.Plan)
    choice = engine_choice(chosen)
    assert choice is not None
    assert chosen.facts.engine == EAGER
    assert choice.excluded == {SGLANG: f"{NOT_RUN[SGLANG]}; name it as engine to plan with it."}
    named = api.plan(on_gpus.model_copy(update={"engine": SGLANG}), limits=LOOSE)
    assert isinstance(named, api.Plan)
    choice = engine_choice(named)
    assert choice is not None
    assert list(choice.sentences)[1:] == [f"engine sglang: {NOT_RUN[SGLANG]}"]


DEGREES = {
    "verl": "actor_rollout_ref.rollout.tensor_model_parallel_size",
    "nemo-rl": "policy.generation.vllm_cfg.tensor_parallel_size",
}


@pytest.mark.parametrize("trainer", DEGREES)
def test_a_plan_that_runs_with_vllm_is_exported_with_its_degrees_and_measured_costs(
    trainer: str, tmp_path: Path
) -> None:
    table, facts = table_with(0.2), FACTS.model_copy(update={"engine": VLLM})
    plan = api.plan_for(trainer, facts, table, pins=(f"{GENERATE}.tp=1",), limits=LOOSE)
    assert isinstance(plan, api.Plan)
    found = api.export_plan(plan, tmp_path / "out", to=trainer, table=table)
    assert isinstance(found, api.Exported)
    assert (found.plan, found.inexpressible) == (plan, ())
    assert plan.facts.engine == VLLM
    assert {setting.value for setting in found.settings if setting.key == DEGREES[trainer]} == {1}
    assert plan.placement(GENERATE).layout.num_ranks == plan.placement(GENERATE).layout.dp
    equations = api.plan_for(trainer, facts, pins=plan.pins, limits=LOOSE)
    assert isinstance(equations, api.Plan)
    assert equations.placement(GENERATE).cost != plan.placement(GENERATE).cost


def written(directory: Path, **changes: object) -> Path:
    """A job that vLLM can generate for."""
    path = write_job(directory, num_ranks=2)
    write_checkpoint(directory / "actor", vocab_size=VOCAB_SIZE, head_dim=32)
    name_end_tokens(directory / "actor", 1)
    path.write_text(yaml.safe_dump({**yaml.safe_load(path.read_text()), "engine": "auto", **changes}))
    return path


NAMED = {"engines": {"vllm": {"python": "no/python"}}}


def test_a_job_chooses_among_our_engine_and_those_that_it_names(tmp_path: Path) -> None:
    job = api.read_job(written(tmp_path, **NAMED))
    facts = api.resolve(job, tmp_path)
    assert facts.engine == EAGER
    assert engines_of(job, facts) == BOTH
    alone = api.read_job(written(tmp_path))
    assert engines_of(alone, facts) == (EAGER,)


def test_a_plan_with_a_chosen_engine_is_one_of_the_job_that_names_it(call: Call, tmp_path: Path) -> None:
    job = written(tmp_path, **NAMED)
    done = call("plan", job, "-o", tmp_path / "plan.json", "--gap", 0.3)
    assert done.code == 0, done.err
    plan = api.read_plan(tmp_path / "plan.json")
    choice = engine_choice(plan)
    assert choice is not None
    for sentence in choice.sentences:
        assert sentence in done.out
    assert next(iter(choice.sentences)) in call("explain", tmp_path / "plan.json").out
    by_vllm = plan.model_copy(update={"facts": plan.facts.model_copy(update={"engine": VLLM})})
    by_vllm.require_made_for(api.read_job(job), tmp_path)
    with pytest.raises(BadInput, match="made for another job: engine is 'vllm' in the plan"):
        by_vllm.require_made_for(api.read_job(written(tmp_path)), tmp_path)


def test_engines_none_of_which_can_run_the_job_are_refused_with_a_reason() -> None:
    with pytest.raises(BadInput, match="engine vllm: it is started on CPUs only"):
        api.plan(quantised_facts(), engines=("vllm", "vllm"))
