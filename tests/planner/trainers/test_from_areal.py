"""What was written for AReaL is read as the plan that it was written for; its forms of a backend are read."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.planner.plan.plan import Plan
from meshwright.planner.trainers.areal import read_areal
from meshwright.planner.trainers.parsed_config import ParsedConfig
from meshwright.profiles.errors import BadInput
from tests.planner.trainers.plans import best
from tests.planner.trainers.written import assert_is_read, plan_of, written


def plan_with_critic() -> Plan:
    return best("areal", algorithm="ppo").plan


@pytest.mark.parametrize("staleness", [0, 1])
def test_every_choice_that_is_read_is_the_plans(tmp_path: Path, staleness: int) -> None:
    plan = plan_of("areal", staleness)
    assert_is_read(plan, read_areal(written("areal", plan, tmp_path)))


@pytest.mark.check_all
def test_every_choice_of_a_critic_is_read(tmp_path: Path) -> None:
    found = read_areal(written("areal", plan_with_critic(), tmp_path))
    assert found.algorithm == "ppo"
    assert_is_read(plan_with_critic(), found)


BASE = """\
cluster: {n_nodes: 1, n_gpus_per_node: 8}
gconfig: {n_samples: 4, max_new_tokens: 1024}
train_dataset: {batch_size: 8, path: openai/gsm8k, max_length: 512}
"""
GROUP = "reward_norm: {mean_level: group, std_level: group}"


def configured(tmp_path: Path, text: str) -> ParsedConfig:
    path = tmp_path / "run.yaml"
    path.write_text(BASE + text)
    return read_areal(path)


@pytest.mark.parametrize(
    ("backend", "layout"),
    [
        ("megatron:d2p2t2", "tp2,pp2,dp2,sp"),
        ("megatron:d4c2", "tp1,pp1,dp4,cp2"),
        ("megatron:(attn:d4p1t2|ffn:d1p1t1e8)", "tp2,pp1,dp4,ep8,etp1,sp"),
        ("megatron:(attn:d4p1t2|ffn:d2p1t2e2)", "tp2,pp1,dp4,ep2,sp"),
        ("megatron:d4t2e8", "tp2,pp1,dp4,ep8,etp1,sp"),
    ],
)
def test_a_backend_is_a_layout(tmp_path: Path, backend: str, layout: str) -> None:
    actor = f"backend: '{backend}', recompute_logprob: true, {GROUP}"
    text = f"actor: {{{actor}}}\nrollout: {{backend: 'sglang:d4t2'}}\n"
    values = configured(tmp_path, text).by_name
    assert (values["actor_train.layout"], values["actor_logprob.layout"]) == (layout, layout)
    assert (values["actor_generate.tp"], values["actor_generate.pool"]) == (2, "8:8")
    assert (values["cluster.nodes"], values["cluster.ranks_per_node"]) == (2, 8)


@pytest.mark.parametrize(
    ("key", "source"), [("recompute_logprob", None), ("use_decoupled_loss", None), ("discount", "generator")]
)
def test_old_log_probabilities_are_the_generators_unless_a_key_recomputes_them(
    tmp_path: Path, key: str, source: str | None
) -> None:
    text = f"actor: {{backend: 'megatron:d4t2', {key}: 1, {GROUP}}}\nrollout: {{backend: 'sglang:d4t2'}}\n"
    values = configured(tmp_path, text).by_name
    assert values.get("old_logprobs") == source


@pytest.mark.parametrize(
    ("norms", "algorithm", "settings"),
    [
        (GROUP, "grpo", {"grpo.loss_mean": "token"}),
        ("reward_norm: {mean_level: group, std_level: null}", "grpo", {"grpo.normalise_by_std": False}),
        ("reward_norm: {mean_level: group, mean_leave1out: true, std_level: null}", "rloo", {}),
        ("adv_norm: {mean_level: batch}", "reinforce++", {}),
        ("adv_norm: {mean_level: group, std_level: group}", "grpo", {}),
        ("adv_norm: {mean_level: group, std_level: null}", "grpo", {"grpo.normalise_by_std": False}),
        (
            "reward_norm: {mean_level: group, std_level: null}, adv_norm: {mean_level: batch}",
            "reinforce++",
            {"reinforce.group_baseline": True},
        ),
    ],
)
def test_what_is_normalised_over_says_which_algorithm_it_is(
    tmp_path: Path, norms: str, algorithm: str, settings: dict[str, object]
) -> None:
    found = configured(tmp_path, f"actor: {{backend: 'megatron:d4', {norms}}}\nrollout: {{backend: 'vllm:d4'}}\n")
    assert found.algorithm == algorithm
    assert {name: found.by_name.get(name) for name in settings} == settings
    assert found.by_name["engine"] == "vllm"


def test_a_group_may_be_that_of_another_model(tmp_path: Path) -> None:
    actor = f"actor: {{backend: 'megatron:d4', mb_spec: {{max_tokens_per_mb: 4096}}, optimizer: {{lr: 0.5}}, {GROUP}}}"
    critic = "critic: {backend: '${actor.backend}', mb_spec: '${actor.mb_spec}', optimizer: '${actor.optimizer}'}"
    shared = critic.replace("}'}", "}', scheduling_strategy: {type: colocation, target: actor}}")
    for text, pool in ((critic, "4:4"), (shared, "0:4")):
        values = configured(tmp_path, f"{actor}\n{text}\nrollout: {{backend: 'vllm:d4'}}\n").by_name
        assert (values["algorithm"], values["critic_train.pool"]) == ("ppo", pool)
        assert (values["critic_value.micro_batch_tokens"], values["ppo.critic_learning_rate"]) == (4096, 0.5)


def test_the_former_key_of_all_backends_is_read_where_they_have_none(tmp_path: Path) -> None:
    apart = configured(tmp_path, f"allocation_mode: sglang:d2t2+d4p1t1\nactor: {{{GROUP}}}\n")
    assert (apart.by_name["actor_train.pool"], apart.by_name["actor_generate.pool"]) == ("0:4", "4:4")
    assert any("actor.backend is fsdp: its sharding is not modelled" in note for note in apart.notes)
    shared = configured(tmp_path, f"allocation_mode: 'sglang[rollout]:d8|megatron[actor]:d4t2'\nactor: {{{GROUP}}}\n")
    assert (shared.by_name["actor_train.pool"], shared.by_name["actor_generate.pool"]) == ("0:8", "0:8")
    assert shared.by_name["actor_train.layout"] == "tp2,pp1,dp4,sp"


def test_a_backend_of_a_name_alone_has_the_degrees_of_the_former_key(tmp_path: Path) -> None:
    models = f"actor: {{backend: megatron, kl_ctl: 0.1, {GROUP}}}\nref: {{backend: megatron, path: m}}\n"
    values = configured(tmp_path, f"allocation_mode: sglang.d4p1t1+d2p1t2\n{models}").by_name
    assert (values["actor_train.layout"], values["actor_train.pool"]) == ("tp2,pp1,dp2,sp", "0:4")
    assert (values["ref_logprob.pool"], values["actor_generate.pool"]) == ("0:4", "4:4")


def test_an_engine_generates_as_many_sequences_as_its_limit_and_the_prompts_in_flight_allow(tmp_path: Path) -> None:
    actor = (
        f"actor: {{backend: 'megatron:d4', {GROUP}}}\nrollout: {{backend: 'sglang:d4', max_concurrent_rollouts: 8}}\n"
    )
    assert configured(tmp_path, actor).by_name["actor_generate.generation_slots"] == 8
    limited = configured(tmp_path, f"{actor}sglang: {{max_running_requests: 3}}\n")
    assert limited.by_name["actor_generate.generation_slots"] == 3


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("actor: {backend: megatron}\n", "actor.backend='megatron' is not a backend with its degrees; write it like"),
        (
            "rollout: {backend: 'sglang:d4'}\n",
            "actor.backend has no value, and the plan depends on it; give it as --set",
        ),
        (
            "teacher: {path: t}\nactor: {backend: 'fsdp:d4'}\n",
            "teacher: on-policy distillation of a configuration is not",
        ),
    ],
)
def test_what_is_no_backend_and_a_teacher_are_refused_by_their_key(tmp_path: Path, text: str, sentence: str) -> None:
    with pytest.raises(BadInput, match=sentence):
        configured(tmp_path, text)
