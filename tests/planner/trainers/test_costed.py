"""A configuration that was written for a plan has the plan's cost, and nothing better is overlooked."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from meshwright.planner.job.job import Facts, resolve
from meshwright.planner.solver.result import Limits
from meshwright.planner.trainers.importer import JobSource, evaluate_config, image_notes
from meshwright.planner.trainers.parsed_config import ParsedConfig, ParsedField
from meshwright.planner.trainers.registry import READERS
from meshwright.profiles.algorithms import Algorithm
from meshwright.profiles.lengths import LengthSpec
from meshwright.profiles.model_parts.image_encoder import ImageEncoder
from meshwright.profiles.workload import Images
from tests.planner.drawn import model_of
from tests.planner.jobs import small_facts
from tests.planner.trainers.plans import NAMES, facts_of, main_algorithm
from tests.planner.trainers.written import CONFIG, plan_of, written
from tests.seeds import cases

LIMITS = Limits(gap=0.3)


OTHERS: tuple[tuple[str, Algorithm], ...] = (("verl", "rloo"), ("openrlhf", "grpo"), ("slime", "grpo"))
EXPORTED = [
    (*case, staleness) for case in (*((name, main_algorithm(name)) for name in NAMES), *OTHERS) for staleness in (0, 1)
]
FEW = [("verl", "ppo", 1), ("nemo-rl", "ppo", 0), ("openrlhf", "ppo", 0), ("slime", "grpo", 0)]


@cases(("name", "algorithm", "staleness"), EXPORTED, few=FEW)
def test_what_was_exported_costs_the_same_when_it_is_imported(
    tmp_path: Path, name: str, algorithm: Algorithm, staleness: int
) -> None:
    plan = plan_of(name, staleness, algorithm)
    reader = READERS[name]
    configured = reader.read(written(name, plan, tmp_path))
    assert configured.algorithm == algorithm
    found = evaluate_config(reader, configured, plan.facts, model_of, limits=Limits(gap=0.05))
    assert found.plan is not None
    assert found.plan.period_seconds == pytest.approx(plan.period_seconds, rel=0.01)
    assert found.best_in_trainer is not None
    assert found.best is not None
    assert found.best.period_seconds <= found.best_in_trainer.period_seconds * (1 + 1e-9)


def test_a_number_that_is_not_legal_is_read_as_a_smaller_one_and_what_cannot_be_is_left_free(tmp_path: Path) -> None:
    plan = plan_of("verl", 0)
    configured = READERS["verl"].read(written("verl", plan, tmp_path))
    said = [one for one in configured.fields if not one.what.startswith("ref_logprob.")]
    said += [
        ParsedField("ref_logprob.micro_batch_size", 5, ("a.b",)),
        ParsedField("ref_logprob.layout", "tp3", ("c.d",)),
    ]
    found = evaluate_config(
        READERS["verl"], replace(configured, fields=tuple(said)), facts_of(), model_of, limits=LIMITS
    )
    assert found.plan is not None
    assert found.plan.placement("ref_logprob").schedule.micro_batch_size == 4
    assert "a.b: ref_logprob.micro_batch_size=5 is read as 4" in found.notes
    assert any(note.startswith("c.d: pin 'ref_logprob.layout=tp3") and "left free" in note for note in found.notes)


def test_an_import_says_that_images_are_not_costed_unless_the_job_has_them() -> None:
    facts = facts_of()
    assert image_notes(facts) == []
    encoder = ImageEncoder(
        num_blocks=2, hidden_size=32, ffn_size=64, num_heads=2, output_size=facts.models.actor.hidden_size,
        patch_elements=24, merge_size=2, num_full_blocks=2,
    )  # fmt: skip
    actor = replace(facts.models.actor, image_encoder=encoder)
    seeing = facts.model_copy(update={"models": facts.models.model_copy(update={"actor": actor})})
    [note] = image_notes(seeing)
    assert "reads images, and no key gives their number and size: none is costed" in note
    images = Images.model_validate(yaml.safe_load(note.partition("images: ")[2].partition("; ")[0]))
    workload = seeing.workload.model_copy(update={"images": images})
    assert image_notes(seeing.model_copy(update={"workload": workload})) == []


def test_searches_end_when_their_time_is_over_and_what_was_not_found_is_said(tmp_path: Path) -> None:
    configured = READERS["verl"].read(written("verl", plan_of("verl", 0), tmp_path))
    found = evaluate_config(READERS["verl"], configured, facts_of(), model_of, search_seconds=1e-6)
    assert (found.plan, found.best_in_trainer, found.best) == (None, None, None)
    assert any(
        "not known how long a step of the configuration takes: no plan was found in 1e-06 s" in n for n in found.notes
    )
    slower = evaluate_config(READERS["verl"], configured, facts_of(), model_of, limits=LIMITS, search_seconds=60.0)
    assert slower.plan == evaluate_config(READERS["verl"], configured, facts_of(), model_of, limits=LIMITS).plan


def test_a_cap_of_tokens_is_read_as_it_is_or_as_the_next_smaller_and_where_tokens_do_not_decide_as_rows(
    tmp_path: Path,
) -> None:
    plan = plan_of("verl", 0)
    configured = READERS["verl"].read(written("verl", plan, tmp_path))
    stages = ("reward_score", "ref_logprob", "actor_train")
    dropped = ("micro_batch_size", "micro_batch_tokens")
    said = [one for one in configured.fields if one.what not in {f"{s}.{key}" for s in stages for key in dropped}]
    said += [ParsedField(f"{s}.micro_batch_tokens", n, (s,)) for s, n in zip(stages, (500, 100, 10**6), strict=True)]
    found = evaluate_config(
        READERS["verl"], replace(configured, fields=tuple(said)), facts_of(), model_of, limits=LIMITS
    )
    assert found.plan is not None
    longest = facts_of().workload.max_tokens
    assert found.plan.placement("reward_score").schedule.micro_batch_tokens == 500
    assert found.plan.placement("ref_logprob").schedule.micro_batch_tokens == longest
    assert f"ref_logprob: ref_logprob.micro_batch_tokens=100 is read as {longest}" in found.notes
    trained = found.plan.placement("actor_train")
    rows = facts_of().workload.batch_size // facts_of().workload.num_minibatches // trained.layout.dp
    assert longest <= trained.schedule.micro_batch_tokens <= rows * longest


def test_a_configuration_that_does_not_fit_says_what_binds(tmp_path: Path) -> None:
    plan = plan_of("openrlhf", 0)
    configured = READERS["openrlhf"].read(written("openrlhf", plan, tmp_path))
    told: list[str] = []
    found = evaluate_config(
        READERS["openrlhf"],
        configured,
        small_facts(memory_bytes=2**10, num_minibatches=2),
        model_of,
        limits=LIMITS,
        progress=lambda what, _done, _total: told.append(what),
    )
    assert (found.plan, found.best_in_trainer, found.best) == (None, None, None)
    assert any("the cost model predicts out of memory" in note for note in found.notes)
    assert "searching what openrlhf can express" in told


def test_grpo_is_costed_as_it_is_and_within_the_trainer(tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    path.write_text(
        "python3 train.py --advantage-estimator grpo --rollout-batch-size 4 --n-samples-per-prompt 4 --colocate "
        "--rollout-max-response-len 128 --rollout-max-prompt-len 64 --global-batch-size 8 "
        "--actor-num-gpus-per-node 4 --tensor-model-parallel-size 2\n"
    )
    facts = facts_of(algorithm="grpo")
    found = evaluate_config(READERS["slime"], READERS["slime"].read(path), facts, model_of, limits=LIMITS)
    assert found.plan is not None
    assert found.plan.placement("actor_train").layout.tp == 2
    assert found.best_in_trainer is not None
    assert found.best is not None
    assert found.best.period_seconds <= found.plan.period_seconds * (1 + 1e-9)
    assert any(one.what == "workload.group_size" for one in found.deciding)
    assert not any(one.what.startswith("grpo.") for one in found.deciding)


BUDGETS = {
    "verl": (
        "run.sh",
        "python3 -m verl.trainer.main_ppo model_engine=megatron algorithm.adv_estimator=grpo {A}.rollout.n=8 "
        "data.train_batch_size=16 data.max_prompt_length=1024 data.max_response_length=3072 {A}.rollout.name=vllm "
        "{A}.actor.ppo_mini_batch_size=16 {A}.actor.use_dynamic_bsz=True {A}.actor.ppo_max_token_len_per_gpu=8192 "
        "{A}.actor.megatron.context_parallel_size=2 {A}.rollout.tensor_model_parallel_size=1 "
        "trainer.nnodes=1 trainer.n_gpus_per_node=8",
    ),
    "openrlhf": (
        "run.sh",
        "python3 -m openrlhf.cli.train_ppo_ray --algo.advantage.estimator group_norm --algo.kl.init_coef 0 "
        "--reward.remote_url f.py --train.colocate_all --actor.num_nodes 1 --actor.num_gpus_per_node 8 "
        "--vllm.num_engines 8 --rollout.batch_size 16 --rollout.n_samples_per_prompt 8 --train.batch_size 128 "
        "--data.max_len 4096 --rollout.max_new_tokens 3072 --ds.ring_attn_size 2 --train.dynamic_batch_enable "
        "--train.max_tokens_per_gpu 8192",
    ),
    "nemo-rl": (
        "run.yaml",
        "grpo: {{num_prompts_per_step: 16, num_generations_per_prompt: 8}}\n"
        "policy: {{max_total_sequence_length: 4096, train_global_batch_size: 128, train_micro_batch_size: 4,"
        " megatron_cfg: {{enabled: true, context_parallel_size: 2}}}}\n"
        "data: {{max_input_seq_length: 1024}}\ncluster: {{num_nodes: 1, gpus_per_node: 8}}\n",
    ),
    "slime": (
        "run.sh",
        "python3 train.py --colocate --actor-num-nodes 1 --actor-num-gpus-per-node 8 --rollout-batch-size 16 "
        "--n-samples-per-prompt 8 --rollout-max-response-len 3072 --rollout-max-prompt-len 1024 "
        "--global-batch-size 128 --context-parallel-size 2 --use-dynamic-batch-size --max-tokens-per-gpu 8192",
    ),
    "skyrl": (
        "run.sh",
        "python -m skyrl.train.entrypoints.main_base trainer.strategy=megatron trainer.placement.policy_num_nodes=1 "
        "trainer.placement.policy_num_gpus_per_node=8 generator.inference_engine.num_engines=8 "
        "trainer.algorithm.use_kl_loss=false generator.n_samples_per_prompt=8 trainer.train_batch_size=16 "
        "trainer.policy_mini_batch_size=16 trainer.max_prompt_length=1024 trainer.max_tokens_per_microbatch=16384 "
        "generator.sampling_params.max_generate_length=3072 "
        "trainer.policy.megatron_config.context_parallel_size=2",
    ),
    "areal": (
        "run.yaml",
        "actor: {{backend: 'megatron:d4c2', path: m, ppo_n_minibatches: 1, mb_spec: {{max_tokens_per_mb: 16384}},"
        " kl_ctl: 0.0, reward_norm: {{mean_level: group}}}}\n"
        "rollout: {{backend: 'sglang:d8', scheduling_strategy: {{type: colocation, target: actor}}}}\n"
        "gconfig: {{n_samples: 8, max_new_tokens: 3072}}\ncluster: {{n_nodes: 1, n_gpus_per_node: 8}}\n"
        "train_dataset: {{batch_size: 16, max_length: 1024, path: gsm8k}}\n",
    ),
}
"""Sequences of 4,096 tokens on pairs of ranks that have room for 16,384 tokens together."""

HALF = LengthSpec(max=3072, fixed=1536)
"""Responses half as long as they may be."""


def facts_in(trainer: str, directory: Path) -> tuple[ParsedConfig, Facts]:
    file, text = BUDGETS[trainer]
    (directory / file).write_text(text.format(A="actor_rollout_ref"))
    (directory / "config.json").write_text(json.dumps({**CONFIG, "max_position_embeddings": 4096}))
    configured = READERS[trainer].read(directory / file)
    source = JobSource(
        path=directory / file,
        trainer=trainer,
        engine="vllm",
        device="h100-sxm",
        shapes={"": directory / "config.json"},
    )
    return configured, resolve(source.job(configured, directory), directory)


@cases("trainer", BUDGETS, few=["verl", "nemo-rl", "areal"])
def test_ranks_that_share_sequences_take_as_many_rows_as_their_budgets_hold_together(
    tmp_path: Path, trainer: str
) -> None:
    configured, facts = facts_in(trainer, tmp_path)
    found = evaluate_config(READERS[trainer], configured, facts, model_of, limits=LIMITS)
    assert found.plan is not None
    trained = found.plan.placement("actor_train")
    assert (trained.layout.cp, trained.schedule.micro_batch_tokens) == (2, 16384)
    assert not any("micro_batch_tokens" in note for note in found.notes)


def test_where_rows_alone_decide_a_budget_is_read_as_the_rows_of_mean_length_that_it_holds(tmp_path: Path) -> None:
    configured, facts = facts_in("slime", tmp_path)
    facts = facts.model_copy(update={"workload": facts.workload.model_copy(update={"response": HALF})})
    said = [
        replace(one, value="tp1,pp2,dp4,vpp2") if one.what == "actor_train.layout" else one for one in configured.fields
    ]
    found = evaluate_config(READERS["slime"], replace(configured, fields=tuple(said)), facts, model_of, limits=LIMITS)
    assert found.plan is not None
    trained = found.plan.placement("actor_train")
    assert (trained.layout.vpp, trained.schedule.micro_batch_size) == (2, 4)
    assert any("is read as micro_batch_size=4: this layout is costed by rows" in note for note in found.notes)


def test_stages_that_cannot_be_interleaved_are_read_as_plain_ones(tmp_path: Path) -> None:
    configured, facts = facts_in("slime", tmp_path)
    assert facts.models.actor.num_layers == 4
    vpp = [
        replace(one, value="tp1,pp2,dp4,vpp3") if one.what == "actor_train.layout" else one for one in configured.fields
    ]
    found = evaluate_config(READERS["slime"], replace(configured, fields=tuple(vpp)), facts, model_of, limits=LIMITS)
    assert found.plan is not None
    assert str(found.plan.placement("actor_train").layout) == "tp1,pp2,dp4"
    assert any("actor_train.layout=tp1,pp2,dp4,vpp3 is read as tp1,pp2,dp4, the nearest" in n for n in found.notes)


def test_a_sequence_that_is_cut_more_than_is_costed_leaves_each_rank_its_budget(tmp_path: Path) -> None:
    configured, facts = facts_in("slime", tmp_path)
    cut = [
        replace(one, value=str(one.value).replace("dp4,cp2", "dp2,cp4")) if one.what.endswith(".layout") else one
        for one in configured.fields
    ]
    cut = [replace(one, value=32768) if one.what.endswith("micro_batch_tokens") else one for one in cut]
    found = evaluate_config(READERS["slime"], replace(configured, fields=tuple(cut)), facts, model_of, limits=LIMITS)
    assert found.plan is not None
    trained = found.plan.placement("actor_train")
    assert (trained.layout.cp, trained.layout.dp, trained.schedule.micro_batch_tokens) == (2, 4, 16384)
    assert any("actor_train.layout=tp1,pp1,dp2,cp4 is read as tp1,pp1,dp4,cp2" in note for note in found.notes)


def test_rows_that_no_replica_can_take_are_read_as_the_most_that_one_can(tmp_path: Path) -> None:
    configured, facts = facts_in("slime", tmp_path)
    said = [one for one in configured.fields if not one.what.endswith("micro_batch_tokens")]
    said += [
        ParsedField("actor_train.micro_batch_size", 1000, ("a",)),
        ParsedField("actor_logprob.micro_batch_size", 7, ("b",)),
    ]
    found = evaluate_config(READERS["slime"], replace(configured, fields=tuple(said)), facts, model_of, limits=LIMITS)
    assert found.plan is not None
    sizes = [found.plan.placement(stage).schedule.micro_batch_size for stage in ("actor_train", "actor_logprob")]
    assert sizes == [32, 4]
