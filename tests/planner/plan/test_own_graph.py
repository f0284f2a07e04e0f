"""A job's own graph of stages is planned where it makes a graph, and refused in one sentence where it does not."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from meshwright.planner.job.custom_graph import OwnGraph, is_same_graph
from meshwright.planner.job.job import Job
from meshwright.profiles.algorithms import PPO_GRAPH, Algorithm, graph_of
from meshwright.profiles.documents import canonical_json, parse
from meshwright.profiles.errors import BadInput
from meshwright.profiles.stages import Role
from tests.planner.jobs import stated

GENERATE = {"name": "actor_generate", "kind": "generation", "role": "actor", "writes": ["tokens", "prompt_lengths"]}
VALUE = {"name": "value", "kind": "inference", "role": "critic", "reads": ["tokens"], "writes": ["values"]}
SCORE = {"name": "score", "kind": "inference", "role": "reward", "reads": ["tokens"], "writes": ["scores"]}
HOSTED = {"name": "environment_score", "kind": "environment", "reads": ["tokens"], "writes": ["paid"]}
ACTOR = {"name": "actor_train", "kind": "training", "role": "actor", "reads": ["tokens", "values", "scores"]}
CRITIC = {"name": "critic_train", "kind": "training", "role": "critic", "reads": ["tokens", "values"]}
WHOLE = (GENERATE, VALUE, SCORE, ACTOR, CRITIC)

JOB: dict[str, Any] = {
    "models": {role: {"path": role} for role in ("actor", "critic", "reward")},
    "workload": {
        "batch_size": 8,
        "group_size": 4,
        "prompt": {"max": 8, "fixed": 8},
        "response": {"max": 8, "fixed": 8},
    },
}
MATHS = {"name": "maths", "function": "maths_answer"}


def job_of(stages: Sequence[Mapping[str, Any]], **changes: Any) -> Job:
    return parse(Job, json.dumps({**JOB, "algorithm": {"stages": stages}, **changes}), "job")


def alike(algorithm: Mapping[str, Any], **changes: Any) -> Job:
    return parse(Job, json.dumps({**JOB, "algorithm": algorithm, **changes}), "job")


def test_a_graph_of_the_jobs_own_has_its_stages_and_knows_which_weights_are_trained() -> None:
    job = job_of(WHOLE)
    assert not isinstance(job.algorithm, str)
    graph = job.algorithm.graph()
    assert graph.names == ("actor_generate", "value", "score", "actor_train", "critic_train")
    assert {stage.name for stage in graph.stages if stage.is_trained} == set(graph.names) - {"score"}
    assert graph.train_stage == {Role.ACTOR: "actor_train", Role.CRITIC: "critic_train"}
    assert graph.refit_targets == ("actor_generate", "value")
    assert parse(Job, canonical_json(job), "job") == job


def test_a_preset_in_the_words_of_a_job_is_the_preset() -> None:
    for graph in (PPO_GRAPH, graph_of("grpo", has_ref=False, has_environment=True), graph_of("distill")):
        assert stated(graph).graph() == graph
        assert is_same_graph(stated(graph).graph(), graph)
    assert not is_same_graph(graph_of("grpo"), graph_of("grpo", has_ref=False))


def test_the_reference_may_be_the_actor_without_its_adapter() -> None:
    graph = graph_of("grpo", ref_is_base=True)
    assert stated(graph).graph(ref_is_base=True) == graph


@pytest.mark.parametrize(
    ("stages", "sentence"),
    [
        (WHOLE[1:], "value reads tokens, which no stage writes; add a stage that does"),
        (
            ({**GENERATE, "reads": ["values"]}, *WHOLE[1:]),
            "actor_generate generates and reads values; it is given only prompts: let it read nothing",
        ),
        (
            ({**GENERATE, "writes": ["words"]}, *WHOLE[1:]),
            "actor_generate generates and does not write tokens, which all other stages read; add it",
        ),
        (({**GENERATE, "name": "draw"}, *WHOLE[1:]), "the stage that generates is called draw; call it actor_generate"),
        (
            ({**GENERATE, "role": "critic"}, *WHOLE[1:]),
            "actor_generate generates with the critic, .*let the actor generate",
        ),
        ((GENERATE, GENERATE, *WHOLE[1:]), "the stage actor_generate is listed 2 times; list it once"),
        ((GENERATE, SCORE, ACTOR), "actor_train reads values, which no stage writes; add a stage that does"),
        ((GENERATE, SCORE, VALUE, CRITIC), "no stage trains the actor, .* add one of kind=training and role=actor"),
        ((*WHOLE, {**CRITIC, "name": "again"}), "the critic is trained by critic_train and again; let one stage"),
        (
            (GENERATE, {**VALUE, "reads": ["tokens", "scores"]}, SCORE, ACTOR, CRITIC),
            "value reads scores before score writes it; put score first",
        ),
        (
            (GENERATE, {**VALUE, "reads": ["tokens", "scores"]}, {**SCORE, "reads": ["tokens", "values"]}, *WHOLE[3:]),
            r"value reads scores before score writes it, and they read from each other in a cycle \(value -> score -> "
            r"value\); let one of them read less",
        ),
        (
            (GENERATE, {**VALUE, "reads": ["tokens", "values"]}, *WHOLE[2:]),
            r"value reads values before value writes it, .* in a cycle \(value -> value\); let one of them read less",
        ),
        (
            (GENERATE, VALUE, {**SCORE, "writes": ["scores", "values"]}, ACTOR, CRITIC),
            "score writes values, and so does value; let one stage write it",
        ),
        ((GENERATE, VALUE, {**SCORE, "reads": []}, ACTOR, CRITIC), "score does not read tokens, .*; add it"),
        ((GENERATE, VALUE, {**SCORE, "writes": []}, ACTOR, CRITIC), "score writes nothing; .* or remove score"),
        (
            (GENERATE, VALUE, SCORE, {**ACTOR, "reads": ["tokens", "values"]}, CRITIC),
            "score writes scores, which no stage reads; let a later stage read what it writes, or remove score",
        ),
        ((GENERATE, VALUE, SCORE, {**ACTOR, "writes": ["loss"]}, CRITIC), "actor_train trains and writes loss; .*"),
        ((GENERATE, VALUE, CRITIC, SCORE, ACTOR), "score comes after critic_train, which trains; put .* last"),
        (
            (GENERATE, VALUE, {**SCORE, "role": None}, ACTOR, CRITIC),
            "score is a stage of inference and has no role; say whose weights it uses",
        ),
        ((GENERATE, VALUE, {**SCORE, "role": "judge"}, ACTOR, CRITIC), "stages.2.role is 'judge': input should be"),
        ((GENERATE, VALUE, {**SCORE, "kind": "scoring"}, ACTOR, CRITIC), "stages.2.kind is 'scoring': input should"),
        (
            (GENERATE, VALUE, {**SCORE, "name": "my.score"}, ACTOR, CRITIC),
            r"stages.2.name is 'my.score': string should",
        ),
        ((GENERATE, VALUE, {**SCORE, "modes": []}, ACTOR, CRITIC), "unknown key 'algorithm.stages.2.modes'"),
        ((GENERATE, VALUE, {"kind": "inference"}, ACTOR, CRITIC), "missing key 'algorithm.stages.2.name'; add it"),
        (
            (GENERATE, VALUE, SCORE, {**SCORE, "name": "again", "writes": ["more"]}, *WHOLE[3:]),
            "again writes more, which no stage reads",
        ),
        (
            (
                *WHOLE[:3],
                {**SCORE, "name": "again", "reads": ["tokens", "scores"], "writes": ["more"]},
                {**ACTOR, "reads": ["tokens", "values", "scores", "more"]},
                CRITIC,
            ),
            "score and again use the reward, which no stage trains, .*; let one stage write what all of them do",
        ),
        (
            (GENERATE, VALUE, SCORE, {**ACTOR, "may_stream": True}, CRITIC),
            "actor_train has may_stream=true, .*; set it to false",
        ),
        ((GENERATE, {**VALUE, "loss": "value"}, *WHOLE[2:]), "value is a stage of inference and has loss=value; only"),
        ((*WHOLE[:3], {**ACTOR, "loss": "dpo"}, CRITIC), "actor_train has loss='dpo'; use policy, value, distill, or"),
        ((*WHOLE[:3], {**ACTOR, "advantages": "gae"}, CRITIC), "actor_train has advantages='gae'; use the form module"),
        (
            (*WHOLE[:3], {**ACTOR, "loss": "distill", "advantages": "own:gae"}, CRITIC),
            "actor_train has loss=distill, .* and advantages=own:gae; remove one of them",
        ),
        ((GENERATE, {**VALUE, "reads": ["tokens", "tokens"]}, *WHOLE[2:]), "value reads tokens 2 times; list it once"),
        ((), "algorithm.stages"),
    ],
)
def test_stages_that_make_no_graph_are_refused_in_one_sentence(
    stages: Sequence[Mapping[str, Any]], sentence: str
) -> None:
    with pytest.raises(BadInput, match=sentence) as refused:
        job_of(stages)
    assert str(refused.value).startswith("job: ")
    assert str(refused.value).count("\n") == 0
    assert refused.value.exit_code == 2


@pytest.mark.parametrize(
    ("hosted", "reads", "sentence"),
    [
        ({"role": "reward"}, ["paid"], "environment_score runs on hosts and has role=reward; .*: remove it"),
        ({"name": "judge"}, ["paid"], "the stage that scores on hosts is called judge; call it environment_score"),
        ({"reads": ["tokens", "values"]}, ["paid"], "environment_score reads values, which the generation does not"),
        ({}, [], "environment_score writes paid, which no stage reads"),
    ],
)
def test_a_stage_on_hosts_that_cannot_be_is_refused(
    hosted: Mapping[str, Any], reads: Sequence[str], sentence: str
) -> None:
    stages = (GENERATE, VALUE, SCORE, {**HOSTED, **hosted}, {**ACTOR, "reads": [*ACTOR["reads"], *reads]}, CRITIC)
    with pytest.raises(BadInput, match=sentence):
        job_of(stages, rewards=[MATHS])


def test_what_hosts_write_is_read_by_stages_that_train() -> None:
    paid = {**ACTOR, "reads": [*ACTOR["reads"], "paid"]}
    assert job_of((GENERATE, VALUE, SCORE, HOSTED, paid, CRITIC), rewards=[MATHS]).rewards
    value = {**VALUE, "reads": ["tokens", "paid"]}
    with pytest.raises(BadInput, match="value reads paid, and only stages that train read what hosts write"):
        job_of((GENERATE, value, SCORE, HOSTED, ACTOR, CRITIC), rewards=[MATHS])
    with pytest.raises(BadInput, match="environment_score and environment_score are stages of the environment"):
        job_of((GENERATE, VALUE, SCORE, HOSTED, HOSTED, paid, CRITIC), rewards=[MATHS])


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"models": {"actor": {"path": "a"}, "critic": {"path": "c"}}}, "missing key 'models.reward': the job's own"),
        (
            {"models": {**JOB["models"], "ref": {"path": "r"}}},
            "models.ref: the job's own graph has no stage of that role; remove it",
        ),
        ({"rewards": [MATHS]}, "rewards: the job's own graph has no stage of the environment; add environment_score"),
        (
            {"workload": {**JOB["workload"], "dynamic_sampling": {"acceptance": 0.5}}},
            "workload.dynamic_sampling: value does not read scores, and it works on the groups that are selected by it",
        ),
    ],
)
def test_a_job_that_does_not_go_with_its_graph_is_refused(changes: Mapping[str, Any], sentence: str) -> None:
    with pytest.raises(BadInput, match=sentence):
        job_of(WHOLE, **changes)


def test_a_graph_with_a_stage_on_hosts_needs_rewards() -> None:
    paid = {**ACTOR, "reads": [*ACTOR["reads"], "paid"]}
    with pytest.raises(BadInput, match="missing key 'rewards': the job's own graph has the stage environment_score"):
        job_of((GENERATE, VALUE, SCORE, HOSTED, paid, CRITIC))


def test_the_settings_of_a_graph_are_those_of_the_preset_that_has_it() -> None:
    ppo = json.loads(canonical_json(stated(PPO_GRAPH)))
    models = {role: {"path": role} for role in ("actor", "critic", "ref", "reward")}
    job = alike(ppo, models=models, ppo={"clip_ratio": 0.3})
    assert (job.preset, job.settings.clip_ratio) == ("ppo", 0.3)
    with pytest.raises(BadInput, match="grpo: algorithm is the job's own graph, and its settings are under ppo"):
        alike(ppo, models=models, grpo={})


def test_of_presets_that_have_the_same_graph_the_settings_say_which_it_is() -> None:
    grpo = json.loads(canonical_json(stated(graph_of("grpo"))))
    models = {role: {"path": role} for role in ("actor", "ref", "reward")}
    unsaid = alike(grpo, models=models)
    assert (unsaid.presets, unsaid.preset) == (("grpo", "rloo", "reinforce++"), None)
    said = alike(grpo, models=models, rloo={"temperature": 0.9})
    assert (said.preset, said.settings.temperature) == ("rloo", 0.9)
    assert parse(Job, canonical_json(said), "job") == said
    with pytest.raises(BadInput, match=r"unknown key 'reinforce'; .* this job has its settings under rloo; move them"):
        alike(grpo, models=models, rloo={}, reinforce={})
    with pytest.raises(BadInput, match="group_size=1: algorithm=rloo compares the samples"):
        alike(grpo, models=models, rloo={}, workload={**JOB["workload"], "group_size": 1})


KEEP = {"name": "keep_best", "kind": "filter", "reads": ["scores"], "writes": ["kept"]}
KEPT_VALUE, KEPT_ACTOR, KEPT_CRITIC = (
    {**stage, "reads": [*stage["reads"], "kept"]} for stage in (VALUE, ACTOR, CRITIC)
)
FILTERED = (GENERATE, SCORE, KEEP, KEPT_VALUE, KEPT_ACTOR, KEPT_CRITIC)
BEST = {"workload": {**JOB["workload"], "best_of": 8}}


def test_all_but_what_scores_stands_behind_a_filter() -> None:
    job = job_of(FILTERED, **BEST)
    assert not isinstance(job.algorithm, str)
    assert parse(Job, canonical_json(job), "job") == job
    graph = job.algorithm.graph()
    assert graph.names == ("actor_generate", "score", "value", "actor_train", "critic_train")
    assert {consumer for producer, consumer, _ in graph.edges if producer == "score"} == set(graph.names[2:])
    assert graph.by_name["value"].reads == ("tokens", "scores")
    assert graph.by_name["actor_train"].reads == ("tokens", "values", "scores")


@pytest.mark.parametrize(("has_reward", "hosted"), [(True, False), (True, True), (False, True)])
@pytest.mark.parametrize("algorithm", ["ppo", "grpo"])
def test_a_preset_that_keeps_the_best_samples_is_told_with_a_filter(
    algorithm: Algorithm, has_reward: bool, hosted: bool
) -> None:
    preset = graph_of(algorithm, has_reward=has_reward, has_environment=hosted, has_filter=True)
    generate, *others = json.loads(canonical_json(stated(preset)))["stages"]
    for stage in others:
        if stage["kind"] in ("inference", "training") and stage.get("role") != "reward":
            stage["reads"] = [*(f for f in stage["reads"] if f != "scores" or stage["kind"] == "training"), "kept"]
    scorers = [stage for stage in others if stage.get("role") == "reward" or stage["kind"] == "environment"]
    keep = {**KEEP, "reads": [stage["writes"][0] for stage in scorers]}
    stages = (generate, *scorers, keep, *(stage for stage in others if stage not in scorers))
    assert is_same_graph(parse(OwnGraph, json.dumps({"stages": stages}), "graph").graph(), preset)


@pytest.mark.parametrize(
    ("stages", "sentence"),
    [
        ((GENERATE, SCORE, KEEP, {**KEEP, "name": "again"}, *FILTERED[3:]), "keep_best and again are filters, .*"),
        ((GENERATE, SCORE, {**KEEP, "role": "actor"}, *FILTERED[3:]), "keep_best filters and has role=actor; .*"),
        ((GENERATE, SCORE, {**KEEP, "writes": []}, *FILTERED[3:]), "keep_best writes nothing; let a later stage"),
        ((GENERATE, SCORE, {**KEEP, "writes": ["kept", "more"]}, *FILTERED[3:]), "keep_best filters and writes more"),
        ((GENERATE, SCORE, {**KEEP, "reads": []}, *FILTERED[3:]), "keep_best filters and reads nothing; .* scores"),
        (
            (GENERATE, SCORE, {**KEEP, "reads": ["scores", "values"]}, *FILTERED[3:]),
            "keep_best reads values, which is no score; .*: let it read that",
        ),
        ((GENERATE, KEEP, SCORE, *FILTERED[3:]), "keep_best reads scores before score writes it; put score first"),
        (
            (GENERATE, KEPT_VALUE, SCORE, KEEP, KEPT_ACTOR, KEPT_CRITIC),
            "value reads kept before keep_best writes it; put keep_best first",
        ),
        ((GENERATE, SCORE, KEEP, VALUE, *FILTERED[4:]), "value does not read kept, .* add it to its reads"),
        (
            (GENERATE, {**SCORE, "reads": ["tokens", "kept"]}, *FILTERED[2:]),
            "score reads kept, and it scores all samples before keep_best keeps some; .*",
        ),
        (
            (GENERATE, SCORE, HOSTED, KEEP, *FILTERED[3:4], {**KEPT_ACTOR, "reads": [*KEPT_ACTOR["reads"], "paid"]}),
            "environment_score scores what keep_best compares; let keep_best read what it writes",
        ),
        (WHOLE, "workload.best_of: the job's own graph has no stage that keeps the best samples; .*kind=filter"),
    ],
)
def test_a_filter_that_cannot_be_is_refused(stages: Sequence[Mapping[str, Any]], sentence: str) -> None:
    with pytest.raises(BadInput, match=sentence):
        job_of(stages, **BEST)


def test_a_filter_needs_more_samples_than_it_keeps() -> None:
    with pytest.raises(BadInput, match=r"missing key 'workload\.best_of': keep_best keeps some samples of a prompt"):
        job_of(FILTERED)


def test_a_graph_of_its_own_keeps_no_sampling_mask() -> None:
    with pytest.raises(BadInput, match=r"workload\.kept_tokens=8: the job's own graph has stages that do not read the"):
        job_of(WHOLE, workload={**JOB["workload"], "kept_tokens": 8})
