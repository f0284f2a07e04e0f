"""A job: how its cluster is written, and whether a plan was made for it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from meshwright.cost_models.params import stage_parts
from meshwright.planner.job.job import Facts, Job, PPOJob, read_job, require_job, resolve
from meshwright.planner.job.rewards_and_tools import Reward
from meshwright.planner.job.sections import ClusterSpec, MixedSpec, Models, ModelSource
from meshwright.planner.job.tokenizer_facts import TokenizerFacts
from meshwright.profiles.documents import canonical_json, parse
from meshwright.profiles.errors import BadInput
from meshwright.profiles.hardware import Cluster
from meshwright.profiles.lengths import LengthSpec
from meshwright.profiles.model_parts.adapter import Adapter
from meshwright.profiles.stages import Role
from meshwright.profiles.workload import Workload

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 260,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
LENGTHS = LengthSpec(max=8, fixed=8)


@pytest.fixture
def job(tmp_path: Path) -> Job:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    source = ModelSource(path="config.json")
    return PPOJob(
        models=Models(actor=source, critic=source, ref=source, reward=source),
        workload=Workload(batch_size=8, prompt=LENGTHS, response=LENGTHS),
    )


@pytest.mark.parametrize(
    ("cluster", "kind"),
    [
        ("a100-80gb", str),
        ({"device": "a100-80gb", "nodes": 2}, ClusterSpec),
        ({"parts": [{"device": "a100-80gb"}, {"device": "l40s"}]}, MixedSpec),
    ],
)
def test_a_cluster_is_a_name_or_of_one_kind_of_node_or_where_it_has_parts_of_several(
    cluster: object, kind: type[object], job: Job
) -> None:
    written = job.model_dump(mode="json") | {"cluster": cluster}
    assert isinstance(parse(Job, json.dumps(written), "job").cluster, kind)


def others(facts: Facts) -> dict[str, object]:
    """Of every fact that a plan holds, another one."""
    actor = replace(facts.models.actor, num_layers=2)
    assert isinstance(facts.cluster, Cluster)
    device = facts.cluster.device.model_copy(update={"kind": "cuda"})
    return {
        "algorithm": "grpo",
        "models": facts.models.model_copy(update={"actor": actor}),
        "cluster": facts.cluster.model_copy(update={"device": device}),
        "precision": "fp32",
        "workload": facts.workload.model_copy(update={"batch_size": 16}),
        "staleness": 2,
        "controllers": True,
        "cache_after_refit": "recompute",
        "old_logprobs": "generator",
        "teacher_top_k": 8,
        "engine": "vllm",
        "generation_weights": "fp8",
        "rewards": (Reward(name="exact", function="exact_match").load,),
        "ref_is_base": True,
        "tokenizer": TokenizerFacts(end_tokens=(1,)),
    }


@pytest.mark.parametrize("name", Facts.model_fields)
def test_a_plan_that_holds_another_fact_than_the_job_is_refused(name: str, job: Job, tmp_path: Path) -> None:
    facts = resolve(job, tmp_path)
    require_job(facts, job, tmp_path)
    with pytest.raises(BadInput, match=r"^the plan was made for another job: .* plan this job again\.$") as caught:
        require_job(facts.model_copy(update={name: others(facts)[name]}), job, tmp_path)
    assert {"tokenizer": "eos_token_id"}.get(name, name) in str(caught.value)


def adapted(job: Job, **paths: str) -> Job:
    """The job with an adapter of the actor, and some models elsewhere."""
    actor = ModelSource(path="config.json", adapter=Adapter(rank=4, alpha=8.0))
    others = {role: ModelSource(path=path) for role, path in paths.items()}
    return job.model_copy(update={"models": job.models.model_copy(update={"actor": actor, **others})})


def test_a_reference_of_the_same_place_is_the_base_of_an_adapter_and_no_other_is(job: Job, tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text(json.dumps(CONFIG))
    facts = resolve(adapted(job, ref="./config.json"), tmp_path)
    assert facts.ref_is_base
    assert facts.models.actor.adapter == Adapter(rank=4, alpha=8.0)
    assert facts.models.ref == replace(facts.models.actor, adapter=None)
    assert facts.graph.by_name["ref_logprob"].base_of is Role.ACTOR
    assert not resolve(adapted(job, ref="other.json"), tmp_path).ref_is_base
    assert not resolve(job, tmp_path).ref_is_base


def test_facts_with_an_adapter_are_read_as_they_were_written_and_others_have_none(job: Job, tmp_path: Path) -> None:
    facts = resolve(adapted(job), tmp_path)
    assert parse(Facts, canonical_json(facts), "facts") == facts
    assert '"adapter"' not in canonical_json(resolve(job, tmp_path))
    assert '"adapter"' not in canonical_json(job)


def test_an_adapter_of_a_model_that_is_not_trained_is_refused(job: Job) -> None:
    document = json.loads(canonical_json(adapted(job)))
    document["models"]["reward"]["adapter"] = {"rank": 4, "alpha": 4.0}
    with pytest.raises(BadInput, match=r"models\.reward\.adapter: only actor and critic are trained by adapters; rem"):
        parse(Job, json.dumps(document), "job")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"workload": {"images": {"number": {"max": 1, "fixed": 1}, "tokens": {"max": 4, "fixed": 4}}}},
            "of the actor reads no images; give one that does, or remove workload.images.",
        ),
        ({"engine": "meshwright-graph", "cluster": "local"}, "engine=meshwright-graph"),
        ({"generation_weights": "fp8", "cluster": "a100-80gb"}, "generation_weights=fp8"),
        ({"old_logprobs": "training", "workload": {"num_minibatches": 2}}, "old_logprobs=training"),
    ],
)
def test_settings_that_its_models_or_its_cluster_do_not_allow_are_refused_when_a_job_is_resolved(
    job: Job, tmp_path: Path, changes: dict[str, Any], says: str
) -> None:
    document = json.loads(canonical_json(job))
    document |= {**changes, "workload": {**document["workload"], **changes.get("workload", {})}}
    with pytest.raises(BadInput) as refused:
        resolve(parse(Job, json.dumps(document), "job"), tmp_path)
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_critic_may_have_an_adapter_beside_its_scalar_head(job: Job, tmp_path: Path) -> None:
    document = json.loads(canonical_json(job))
    document["models"]["critic"]["adapter"] = {"rank": 4, "alpha": 4.0}
    facts = resolve(parse(Job, json.dumps(document), "job"), tmp_path)
    critic, plain = facts.models.spec(Role.CRITIC), resolve(job, tmp_path).models.spec(Role.CRITIC)
    assert facts.models.actor.adapter is None
    assert critic.trainable_params == critic.num_layers * critic.adapter_layer_params + critic.hidden_size
    assert critic.num_params == plain.num_params == plain.trainable_params
    assert sum(part.trained.num_params for part in stage_parts(critic, 1, 2)) == critic.trainable_params


def test_a_reference_that_is_not_the_base_is_refused_as_one(job: Job, tmp_path: Path) -> None:
    document = json.loads(canonical_json(resolve(adapted(job), tmp_path)))
    document["models"]["ref"]["num_layers"] += 1
    with pytest.raises(BadInput, match="ref_is_base=true, and the reference is not the actor without an adapter"):
        parse(Facts, json.dumps(document), "facts")


def test_the_key_that_differs_is_named_with_both_values(job: Job, tmp_path: Path) -> None:
    facts = resolve(job, tmp_path)
    with pytest.raises(BadInput, match="staleness is 2 in the plan and 0 in the job"):
        require_job(facts.model_copy(update={"staleness": 2}), job, tmp_path)
    workload = facts.workload.model_copy(update={"batch_size": 16})
    with pytest.raises(BadInput, match=r"workload\.batch_size is 16 in the plan and 8 in the job"):
        require_job(facts.model_copy(update={"workload": workload}), job, tmp_path)


def test_a_plan_may_be_for_another_cluster_of_the_same_kind(job: Job, tmp_path: Path) -> None:
    facts = resolve(job, tmp_path)
    assert isinstance(facts.cluster, Cluster)
    larger = facts.cluster.model_copy(update={"ranks_per_node": facts.cluster.ranks_per_node + 1})
    require_job(facts.model_copy(update={"cluster": larger}), job, tmp_path)


def test_what_generates_is_what_run_has_on_the_cluster_unless_the_job_names_it(job: Job, tmp_path: Path) -> None:
    on = {name: job.model_copy(update={"cluster": name}) for name in ("local", "a100-80gb")}
    assert resolve(on["local"], tmp_path).engine == "meshwright-eager"
    assert resolve(on["a100-80gb"], tmp_path).engine == "meshwright-graph"
    assert resolve(on["a100-80gb"].model_copy(update={"engine": "vllm"}), tmp_path).engine == "vllm"
    with pytest.raises(BadInput, match=r"^engine=meshwright-graph .* a CPU has no graphs; use meshwright-eager\.$"):
        resolve(on["local"].model_copy(update={"engine": "meshwright-graph"}), tmp_path)


def test_an_engine_that_is_not_known_is_refused_with_those_that_are(job: Job) -> None:
    written = job.model_dump(mode="json") | {"engine": "vlm"}
    with pytest.raises(BadInput, match=r"^job: engine is 'vlm': input should be .*'trtllm' or 'auto'\.$"):
        parse(Job, json.dumps(written), "job")


def test_a_plan_is_of_its_job_wherever_the_models_lie_and_whatever_they_are_called(job: Job, tmp_path: Path) -> None:
    facts = resolve(job, tmp_path)
    other, own = tmp_path / "other", ModelSource(path=".")
    other.mkdir()
    (other / "config.json").write_text(json.dumps(CONFIG))
    require_job(facts, job, other)
    beside = job.model_copy(update={"models": Models(actor=own, critic=own, ref=own, reward=own)})
    require_job(facts, beside, other)
    require_job(resolve(beside, other), beside, tmp_path)
    (other / "config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": 3}))
    with pytest.raises(BadInput, match=r"models.actor.num_layers is 4 in the plan and 3 in .*/other; give"):
        require_job(facts, beside, other)


def test_the_balance_of_experts_is_stated_for_each_model_and_changes_no_other() -> None:
    path = Path(__file__).parents[3] / "examples" / "30b-a3b-32xh100" / "job.yaml"
    job = read_job(path)
    actor = job.models.actor.model_copy(update={"balance": "forced"})
    stated = resolve(job.model_copy(update={"models": job.models.model_copy(update={"actor": actor})}), path.parent)
    plain = resolve(job, path.parent)
    for facts, balance in ((plain, None), (stated, "forced")):
        assert facts.models.actor.experts is not None
        assert facts.models.actor.experts.balance == balance
    assert stated.models.by_name["ref"] == plain.models.by_name["ref"]


def test_the_balance_of_a_model_without_experts_is_refused(job: Job, tmp_path: Path) -> None:
    actor = job.models.actor.model_copy(update={"balance": "forced"})
    with pytest.raises(BadInput, match="has no experts, and balance=forced is about them; remove it"):
        resolve(job.model_copy(update={"models": job.models.model_copy(update={"actor": actor})}), tmp_path)
